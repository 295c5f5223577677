"""Run the Adam step on an NVIDIA GPU: two launches over all parameters of a kind, of any number and
sizes.

`bounds_kernel` bounds each parameter's amaxes, for its scales. A program of `write_kernel` finds
one chunk of one parameter in the table (`adam_table.py`), computes, rounds and stores its new
values (`triton_tiles.py`), and casts the copy of an O3 master. Programs run in any order, so the
first kernel saves the scales replaced by the second.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from ..formats.formats import FORMATS, ROOT8
from .adam_table import GRADIENT_LIMIT, LEAST_ROOT, RATIO_BITS, SLACK, UPDATE_SLACK, AdamTable, Kind
from .devices import has_fp8_casts, on_device_of
from .rounding import EXP_AVG_BITS, EXP_AVG_SQ_BITS, WEIGHT_BITS
from .triton_common import OPTIONS, as_bits, format_max, from_bits, is_finite
from .triton_tiles import (
    COPY,
    FINITE_FLAG,
    NUMEL,
    RECORD_COLUMN,
    ROW_WIDTH,
    SEED,
    data_at,
    hyper_of,
    if_finite,
    inverse_of,
    keep_record,
    load,
    mixed,
    new_scale,
    nothing_stored,
    place_of,
    pointer_at,
    pointers_of,
    row_of,
    scale_within,
    write_tile,
)

_CHUNK = 8192
"""Elements of a program; no block has more than half."""

_LANES, LIMITS = 4, {"num_warps": 8}
"""A thread's consecutive elements: with four, nothing spills and enough programs hide each other's
waits."""

_RATIO_BITS, _LIMIT = tl.constexpr(RATIO_BITS), tl.constexpr(GRADIENT_LIMIT)
_SLACK, _UPDATE_SLACK, _LEAST_ROOT = (
    tl.constexpr(SLACK),
    tl.constexpr(UPDATE_SLACK),
    tl.constexpr(LEAST_ROOT),
)


# Grid of the kernels: one program for each chunk of each parameter; `parameters` has the index of a
# chunk's parameter.


@triton.jit
def gradient_kernel(table, parameters, grad_amax_ptr, KIND: tl.constexpr, ALIGNED: tl.constexpr):
    """Store amaxes of gradients, and clear the finite flag of those with a non-finite element."""
    row, index, start = row_of(table, parameters, KIND)
    numel = tl.load(row + NUMEL)
    pointer = data_at(row, 1, KIND.formats[1], ALIGNED)
    largest = tl.zeros((KIND.rows, KIND.width), tl.int32)
    for tile in range(KIND.tiles):
        first = start + tile * KIND.rows * KIND.width
        at, inside, _, _ = place_of(numel, first, KIND)
        if first + KIND.rows * KIND.width <= numel:
            g = load(pointer + first + at, None, 0.0)
        else:
            g = load(pointer + first + at, inside, 0.0)
        largest = tl.maximum(largest, as_bits(g.to(tl.float32)) & 0x7FFFFFFF)
    amax = tl.max(tl.max(largest, axis=1), axis=0)
    tl.atomic_max(grad_amax_ptr + index, amax, sem="relaxed")
    if amax >= 0x7F800000:
        tl.store(pointer_at(row, FINITE_FLAG, tl.uint8), tl.full((), 0, tl.uint8))


@triton.jit
def _grad_amax(row, measured, KIND: tl.constexpr):
    """Compute `largest_gradient`. measured: the amax of a gradient without one scale."""
    if KIND.scaled[1] and not KIND.blocked[1]:
        inverse = inverse_of(row, KIND, 1)
        amax = tl.where(is_finite(inverse), inverse * format_max(KIND.formats[1]), 0.0)
    else:
        amax = measured
    return if_finite(row, amax, 0.0, KIND)


@triton.jit
def _new_bounds(record, grad_amax, hyper, v_inverse, KIND: tl.constexpr):
    """Compute `adam_table.new_bounds`. record: int32. v_inverse: scale_inv of exp_avg_sq, 1 for
    roots."""
    w, m, v = from_bits(record[0]), from_bits(record[1]), from_bits(record[2])
    ratio = from_bits(record[3] + _RATIO_BITS)
    step_size, decay, weight_decay, n, beta2, new_in_exp_avg_sq, c, eps, _ = hyper
    step_size = tl.abs(step_size)
    g = tl.where(grad_amax < _LIMIT, grad_amax, _LIMIT)
    if not KIND.decoupled:
        g = g + tl.abs(weight_decay) * w
    kept, new = 1 - n + _SLACK, n + _SLACK
    m = kept * m + new * g
    v = v * beta2 + new_in_exp_avg_sq * g * g
    of_exp_avg = tl.div_rn(kept, tl.sqrt_rn(beta2)) * ratio
    of_gradient = tl.div_rn(new, tl.sqrt_rn(new_in_exp_avg_sq))
    of_eps = tl.div_rn(step_size * m, eps)
    if KIND.blocked[3] and not KIND.has_roots:
        update = of_eps
    else:
        least_root = _LEAST_ROOT * tl.sqrt_rn(tl.maximum(v_inverse, 1.0))
        above_eps = tl.maximum(tl.div_rn(c * least_root, eps), 1.0)
        of_quotient = tl.div_rn(step_size * (of_exp_avg + of_gradient), c) * above_eps
        update = tl.where(of_quotient < of_eps, of_quotient, of_eps)
    if KIND.decoupled:
        w = w * tl.abs(decay)
    return (w + update * _UPDATE_SLACK) * (1 + _SLACK), m, v


@triton.jit
def bounds_kernel(table, bounds_ptr, grad_amax_ptr, old_ptr, KIND: tl.constexpr):
    """Find bounds, clear the record and save the old scales. Grid: one program for each
    parameter."""
    index = tl.program_id(0).to(tl.int64)
    row, bounds, old = table + index * ROW_WIDTH, bounds_ptr + index * 3, old_ptr + index * 3
    hyper, v_inv = hyper_of(row), inverse_of(row, KIND, 3)
    record = pointer_at(row, RECORD_COLUMN, tl.int32)
    known = [tl.load(record + place) for place in (0, 1, 2, 3)]
    for place in tl.static_range(4):
        tl.store(record + place, 0)
    w, m, v = _new_bounds(
        known, _grad_amax(row, tl.load(grad_amax_ptr + index), KIND), hyper, v_inv, KIND
    )
    tl.store(bounds, w)
    tl.store(bounds + 1, m)
    tl.store(bounds + 2, v)
    tl.store(old, inverse_of(row, KIND, 0))
    tl.store(old + 1, inverse_of(row, KIND, 2))
    tl.store(old + 2, v_inv)


@triton.jit
def write_kernel(table, parameters, bounds_ptr, old_ptr, KIND: tl.constexpr, ALIGNED: tl.constexpr):
    row, index, start = row_of(table, parameters, KIND)
    numel, pointers, hyper = tl.load(row + NUMEL), pointers_of(row, KIND, ALIGNED), hyper_of(row)
    key = mixed(mixed(hyper[8].to(tl.int32).to(tl.uint32)) + tl.load(row + SEED).to(tl.uint32))
    bounds, old = bounds_ptr + index * 3, old_ptr + index * 3
    # NaN makes all of a gradient zero
    g_inv = if_finite(row, inverse_of(row, KIND, 1), float("nan"), KIND)
    if KIND.bounded:
        inverses = (tl.load(old), g_inv, tl.load(old + 1), tl.load(old + 2))
    else:
        inverses = (1.0, g_inv, 1.0, 1.0)
    w_scale = new_scale(bounds, row, start, KIND, 0)
    scales = (
        w_scale,
        new_scale(bounds, row, start, KIND, 2),
        new_scale(bounds, row, start, KIND, 3),
    )
    copy = (pointers[0], w_scale[0])
    if KIND.copied:
        copy_pointer = data_at(row, COPY, KIND.formats[4], ALIGNED)
        copy = (copy_pointer, scale_within(bounds, row, start, KIND, 4)[0])
    step = (pointers, row, inverses, hyper, scales, copy, key, numel)
    largest = nothing_stored(KIND)
    for tile in range(KIND.tiles):
        first = start + tile * KIND.rows * KIND.width
        if first + KIND.rows * KIND.width <= numel:
            largest = write_tile(step, first, largest, KIND, True)
        elif first < numel:
            largest = write_tile(step, first, largest, KIND, False)
    if KIND.bounded:
        keep_record(row, largest, scales, KIND)


@dataclass(frozen=True, repr=False)
class _Constants:
    """Constants of a kind's kernels in the form of Triton's function arguments: an object with
    constants as attributes. Has the fields of `Kind` and more. Its repr is part of the key of
    Triton's disk cache."""

    kind: Kind
    fp8_casts: bool

    @functools.cached_property
    def _values(self) -> dict[str, object]:
        kind, threads = self.kind, 32 * LIMITS["num_warps"]
        width = kind.block_size or threads * _LANES
        rows, fields = (
            max(1, threads * _LANES // width),
            (WEIGHT_BITS, (0, 0), EXP_AVG_BITS, EXP_AVG_SQ_BITS),
        )
        return kind._asdict() | {
            "formats": (
                *(kind.format(i).name for i in range(4)),
                FORMATS[kind.copy or torch.float8_e4m3fn].name,
            ),
            "has_roots": kind.format(3) is ROOT8,
            "low_bit": tuple(low for low, _ in fields),
            "bits": tuple(bits for _, bits in fields),
            "has_fp8_casts": self.fp8_casts,
            "copied": kind.copy is not None,
            "rows": rows,
            "width": width,
            "lanes": min(width, _LANES),
            "tiles": _CHUNK // (rows * width),
            "chunk": _CHUNK,
        }

    def __repr__(self) -> str:
        return repr(self._values)

    def __getattr__(self, name: str):
        if name not in self._values:
            raise AttributeError(name)
        value = self._values[name]
        return tuple(map(tl.constexpr, value)) if isinstance(value, tuple) else tl.constexpr(value)


def kernels(kind: Kind, tensor: torch.Tensor) -> TritonKernels | None:
    """Return the kernels of a kind for the tensor's device; None for a block size without a
    tile."""
    size = kind.block_size
    return (
        _kernels(kind, has_fp8_casts(tensor))
        if size & (size - 1) == 0 and size <= _CHUNK // 2
        else None
    )


class TritonKernels:
    """Launch the kernels of one kind."""

    def __init__(self, kind: Kind, fp8_casts: bool):
        self.constants = _Constants(kind, fp8_casts)

    def chunk_size(self) -> int:
        return self.constants.chunk.value

    def run(self, kernel: str, table: AdamTable) -> None:
        """Launch "measure_gradients", "bounds" or "write", once for all parameters of a table."""
        parameters = _parameter_of_each_chunk(tuple(table.chunk_counts), table.device)
        function, *arguments = {
            "measure_gradients": (gradient_kernel, parameters, table.grad_amax.view(torch.int32)),
            "bounds": (bounds_kernel, table.bounds, table.grad_amax, table.old_scale_inv),
            "write": (write_kernel, parameters, table.bounds, table.old_scale_inv),
        }[kernel]
        options = {"num_warps": 1} if kernel == "bounds" else {"ALIGNED": table.aligned, **LIMITS}
        grid = len(table.jobs) if kernel == "bounds" else len(parameters)
        with on_device_of(table.rows):
            function[(grid,)](table.rows, *arguments, KIND=self.constants, **options, **OPTIONS)


_kernels = functools.cache(TritonKernels)


@functools.lru_cache(maxsize=32)
def _parameter_of_each_chunk(counts: tuple[int, ...], device: torch.device) -> torch.Tensor:
    """Return the index of each chunk's parameter, int32 [chunks]. Cached, as parameters keep their
    sizes."""
    index = torch.arange(len(counts), dtype=torch.int32, device="cpu")
    return torch.repeat_interleave(index, torch.tensor(counts, device="cpu")).to(device)
