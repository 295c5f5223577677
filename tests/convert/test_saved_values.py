"""Saved values as E4M3 codes: errors and bytes."""

from __future__ import annotations

import pytest
import torch

from fp8_backends.convert import saved_activations
from fp8_backends.convert.saved_activations import packed
from fp8_backends.formats.formats import COMPUTE_DTYPES


def off_by(values: torch.Tensor) -> torch.Tensor:
    """The error of each value over its bound."""
    read = packed(values).unpacked(values.shape)
    assert (read.dtype, read.shape) == (values.dtype, values.shape) and read.is_contiguous()
    x = values.double()
    blocks = torch.nn.functional.pad(x.abs(), (0, -x.shape[-1] % 32)).unflatten(-1, (-1, 32))
    largest = blocks.amax(-1, keepdim=True).expand(blocks.shape).flatten(-2)[..., : x.shape[-1]]
    return (read.double() - x).abs() / torch.maximum(2**-4 * x.abs(), 2**-16 * largest)


@pytest.mark.parametrize("dtype", COMPUTE_DTYPES, ids=str)
# the last: a CPU's own casts
@pytest.mark.parametrize("shape", [(3, 5, 64), (2, 50), (128, 96)], ids=str)
def test_relative_error_is_at_most_a_sixteenth(dtype, shape):
    torch.manual_seed(0)
    magnitudes = torch.exp2(torch.randint(-12, 5, shape))  # far apart inside one block
    assert off_by((torch.randn(shape) * magnitudes).to(dtype)).max() <= 1


def test_any_strides_are_packed():
    torch.manual_seed(0)
    heads = torch.randn(2, 40, 4, 32).transpose(1, 2)
    assert off_by(heads).max() <= 1
    assert off_by(torch.randn(128, 160).t()).max() <= 1


@pytest.mark.parametrize("dtype", COMPUTE_DTYPES, ids=str)
def test_parts_unpack_like_the_whole(dtype, monkeypatch):
    torch.manual_seed(0)
    values = packed(torch.randn(7, 9, 96).to(dtype))
    whole = values.unpacked((7, 9, 96))
    monkeypatch.setattr(saved_activations, "SAVED_AT_ONCE", 5 * 96)
    assert torch.equal(values.unpacked((7, 9, 96)), whole)


@pytest.mark.parametrize("dtype", COMPUTE_DTYPES, ids=str)
def test_zeros_signs_nan_and_inf_are_preserved(dtype):
    ends = [
        0.0,
        -0.0,
        torch.nan,
        torch.inf,
        -torch.inf,
        torch.finfo(dtype).max,
        torch.finfo(dtype).min,
    ]
    values = torch.zeros(len(ends), 32).to(dtype)
    values[:, 0] = torch.tensor(ends).to(dtype)
    read = packed(values).unpacked(values.shape)[:, 0]
    assert read[:2].tolist() == [0, 0] and read[:2].signbit().tolist() == [False, True]
    assert read[2].isnan() and read[3:5].tolist() == [torch.inf, -torch.inf]
    assert not read[5:].isnan().any()
    if dtype == torch.float16:  # no finite number of it overflows, as a rounded up 65504 would
        assert read[5:].isfinite().all()


def test_the_error_of_random_values_is_under_three_percent():
    torch.manual_seed(0)
    values = torch.randn(256, 256)
    error = packed(values).unpacked(values.shape) - values
    assert 0.02 < error.norm() / values.norm() < 0.03


def test_element_takes_33_32ths_of_a_byte():
    values = torch.randn(64, 128)
    assert packed(values).nbytes == values.numel() * 33 / 32
