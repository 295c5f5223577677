"""A table on the device of where the parts of a message lie: a bucket of any number of gradients is one launch."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch

from .format import BLOCK, Part

VECTOR = 16
"""Bytes that a thread of a GPU reads or writes at once, from addresses that are a multiple of them."""


class Row(NamedTuple):
    """A row of a table: a part, or blocks that no part covers."""

    address: int
    scale_address: int
    """0 where there is no scale."""
    first_tile: int
    first_block: int
    numel: int
    """0 where all blocks are zeros."""
    end_block: int

    @property
    def aligned(self) -> bool:
        return self.address % VECTOR == 0 and self.numel % VECTOR == 0


class Table(NamedTuple):
    rows: list[Row]
    tiles: int
    aligned: bool
    """Whether vectors may be read and written in all rows."""

    @property
    def steps(self) -> int:
        """How many steps a binary search for a row takes."""
        return (len(self.rows) - 1).bit_length()

    def on(self, device: torch.device) -> torch.Tensor:
        """int64, [fields, rows]. Nothing waits for the device."""
        columns = list(zip(*self.rows, strict=True))
        return torch.tensor(columns, dtype=torch.int64, pin_memory=device.type == "cuda").to(device, non_blocking=True)


def tables(parts: Sequence[Part], tile: int, blocks: int = 0) -> Iterator[Table]:
    """One table for all parts at addresses that suit vectors, and one for the others, should there be any.

    Args:
        tile: blocks in a tile; no tile has blocks of two parts.
        blocks: blocks in all rows. What no part covers then is a row of its own, of zeros.
    """
    rows = list(_rows(parts, blocks))
    for aligned in (True, False):
        chosen, tiles = [], 0
        for row in rows:
            if row.aligned == aligned:
                chosen.append(row._replace(first_tile=tiles))
                tiles += -(-(row.end_block - row.first_block) // tile)
        if chosen:
            yield Table(chosen, tiles, aligned)


def _rows(parts: Sequence[Part], blocks: int) -> Iterator[Row]:
    filled = 0
    for part in parts:
        first, end = part.start // BLOCK, -(-(part.start + part.values.numel()) // BLOCK)
        if blocks and filled < first:
            yield Row(0, 0, 0, filled, 0, first)
        if first < end:
            scale = 0 if part.scale_inv is None else part.scale_inv.data_ptr()
            yield Row(part.values.data_ptr(), scale, 0, first, part.values.numel(), end)
        filled = max(filled, end)
    if filled < blocks:
        yield Row(0, 0, 0, filled, 0, blocks)
