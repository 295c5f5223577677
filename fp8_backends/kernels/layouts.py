"""Layouts of kernel results: quantized matrices for products, and messages between ranks."""

from typing import NamedTuple

import torch

from ..formats.scaling import Quantized, scale_inv_of


class Layouts(NamedTuple):
    """A quantized matrix [rows, columns] in the layouts of both products."""

    codes: torch.Tensor | None = None
    """FP8 [rows, columns], row-major; None: not requested."""
    scale_inv: torch.Tensor | None = None
    """Inverse scale of `codes`, as in `Quantized`."""
    transposed: torch.Tensor | None = None
    """FP8 [columns, rows], row-major; None: not requested, or a view of `codes` serves."""
    transposed_scale_inv: torch.Tensor | None = None
    """Inverse scale of `transposed`: the same tensor for one scale, else one for each block of
    x.t()."""
    amax: torch.Tensor | None = None
    """max |x| in FP32, 0-dim; None for blocks."""

    def along_columns(self) -> Quantized:
        """Return the operand of a product contracting the columns."""
        return Quantized(self.codes, self.scale_inv)

    def along_rows(self) -> Quantized:
        """Return the operand of a product contracting the rows, [columns, rows]."""
        if self.transposed is None:
            return Quantized(self.codes.t(), self.scale_inv)
        return Quantized(self.transposed, self.transposed_scale_inv)


MESSAGE_BLOCK = 128
"""Elements that share a scale on the wire."""


class Part(NamedTuple):
    """Contiguous values and their place among the values of all rows, row after row. Gaps between
    parts are zero."""

    values: torch.Tensor
    """[numel], contiguous; FP32, bf16, fp16 or any dtype that casts to FP32."""
    start: int
    """Index in the flattened rows, a multiple of MESSAGE_BLOCK. The last block may be
    incomplete."""
    scale_inv: torch.Tensor | None = None
    """Factor of the values: FP32, 0-dim."""


def shape_of(rows: int, columns: int) -> tuple[int, int]:
    """Return the shape of messages for a matrix of values."""
    return rows, columns + -(-columns // MESSAGE_BLOCK)


def columns_of(messages: torch.Tensor) -> int:
    """Count the codes in a message."""
    return messages.shape[1] - -(-messages.shape[1] // (MESSAGE_BLOCK + 1))


def exponents_of(scale: torch.Tensor, amax: torch.Tensor) -> torch.Tensor:
    """Return inverse scales as E8M0: uint8, 255 for a non-finite amax."""
    return (scale_inv_of(scale, amax).view(torch.int32) >> 23 & 0xFF).to(torch.uint8)
