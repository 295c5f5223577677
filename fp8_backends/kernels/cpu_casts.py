"""Casts to FP8 and back on a CPU, eagerly: the reference's operations, part by part, to the same bits.

A chain of eager operations over a whole matrix writes an FP32 copy at each step, and copies of many megabytes cost
more in page faults than in arithmetic. Here the chain runs over parts that stay in cache, into one result. Codes are
decoded two at a time, through a table of their bf16 values: torch's own E4M3 cast takes seven times as long.

Nothing here is traced: the parts would be as many nodes of a graph, and values are looked at where that saves a pass.
"""

from __future__ import annotations

import functools
import math
import threading
from collections.abc import Iterator

import torch

from ..formats import Format
from .eager import is_eager

PART = 2**19
"""Elements that are worked on at a time: 2 MiB in FP32. Smaller parts are no faster, and threads meet at the end of
each operation on one, which takes long where they share their cores with other processes."""
MOST_SCRATCH = 2**25
"""Bytes that a thread keeps for each of three purposes: a part, and the values of both operands of a product."""
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
        values = part_of(x[rows].shape).copy_(x[rows])
        codes[rows].copy_(values.mul_(_of_rows(factor, rows)).clamp_(-fmt.max, fmt.max))
    return codes


def product(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """`a.bfloat16() @ b.bfloat16().t()` of codes [m, k] and [n, k], each row-major or column-major. bf16 [m, n]."""
    return torch.mm(bf16_values(a, scratch="a"), bf16_values(b, scratch="b").t())


def bf16_values(codes: torch.Tensor, scratch: str | None = None) -> torch.Tensor:
    """`codes.bfloat16()` of E4M3 or E5M2 [rows, columns], row-major or column-major, in the same layout; NaN is NaN.

    Args:
        scratch: the name of memory that holds the values until this thread asks for it again; None: memory of their
            own.
    """
    if codes.numel() < 2:
        return codes.bfloat16()
    if not codes.is_contiguous():
        if codes.t().is_contiguous():
            return bf16_values(codes.t(), scratch).t()
        codes = codes.contiguous()
    if scratch is None:
        values = torch.empty(codes.shape, dtype=torch.bfloat16)
    else:
        values = _scratch(codes.shape, torch.bfloat16, scratch)
    flat, out = codes.view(-1), values.view(-1)
    if flat.storage_offset() % 2:
        flat = flat.clone()  # begins between two places of 16 bits
    even = flat.numel() // 2 * 2
    pairs, pairs_out = flat[:even].view(torch.uint16), out[:even].view(torch.int32)
    table = _pairs_of(codes.dtype)
    for start in range(0, len(pairs), PART):
        part = slice(start, min(start + PART, len(pairs)))
        index = part_of(pairs[part].shape, torch.int32).copy_(pairs[part])
        torch.index_select(table, 0, index, out=pairs_out[part])
    out[even:].copy_(flat[even:])
    return values


@functools.cache
def _pairs_of(dtype: torch.dtype) -> torch.Tensor:
    """The bf16 values of every two codes, as the bits of one int32. [65536], a quarter of a MiB."""
    with torch.inference_mode(False):
        return torch.arange(2**16, dtype=torch.int32).to(torch.uint16).view(dtype).bfloat16().view(torch.int32)


def scale_(product: torch.Tensor, *factors: torch.Tensor) -> torch.Tensor:
    """`(product.float() * factors[0] * factors[1] ...)` rounded to the product's dtype, in place.

    Args:
        product: [rows, columns], bf16 or fp16.
        factors: FP32; each 0-dimensional, [rows, 1] or [1, columns].
    """
    for rows in _row_parts(product.shape):
        values = part_of(product[rows].shape).copy_(product[rows])
        for factor in factors:
            values.mul_(_of_rows(factor, rows))
        product[rows].copy_(values)
    return product


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


def _of_rows(factor: torch.Tensor, rows: slice) -> torch.Tensor:
    return factor[rows] if factor.dim() == 2 and factor.shape[0] > 1 else factor
