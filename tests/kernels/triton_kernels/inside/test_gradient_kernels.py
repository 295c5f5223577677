"""Gradients in E4M3 by kernels, against plain PyTorch: casts and sums to the bit, norms to the
order of their sums."""

from __future__ import annotations

import pytest
import torch
from widths import nightly

from fp8_backends.formats.formats import E4M3
from fp8_backends.kernels import backward as gradients
from fp8_backends.kernels import triton_backward
from fp8_backends.tensors.scaled_tensor import Kind, ScaledTensor, quantize

DTYPES = pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)


def values_of(
    dtype: torch.dtype, rows: int = 33, columns: int = 160, seed: int = 0
) -> torch.Tensor:
    """Magnitudes over more than E4M3's range."""
    values = torch.randn(rows, columns, generator=torch.Generator().manual_seed(seed))
    return (values * torch.logspace(-4, 0, columns)).to(dtype)


def in_plain_pytorch(function, monkeypatch):
    """Return `function`'s result without kernels."""
    with monkeypatch.context() as patch:
        patch.setenv("FP8_BACKENDS_TRITON", "0")
        return function()


def same(found: ScaledTensor, expected: ScaledTensor) -> bool:
    equal = torch.equal(found.codes.view(torch.uint8), expected.codes.view(torch.uint8))
    return equal and torch.equal(found.scale_inv.nan_to_num(-1), expected.scale_inv.nan_to_num(-1))


@DTYPES
@pytest.mark.parametrize("spoiled", [None, torch.inf, torch.nan])
@pytest.mark.parametrize("transposed", [False, True])
def test_cast_matches_plain_operations(dtype, spoiled, transposed, monkeypatch):
    values = values_of(dtype)
    if spoiled is not None:
        values[7, 3] = spoiled
    values = values.t() if transposed else values
    expected = in_plain_pytorch(lambda: quantize(values, E4M3.dtype), monkeypatch)
    found = quantize(values, E4M3.dtype)
    assert found.codes.is_contiguous() and found.shape == values.shape
    assert same(found, expected)


@DTYPES
@pytest.mark.parametrize(
    "factor", [nightly(1.0), 2.0**-16, nightly(0.3), -0.7, nightly(0.0), torch.inf]
)
def test_accumulated_gradients_match_plain_operations(dtype, factor, monkeypatch):
    """Include three microbatches, a loss scale or a clip, and the final rounding."""

    def accumulated():
        total = quantize(values_of(dtype), E4M3.dtype)
        total.kind = Kind.GRADIENT
        total.add_(values_of(dtype, seed=1)).add_(values_of(dtype, seed=2))
        total.mul_(torch.tensor(factor))
        total.finish_accumulation()
        return total

    expected, found = in_plain_pytorch(accumulated, monkeypatch), accumulated()
    assert found.codes.dtype == E4M3.dtype and same(found, expected)


@DTYPES
@pytest.mark.parametrize(
    "numel", [1, 5, triton_backward.ADDED_AT_ONCE, 3 * triton_backward.ADDED_AT_ONCE + 17]
)
def test_sum_matches_plain_operations(dtype, numel):
    codes = (torch.randn(numel, generator=torch.Generator().manual_seed(numel)) * 100).to(
        E4M3.dtype
    )
    addend, scale_inv = values_of(dtype, 1, numel)[0], torch.tensor(0.3)
    assert torch.equal(
        gradients.accumulate(codes, scale_inv, addend), codes.float() * scale_inv + addend
    )


@pytest.mark.parametrize(
    "numel", [1, 100, triton_backward.SQUARED, 5 * triton_backward.SQUARED + 3]
)
@pytest.mark.parametrize("scale_inv", [0.25, -3.0, 1e-30])
def test_norm_matches_values(numel, scale_inv):
    codes = (torch.randn(numel, generator=torch.Generator().manual_seed(numel)) * 100).to(
        E4M3.dtype
    )
    exact = codes.double().norm() * abs(scale_inv)
    found = gradients.norm(codes, torch.tensor(scale_inv))
    assert found.dtype == torch.float32 and found.dim() == 0
    torch.testing.assert_close(found.double(), exact, rtol=1e-5, atol=0)


def test_norm_of_non_finite_gradient_is_nan():
    values = values_of(torch.bfloat16)
    values[0, 0] = torch.inf
    gradient = quantize(values, E4M3.dtype)
    gradient.kind = Kind.GRADIENT
    assert torch.linalg.vector_norm(gradient).isnan()


def test_kernels_allocate_no_copies_of_values(monkeypatch):
    """Read codes directly: the kernels exist to save an FP32 copy of the whole."""

    def refused(*_, **__):
        raise AssertionError("codes were turned into FP32")

    gradient = quantize(values_of(torch.bfloat16), E4M3.dtype)
    gradient.kind = Kind.GRADIENT
    monkeypatch.setattr(ScaledTensor, "dequantize", refused)
    monkeypatch.setattr(torch.Tensor, "float", refused)
    torch.linalg.vector_norm(gradient)
    gradient.add_(values_of(torch.bfloat16, seed=1))
    gradient.finish_accumulation()
