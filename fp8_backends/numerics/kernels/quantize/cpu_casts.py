"""Casts to FP8 and back on a CPU, eagerly: the reference's operations, part by part, to the same bits.

A chain of eager operations over a whole matrix writes an FP32 copy at each step, and copies of many megabytes cost
more in page faults than in arithmetic. Here the chain runs over parts that stay in cache, into one result. Codes are
decoded by way of FP16, whose bits theirs become by a shift, or two at a time through a table of their values: torch's
own E4M3 cast takes five times as long.

Nothing here is traced: the parts would be as many nodes of a graph, and values are looked at where that saves a pass.
"""

from __future__ import annotations

import functools
import math
import threading
from collections.abc import Iterator, Sequence

import torch

from ...formats import E4M3, FP16, Format
from ..eager import is_eager

PART = 2**19
"""Elements that are worked on at a time: 2 MiB in FP32. Smaller parts are no faster, and threads meet at the end of
each operation on one, which takes long where they share their cores with other processes."""
MOST_SCRATCH = 2**25
"""Bytes that a thread keeps for each of four uses: a part, the values of both operands of a product, and the product
before it is rounded."""
FEWEST = 2**13
"""Elements below which the reference, of fewer operations, is the faster one."""


def serves(tensor: torch.Tensor) -> bool:
    """Whether these are real numbers in a CPU's memory, in eager mode, and so many that it pays. What is traced takes
    the reference as one."""
    return is_eager(tensor) and tensor.device.type == "cpu" and tensor.numel() >= FEWEST


def cast(x: torch.Tensor, factor: torch.Tensor, fmt: Format) -> torch.Tensor:
    """`saturating_cast(x.float() * factor, fmt)`.

    Args:
        x: [rows, columns] of any strides; bf16, fp16 or fp32.
        factor: FP32; 0-dimensional, [rows, 1] or [1, columns].

    Returns:
        [rows, columns] of `fmt.dtype`, row-major.
    """
    codes = torch.empty(x.shape, dtype=fmt.dtype)
    for rows in _row_parts(x.shape):
        part, values = x[rows], part_of(x[rows].shape)
        part = part if part.dtype == torch.float32 else values.copy_(part)
        codes[rows].copy_(torch.mul(part, _factor_of(rows, factor), out=values).clamp_(-fmt.max, fmt.max))
    return codes


def product(
    a: torch.Tensor,
    b: torch.Tensor,
    a_factor: torch.Tensor,
    b_factor: torch.Tensor,
    values_dtype: torch.dtype,
    out_dtype: torch.dtype,
) -> torch.Tensor:
    """`((a.to(values_dtype) @ b.to(values_dtype).t()).float() * a_factor * b_factor).to(out_dtype)` of codes.

    Args:
        a: [m, k], row-major or column-major.
        b: [n, k], likewise.
        a_factor: FP32; 0-dimensional, or [m, 1].
        b_factor: FP32; 0-dimensional, or [1, n].
        values_dtype: bf16 or FP32.

    Returns:
        [m, n] of out_dtype, row-major.
    """
    values = decoded(a, values_dtype, scratch="a"), decoded(b, values_dtype, scratch="b")
    out = torch.empty(len(a), len(b), dtype=out_dtype)
    unscaled = out if out_dtype == values_dtype else _scratch(out.shape, values_dtype, "product")
    scale(torch.mm(values[0], values[1].t(), out=unscaled), (a_factor, b_factor), out)
    return out


def decoded(codes: torch.Tensor, dtype: torch.dtype, scratch: str | None = None) -> torch.Tensor:
    """`codes.to(dtype)` of E4M3 or E5M2 [rows, columns], row-major or column-major, in the same layout; NaN is NaN.

    Args:
        dtype: bf16 or FP32.
        scratch: the name of memory that holds the values until this thread asks for it again; None: memory of their
            own.
    """
    if codes.numel() < 2:
        return codes.to(dtype)
    if not codes.is_contiguous():
        if codes.t().is_contiguous():
            return decoded(codes.t(), dtype, scratch).t()
        codes = codes.contiguous()
    values = torch.empty(codes.shape, dtype=dtype) if scratch is None else _scratch(codes.shape, dtype, scratch)
    if dtype == torch.bfloat16:
        _decode_pairs(codes.view(-1), values.view(-1))
    elif codes.dtype == torch.float8_e5m2:
        values.copy_(codes)  # the upper half of an FP16: torch's own cast is as fast
    else:
        _decode_e4m3(codes.view(-1), values.view(-1))
    return values


