"""What backward reads of a forward, as FP8 codes until it is read: E4M3 in blocks of 32 along the last dimension.

    value = code * 2**(scale - 127)        1 byte an element, and 1 byte (E8M0) a block: 33/32 bytes an element

The blocks are those of `mxfp8`. A value is off by at most 2**-4 of itself or, where that is more, 2**-16 of the largest
of its block. Zeros, signs, NaN and inf stay what they are, and so does what is no zero: backward may divide by it. (The
other values of a block with an inf become the least.) Where backward reads how far values are from the mean of their
row, that difference is what has a code, beside the mean in FP32.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from .formats import E4M3
from .kernels.quantize import dequantize_blocks, quantize_blocks
from .scaling import MX, Quantized

DTYPES = (torch.bfloat16, torch.float16, torch.float32)
"""Dtypes of values that can be packed."""
PART = 2**24
"""Elements that are unpacked at a time: eager operations make FP32 copies of them."""


class PackedValues(NamedTuple):
    """Values as codes."""

    quantized: Quantized
    """E4M3 [rows, columns] and the bits of E8M0, uint8 [rows, columns / 32, rounded up]."""
    dtype: torch.dtype
    """Of the values."""
    mean: torch.Tensor | None = None
    """Of each row, FP32 [rows, 1], where the codes stand for what values are beyond it."""

    @property
    def nbytes(self) -> int:
        return sum(part.nbytes for part in (*self.quantized, self.mean) if part is not None)

    def unpacked(self, shape: torch.Size) -> torch.Tensor:
        """The values that the codes stand for, of the dtype that was packed, contiguous."""
        codes = self.quantized.codes
        rows = max(1, PART // codes.shape[1])
        if self.mean is not None:
            beyond = dequantize_blocks(self.quantized, MX, torch.float32)
            return beyond.add_(self.mean).to(self.dtype).view(shape)
        if len(codes) <= rows:
            return _values(self.quantized, self.dtype).view(shape)
        values = torch.empty(codes.shape, dtype=self.dtype, device=codes.device)
        for out, *part in zip(values.split(rows), *(each.split(rows) for each in self.quantized), strict=True):
            out.copy_(_values(Quantized(*part), self.dtype))
        return values.view(shape)


def _values(quantized: Quantized, dtype: torch.dtype) -> torch.Tensor:
    if dtype != torch.float16:
        return dequantize_blocks(quantized, MX, dtype)
    # by way of FP32, in which no value that is rounded up overflows
    values, largest = dequantize_blocks(quantized, MX, torch.float32), torch.finfo(dtype).max
    return values.where(values.isinf(), values.clamp(-largest, largest)).to(dtype)


def packed(values: torch.Tensor, centers: bool = False) -> PackedValues:
    """The codes of a tensor.

    Args:
        values: [..., columns] of any strides; one of DTYPES.
        centers: whether backward reads how far values are from the mean of their row.
    """
    dtype, mean = values.dtype, None
    matrix = values.contiguous().view(-1, values.shape[-1])
    if centers:
        mean = matrix.mean(-1, keepdim=True, dtype=torch.float32)
        matrix = matrix - mean
    quantized = quantize_blocks(matrix, MX, E4M3, columns=False).along_columns()
    bits = quantized.codes.view(torch.uint8)
    bits |= matrix.bool() > bits << 1  # no zero, and a code of zero but for its sign
    return PackedValues(quantized, dtype, mean)


class ValuesFunction(torch.autograd.Function):
    """Custom function whose backward tolerates errors of 2**-4 in the tensors that it saves: they may be packed."""
