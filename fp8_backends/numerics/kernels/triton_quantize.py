"""Triton kernels that quantize a matrix with one scale for FP8 products, in both layouts, in one pass over it.

Hopper's FP8 units contract along rows only, so codes are wanted as they lie, and transposed. Eager PyTorch reads and
writes a matrix six times for that (amax, multiply, clamp, cast, transpose, and the FP32 copies between). Here it is
read once and written as two bytes an element; a rule whose scale follows from the amax of all of it reads it twice.

The numbers are those of `scaling` and `formats`, to the bit. Nothing waits for the device.
"""

from __future__ import annotations

import functools
import threading
from typing import NamedTuple

import torch
import triton
import triton.language as tl

from ..formats import Format
from ..scaling import ROLLS, SCALE, WINDOW
from . import triton_gate
from .layouts import DYNAMIC, Layouts
from .triton_common import (
    OPTIONS,
    as_bits,
    as_fp32,
    ceil_div,
    format_max,
    from_bits,
    is_finite,
    magnitude,
    power_of_two_scale,
    scale_from_amax,
    scale_inv_of,
    to_codes,
)


class Tile(NamedTuple):
    """What one program works on, and with how many warps."""

    rows: int
    columns: int
    warps: int
    registers: int | None = None
    """The most that a thread may have, so that more programs fit on a multiprocessor; None: as the compiler likes."""


AMAX_TILE, AMAX_ROW_TILE = Tile(1, 8192, 8), Tile(16, 512, 8)
"""The amax pass over memory without gaps, taken as one row, and over memory with gaps between the rows."""
CAST_TILE = Tile(64, 128, 4)
"""The cast has 128 bytes of codes in a row and 64 in a transposed one, whole sectors of memory in both; four such
programs and their loads are at work on a multiprocessor at a time."""
AMAX_PROGRAMS = 1024
"""The amax pass has so many at most: each leaves the maximum of its tiles, and each program of the cast reads them all.
Without atomics there is nothing to set to zero before."""
_AMAX_PROGRAMS_AT_A_TIME = 4
"""The registers of a multiprocessor allow so many: no more are started, so that all work to the end."""

_RESULTS = 256
"""Results that are made at a time, since each zero of its own would be a launch."""

_PARTIALS, _ROLLS, _SCALE, _WINDOW = (tl.constexpr(each) for each in (AMAX_PROGRAMS, ROLLS, SCALE, WINDOW))


def amax(x: torch.Tensor, keep_nan: bool = False, *, tile: Tile | None = None) -> torch.Tensor:
    """`scaling.tensor_amax` of a matrix of any strides: FP32, 0-dimensional. NaN is left out unless `keep_nan`."""
    with triton_gate.on_device_of(x):
        partials = _partial_amaxes(row_major(x)[0], keep_nan, tile)
    return partials.amax().view(torch.float32)


def quantize(
    x: torch.Tensor,
    fmt: Format,
    scale: torch.Tensor | None = None,
    rows: bool = True,
    columns: bool = True,
    *,
    rule: str = DYNAMIC,
    window_state: torch.Tensor | None = None,
    stored_scale_inv: torch.Tensor | None = None,
    record: torch.Tensor | None = None,
    amax: torch.Tensor | None = None,
    tile: Tile = CAST_TILE,
) -> Layouts:
    """`dispatch.quantize`, with the same arguments and results.

    One pass casts and takes the amax if the scale is known; else a pass of its own takes the amax first. A matrix is
    read in place where one of its strides is 1, and copied before where none is.

    Args:
        tile: what one program casts.
    """
    matrix, turned = row_major(x)
    rows, columns = (columns, rows) if turned else (rows, columns)
    keep_nan, partials, programs = rule != DYNAMIC, None, 0
    codes, transposed = empty_codes(matrix, rows, columns)
    with triton_gate.on_device_of(matrix):
        if scale is None:
            partials = _partial_amaxes(matrix, keep_nan) if amax is None else amax.view(torch.int32).view(1)
            programs = partials.numel()
        scale_inv, found = _zeroed_result(matrix)
        _cast_kernel[(max(tiles_of(matrix, tile), 1),)](  # an empty matrix has a scale, too
            matrix,
            codes,
            transposed,
            scale_inv,
            window_state if scale is None else scale,
            partials,
            record,
            stored_scale_inv,
            programs,
            *matrix.shape,
            matrix.stride(0),
            "given" if partials is None else rule,
            keep_nan,
            **casting(matrix, fmt),
            **tiling(tile),
        )
    return layouts(codes, scale_inv, transposed, scale_inv, fmt, turned, found)


