"""Triton kernels of RMSNorm as models write it, forward and backward, each one pass over memory:

    weight * (x * rsqrt(mean(x**2) + eps)).to(x.dtype)          as Llama
    (x * rsqrt(mean(x**2) + eps) * (1 + weight)).to(x.dtype)    as Gemma: `centered`

In FP32, as the residual stream is under autocast, PyTorch reads and writes 28 bytes an element forward and 92
backward; these kernels 8 and 12. The forward also leaves the maxima of what it writes, of which the quantizing kernel
makes the scale without reading it first.

Sums are in FP32, and in another order than PyTorch's. What PyTorch would store in 16 bits is rounded as if it were
stored, but for the terms of the weight's gradient.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import torch
import triton
import triton.language as tl

from .. import triton_gate
from ..quantize.triton_quantize import AMAX_PROGRAMS
from ..triton_common import OPTIONS, as_fp32, ceil_div
from .triton_values import larger, store_largest, stored

_ELEMENTS = 2048
"""Of a program's tile at least: short rows go several at a time, and rows up to LONGEST_ROW one by one, always with
sixteen elements for a thread."""
_FORWARD_AT_A_TIME, _BACKWARD_AT_A_TIME = 4, 2
"""Programs that the registers of a multiprocessor allow: no more are started, so that all work to the end."""


class Normed(NamedTuple):
    """RMSNorm of a matrix."""

    values: torch.Tensor
    partials: torch.Tensor
    """As in `KnownAmax`."""


def forward(x: torch.Tensor, weight: torch.Tensor, eps: float, centered: bool, keep_nan: bool) -> Normed:
    """The norm of each row, and the amax of all.

    Args:
        x: [..., columns], bf16, fp16 or fp32, contiguous; up to LONGEST_ROW columns.
        weight: [columns], contiguous.
        centered: which of the two formulas.
        keep_nan: whether NaN counts in the amax.

    Returns:
        values of the shape of x, and of its dtype or, unless `centered`, the one to which x and weight are promoted.
    """
    programs = _programs(x, _FORWARD_AT_A_TIME)
    dtype = x.dtype if centered or x.dtype == weight.dtype else torch.promote_types(x.dtype, weight.dtype)
    values = torch.empty(x.shape, dtype=dtype, device=x.device)
    made = Normed(values, torch.empty(programs, dtype=torch.int32, device=x.device))
    with triton_gate.on_device_of(x):
        _forward_kernel[(programs,)](
            x, weight, *made, *_matrix(x), eps, CENTERED=centered, KEEP_NAN=keep_nan, **_tile(x)
        )
    return made


def backward(
    grad: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, eps: float, centered: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """The gradients of x, in its dtype, and of the weight, FP32. grad: of the shape and dtype of the norm's values,
    contiguous; the rest as in `forward`."""
    programs, columns = _programs(x, _BACKWARD_AT_A_TIME), x.shape[-1]
    x_grad, parts = torch.empty_like(x), torch.empty(programs, columns, dtype=torch.float32, device=x.device)
    with triton_gate.on_device_of(x):
        _backward_kernel[(programs,)](grad, x, weight, x_grad, parts, *_matrix(x), eps, CENTERED=centered, **_tile(x))
    return x_grad, parts.sum(0)


def _matrix(x: torch.Tensor) -> tuple[int, int]:
    return x.numel() // x.shape[-1], x.shape[-1]


@functools.cache
def tile_of(columns: int) -> tuple[int, int, int]:
    """The rows and columns of a tile, and its warps."""
    across = triton.next_power_of_2(columns)
    return max(_ELEMENTS // across, 1), across, max(across // 512, 4)


def _tile(x: torch.Tensor) -> dict[str, object]:
    rows, columns, warps = tile_of(x.shape[-1])
    return {"ON_GPU": x.is_cuda, "TILE_ROWS": rows, "TILE_COLUMNS": columns, "num_warps": warps, **OPTIONS}


def _programs(x: torch.Tensor, at_a_time: int) -> int:
    tiles = ceil_div(_matrix(x)[0], tile_of(x.shape[-1])[0])
    return max(min(tiles, at_a_time * triton_gate.multiprocessors(x), AMAX_PROGRAMS), 1)


@triton.jit
def _load(ptr, rows, columns, tile, TILE_ROWS: tl.constexpr, TILE_COLUMNS: tl.constexpr):
    """A tile as it is stored, zero outside of the matrix."""
    i, j = tile.to(tl.int64) * TILE_ROWS + tl.arange(0, TILE_ROWS), tl.arange(0, TILE_COLUMNS)
    inside = (i < rows)[:, None] & (j < columns)[None, :]
    return tl.load(ptr + i[:, None] * columns + j[None, :], mask=inside, other=0.0)


@triton.jit
def _store(ptr, values, rows, columns, tile, TILE_ROWS: tl.constexpr, TILE_COLUMNS: tl.constexpr):
    i, j = tile.to(tl.int64) * TILE_ROWS + tl.arange(0, TILE_ROWS), tl.arange(0, TILE_COLUMNS)
    inside = (i < rows)[:, None] & (j < columns)[None, :]
    tl.store(ptr + i[:, None] * columns + j[None, :], values, mask=inside)


@triton.jit
def _load_factor(weight_ptr, columns, CENTERED: tl.constexpr, TILE_COLUMNS: tl.constexpr):
    """What a normed row is multiplied by, FP32, [1, columns]."""
    j = tl.arange(0, TILE_COLUMNS)
    weight = as_fp32(tl.load(weight_ptr + j, mask=j < columns, other=0.0))[None, :]
    return weight + 1.0 if CENTERED else weight


@triton.jit
def _rounded(x, DTYPE: tl.constexpr, CENTERED: tl.constexpr, ON_GPU: tl.constexpr):
    """FP32 values as they come back from memory of that dtype; as they are where the formula stores none there."""
    return x if CENTERED else as_fp32(stored(x, DTYPE, ON_GPU))


@triton.jit
def _mean(x, columns):
    """Of each row, [rows, 1]."""
    total = tl.sum(x, axis=1)
    return tl.div_rn(total, tl.zeros_like(total) + columns)[:, None]


@triton.jit
def _forward_kernel(
    x_ptr,
    weight_ptr,
    values_ptr,
    partial_ptr,  # int32 [programs]
    rows,
    columns,
    eps,
    CENTERED: tl.constexpr,
    KEEP_NAN: tl.constexpr,
    ON_GPU: tl.constexpr,
    TILE_ROWS: tl.constexpr,
    TILE_COLUMNS: tl.constexpr,
):
    """Each program takes every n-th tile of whole rows, n being the number of programs."""
    largest = tl.zeros((TILE_ROWS, TILE_COLUMNS), dtype=tl.float32)
    factor = _load_factor(weight_ptr, columns, CENTERED, TILE_COLUMNS)
    tile = tl.program_id(0)
    while tile < tl.cdiv(rows, TILE_ROWS):
        x = _load(x_ptr, rows, columns, tile, TILE_ROWS, TILE_COLUMNS)
        x32 = as_fp32(x)
        normed = _rounded(x32 * tl.rsqrt(_mean(x32 * x32, columns) + eps), x.dtype, CENTERED, ON_GPU)
        values = stored(normed * factor, values_ptr.dtype.element_ty, ON_GPU)
        _store(values_ptr, values, rows, columns, tile, TILE_ROWS, TILE_COLUMNS)
        largest = larger(largest, values, KEEP_NAN)
        tile += tl.num_programs(0)
    store_largest(partial_ptr, largest)


@triton.jit
def _backward_kernel(
    grad_ptr,
    x_ptr,
    weight_ptr,
    x_grad_ptr,
    weight_grad_ptr,  # FP32 [programs, columns]
    rows,
    columns,
    eps,
    CENTERED: tl.constexpr,
    ON_GPU: tl.constexpr,
    TILE_ROWS: tl.constexpr,
    TILE_COLUMNS: tl.constexpr,
):
    """Tiles as in `_forward_kernel`. Each program leaves its part of the weight's gradient."""
    of_weight = tl.zeros((TILE_ROWS, TILE_COLUMNS), dtype=tl.float32)
    factor = _load_factor(weight_ptr, columns, CENTERED, TILE_COLUMNS)
    tile = tl.program_id(0)
    while tile < tl.cdiv(rows, TILE_ROWS):
        x = _load(x_ptr, rows, columns, tile, TILE_ROWS, TILE_COLUMNS)
        grad = as_fp32(_load(grad_ptr, rows, columns, tile, TILE_ROWS, TILE_COLUMNS))
        x32 = as_fp32(x)
        inverse = tl.rsqrt(_mean(x32 * x32, columns) + eps)
        of_weight += grad * _rounded(x32 * inverse, x.dtype, CENTERED, ON_GPU)
        grad = _rounded(grad * factor, x.dtype, CENTERED, ON_GPU)
        grad = (grad - x32 * inverse * inverse * _mean(grad * x32, columns)) * inverse
        _store(x_grad_ptr, stored(grad, x.dtype, ON_GPU), rows, columns, tile, TILE_ROWS, TILE_COLUMNS)
        tile += tl.num_programs(0)
    j = tl.arange(0, TILE_COLUMNS)
    at = tl.program_id(0).to(tl.int64) * columns + j
    tl.store(weight_grad_ptr + at, tl.sum(of_weight, axis=0), mask=j < columns)