def _decode_e4m3(codes: torch.Tensor, out: torch.Tensor) -> None:
    """Decode E4M3 codes to FP32. Sign, exponent and mantissa lie in an FP16 as they do in a code, seven places up, and
    the biases differ by 8: the value is 2**8 times that of the FP16, subnormal numbers included. NaN alone is a number
    there: 480, above all that E4M3 has."""
    codes = codes.view(torch.int8)
    for start in range(0, len(codes), PART):
        part, values = codes[start : start + PART], out[start : start + PART]
        bits = _scratch(part.shape, torch.int16, "part").copy_(part)
        values.copy_(bits.bitwise_left_shift_(7).bitwise_and_(-0x4080).view(torch.float16))
        values.mul_(2.0 ** (FP16.bias - E4M3.bias))
        low, high = values.aminmax()
        if low <= -480 or high >= 480:
            values.masked_fill_(values.abs() >= 480, torch.nan)


def _decode_pairs(codes: torch.Tensor, out: torch.Tensor) -> None:
    """Decode codes of either format to bf16, two at a time."""
    if codes.storage_offset() % 2:
        codes = codes.clone()  # begins between two places of 16 bits
    even = codes.numel() // 2 * 2
    pairs, pairs_out = codes[:even].view(torch.uint16), out[:even].view(torch.int32)
    for start in range(0, len(pairs), PART):
        part = slice(start, min(start + PART, len(pairs)))
        index = part_of(pairs[part].shape, torch.int32).copy_(pairs[part])
        torch.index_select(_pairs_of(codes.dtype), 0, index, out=pairs_out[part])
    out[even:].copy_(codes[even:])


@functools.cache
def _pairs_of(dtype: torch.dtype) -> torch.Tensor:
    """The bf16 values of every two codes, as the bits of one int32. [65536], a quarter of a MiB."""
    with torch.inference_mode(False):
        return torch.arange(2**16, dtype=torch.int32).to(torch.uint16).view(dtype).bfloat16().view(torch.int32)


def scale(product: torch.Tensor, factors: Sequence[torch.Tensor], out: torch.Tensor) -> None:
    """Write `(product.float() * factors[0] * factors[1] ...).to(out.dtype)` into `out`, which may be the product.

    Args:
        product: [rows, columns], FP32, bf16 or fp16. One in FP32 is overwritten.
        factors: FP32; each 0-dimensional, [rows, 1] or [1, columns].
    """
    for rows in _row_parts(product.shape):
        part = product[rows]
        values = part if part.dtype == torch.float32 else part_of(part.shape).copy_(part)
        for factor in factors:
            values.mul_(_factor_of(rows, factor))
        if out is not product or values is not part:
            out[rows].copy_(values)


def part_of(shape: torch.Size, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Memory for one part, with random bits, until this thread asks again. FP32 or int32."""
    return _scratch(shape, dtype, "part")


def _scratch(shape: torch.Size, dtype: torch.dtype, name: str) -> torch.Tensor:
    """Memory of that name, with random bits. Up to a limit it stays with the thread: the system takes freed memory
    back, and a page that it gives anew costs more than what is computed on it."""
    size = math.prod(shape) * dtype.itemsize
    if size > MOST_SCRATCH:
        return torch.empty(shape, dtype=dtype)
    memory = _thread.memory.get(name)
    if memory is None or len(memory) < size:
        with torch.inference_mode(False):
            memory = _thread.memory[name] = torch.empty(size, dtype=torch.uint8)
    return memory[:size].view(dtype).view(shape)


class _Thread(threading.local):
    def __init__(self) -> None:
        self.memory: dict[str, torch.Tensor] = {}


_thread = _Thread()


def _row_parts(shape: torch.Size) -> Iterator[slice]:
    step = max(1, PART // max(1, shape[1]))
    return (slice(start, min(start + step, shape[0])) for start in range(0, shape[0], step))


def _factor_of(rows: slice, factor: torch.Tensor) -> torch.Tensor:
    return factor[rows] if factor.dim() == 2 and factor.shape[0] > 1 else factor