def row_major(x: torch.Tensor) -> tuple[torch.Tensor, bool]:
    """A matrix whose rows are contiguous, though gaps may lie between them: x, x.t() (and True), or a copy."""
    if x.stride(1) == 1 or x.shape[1] == 1:
        return x, False
    return (x.t(), True) if x.stride(0) == 1 or x.shape[0] == 1 else (x.contiguous(), False)


def empty_codes(matrix: torch.Tensor, rows: bool, columns: bool) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """Memory for the codes in both layouts, uint8."""
    (m, n), device = matrix.shape, matrix.device
    codes = torch.empty(m, n, dtype=torch.uint8, device=device) if rows else None
    return codes, torch.empty(n, m, dtype=torch.uint8, device=device) if columns else None


def layouts(codes, scale_inv, transposed, transposed_scale_inv, fmt: Format, turned: bool, amax=None) -> Layouts:
    """The layouts of a matrix, from the codes of the one that `row_major` returned for it."""
    plain = (None, None) if codes is None else (codes.view(fmt.dtype), scale_inv)
    other = (None, None) if transposed is None else (transposed.view(fmt.dtype), transposed_scale_inv)
    return Layouts(*other, *plain, amax) if turned else Layouts(*plain, *other, amax)


def tiles_of(matrix: torch.Tensor, tile: Tile) -> int:
    rows, columns = matrix.shape
    return ceil_div(rows, tile.rows) * ceil_div(columns, tile.columns)


def limits(tile: Tile) -> dict[str, object]:
    """The options of every launch."""
    most = {} if tile.registers is None else {"maxnreg": tile.registers}
    return {"num_warps": tile.warps, **most, **OPTIONS}


@functools.cache
def tiling(tile: Tile) -> dict[str, object]:
    """The options of every launch, and the tile."""
    return {"TILE_ROWS": tile.rows, "TILE_COLUMNS": tile.columns, **limits(tile)}


def casting(matrix: torch.Tensor, fmt: Format) -> dict[str, object]:
    """The arguments of every launch that casts."""
    return {"FORMAT": fmt.name, "HAS_FP8_CASTS": triton_gate.has_fp8_casts(matrix)}


def _partial_amaxes(matrix: torch.Tensor, keep_nan: bool, tile: Tile | None = None) -> torch.Tensor:
    """Bits of the maxima of parts of a matrix on the current device: int32, 1 to AMAX_PROGRAMS of them."""
    matrix = matrix.view(1, matrix.numel()) if matrix.is_contiguous() else matrix
    tile = tile or (AMAX_TILE if matrix.shape[0] == 1 else AMAX_ROW_TILE)
    tiles = tiles_of(matrix, tile)
    at_a_time = _AMAX_PROGRAMS_AT_A_TIME * triton_gate.multiprocessors(matrix)
    programs = max(min(tiles, at_a_time, AMAX_PROGRAMS), 1)
    partials = torch.empty(programs, dtype=torch.int32, device=matrix.device)
    _amax_kernel[(programs,)](matrix, partials, *matrix.shape, matrix.stride(0), tiles, keep_nan, **tiling(tile))
    return partials


class _Results(threading.local):
    """Zeros for results to come, of each device and stream on which this thread launches."""

    def __init__(self) -> None:
        self.left: dict[tuple[int, int], list[tuple[torch.Tensor, torch.Tensor]]] = {}


