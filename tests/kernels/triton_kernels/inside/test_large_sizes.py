"""Run kernels near and beyond 2**31 elements, the end of an int32: single programs of a large
grid."""

from __future__ import annotations

import pytest
import torch
import triton
import triton.language as tl
from triton.runtime.interpreter import interpreter_builder

from fp8_backends.kernels import triton_backward, triton_matrix, triton_messages

ALMOST = 2**31 - 100
"""A number of elements that allows no addition."""


@pytest.fixture
def programs(monkeypatch):
    """Run a grid of one program as program `first` of a larger grid: `programs(first, count)`."""
    set_dim, set_idx = interpreter_builder.set_grid_dim, interpreter_builder.set_grid_idx

    def as_one_of(first: int, count: int) -> None:
        monkeypatch.setattr(
            interpreter_builder, "set_grid_dim", lambda x, y, z: set_dim(count, y, z)
        )
        monkeypatch.setattr(
            interpreter_builder, "set_grid_idx", lambda x, y, z: set_idx(x + first, y, z)
        )

    return as_one_of


def test_amax_beyond_2_31_elements(programs):
    programs(1, 2**21)
    tile = triton_matrix.AMAX_TILE
    x, partials = torch.randn(2 * tile.columns), torch.zeros(2, dtype=torch.int32)
    sizes = 1, ALMOST, ALMOST, -(-ALMOST // tile.columns)
    triton_matrix.amax_kernel[(1,)](x, partials, *sizes, False, **triton_matrix.tiling(tile))
    assert partials.view(torch.float32)[1] == x[tile.columns :].abs().max()


def test_sum_of_messages_stays_in_bounds(programs):
    """Run a program with blocks from 2**31 elements on."""
    blocks = 2**31 // triton_messages.MESSAGE_BLOCK
    programs(blocks // triton_messages.TILE, blocks)
    received, own, columns = (
        torch.zeros(1, blocks + 8192, dtype=torch.uint8),
        torch.zeros(1024),
        1024,
    )
    out = torch.zeros_like(received)
    arguments = received, own, out, 1000, columns, received.stride(0), 0, 1.0, 1.0
    options = {
        "RANKS": 1,
        "TOGETHER": 16,
        "ENCODED": True,
        "HAS_FP8_CASTS": False,
        "TILE": triton_messages.TILE,
    }
    triton_messages.sum_kernel[(1,)](*arguments, **options)
    assert not out.any()


@triton.jit
def _places_kernel(blocks_ptr, out_ptr, columns, stride, COUNT: tl.constexpr):
    at = tl.arange(0, COUNT)
    row, column, begin, exponent = triton_messages._in_messages(
        tl.load(blocks_ptr + at), columns, stride
    )
    tl.store(out_ptr + at, column)
    tl.store(out_ptr + COUNT + at, begin)
    tl.store(out_ptr + 2 * COUNT + at, exponent)


@pytest.mark.parametrize("columns", [ALMOST, 2**32])
def test_message_offsets_beyond_2_31_elements(columns):
    of_row = -(-columns // 128)
    blocks = torch.tensor(
        [0, 5, of_row - 1, of_row, of_row + 3, 2 * of_row - 1, 7, 2**24], dtype=torch.int32
    )
    found, stride = torch.zeros(3, 8, dtype=torch.int64), columns + of_row
    _places_kernel[(1,)](blocks, found, columns, stride, COUNT=8)
    row, block = blocks.long() // of_row, blocks.long() % of_row
    begin = row * stride
    assert torch.equal(
        found, torch.stack([block * 128, begin + block * 128, begin + columns + block])
    )


def test_strided_logits_are_read_by_rows(monkeypatch):
    """The kernel would multiply a stride between words by the word's number: beyond 2**31 for
    logits of long texts."""
    seen = []
    kernel = triton_backward.cross_entropy_kernel
    monkeypatch.setattr(
        triton_backward, "cross_entropy_kernel", {(4,): lambda x, *_, **__: seen.append(x.stride())}
    )
    logits = torch.randn(9, 4).t()
    triton_backward.cross_entropy(logits, torch.zeros(4, dtype=torch.int64), -100, 0.0)
    assert seen == [(9, 1)] and "word_stride" not in kernel.arg_names
