"""Casts to FP8 and back on a CPU, with a scale for each block of a matrix: `scaling.Blocks`, part by part, eagerly.

A matrix is read as it lies. The codes of its transpose are those of the matrix in transposed blocks, and a view of them
is what the products take on a CPU.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.nn.functional as F

from ...formats import Format
from ...scaling import Blocks, Quantized, e8m0_values
from . import cpu_casts

_BITS = {2: (torch.int16, 0x7FFF), 4: (torch.int32, 0x7FFFFFFF)}
"""Bytes of an element: the integer of that size, and its bits without the sign."""


def quantize(
    x: torch.Tensor, blocks: Blocks, fmt: Format, transposed: bool, stored_scale_inv: torch.Tensor | None
) -> Quantized | None:
    """`blocks.quantize(x, fmt)`, or of x.t(): codes and scales may be views. None where x has a NaN.

    Args:
        x: [rows, columns] of any strides; bf16, fp16 or fp32.
        stored_scale_inv: FP32, 0-dimensional, a power of two: the values are `x * stored_scale_inv`.
    """
    if not x.is_contiguous():
        if x.t().is_contiguous():
            x, transposed = x.t(), not transposed
        x = x.contiguous()
    size = _size(blocks, x.shape, transposed)
    amax = _amax(x, *size)
    if amax.isnan().any():
        return None
    factor = 1 if stored_scale_inv is None else stored_scale_inv
    amax = amax * factor
    scale = blocks.scale(amax, fmt)
    codes, scale_inv = _cast(x, scale * factor, *size, fmt), blocks.inverse(scale, amax)
    return Quantized(codes.t(), scale_inv.t()) if transposed else Quantized(codes, scale_inv)


def dequantize(q: Quantized, blocks: Blocks, dtype: torch.dtype) -> torch.Tensor:
    """`blocks.dequantize(q, dtype)` of codes that are row-major or column-major, in the same layout. bf16 or FP32."""
    transposed = not q.codes.is_contiguous()
    codes, scale_inv = (q.codes.t(), q.scale_inv.t()) if transposed else q
    scale_inv = e8m0_values(scale_inv) if scale_inv.dtype == torch.uint8 else scale_inv
    if ((scale_inv.to(dtype) != scale_inv) & ~scale_inv.isnan()).any():
        return dequantize(q, blocks, torch.float32).to(dtype)  # bf16 would round such a scale, and the values again
    values, scale_inv = cpu_casts.decoded(codes, dtype), scale_inv.to(dtype)
    height, width = _size(blocks, codes.shape, transposed)
    for rows, bands in _parts(values.shape, height):
        _times(values[rows], scale_inv[bands], width)
    return values.t() if transposed else values


def _size(blocks: Blocks, shape: torch.Size, transposed: bool) -> tuple[int, int]:
    """Rows and columns of a block in a matrix of that shape. transposed: the blocks are those of its transpose."""
    columns = blocks.columns or shape[0 if transposed else 1]
    return (columns, blocks.rows) if transposed else (blocks.rows, columns)


def _amax(x: torch.Tensor, height: int, width: int) -> torch.Tensor:
    """max |x| of blocks. FP32 [rows of blocks, blocks in a row]; NaN where a block has one.

    Bits without the sign have the order of the numbers, and NaN above all: as integers they are compared tens of times
    as fast, since torch's own maximum has vector code for few layouts.
    """
    integer, magnitude = _BITS[x.dtype.itemsize]
    found = torch.zeros(-(-x.shape[0] // height), -(-x.shape[1] // width), dtype=integer)
    for rows, bands in _parts(x.shape, height):
        bits = x[rows].view(integer) & magnitude
        if missing := -x.shape[1] % width:
            bits = F.pad(bits, (0, missing))
        largest = bits.view(bands.stop - bands.start, -1, found.shape[1], width).amax((1, 3))
        found[bands] = torch.maximum(found[bands], largest)
    return found.view(x.dtype).float()


def _cast(x: torch.Tensor, factor: torch.Tensor, height: int, width: int, fmt: Format) -> torch.Tensor:
    """x times the factor of its block, saturated and rounded to nearest: FP8, row-major."""
    codes = torch.empty(x.shape, dtype=fmt.dtype)
    for rows, bands in _parts(x.shape, height):
        values = cpu_casts.part_of(x[rows].shape).copy_(x[rows])
        _times(values, factor[bands], width)
        codes[rows].copy_(values.clamp_(-fmt.max, fmt.max))
    return codes


def _times(values: torch.Tensor, factor: torch.Tensor, width: int) -> None:
    """values [rows, columns] times the factors [bands, blocks in a band] of their blocks, in place."""
    bands, columns = len(factor), values.shape[1]
    if columns % width:
        factor, width = factor.repeat_interleave(width, 1)[:, :columns], 1
    values.view(bands, -1, columns // width, width).mul_(factor[:, None, :, None])


def _parts(shape: torch.Size, height: int) -> Iterator[tuple[slice, slice]]:
    """Rows of a matrix that are worked on at a time, and the bands of blocks, `height` rows each, in which they lie:
    several whole ones, or part of one."""
    step = max(1, cpu_casts.PART // max(1, shape[1]))
    together = max(1, step // height)
    whole = shape[0] // height
    firsts = [*range(0, whole, together), *([whole] if shape[0] % height else [])]
    for band in firsts:
        last = min(band + together, whole) if band < whole else band + 1
        start, stop = band * height, min(last * height, shape[0])
        size = step if last == band + 1 else stop - start
        for row in range(start, stop, size):
            yield slice(row, min(row + size, stop)), slice(band, last)
