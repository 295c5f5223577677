"""One pass over memory gives the bits of the reference, in chunks on a CPU. Triton:
tests/kernels/triton_kernels."""

from __future__ import annotations

import message_cases as cases
import pytest
import torch

from fp8_backends.kernels import messages
from fp8_backends.kernels.layouts import MESSAGE_BLOCK, Part


@pytest.fixture(params=[2 * MESSAGE_BLOCK, 2**18], ids=["small chunks", "chunks"])
def chunks(request, monkeypatch):
    monkeypatch.setattr(messages, "CHUNK", request.param)
    return messages


@pytest.mark.parametrize("rounded", [False, True])
@pytest.mark.parametrize("rows, rank", [(1, 0), (2, 1), (3, 0), (8, 5)])
@pytest.mark.parametrize("dtype", cases.DTYPES)
def test_gradients_are_packed_in_place(chunks, dtype, rows, rank, rounded):
    cases.check_pack(chunks, dtype, rows, rank, rounded)


@pytest.mark.parametrize("columns", [1, 127, 128, 129, 1000])
@pytest.mark.parametrize("rows, kept", [(1, None), (3, 1)])
@pytest.mark.parametrize("dtype", cases.DTYPES)
def test_rows_of_any_length_are_encoded(chunks, dtype, rows, kept, columns):
    cases.check_encode(chunks, dtype, rows, columns, kept)


@pytest.mark.parametrize("columns", [MESSAGE_BLOCK, 5001])
@pytest.mark.parametrize("ranks, rank, divisor", [(1, 0, 1), (2, 1, 2), (3, 0, 3), (40, 17, 40)])
@pytest.mark.parametrize("dtype", cases.DTYPES)
def test_contributions_are_summed_in_one_pass(chunks, dtype, ranks, rank, divisor, columns):
    cases.check_reduce(chunks, ranks, columns, rank, dtype, divisor, factor=0.3)


def test_padding_is_not_read(chunks):
    cases.check_reduce_of_longer_messages(chunks)


@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize("dtype", cases.DTYPES)
def test_averages_are_written_to_gradients(chunks, dtype, rows):
    cases.check_unpack(chunks, dtype, rows)


@pytest.mark.parametrize("columns", [1, 127, 128, 1000])
def test_codes_and_scales_round_trip(chunks, columns):
    cases.check_decode(messages, 3, columns)


def test_every_code_is_decoded():
    codes = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn)
    for scale in (2.0**-126, 1.0, 2.0**110):
        scale_inv = torch.full((2,), scale)
        result, expected = (
            passes.dequantize(codes, scale_inv) for passes in (messages, cases.reference)
        )
        ordinary = ~expected.isnan()  # NaN's code occurs only with the scale NaN
        assert ordinary.sum() == 254 and cases.same(result[ordinary], expected[ordinary])


def test_no_temporary_grows_with_the_bucket(monkeypatch):
    """Allocate the length of a bucket once, for a message or a result; everything else fits into
    chunks."""
    from torch.utils._python_dispatch import TorchDispatchMode

    monkeypatch.setattr(messages, "CHUNK", 16 * MESSAGE_BLOCK)
    numel, rows = 1024 * MESSAGE_BLOCK, 2

    class Sizes(TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            out = function(*args, **(kwargs or {}))
            fresh = (
                isinstance(out, torch.Tensor)
                and not function.is_view
                and not any(out is a for a in args)
            )
            sizes.extend(
                [out.numel() * out.element_size()] if fresh and "out" not in (kwargs or {}) else []
            )
            return out

    given, arrived = cases.values(numel), cases.received(rows, numel // rows)
    out, own = torch.empty(numel), torch.empty(numel // rows)
    chunk = 16 * MESSAGE_BLOCK * 4 * 2  # two of them in FP32
    for call, lasting in (
        (lambda: messages.pack([Part(given, 0)], rows, numel // rows, 0), 2),
        (lambda: messages.reduce(arrived, own, 0, 2), 1),
        (lambda: messages.reduce_values(arrived, own, 0, own.clone()), 1),
        (lambda: messages.unpack(arrived, [Part(out, 0)]), 0),
    ):
        sizes: list[int] = []
        with Sizes():
            call()
        assert len([size for size in sizes if size > chunk]) == lasting, sizes
