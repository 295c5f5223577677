"""Compare packing, summing and reading of messages by kernels with the reference, bitwise."""

from __future__ import annotations

import message_cases as cases
import pytest
import torch

from fp8_backends.kernels import messages, triton_messages
from fp8_backends.kernels.layouts import MESSAGE_BLOCK, Part
from fp8_backends.kernels.triton_messages import tables


@pytest.mark.parametrize(
    "rows, rank, rounded", [(1, 0, False), (2, 1, True), (3, 0, False), (8, 5, True)]
)
@pytest.mark.parametrize("dtype", cases.DTYPES)
def test_gradients_are_packed_in_place(dtype, rows, rank, rounded):
    cases.check_pack(triton_messages, dtype, rows, rank, rounded)


@pytest.mark.parametrize("rows, kept, columns", [(1, None, 129), (3, 1, 1), (3, 1, 4096)])
@pytest.mark.parametrize("dtype", cases.DTYPES)
def test_rows_of_any_length_are_encoded(dtype, rows, kept, columns):
    cases.check_encode(triton_messages, dtype, rows, columns, kept)


@pytest.mark.parametrize("columns", [MESSAGE_BLOCK, 5001])
@pytest.mark.parametrize(
    "ranks, dtype", [*((ranks, dtype) for ranks in (1, 3) for dtype in cases.DTYPES)]
)
def test_contributions_are_summed_in_one_pass(ranks, dtype, columns):
    cases.check_reduce(triton_messages, ranks, columns, 0, dtype, divisor=ranks, factor=0.3)


@pytest.mark.parametrize("ranks, rank", [(8, 7), (40, 17)])
def test_many_contributions_are_summed_in_pytorchs_order(ranks, rank):
    """Follow the order of PyTorch's vectors, of at most 16 elements; the remainder has another
    order, not followed here."""
    cases.check_reduce(triton_messages, ranks, 5008, rank, torch.float32, divisor=ranks, factor=0.3)


def test_padding_is_not_read():
    cases.check_reduce_of_longer_messages(triton_messages)


@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize("dtype", cases.DTYPES)
def test_averages_are_written_to_gradients(dtype, rows):
    cases.check_unpack(triton_messages, dtype, rows)


@pytest.mark.parametrize("columns", [1, 128, 1000])
def test_codes_and_scales_round_trip(columns):
    cases.check_decode(triton_messages, 3, columns)


def test_gradients_of_several_dtypes_share_a_bucket():
    of = [
        Part(cases.values(300, dtype, seed), 3 * MESSAGE_BLOCK * seed)
        for seed, dtype in enumerate(cases.DTYPES)
    ]
    made, expected = (
        passes.pack(of, 2, 5 * MESSAGE_BLOCK, 0, True)
        for passes in (triton_messages, cases.reference)
    )
    assert cases.same_messages(made[0], expected[0]) and cases.same(made[1], expected[1])
    back, wanted = ([Part(torch.empty_like(part.values), part.start) for part in of] for _ in "12")
    triton_messages.unpack(made[0], back)
    cases.reference.unpack(made[0], wanted)
    assert all(cases.same(one.values, two.values) for one, two in zip(back, wanted, strict=True))


@pytest.mark.parametrize("count", [1, 2, 3, 33])
def test_each_tile_finds_its_gradient(count):
    """Alternate weights and biases: some have several tiles, some a part of one."""
    of, start = [], 0
    for index in range(count):
        of.append(Part(torch.full((5000 if index % 2 else 100,), index + 1.0), start))
        start += -(-of[-1].values.numel() // MESSAGE_BLOCK) * MESSAGE_BLOCK
    (table,) = tables(of, triton_messages.TILE, start // MESSAGE_BLOCK)
    assert table.tiles == sum(
        -(-part.values.numel() // (triton_messages.TILE * MESSAGE_BLOCK)) for part in of
    )
    back = [Part(torch.empty_like(part.values), part.start) for part in of]
    sent, _ = triton_messages.pack(of, 1, start, 0, True)
    triton_messages.unpack(sent, back)
    # the same at any power of two
    rounded = (torch.arange(count) + 1.0).to(torch.float8_e4m3fn).float()
    for expected, part in zip(rounded, back, strict=True):
        assert (part.values == expected).all()


def test_dispatch_reaches_the_kernels(monkeypatch):
    """A step takes one launch for any number of gradients; gradients at odd addresses take a second
    one."""
    launches = []
    original = triton_messages._launch
    monkeypatch.setattr(
        triton_messages,
        "_launch",
        lambda kernel, *a, **k: launches.append(original(kernel, *a, **k)),
    )
    own_rank, arrived, odd = 1, cases.received(3, 1000), cases.parts(torch.bfloat16, 0)
    even = [Part(torch.ones(6 * MESSAGE_BLOCK), index * 6 * MESSAGE_BLOCK) for index in range(4)]
    calls = [
        (1, lambda: messages.pack(even, 2, 12 * MESSAGE_BLOCK, own_rank)),
        (2, lambda: messages.pack(odd, 2, 3072, own_rank)),
        (1, lambda: messages.encode(torch.ones(3, 1000))),
        (1, lambda: messages.reduce(arrived, torch.ones(1000), own_rank, 3)),
        (1, lambda: messages.reduce_values(arrived, torch.ones(1000), own_rank, torch.empty(1000))),
        (1, lambda: messages.unpack(cases.received(2, 12 * MESSAGE_BLOCK), even)),
        (1, lambda: messages.decode(arrived)),
    ]
    for expected, call in calls:
        call()
        assert len(launches) == expected
        launches.clear()
