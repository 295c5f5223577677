"""The Adam step on an NVIDIA GPU: two launches over all parameters of a kind, whatever their number and sizes.

Where scales follow from bounds, `_bounds_kernel` takes the place of `_amax_kernel` below: a program for each parameter
reads a few numbers, and `_write_kernel` alone reads tensors.

A program works on one chunk of one parameter, which it finds in the table (`table.py`). `_amax_kernel` computes the
new values and keeps their largest; `_write_kernel` computes them again, rounds and stores them. Its programs run in any
order, so the scales that it replaces are set aside by the first kernel. The copy of an O3 master is cast in the second
too, with the scale that follows from the master before it is rounded; the third launch, `_recast_kernel`, finds all
but a few as they should be, and leaves at once.

What a program does with a tile is in `triton_tiles.py`; in `triton_usual.py` again, for the usual tile of a step of one
pass, in fewer instructions: on a Hopper GPU the general one is bound by these, not by memory.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from ...formats import FORMATS, ROOT8
from ..triton_common import OPTIONS, as_bits, from_bits, scale_inv_of
from ..triton_gate import has_fp8_casts, on_device_of
from .rounding import EXP_AVG_BITS, EXP_AVG_SQ_BITS, WEIGHT_BITS
from .table import WRITTEN, AdamTable, Kind
from .triton_bounds import grad_amax, new_bounds
from .triton_rounding import mixed, pointer_to, scale_of
from .triton_tiles import (
    AMAX,
    COLUMNS,
    COPY,
    COPY_INVERSE,
    FINITE,
    NUMEL,
    RECORD,
    SEED,
    STEP,
    amax_of,
    amax_tile,
    grad_factor,
    hyper_of,
    inverse_of,
    keep_amax,
    keep_record,
    load,
    new_scale,
    no_bits,
    nothing_stored,
    place_of,
    pointers_of,
    row_of,
    store_copy,
    values_of,
    write_tile,
)
from .triton_usual import bases_of, has_usual_numbers, write_usual_tile

_CHUNK = 8192
"""Elements of a program; no block has more than half."""

_LANES, LIMITS = 4, {"num_warps": 8}
"""Elements in a row that a thread has. Four of them: nothing is spilled, and enough programs run at a time to hide what
they wait for."""

_LANES_OF_BYTES, LIMITS_OF_BYTES = 16, {"num_warps": 4, "maxnreg": 168}
"""Of a usual tile whose states are bytes: one access reads all that a thread has, and a block's scale is that of eight
threads and not of a whole warp. With so many registers three programs run at a time; with fewer, some were spilled."""


# Kernels. Grid: one program for each chunk of each parameter; `parameters` has the index of a chunk's parameter.


@triton.jit
def _gradient_kernel(table, parameters, grad_amax_ptr, KIND: tl.constexpr, ALIGNED: tl.constexpr):
    """Keep the amaxes of gradients, and tell the table of those with an element that is not finite."""
    row, index, start = row_of(table, parameters, KIND)
    numel = tl.load(row + NUMEL)
    pointer = pointer_to(tl.load(row + 1), KIND.formats[1], ALIGNED)
    largest = no_bits(KIND)
    for tile in range(KIND.tiles):
        first = start + tile * KIND.rows * KIND.width
        at, inside, block = place_of(numel, first, KIND)
        if first + KIND.rows * KIND.width <= numel:
            g = load(pointer + first + at, inside, 0.0, True)
        else:
            g = load(pointer + first + at, inside, 0.0, False)
        largest = tl.maximum(largest, as_bits(g.to(tl.float32)) & 0x7FFFFFFF)
    amax = tl.max(tl.max(largest, axis=1), axis=0)
    tl.atomic_max(grad_amax_ptr + index, amax, sem="relaxed")
    if amax >= 0x7F800000:
        tl.store(tl.load(row + FINITE).to(tl.pointer_type(tl.uint8)), tl.full((), 0, tl.uint8))


@triton.jit
def _bounds_kernel(table, amax_ptr, grad_amax_ptr, old_ptr, KIND: tl.constexpr):
    """`bounds.new_bounds` in the place of amaxes. Empties the record, and sets aside the old scales; where blocks have
    them the bound, which has no other place. Grid: one program for each parameter."""
    index = tl.program_id(0).to(tl.int64)
    row, old = table + index * COLUMNS, old_ptr + index * 3
    hyper, v_inv = hyper_of(row), inverse_of(row, KIND, 3)
    record = tl.load(row + RECORD).to(tl.pointer_type(tl.int32))
    known = (tl.load(record), tl.load(record + 1), tl.load(record + 2), tl.load(record + 3))
    for place in tl.static_range(4):
        tl.store(record + place, 0)
    w, m, v = new_bounds(known, grad_amax(row, tl.load(grad_amax_ptr + index), KIND), hyper, v_inv, KIND)
    if not KIND.blocked[0]:
        tl.store(amax_ptr + tl.load(row + AMAX), as_bits(w))
    if not KIND.blocked[2]:
        tl.store(amax_ptr + tl.load(row + AMAX + 1), as_bits(m))
        m = inverse_of(row, KIND, 2)
    if not KIND.blocked[3]:
        tl.store(amax_ptr + tl.load(row + AMAX + 2), as_bits(v))
        v = v_inv
    tl.store(old, inverse_of(row, KIND, 0))
    tl.store(old + 1, m)
    tl.store(old + 2, v)


@triton.jit
def _amax_kernel(table, parameters, amax_ptr, old_ptr, KIND: tl.constexpr, ALIGNED: tl.constexpr):
    row, index, start = row_of(table, parameters, KIND)
    numel, pointers, hyper = tl.load(row + NUMEL), pointers_of(row, KIND, ALIGNED), hyper_of(row)
    w_inv, m_inv, v_inv = inverse_of(row, KIND, 0), inverse_of(row, KIND, 2), inverse_of(row, KIND, 3)
    if start == 0:
        old = old_ptr + index * 3
        tl.store(old, w_inv)
        tl.store(old + 1, m_inv)
        tl.store(old + 2, v_inv)
    inverses = (w_inv, grad_factor(row, KIND), m_inv, v_inv)
    w_amax, m_amax, v_amax = no_bits(KIND), no_bits(KIND), no_bits(KIND)
    for tile in range(KIND.tiles):
        first = start + tile * KIND.rows * KIND.width
        amaxes = (w_amax, m_amax, v_amax)
        if first + KIND.rows * KIND.width <= numel:
            w_amax, m_amax, v_amax = amax_tile(
                pointers, row, inverses, hyper, amaxes, amax_ptr, numel, first, KIND, True
            )
        elif first < numel:
            w_amax, m_amax, v_amax = amax_tile(
                pointers, row, inverses, hyper, amaxes, amax_ptr, numel, first, KIND, False
            )
    if KIND.scaled[0] and not KIND.blocked[0]:
        keep_amax(amax_ptr, row, 0, w_amax)
    if KIND.scaled[2] and not KIND.blocked[2]:
        keep_amax(amax_ptr, row, 1, m_amax)
    if KIND.scaled[3] and not KIND.blocked[3]:
        keep_amax(amax_ptr, row, 2, v_amax)


@triton.jit
def _old_inverse(old, KIND: tl.constexpr, SLOT: tl.constexpr):
    """The only scale_inv of exp_avg or exp_avg_sq, as it was before the step."""
    if KIND.blocked[SLOT]:
        return tl.full((), 1.0, tl.float32)
    else:
        return tl.load(old + (SLOT - 1))


@triton.jit
def _bound_of(amax_ptr, row, old, KIND: tl.constexpr, SLOT: tl.constexpr):
    """The bound of exp_avg or exp_avg_sq, from `_bounds_kernel`."""
    if KIND.blocked[SLOT]:
        return tl.load(old + (SLOT - 1))
    else:
        return amax_of(amax_ptr, row, SLOT - 1)


@triton.jit
def _write_kernel(table, parameters, amax_ptr, old_ptr, stored_ptr, KIND: tl.constexpr, ALIGNED: tl.constexpr):
    row, index, start = row_of(table, parameters, KIND)
    numel, pointers, hyper = tl.load(row + NUMEL), pointers_of(row, KIND, ALIGNED), hyper_of(row)
    key = mixed(mixed(hyper[STEP].to(tl.int32).to(tl.uint32)) + tl.load(row + SEED).to(tl.uint32))
    old, g_inv = old_ptr + index * 3, grad_factor(row, KIND)
    if KIND.scaled[0] or KIND.scaled[2] or KIND.scaled[3]:
        inverses = (tl.load(old), g_inv, _old_inverse(old, KIND, 2), _old_inverse(old, KIND, 3))
    else:
        inverses = (1.0, g_inv, 1.0, 1.0)
    w_scale = new_scale(amax_ptr, row, start, KIND, 0)
    scales = (w_scale, new_scale(amax_ptr, row, start, KIND, 2), new_scale(amax_ptr, row, start, KIND, 3))
    copy = (pointers[0], w_scale[0])
    if KIND.copied:
        amax = amax_of(amax_ptr, row, 0)
        copy = (pointer_to(tl.load(row + COPY), KIND.formats[4], ALIGNED), scale_of(amax, KIND.formats[4]))
        if KIND.bounded and start == 0:
            tl.store(tl.load(row + COPY_INVERSE).to(tl.pointer_type(tl.float32)), scale_inv_of(copy[1], amax))
    largest = nothing_stored(KIND)
    tile_size: tl.constexpr = KIND.rows * KIND.width
    usual_size: tl.constexpr = KIND.usual_rows * KIND.width
    count = tl.minimum(numel - start, KIND.chunk).to(tl.int32)
    if KIND.has_usual_case:
        bounds = (
            amax_of(amax_ptr, row, 0),
            _bound_of(amax_ptr, row, old, KIND, 2),
            _bound_of(amax_ptr, row, old, KIND, 3),
        )
        is_usual = has_usual_numbers(bounds, inverses, hyper, scales, KIND)
        is_usual &= ALIGNED or KIND.usual_lanes == KIND.lanes  # so many narrow accesses would take too many registers
        bases = bases_of(pointers, copy[0], row, start, KIND)
    for tile in range(KIND.chunk // usual_size):
        first = tile * usual_size
        is_full = first + usual_size <= count
        if KIND.has_usual_case:
            if is_usual & is_full:
                largest = write_usual_tile(
                    bases, inverses, hyper, scales, copy[1], bounds[2], key, first, largest, KIND
                )
            else:
                for part in range(usual_size // tile_size):
                    if first + part * tile_size < count:
                        at = start + first + part * tile_size
                        largest = write_tile(
                            pointers, row, inverses, hyper, scales, copy, amax_ptr, key, numel, at, largest, KIND, False
                        )
        elif is_full:
            at = start + first
            largest = write_tile(
                pointers, row, inverses, hyper, scales, copy, amax_ptr, key, numel, at, largest, KIND, True
            )
        elif first < count:
            at = start + first
            largest = write_tile(
                pointers, row, inverses, hyper, scales, copy, amax_ptr, key, numel, at, largest, KIND, False
            )
    if KIND.bounded:
        keep_record(row, largest, scales, KIND)
    elif KIND.copied:
        found = from_bits(tl.max(tl.max(largest[0], axis=1), axis=0)) * w_scale[1]
        tl.atomic_max(stored_ptr + index, as_bits(found) & 0x7FFFFFFF, sem="relaxed")


@triton.jit
def _recast_kernel(table, parameters, amax_ptr, stored_ptr, KIND: tl.constexpr, ALIGNED: tl.constexpr):
    """Cast copies again whose scale is not the one that `_write_kernel` took, and store the scales of all."""
    row, index, start = row_of(table, parameters, KIND)
    amax = from_bits(tl.load(stored_ptr + index))
    scale = scale_of(amax, KIND.formats[4])
    if start == 0:
        tl.store(tl.load(row + COPY_INVERSE).to(tl.pointer_type(tl.float32)), scale_inv_of(scale, amax))
    if scale != scale_of(amax_of(amax_ptr, row, 0), KIND.formats[4]):
        numel, inverse = tl.load(row + NUMEL), inverse_of(row, KIND, 0)
        pointer = pointer_to(tl.load(row), KIND.formats[0], ALIGNED)
        copy = pointer_to(tl.load(row + COPY), KIND.formats[4], ALIGNED)
        for tile in range(KIND.tiles):
            first = start + tile * KIND.rows * KIND.width
            at, inside, block = place_of(numel, first, KIND)
            stored = values_of(pointer + first, row, 1.0, at, inside, block, KIND, 0, False)
            store_copy(copy + first, stored, inverse, scale, at, inside, KIND, False)


# Launches


@dataclass(frozen=True, repr=False)
class _Constants:
    """What the kernels of a kind are compiled for, as Triton wants what its functions hand on: an object whose
    attributes are constants. It has those of `Kind`, and the ones below. Triton's disk cache knows it by its repr."""

    kind: Kind
    fp8_casts: bool

    @property
    def limits(self) -> dict[str, int]:
        """How the kernels are to be compiled."""
        return LIMITS_OF_BYTES if _is_of_bytes(self.kind) else LIMITS

    @functools.cached_property
    def _values(self) -> dict[str, object]:
        kind, of_bytes, threads = self.kind, _is_of_bytes(self.kind), 32 * self.limits["num_warps"]
        width = kind.block_size or threads * _LANES
        rows, fields = max(1, threads * _LANES // width), (WEIGHT_BITS, (0, 0), EXP_AVG_BITS, EXP_AVG_SQ_BITS)
        lanes = _LANES_OF_BYTES if of_bytes else _LANES
        return kind._asdict() | {
            "formats": (*(kind.format(i).name for i in range(4)), FORMATS[kind.copy or torch.float8_e4m3fn].name),
            "has_roots": kind.format(3) is ROOT8,
            "low_bit": tuple(low for low, _ in fields),
            "bits": tuple(bits for _, bits in fields),
            "has_fp8_casts": self.fp8_casts,
            "copied": kind.copy is not None,
            "rows": rows,
            "width": width,
            "lanes": min(width, _LANES),
            "has_usual_case": _has_usual_case(kind),
            "usual_rows": max(1, threads * lanes // width),
            "usual_lanes": min(width, lanes),
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


def _has_usual_case(kind: Kind) -> bool:
    """Whether `triton_usual` writes tiles of this kind: it wants bounds."""
    is_scaled = any(kind.scaled[i] for i in WRITTEN)
    in_blocks = kind.blocked[0] or kind.blocked[1] or kind.blocked[3] and kind.format(3) is not ROOT8
    return kind.bounded and kind.stochastic and is_scaled and not in_blocks


def _is_of_bytes(kind: Kind) -> bool:
    """Whether usual tiles are those of O4."""
    return _has_usual_case(kind) and kind.format(3) is ROOT8


def kernels(kind: Kind, tensor: torch.Tensor) -> TritonKernels | None:
    """The kernels of a kind for the tensor's device; None for a block size that no tile has."""
    size = kind.block_size
    return _kernels(kind, has_fp8_casts(tensor)) if size & (size - 1) == 0 and size <= _CHUNK // 2 else None


class TritonKernels:
    """Launches the kernels of one kind."""

    def __init__(self, kind: Kind, fp8_casts: bool):
        self.constants = _Constants(kind, fp8_casts)

    def chunk_size(self) -> int:
        return self.constants.chunk.value

    def run(self, kernel: str, table: AdamTable) -> None:
        amaxes, stored = table.amax.view(torch.int32), table.stored.view(torch.int32)
        gradients, old = table.grad_amax, table.old_scale_inv
        parameters = _parameter_of_each_chunk(tuple(table.chunk_counts), table.device)
        function, *arguments = {
            "measure_gradients": (_gradient_kernel, parameters, gradients.view(torch.int32)),
            "bounds": (_bounds_kernel, amaxes, gradients, old),
            "amaxes": (_amax_kernel, parameters, amaxes, old),
            "write": (_write_kernel, parameters, amaxes, old, stored),
            "recast": (_recast_kernel, parameters, amaxes, stored),
        }[kernel]
        options = {"num_warps": 1} if kernel == "bounds" else {"ALIGNED": table.aligned, **self.constants.limits}
        grid = len(table.jobs) if kernel == "bounds" else len(parameters)
        with on_device_of(table.rows):
            function[(grid,)](table.rows, *arguments, KIND=self.constants, **options, **OPTIONS)


_kernels = functools.cache(TritonKernels)


@functools.lru_cache(maxsize=32)
def _parameter_of_each_chunk(counts: tuple[int, ...], device: torch.device) -> torch.Tensor:
    """The index of each chunk's parameter, int32 [chunks]. Cached, since an optimizer's parameters keep their sizes."""
    return torch.repeat_interleave(torch.arange(len(counts), dtype=torch.int32), torch.tensor(counts)).to(device)
