"""Codes and scales of NVFP4: equal to an independent reference, to TransformerEngine's and
TorchAO's recorded references, and to NVIDIA's casts."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from nvfp4_oracles import FILE, matrices
from safetensors import safe_open

from fp8_backends.kernels import nvfp4

GRID = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6])


@pytest.fixture(scope="module")
def recording():
    with safe_open(FILE, "pt") as file:
        return {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (no mapping)


def reference(x: torch.Tensor) -> tuple[np.ndarray, np.ndarray]:
    """Quantize block by block in FP32 scalars, and search the nearest code. Returns codes and E4M3
    scales as FP32."""
    x, one = x.float().numpy(), np.float32(1)
    rows, columns = x.shape
    codes, scales = np.zeros((rows, columns), np.uint8), np.zeros((rows, columns // 16), np.float32)
    amax = np.abs(x).max()
    largest = np.finfo(np.float32).max
    with np.errstate(divide="ignore", over="ignore"):
        tensor = min(np.float32(2688) / amax, largest) if amax else one
        for r in range(rows):
            for c in range(0, columns, 16):
                block = x[r, c : c + 16]
                wanted = np.abs(block).max() * (tensor * (one / np.float32(6)))
                scale = (
                    torch.tensor(min(wanted, np.float32(448)))
                    .to(torch.float8_e4m3fn)
                    .float()
                    .numpy()
                )
                factor = min(one / (scale * (one / tensor)), largest)
                distance = np.abs(
                    np.minimum(np.abs(block * factor), 6).astype(np.float64)[..., None] - GRID
                )
                # of two equally near codes the even one
                nearest = (distance + (np.arange(8) % 2) * 1e-12).argmin(-1)
                codes[r, c : c + 16] = nearest + 8 * np.signbit(block)
                scales[r, c // 16] = scale
    return codes, scales


def unpacked(codes: torch.Tensor) -> torch.Tensor:
    return torch.stack([codes & 15, codes >> 4], -1).flatten(1)


@pytest.mark.parametrize(
    "name", [name for name in matrices() if name not in ("inf", "nan", "denormal", "huge")]
)
def test_codes_and_scales_match_a_search_of_the_nearest_code(name):
    x = matrices()[name]
    packed, scales, _ = nvfp4.quantized(x)
    codes, expected = reference(x)
    assert np.array_equal(unpacked(packed).numpy(), codes)
    assert np.array_equal(scales.float().numpy(), expected)


@pytest.mark.parametrize("source", ["te", "ao"])
@pytest.mark.parametrize("name", list(matrices()))
def test_codes_and_scales_match_recorded_references(name, source, recording):
    x = recording[f"{name}: matrix"]
    assert torch.equal(x.view(torch.int16), matrices()[name].view(torch.int16))
    packed, scales, tensor_scale = nvfp4.quantized(x)
    expected_scales = recording[f"{name}: {source} input scales"]
    if name == "nan":  # both have NaN in every scale, and codes of no meaning
        assert tensor_scale.isnan() and scales.float().isnan().all()
        assert expected_scales.view(torch.float8_e4m3fn).float().isnan().all()
        return
    assert tensor_scale.isfinite()
    assert torch.equal(scales.view(torch.uint8), expected_scales)
    codes = unpacked(packed)
    expected = unpacked(recording[f"{name}: {source} input codes"])
    if source == "te":  # it drops the sign of a zero
        codes = torch.where((codes == 8) & (expected == 0), expected, codes)
    assert torch.equal(codes, expected)


def test_casts_match_nvidias_host_code_for_every_bf16_value(recording):
    values = torch.arange(2**16).to(torch.int32).to(torch.int16).view(torch.bfloat16)
    assert torch.equal(nvfp4.cast(values.float()), unpacked(recording["casts of bf16"][None])[0])


@pytest.mark.parametrize("shape", [(5, 7), (16, 16), (33, 100)])
def test_values_differ_by_less_than_half_a_step(shape):
    x = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    codes, scales, tensor_scale = nvfp4.quantized(x)
    values = nvfp4.unpacked(codes).unflatten(1, (-1, 16)) * scales.float().unsqueeze(2)
    values = (values / tensor_scale).flatten(1)[:, : shape[1]]
    blocks = torch.nn.functional.pad(x, (0, -shape[1] % 16)).unflatten(1, (-1, 16)).abs().amax(2)
    # the steps at the largest codes are 2 of 6, and a scale's rounding in E4M3 moves them by 1/16
    assert ((values - x).abs() <= blocks.repeat_interleave(16, 1)[:, : shape[1]] / 6 * 1.0625).all()


def test_codes_of_a_transposed_view_are_those_of_its_copy():
    """A view is padded and packed in its own rows; a file stores contiguous tensors."""
    x = torch.randn(48, 33, generator=torch.Generator().manual_seed(0)).t()
    for ours, theirs in zip(nvfp4.quantized(x), nvfp4.quantized(x.contiguous()), strict=True):
        assert ours.is_contiguous()
        assert torch.equal(ours.view(torch.uint8), theirs.view(torch.uint8))