_thread = _Results()


def _zeroed_result(matrix: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Room for one scale_inv and one amax, zeros: FP32, 0-dimensional, side by side, 16 bytes for both."""
    stream = triton_gate.stream_of(matrix)
    if stream is None:
        return _zeroed_results(matrix.device, 1)[0]
    of_stream = matrix.get_device(), stream
    left = _thread.left.get(of_stream)
    if not left:
        left = _thread.left[of_stream] = _zeroed_results(matrix.device, _RESULTS)
    return left.pop()


@torch.inference_mode(False)  # a forward that trains may get the others
def _zeroed_results(device: torch.device, count: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    scales_inv, amaxes, *_ = torch.zeros(count, 4, dtype=torch.float32, device=device).unbind(1)
    # `data`: each counts its own changes. Views count those of all, and a scale that is multiplied in place, as that of
    # a gradient, would make those that wait for backward stale
    return [(scale_inv.data, amax.data) for scale_inv, amax in zip(scales_inv.unbind(), amaxes.unbind(), strict=True)]


@triton.jit
def place_of(tile, columns, TILE_COLUMNS: tl.constexpr):
    """Row and column of a tile. Tiles are counted row by row."""
    across = tl.maximum((columns - 1) // TILE_COLUMNS + 1, 1)  # columns near 2**31 may get no addend
    return tile // across, tile % across


@triton.jit
def load_tile(x_ptr, rows, columns, row_stride, at_row, at_column, TILE_ROWS: tl.constexpr, TILE_COLUMNS: tl.constexpr):
    """A tile in FP32, zero outside of the matrix, and the numbers of its rows and columns."""
    i = at_row.to(tl.int64) * TILE_ROWS + tl.arange(0, TILE_ROWS)
    j = at_column.to(tl.int64) * TILE_COLUMNS + tl.arange(0, TILE_COLUMNS)
    inside = (i < rows)[:, None] & (j < columns)[None, :]
    x = tl.load(x_ptr + i[:, None] * row_stride + j[None, :], mask=inside, other=0.0)
    return as_fp32(x), i, j


@triton.jit
def store_tile(ptr, values, i, j, rows, columns):
    """Store values into a matrix [rows, columns] without gaps."""
    inside = (i < rows)[:, None] & (j < columns)[None, :]
    tl.store(ptr + i[:, None] * columns + j[None, :], values, mask=inside)


@triton.jit
def _magnitude_bits(x, KEEP_NAN: tl.constexpr):
    """The bits of |x|. As an integer NaN is the largest."""
    if KEEP_NAN:
        return as_bits(x) & 0x7FFFFFFF
    else:
        return as_bits(magnitude(x))


@triton.jit(do_not_specialize=["rows", "tiles"])
def _amax_kernel(
    x_ptr,
    partial_ptr,  # int32 [programs]
    rows,
    columns,
    row_stride,
    tiles,
    KEEP_NAN: tl.constexpr,
    TILE_ROWS: tl.constexpr,
    TILE_COLUMNS: tl.constexpr,
):
    """Each program takes every n-th tile, n being the number of programs."""
    largest = tl.zeros((TILE_ROWS, TILE_COLUMNS), dtype=tl.int32)
    tile = tl.program_id(0)
    while tile < tiles:
        at_row, at_column = place_of(tile, columns, TILE_COLUMNS)
        x, _, _ = load_tile(x_ptr, rows, columns, row_stride, at_row, at_column, TILE_ROWS, TILE_COLUMNS)
        largest = tl.maximum(largest, _magnitude_bits(x, KEEP_NAN))
        tile += tl.num_programs(0)
    tl.store(partial_ptr + tl.program_id(0), tl.max(largest))


@triton.jit
def _scale_of(amax, state_ptr, FORMAT: tl.constexpr, RULE: tl.constexpr):
    if RULE == "dynamic":
        scale = scale_from_amax(amax, format_max(FORMAT))
    else:
        scale = power_of_two_scale(amax, format_max(FORMAT), 126)
    if RULE == "window":
        in_force = from_bits(tl.load(state_ptr + _SCALE))
        scale = tl.where(tl.load(state_ptr + _ROLLS) >= _WINDOW, in_force, scale)
    return scale


@triton.jit
def record_amax(record_ptr, amax, KEEP_NAN: tl.constexpr):
    """The largest of an amax and of what int32 bits hold, in place. NaN is the largest, or ignored."""
    bits = as_bits(amax)
    if not KEEP_NAN:
        bits = tl.where(amax == amax, bits, 0)
    tl.atomic_max(record_ptr, bits, sem="relaxed")


@triton.jit(
    do_not_specialize=["partials"],
    do_not_specialize_on_alignment=["given_ptr", "record_ptr", "stored_scale_inv_ptr"],
)
def _cast_kernel(
    x_ptr,
    codes_ptr,  # uint8 [rows, columns], or None
    transposed_ptr,  # uint8 [columns, rows], or None
    result_ptr,  # FP32 [2]: scale_inv, which products may want aligned, and amax; zeros before "given"
    given_ptr,  # FP32: the scale; or the window rule's state, int32 [2 + WINDOW]; or None
    partial_ptr,  # int32 [partials]; None if the scale is given
    record_ptr,  # int32: the bits of an amax, or None
    stored_scale_inv_ptr,  # FP32, or None
    partials,
    rows,
    columns,
    row_stride,
    RULE: tl.constexpr,  # "given", or one of those in `layouts`
    KEEP_NAN: tl.constexpr,
    FORMAT: tl.constexpr,
    HAS_FP8_CASTS: tl.constexpr,
    TILE_ROWS: tl.constexpr,
    TILE_COLUMNS: tl.constexpr,
):
    """One tile: read, scaled, cast, and stored twice."""
    tile = tl.program_id(0)
    if RULE != "given":  # backwards: what the amax pass has read last is still in the cache
        tile = tl.num_programs(0) - 1 - tile
    at_row, at_column = place_of(tile, columns, TILE_COLUMNS)
    x, i, j = load_tile(x_ptr, rows, columns, row_stride, at_row, at_column, TILE_ROWS, TILE_COLUMNS)
    stored_scale_inv = 1.0
    if stored_scale_inv_ptr is not None:
        stored_scale_inv = tl.load(stored_scale_inv_ptr)
    if RULE == "given":
        scale = tl.load(given_ptr)
        amax = from_bits(tl.max(_magnitude_bits(x, KEEP_NAN))) * stored_scale_inv
        result_bits_ptr = result_ptr.to(tl.pointer_type(tl.int32), bitcast=True)
        tl.atomic_max(result_bits_ptr + 1, as_bits(amax), sem="relaxed")
        # of bits a NaN is the largest, so that one inf shows
        if (tl.program_id(0) == 0) | (not is_finite(amax)):
            tl.atomic_max(result_bits_ptr, as_bits(scale_inv_of(scale, amax)), sem="relaxed")
        if record_ptr is not None:
            record_amax(record_ptr, amax, KEEP_NAN)
    else:
        at = tl.arange(0, _PARTIALS)
        found = tl.load(partial_ptr + at, mask=at < partials, other=0)
        amax = from_bits(tl.max(found)) * stored_scale_inv
        scale = _scale_of(amax, given_ptr, FORMAT, RULE)
        if tl.program_id(0) == 0:
            tl.store(result_ptr, scale_inv_of(scale, amax))
            tl.store(result_ptr + 1, amax)
            if record_ptr is not None:
                record_amax(record_ptr, amax, KEEP_NAN)
    codes = to_codes(x * (scale * stored_scale_inv), FORMAT, HAS_FP8_CASTS)
    if codes_ptr is not None:
        store_tile(codes_ptr, codes, i, j, rows, columns)
    if transposed_ptr is not None:
        store_tile(transposed_ptr, tl.trans(codes), j, i, columns, rows)
