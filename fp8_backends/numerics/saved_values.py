"""What backward reads of a forward, as FP8 codes until it is read: E4M3 in blocks of 32 along the last dimension.

    value = code * 2**(scale - 127)        1 byte an element, and 1 byte (E8M0) a block: 33/32 bytes an element

The blocks are those of `mxfp8`. A value is off by at most 2**-4 of itself or, where that is more, 2**-17 of the largest
of its block. Zeros, signs, NaN and inf stay what they are (the other values of a block with an inf become zeros).
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from .formats import E4M3
from .kernels.quantize.dispatch import dequantize_blocks, quantize_blocks
from .scaling import MX, Quantized

DTYPES = (torch.bfloat16, torch.float16, torch.float32)
"""Dtypes of values that can be packed."""


class PackedValues(NamedTuple):
    """Values as codes."""

    quantized: Quantized
    """E4M3 [rows, columns] and the bits of E8M0, uint8 [rows, columns / 32, rounded up]."""
    dtype: torch.dtype
    """Of the values."""

    @property
    def nbytes(self) -> int:
        return sum(part.numel() for part in self.quantized)  # each has one byte an element

    def unpacked(self, shape: torch.Size) -> torch.Tensor:
        """The values that the codes stand for, of the dtype that was packed, contiguous."""
        # FP16 by way of FP32, in which no value that is rounded up overflows
        values = dequantize_blocks(self.quantized, MX, torch.float32 if self.dtype == torch.float16 else self.dtype)
        if self.dtype == torch.float16:
            largest = torch.finfo(torch.float16).max
            values = values.where(values.isinf(), values.clamp(-largest, largest)).half()
        return values.reshape(shape)


def packed(values: torch.Tensor) -> PackedValues:
    """The codes of a tensor.

    Args:
        values: [..., columns] of any strides; one of DTYPES.
    """
    matrix = values.contiguous().view(-1, values.shape[-1])
    return PackedValues(quantize_blocks(matrix, MX, E4M3, columns=False).along_columns(), values.dtype)
