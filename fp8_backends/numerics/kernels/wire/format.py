"""How gradients lie in a message, and where in memory the values of its rows are."""

from __future__ import annotations

from typing import NamedTuple

import torch

BLOCK = 128
"""Elements that share a scale on the wire."""


class Part(NamedTuple):
    """Values that lie in one piece in memory, and where they stand among the values of all rows, row after row.

    What no part covers counts as zero.
    """

    values: torch.Tensor
    """[numel], contiguous; FP32, bf16, fp16, or whatever else a cast to FP32 reads."""
    start: int
    """Index among the values of the flattened rows; a multiple of BLOCK. The last block may be cut off."""
    scale_inv: torch.Tensor | None = None
    """The values are multiplied by it: FP32, 0-dimensional."""


def shape_of(rows: int, columns: int) -> tuple[int, int]:
    """The shape of messages for so many rows and columns of values."""
    return rows, columns + -(-columns // BLOCK)


def columns_of(messages: torch.Tensor) -> int:
    """How many of the bytes of a message are codes."""
    return messages.shape[1] - -(-messages.shape[1] // (BLOCK + 1))
