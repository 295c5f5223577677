"""Check the message of one rank: E4M3 codes and the exponents of their scales, as bytes."""

from __future__ import annotations

import message_cases
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch._subclasses.fake_tensor import FakeTensorMode

from fp8_backends.comm.two_shot import MESSAGE_BLOCK, decode, encode
from fp8_backends.tensors.scaled_tensor import quantize

E4M3_STEP = 2.0**-4
"""Half the distance of neighbouring E4M3 numbers over the smaller one: the largest relative error
of a normal one."""


def decoded(rows: torch.Tensor) -> torch.Tensor:
    return message_cases.values_of(encode(rows))


@settings(max_examples=60)
@given(
    rows=st.integers(1, 8),
    columns=st.integers(1, 3 * MESSAGE_BLOCK + 1),
    seed=st.integers(0, 2**31),
    magnitude=st.floats(-30, 30),
    dtype=st.sampled_from([torch.float32, torch.bfloat16, torch.float16]),
)
def test_message_rounds_by_half_a_step_at_most(rows, columns, seed, magnitude, dtype):
    generator = torch.Generator().manual_seed(seed)
    values = (torch.randn(rows, columns, generator=generator) * 2.0 ** min(magnitude, 10)).to(dtype)
    message = encode(values)
    assert message.dtype == torch.uint8
    assert message.shape == (rows, columns + -(-columns // MESSAGE_BLOCK))
    codes, scale_inv = decode(message)
    assert codes.shape == (rows, columns) and scale_inv.shape == (
        rows,
        -(-columns // MESSAGE_BLOCK),
    )
    padded = torch.nn.functional.pad(values.float(), (0, -columns % MESSAGE_BLOCK)).view(
        rows, -1, MESSAGE_BLOCK
    )
    # below it E4M3 is subnormal, with this for a step
    smallest = padded.abs().amax(-1, keepdim=True) * 2.0**-17
    error = (
        torch.nn.functional.pad(decoded(values), (0, -columns % MESSAGE_BLOCK)).view_as(padded)
        - padded
    )
    assert (error.abs() <= padded.abs() * E4M3_STEP + smallest).all()


@settings(max_examples=30)
@given(blocks=st.integers(1, 5), seed=st.integers(0, 2**31))
def test_message_matches_reference_block_cast(blocks, seed):
    values = torch.randn(blocks * MESSAGE_BLOCK, generator=torch.Generator().manual_seed(seed))
    codes, scale_inv = decode(encode(values.unsqueeze(0)))
    reference = quantize(values, torch.float8_e4m3fn, block_size=MESSAGE_BLOCK)
    assert torch.equal(codes[0].view(torch.uint8), reference.codes.view(torch.uint8))
    assert torch.equal(scale_inv[0], reference.scale_inv)


@pytest.mark.parametrize("value", [float("inf"), float("-inf"), float("nan")])
def test_non_finite_value_turns_only_its_block_into_nan(value):
    values = torch.ones(2, 3 * MESSAGE_BLOCK)
    values[1, MESSAGE_BLOCK + 5] = value
    result = decoded(values)
    assert result[1, MESSAGE_BLOCK : 2 * MESSAGE_BLOCK].isnan().all()
    result[1, MESSAGE_BLOCK : 2 * MESSAGE_BLOCK] = 1
    assert torch.equal(result, torch.ones_like(result))


@pytest.mark.parametrize("value", [0.0, 2.0**-126, 2.0**-133, 3.0e38, -1.5])
def test_fp32_extremes_are_transmitted(value):
    result = decoded(torch.full((1, MESSAGE_BLOCK), value))
    assert torch.isfinite(result).all()
    # 2**-126 is the smallest scale_inv, times E4M3's smallest number 2**-9: smaller values become
    # zero
    assert torch.allclose(result, torch.full_like(result, value), rtol=E4M3_STEP, atol=2.0**-136)


@settings(max_examples=30)
@given(seed=st.integers(0, 2**31), dtype=st.sampled_from([torch.float32, torch.bfloat16]))
def test_rounded_values_are_transmitted_exactly(seed, dtype):
    """Justify one pass for contributions to be rounded: rounding again on the way changes
    nothing."""
    once = decoded(message_cases.values(20 * MESSAGE_BLOCK, dtype, seed).unsqueeze(0))
    finite = torch.where(once.isfinite(), once, torch.zeros_like(once))
    assert torch.equal(decoded(finite).view(torch.int32), finite.view(torch.int32))


def test_blocks_keep_small_rows():
    """Justify blocks as unit: one scale for the tensor turns rows below 2**-18 of the largest into
    zeros."""
    rows = (
        torch.randn(64, 256, generator=torch.Generator().manual_seed(0))
        * 2.0 ** -torch.arange(64).float()[:, None]
    )
    by_block, by_tensor = (
        decoded(rows.reshape(1, -1)).view_as(rows),
        quantize(rows, torch.float8_e4m3fn).dequantize(),
    )
    errors = (
        (by_block - rows).norm(dim=1) / rows.norm(dim=1),
        (by_tensor - rows).norm(dim=1) / rows.norm(dim=1),
    )
    assert errors[0].max() < 0.035
    assert (errors[1] == 1).sum() > 30


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_messages_need_no_host_reads(dtype):
    """Fake tensors raise at every read of a value, so these operations never wait for a GPU."""
    with FakeTensorMode():
        message = encode(torch.empty(4, 1000, dtype=dtype))
        codes, scale_inv = decode(message)
        assert message.shape == (4, 1008) and codes.shape == (4, 1000) and scale_inv.shape == (4, 8)
