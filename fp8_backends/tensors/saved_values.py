"""Pack tensors saved for backward as FP8 codes: E4M3 in blocks of 32 along the last dimension.

    value = code * 2**(scale - 127)        1 byte an element, and 1 byte (E8M0) a block: 33/32 bytes an element

The blocks are those of `mxfp8`. The error of a value is at most 2**-4 of itself or 2**-16 of its block's largest,
whichever is more. Zeros, signs, NaN and inf are kept, and nonzero values stay nonzero: backward may divide by them.
(Other values of a block with an inf become the smallest.) If backward reads distances from row means, the codes store
these distances, next to the mean in FP32.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from ..formats.formats import E4M3
from ..formats.scaling import MX, Quantized
from ..kernels.quantize import dequantize_blocks, quantize_blocks

DTYPES = (torch.bfloat16, torch.float16, torch.float32)
"""Dtypes of values that can be packed."""
PART = 2**24
"""Elements unpacked at a time: eager operations copy them in FP32."""


class PackedValues(NamedTuple):
    quantized: Quantized
    """E4M3 [rows, columns] and the bits of E8M0, uint8 [rows, columns / 32, rounded up]."""
    dtype: torch.dtype
    """dtype of the values."""
    mean: torch.Tensor | None = None
    """Row means, FP32 [rows, 1], if the codes store distances from them."""

    @property
    def nbytes(self) -> int:
        return sum(part.nbytes for part in (*self.quantized, self.mean) if part is not None)

    def unpacked(self, shape: torch.Size) -> torch.Tensor:
        """Return the values, in their dtype, contiguous."""
        codes = self.quantized.codes
        rows = max(1, PART // codes.shape[1])
        if self.mean is not None:
            beyond = dequantize_blocks(self.quantized, MX, torch.float32)
            return beyond.add_(self.mean).to(self.dtype).view(shape)
        if len(codes) <= rows:
            return _values(self.quantized, self.dtype).view(shape)
        values = torch.empty(codes.shape, dtype=self.dtype, device=codes.device)
        for out, *part in zip(values.split(rows), *(stored.split(rows) for stored in self.quantized), strict=True):
            out.copy_(_values(Quantized(*part), self.dtype))
        return values.view(shape)


def _values(quantized: Quantized, dtype: torch.dtype) -> torch.Tensor:
    if dtype != torch.float16:
        return dequantize_blocks(quantized, MX, dtype)
    # in FP32, rounding up does not overflow
    values, largest = dequantize_blocks(quantized, MX, torch.float32), torch.finfo(dtype).max
    return values.where(values.isinf(), values.clamp(-largest, largest)).to(dtype)


def packed(values: torch.Tensor, centers: bool = False) -> PackedValues:
    """Pack a tensor.

    Args:
        values: [..., columns] of any strides; one of DTYPES.
        centers: backward reads distances from row means.
    """
    dtype, mean = values.dtype, None
    matrix = values.contiguous().view(-1, values.shape[-1])
    if centers:
        mean = matrix.mean(-1, keepdim=True, dtype=torch.float32)
        matrix = matrix - mean
    quantized = quantize_blocks(matrix, MX, E4M3, columns=False).along_columns()
    bits = quantized.codes.view(torch.uint8)
    bits |= matrix.bool() > bits << 1  # a nonzero value with a code of ±0
    return PackedValues(quantized, dtype, mean)


class ValuesFunction(torch.autograd.Function):
    """Base of functions with saved tensors that may be packed: their backward tolerates errors of 2**-4."""
