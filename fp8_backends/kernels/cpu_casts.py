"""Cast to FP8 and back on a CPU, eagerly: the reference operations over parts that stay in cache,
to the same bits.

Page faults on large FP32 copies cost more than the arithmetic. Codes are decoded through FP16 by a
shift, or in pairs through a table: five times faster than torch's E4M3 cast. Nothing here is
traced: some values are read on the host.
"""

import functools
import math
import threading
from collections.abc import Iterator, Sequence

import torch
import torch.nn.functional as F

from ..formats.formats import E4M3, FP16, FP32, Format
from ..formats.scaling import Blocks, Quantized, e8m0_values
from .triton_gate import is_eager

CAST_AT_ONCE = 2**19
"""Elements of a part: 2 MiB in FP32. Smaller parts are no faster, and threads synchronize after
each operation."""
MOST_SCRATCH = 2**25
"""Most bytes of a reused buffer. Each thread has four: a part, both operands of a product, its
unrounded result."""
FEWEST_TO_CAST = 2**13
"""Below this many elements, the reference is faster, with fewer operations."""

_BITS = {2: (torch.int16, 0x7FFF), 4: (torch.int32, 0x7FFFFFFF)}
"""Bytes of an element: integer of that size, mask of its magnitude bits."""


def is_on_host(tensor: torch.Tensor) -> bool:
    """Return True for an eager CPU tensor: its numbers can be read without waiting."""
    return is_eager(tensor) and tensor.device.type == "cpu"


def serves(tensor: torch.Tensor) -> bool:
    """Return True for an eager CPU tensor with enough elements to gain."""
    return is_on_host(tensor) and tensor.numel() >= FEWEST_TO_CAST


def scale_from_amax(amax: torch.Tensor, fmt: Format) -> torch.Tensor:
    """Return `scaling.scale_from_amax` of one amax, without seven operators.

    A quotient of FP32 numbers rounds to the same FP32 number by way of FP64, which has more than
    twice the bits.
    """
    number = amax.item()
    if not 0 < number < math.inf:
        return torch.ones_like(amax)
    return amax.new_full((), min(fmt.max / number, FP32.max))


def scale_inv_of(scale: torch.Tensor, amax: torch.Tensor) -> torch.Tensor:
    """Return `scaling.scale_inv_of` of one scale."""
    if amax.item() < math.inf:
        return scale.reciprocal()
    return torch.full_like(scale, math.nan)


def cast(x: torch.Tensor, factor: torch.Tensor, fmt: Format) -> torch.Tensor:
    """Return `saturating_cast(x.float() * factor, fmt)`, row-major.

    Args:
        x: [rows, columns], any strides; bf16, fp16 or FP32.
        factor: FP32; 0-dim, [rows, 1] or [1, columns].
    """
    codes = x.new_empty(x.shape, dtype=fmt.dtype)
    for rows, _ in _bands(x.shape, 1):
        part, values = x[rows], part_of(x[rows].shape)
        part = part if part.dtype == torch.float32 else values.copy_(part)
        codes[rows].copy_(
            torch.mul(part, _factor_of(rows, factor), out=values).clamp_(-fmt.max, fmt.max)
        )
    return codes


def product(
    a: torch.Tensor,
    b: torch.Tensor,
    a_factor: torch.Tensor,
    b_factor: torch.Tensor,
    values_dtype: torch.dtype,
    out_dtype: torch.dtype,
) -> torch.Tensor:
    """Return `((a.to(values_dtype) @ b.to(values_dtype).t()).float() * a_factor *
    b_factor).to(out_dtype)` of codes.

    Args:
        a: [m, k], row-major or column-major.
        b: [n, k], likewise.
        a_factor: FP32; 0-dim or [m, 1].
        b_factor: FP32; 0-dim or [1, n].
        values_dtype: bf16 or FP32.
    """
    values = decoded(a, values_dtype, scratch="a"), decoded(b, values_dtype, scratch="b")
    out = a.new_empty(len(a), len(b), dtype=out_dtype)
    unscaled = out if out_dtype == values_dtype else _scratch(out.shape, values_dtype, "product")
    scale(torch.mm(values[0], values[1].t(), out=unscaled), (a_factor, b_factor), out)
    return out


