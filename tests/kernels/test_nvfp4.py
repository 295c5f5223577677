"""Codes, scales and transform of NVFP4: equal to an independent reference, to TransformerEngine's
and TorchAO's recorded references, and to NVIDIA's casts. Stochastic rounding has no bias."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from nvfp4_oracles import FILE, matrices
from safetensors import safe_open

from fp8_backends.formats.scaling import GRAD_OUTPUT, INPUT, WEIGHT
from fp8_backends.kernels import nvfp4

GRID = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6])


@pytest.fixture(scope="module")
def recording():
    with safe_open(FILE, "pt") as file:
        return {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (no mapping)


def reference(x: torch.Tensor, height: int) -> tuple[np.ndarray, np.ndarray]:
    """Quantize block by block in FP32 scalars, and search the nearest code. Returns codes and E4M3
    scales as FP32."""
    x, one = x.float().numpy(), np.float32(1)
    rows, columns = x.shape
    codes, scales = np.zeros((rows, columns), np.uint8), np.zeros((rows, columns // 16), np.float32)
    amax = np.abs(x).max()
    largest = np.finfo(np.float32).max
    with np.errstate(divide="ignore", over="ignore"):
        tensor = min(np.float32(2688) / amax, largest) if amax else one
        for r in range(0, rows, height):
            for c in range(0, columns, 16):
                block = x[r : r + height, c : c + 16]
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
                codes[r : r + height, c : c + 16] = nearest + 8 * np.signbit(block)
                scales[r : r + height, c // 16] = scale
    return codes, scales


def unpacked(codes: torch.Tensor) -> torch.Tensor:
    return torch.stack([codes & 15, codes >> 4], -1).flatten(1)


@pytest.mark.parametrize("height", [1, 16])
@pytest.mark.parametrize(
    "name", [name for name in matrices() if name not in ("inf", "nan", "denormal", "huge")]
)
def test_codes_and_scales_match_a_search_of_the_nearest_code(name, height):
    x = matrices()[name]
    q = nvfp4.quantized(x, height)
    codes, scales = reference(x, height)
    assert np.array_equal(unpacked(q.codes).numpy(), codes)
    assert np.array_equal(nvfp4.parts_of(q)[1].float().numpy(), scales)


@pytest.mark.parametrize("source", ["te", "ao"])
@pytest.mark.parametrize("name", list(matrices()))
def test_codes_and_scales_match_recorded_references(name, source, recording):
    x = recording[f"{name}: matrix"]
    assert torch.equal(x.view(torch.int16), matrices()[name].view(torch.int16))
    for tensor, kind in ((INPUT, "input"), (WEIGHT, "weight")):
        layouts = nvfp4.quantize(x, tensor)
        for ours, turned in ((layouts.along_columns(), ""), (layouts.along_rows(), " transposed")):
            theirs = f"{name}: {source} {kind}{turned}"
            scale, blocks = nvfp4.parts_of(ours)
            if name == "nan":  # both have NaN in every scale, and codes of no meaning
                assert scale.isnan() and blocks.float().isnan().all()
                assert recording[f"{theirs} scales"].view(torch.float8_e4m3fn).float().isnan().all()
                continue
            assert torch.equal(blocks.view(torch.uint8), recording[f"{theirs} scales"])
            codes, expected = unpacked(ours.codes), unpacked(recording[f"{theirs} codes"])
            if source == "te":  # it drops the sign of a zero
                codes = torch.where((codes == 8) & (expected == 0), expected, codes)
            # the transform makes NaN of two infinities; NVIDIA's casts return 7 for it, and the
            # references 0 or 12
            numbers = torch.ones_like(codes, dtype=torch.bool)
            if name == "inf" and turned and kind == "input":
                numbers = nvfp4.transformed(x.t()).isfinite()
            assert torch.equal(codes[numbers], expected[numbers])
            assert bool(scale.isfinite()) == (name != "inf")


def test_casts_match_nvidias_host_code_for_every_bf16_value(recording):
    values = torch.arange(2**16).to(torch.int32).to(torch.int16).view(torch.bfloat16)
    assert torch.equal(nvfp4.cast(values.float()), unpacked(recording["casts of bf16"][None])[0])


@pytest.mark.parametrize("shape", [(5, 7), (16, 16), (33, 100)])
def test_values_differ_by_less_than_half_a_step(shape):
    x = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    values, scale = nvfp4.dequantized(nvfp4.quantized(x), torch.float32)
    half, exact = nvfp4.dequantized(nvfp4.quantized(x), torch.bfloat16)
    assert torch.equal(values, half.float()) and torch.equal(scale, exact)
    values = (values * scale)[:, : shape[1]]
    blocks = torch.nn.functional.pad(x, (0, -shape[1] % 16)).unflatten(1, (-1, 16)).abs().amax(2)
    # the steps at the largest codes are 2 of 6, and a scale's rounding in E4M3 moves them by 1/16
    assert ((values - x).abs() <= blocks.repeat_interleave(16, 1)[:, : shape[1]] / 6 * 1.0625).all()


def test_transform_is_orthogonal_and_cancels_in_a_product():
    identity = torch.eye(16)
    matrix = nvfp4.transformed(identity)
    assert torch.equal(matrix @ matrix.t(), identity)
    assert set(matrix.unique().tolist()) == {-0.25, 0.25}
    a, b = (torch.randn(12, 64, generator=torch.Generator().manual_seed(seed)) for seed in (0, 1))
    torch.testing.assert_close(nvfp4.transformed(a) @ nvfp4.transformed(b).t(), a @ b.t())
    assert torch.equal(
        nvfp4.transformed(a[:, :20]), nvfp4.transformed(torch.nn.functional.pad(a[:, :20], (0, 12)))
    )


def test_stochastic_rounding_reaches_both_neighbours_by_their_distance():
    count = 2**16
    for value in (0.1, 0.6, 1.2, 2.25, 3.5, 5.5, -0.3, -4.5):
        random = torch.randint(
            -(2**31), 2**31, (count,), generator=torch.Generator().manual_seed(1)
        ).to(torch.int32)
        codes = nvfp4.cast(torch.full((count,), value), random)
        rounded = torch.tensor(GRID).float()[codes.long() & 7] * (1 - 2 * (codes >> 3 & 1).float())
        below, above = (float(bound) for bound in rounded.unique())
        assert below <= value <= above and float(GRID[np.searchsorted(GRID, abs(value))]) == max(
            abs(below), abs(above)
        )
        # five standard deviations of the mean
        assert abs(rounded.double().mean() - value) <= 5 * (above - below) / 2 / count**0.5
    for exact in (0.0, 0.5, 3.0, 6.0, -2.0):
        codes = nvfp4.cast(torch.full((count,), exact), random)
        assert codes.unique().numel() == 1


def test_error_of_mean_of_gradients_falls_as_one_over_their_number():
    """Largest values of 6 times a power of two: no block scale rounds, so no value is clipped."""
    torch.manual_seed(0)
    x = torch.randn(64, 64).clamp(-3, 3)
    x[:, ::16] = 6.0
    x = x * torch.exp2(torch.randint(-3, 4, (64, 1)))
    total, squares = torch.zeros(64, 64, dtype=torch.float64), {}
    for count in range(1, 1025):
        values, scale = nvfp4.dequantized(
            nvfp4.quantize(x, GRAD_OUTPUT, columns=False).along_columns(), torch.float32
        )
        total += values * scale
        if count in (1, 4, 16, 64, 256, 1024):
            squares[count] = ((total / count - x) ** 2).mean().item()
    # of 3,840 elements: the mean square varies by a few percent
    for count, square in squares.items():
        assert square * count == pytest.approx(squares[1], rel=0.15)


def test_ranks_with_one_seed_round_apart():
    """Else their rounding errors are correlated by one half, and the mean over ranks keeps half the
    variance."""
    errors = []
    for seed in (0, 1):
        x = torch.randn(256, 256, generator=torch.Generator().manual_seed(seed))
        torch.manual_seed(3)  # the same on each rank
        values, scale = nvfp4.dequantized(
            nvfp4.quantize(x, GRAD_OUTPUT, columns=False).along_columns(), torch.float32
        )
        errors.append((values * scale - x).flatten())
    assert abs(torch.corrcoef(torch.stack(errors))[0, 1]) < 5 / 256  # five standard deviations


def test_gradients_of_two_backwards_round_apart_and_a_seed_repeats_them():
    x = torch.randn(32, 32)
    drawn = []
    for _ in range(2):
        torch.manual_seed(3)
        drawn += [nvfp4.quantize(x, GRAD_OUTPUT) for _ in range(2)]
    for name in ("codes", "transposed"):
        first, second, again, _ = (getattr(layouts, name) for layouts in drawn)
        assert torch.equal(first, again) and not torch.equal(first, second)
    inputs = [nvfp4.quantize(x, INPUT) for _ in range(2)]
    assert all(torch.equal(a, b) for a, b in zip(*inputs, strict=True) if a is not None)