def decoded(codes: torch.Tensor, dtype: torch.dtype, scratch: str | None = None) -> torch.Tensor:
    """Return `codes.to(dtype)` of E4M3 or E5M2 [rows, columns], row- or column-major, in the same
    layout, NaN included.

    Args:
        dtype: bf16 or FP32.
        scratch: name of a reused buffer for the result, valid until this thread requests it again;
        None: new memory.
    """
    if codes.numel() < 2:
        return codes.to(dtype)
    if not codes.is_contiguous():
        if codes.t().is_contiguous():
            return decoded(codes.t(), dtype, scratch).t()
        codes = codes.contiguous()
    values = (
        codes.new_empty(codes.shape, dtype=dtype)
        if scratch is None
        else _scratch(codes.shape, dtype, scratch)
    )
    if dtype == torch.bfloat16:
        _decode_pairs(codes.view(-1), values.view(-1))
    elif codes.dtype == torch.float8_e5m2:
        values.copy_(codes)  # the upper half of an FP16: torch's own cast is as fast
    else:
        _decode_e4m3(codes.view(-1), values.view(-1))
    return values


def _decode_e4m3(codes: torch.Tensor, out: torch.Tensor) -> None:
    """Decode E4M3 codes to FP32 as FP16 bits: shifted up by seven, a code is the FP16 of its value
    over 2**8, subnormal numbers included. Only NaN becomes a number, 480, above E4M3's largest."""
    codes = codes.view(torch.int8)
    for start in range(0, len(codes), CAST_AT_ONCE):
        part, values = codes[start : start + CAST_AT_ONCE], out[start : start + CAST_AT_ONCE]
        bits = _scratch(part.shape, torch.int16, "part").copy_(part)
        values.copy_(bits.bitwise_left_shift_(7).bitwise_and_(-0x4080).view(torch.float16))
        values.mul_(2.0 ** (FP16.bias - E4M3.bias))
        low, high = values.aminmax()
        if low <= -480 or high >= 480:
            values.masked_fill_(values.abs() >= 480, torch.nan)


def _decode_pairs(codes: torch.Tensor, out: torch.Tensor) -> None:
    """Decode codes of either format to bf16, two at a time through a table."""
    if codes.storage_offset() % 2:
        codes = codes.clone()  # misaligned for 16-bit reads
    even = codes.numel() // 2 * 2
    pairs, pairs_out = codes[:even].view(torch.uint16), out[:even].view(torch.int32)
    for start in range(0, len(pairs), CAST_AT_ONCE):
        part = slice(start, min(start + CAST_AT_ONCE, len(pairs)))
        index = part_of(pairs[part].shape, torch.int32).copy_(pairs[part])
        torch.index_select(_pairs_of(codes.dtype), 0, index, out=pairs_out[part])
    out[even:].copy_(codes[even:])


@functools.cache
def _pairs_of(dtype: torch.dtype) -> torch.Tensor:
    """Tabulate the bf16 values of every pair of codes as int32 bits, [65536]."""
    with torch.inference_mode(False):
        return (
            torch.arange(2**16, dtype=torch.int32, device="cpu")
            .to(torch.uint16)
            .view(dtype)
            .bfloat16()
            .view(torch.int32)
        )


def scale(product: torch.Tensor, factors: Sequence[torch.Tensor], out: torch.Tensor) -> None:
    """Write `(product.float() * factors[0] * factors[1] ...).to(out.dtype)` into `out`; it may be
    the product itself.

    Args:
        product: [rows, columns], FP32 (overwritten), bf16 or fp16.
        factors: FP32; each 0-dim, [rows, 1] or [1, columns].
    """
    for rows, _ in _bands(product.shape, 1):
        part = product[rows]
        values = part if part.dtype == torch.float32 else part_of(part.shape).copy_(part)
        for factor in factors:
            values.mul_(_factor_of(rows, factor))
        if out is not product or values is not part:
            out[rows].copy_(values)


def quantize_blocks(
    x: torch.Tensor,
    blocks: Blocks,
    fmt: Format,
    transposed: bool,
    stored_scale_inv: torch.Tensor | None,
) -> Quantized | None:
    """Return `blocks.quantize(x, fmt)`, or of x.t(), possibly as views; None if x has a NaN.

    Blocks of x.t() are transposed blocks of x, and CPU products read views of the codes.

    Args:
        x: [rows, columns], any strides; bf16, fp16 or FP32.
        stored_scale_inv: FP32, 0-dim, a power of two: the values are `x * stored_scale_inv`.
    """
    if not x.is_contiguous():
        if x.t().is_contiguous():
            x, transposed = x.t(), not transposed
        x = x.contiguous()
    height, width = _block_shape(blocks, x.shape, transposed)
    amax = _block_amaxes(x, height, width)
    if amax.isnan().any():
        return None
    factor = 1 if stored_scale_inv is None else stored_scale_inv
    amax = amax * factor
    scale = blocks.scale(amax, fmt)
    codes = x.new_empty(x.shape, dtype=fmt.dtype)
    scale_inv = blocks.inverse(scale, amax)
    factor = scale * factor
    for rows, bands in _bands(x.shape, height):
        values = part_of(x[rows].shape).copy_(x[rows])
        _multiply_blocks(values, factor[bands], width)
        codes[rows].copy_(values.clamp_(-fmt.max, fmt.max))
    return Quantized(codes.t(), scale_inv.t()) if transposed else Quantized(codes, scale_inv)


def dequantize_blocks(q: Quantized, blocks: Blocks, dtype: torch.dtype) -> torch.Tensor:
    """Return `blocks.dequantize(q, dtype)`, bf16 or FP32, of row- or column-major codes, in the
    same layout."""
    transposed = not q.codes.is_contiguous()
    codes, scale_inv = (q.codes.t(), q.scale_inv.t()) if transposed else q
    scale_inv = e8m0_values(scale_inv) if scale_inv.dtype == torch.uint8 else scale_inv
    if ((scale_inv.to(dtype) != scale_inv) & ~scale_inv.isnan()).any():
        # bf16 would round scale and values
        return dequantize_blocks(q, blocks, torch.float32).to(dtype)
    values, scale_inv = decoded(codes, dtype), scale_inv.to(dtype)
    height, width = _block_shape(blocks, codes.shape, transposed)
    for rows, bands in _bands(values.shape, height):
        _multiply_blocks(values[rows], scale_inv[bands], width)
    return values.t() if transposed else values


def _block_shape(blocks: Blocks, shape: torch.Size, transposed: bool) -> tuple[int, int]:
    """Return rows and columns of a block in a matrix of that shape. transposed: for blocks of the
    transpose."""
    columns = blocks.columns or shape[0 if transposed else 1]
    return (columns, blocks.rows) if transposed else (blocks.rows, columns)


def _block_amaxes(x: torch.Tensor, height: int, width: int) -> torch.Tensor:
    """Return max |x| of blocks, FP32 [rows of blocks, blocks in a row]; NaN for a block with NaN.

    Compares magnitude bits as integers: same order as the numbers, with NaN above all, and tens of
    times faster than torch's own maximum, vectorized for few layouts.
    """
    integer, magnitude = _BITS[x.dtype.itemsize]
    amaxes = x.new_zeros(-(-x.shape[0] // height), -(-x.shape[1] // width), dtype=integer)
    for rows, bands in _bands(x.shape, height):
        bits = x[rows].view(integer) & magnitude
        if missing := -x.shape[1] % width:
            bits = F.pad(bits, (0, missing))
        largest = bits.view(bands.stop - bands.start, -1, amaxes.shape[1], width).amax((1, 3))
        amaxes[bands] = torch.maximum(amaxes[bands], largest)
    return amaxes.view(x.dtype).float()


def _multiply_blocks(values: torch.Tensor, factor: torch.Tensor, width: int) -> None:
    """Multiply values [rows, columns] in place by the factors [bands, blocks in a band] of their
    blocks."""
    bands, columns = len(factor), values.shape[1]
    if columns % width:
        factor, width = factor.repeat_interleave(width, 1)[:, :columns], 1
    values.view(bands, -1, columns // width, width).mul_(factor[:, None, :, None])


def _bands(shape: torch.Size, height: int) -> Iterator[tuple[slice, slice]]:
    """Split a matrix into parts, whole bands of blocks or part of one: slices of rows, and of their
    bands."""
    step = max(1, CAST_AT_ONCE // max(1, shape[1]))
    together = max(1, step // height)
    whole = shape[0] // height
    firsts = [*range(0, whole, together), *([whole] if shape[0] % height else [])]
    for band in firsts:
        last = min(band + together, whole) if band < whole else band + 1
        start, stop = band * height, min(last * height, shape[0])
        size = step if last == band + 1 else stop - start
        for row in range(start, stop, size):
            yield slice(row, min(row + size, stop)), slice(band, last)


def part_of(shape: torch.Size, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Return uninitialized memory for one part, FP32 or int32, valid until this thread's next
    call."""
    return _scratch(shape, dtype, "part")


_thread = threading.local()


def _scratch(shape: torch.Size, dtype: torch.dtype, name: str) -> torch.Tensor:
    """Return a thread's uninitialized buffer of that name, up to a limit: fresh pages cost more
    than arithmetic."""
    size = math.prod(shape) * dtype.itemsize
    if size > MOST_SCRATCH:
        return torch.empty(shape, dtype=dtype, device="cpu")
    buffers = _thread.__dict__
    if name not in buffers or len(buffers[name]) < size:
        with torch.inference_mode(False):
            buffers[name] = torch.empty(size, dtype=torch.uint8, device="cpu")
    return buffers[name][:size].view(dtype).view(shape)


def _factor_of(rows: slice, factor: torch.Tensor) -> torch.Tensor:
    return factor[rows] if factor.dim() == 2 and factor.shape[0] > 1 else factor
