"""Triton kernels quantizing a matrix with one scale, in both layouts of FP8 products, in one pass.

Hopper's FP8 units contract along rows only, so products need codes and transposed codes. The matrix
is read once, twice for a scale from its own amax. Results equal `scaling` and `formats`, to the
bit. Nothing waits for the device.
"""

from __future__ import annotations

import functools
import itertools
import threading
from typing import NamedTuple

import torch
import triton
import triton.language as tl

from ..formats.formats import E4M3, E5M2, Format, saturating_cast
from ..formats.scaling import DYNAMIC, ROLLS, SCALE, WINDOW
from . import devices
from .layouts import Layouts
from .triton_common import (
    OPTIONS,
    amax_along,
    as_bits,
    as_fp32,
    ceil_div,
    format_max,
    from_bits,
    is_finite,
    launch,
    magnitude,
    power_of_two_scale,
    scale_from_amax,
    scale_inv_of,
    to_codes,
)


class Tile(NamedTuple):
    """Elements and warps of one program."""

    rows: int
    columns: int
    warps: int
    registers: int | None = None
    """Limit for a thread, to fit more programs on a multiprocessor; None: the compiler decides."""


AMAX_TILE, AMAX_ROW_TILE = Tile(1, 8192, 8), Tile(16, 512, 8)
"""For the amax pass over contiguous memory, as one row, and over rows with gaps."""
CAST_TILE = Tile(64, 128, 4)
"""128 bytes of codes in a row and 64 in a transposed one, whole memory sectors; four programs fit a
multiprocessor."""
AMAX_PROGRAMS = 1024
"""Most programs of the amax pass. The cast reads every stored maximum: without atomics, nothing
needs zeroing."""
_AMAX_PROGRAMS_AT_A_TIME = 4
"""Programs that fit the registers of a multiprocessor."""

_RESULTS = 256
"""Results zeroed in one launch."""

_PARTIALS, _ROLLS, _SCALE, _WINDOW = map(tl.constexpr, (AMAX_PROGRAMS, ROLLS, SCALE, WINDOW))


def amax(x: torch.Tensor, keep_nan: bool = False, *, tile: Tile | None = None) -> torch.Tensor:
    """Run `scaling.tensor_amax` on a matrix of any strides: FP32, 0-dim. Ignores NaN unless
    `keep_nan`."""
    with devices.on_device_of(x):
        partials = _partial_amaxes(row_major(x)[0], keep_nan, tile)
    return partials.amax().view(torch.float32)


def quantize(
    x: torch.Tensor,
    fmt: Format,
    scale: torch.Tensor | None = None,
    rows: bool = True,
    columns: bool = True,
    *,
    how: str = DYNAMIC,
    window_state: torch.Tensor | None = None,
    stored_scale_inv: torch.Tensor | None = None,
    record: torch.Tensor | None = None,
    amax: torch.Tensor | None = None,
    tile: Tile = CAST_TILE,
) -> Layouts:
    """Run `quantize.quantize`, in one pass for a given scale, else in two. Copies a matrix without
    a stride of 1."""
    matrix, turned = row_major(x)
    rows, columns = (columns, rows) if turned else (rows, columns)
    keep_nan, partials, count = how != DYNAMIC, None, 0
    codes, transposed = empty_codes(matrix, rows, columns)
    with devices.on_device_of(matrix):
        if scale is None:
            partials = _partial_amaxes(matrix, keep_nan) if amax is None else amax.view(torch.int32)
            count = partials.numel()
        scale_inv, own_amax = _zeroed_result(matrix)
        given, how = (window_state, how) if scale is None else (scale, "given")
        pointers = matrix, codes, transposed, scale_inv, given, partials, record, stored_scale_inv
        arguments = *pointers, count, *matrix.shape, matrix.stride(0), how, keep_nan
        programs = max(tiles_of(*matrix.shape, tile), 1)  # an empty matrix has a scale, too
        launch(cast_kernel, programs, arguments, {**casting(matrix, fmt), **tiling(tile)})
    return layouts(codes, scale_inv, transposed, scale_inv, fmt, turned, own_amax)


@torch.no_grad()
def obstacle(device: torch.device) -> str | None:
    """Try the kernels on a device: return the reason against them, or None. Waits for the device.
    Triton's errors pass.

    The launcher needs a C compiler, the code generator may not support a new GPU, and compilers
    have bugs: codes of all bf16 numbers must equal PyTorch's, in both layouts.
    """
    numbers = (
        torch.arange(2**16, dtype=torch.int32, device="cpu")
        .to(torch.uint16)
        .view(torch.bfloat16)
        .view(256, 256)
    )
    for dtype, fmt in itertools.product((torch.float32, torch.bfloat16), (E4M3, E5M2)):
        x = numbers.to(device, dtype)
        expected, made = (
            saturating_cast(x.float(), fmt),
            quantize(x, fmt, torch.ones((), device=device)),
        )
        for codes in (made.codes, made.transposed.t()):
            right = codes.view(torch.uint8) == expected.view(torch.uint8)
            right |= x.isnan() & codes.float().isnan()  # the sign of a NaN is free
            if wrong := int((~right).sum()):
                return (
                    f"{wrong} of {x.numel()} casts of {dtype} to {fmt.name} differ from PyTorch's"
                )
    return None


def row_major(x: torch.Tensor) -> tuple[torch.Tensor, bool]:
    """Return a matrix of contiguous rows, perhaps with gaps between them: x, x.t() (and True), or a
    copy."""
    if x.stride(1) == 1 or x.shape[1] == 1:
        return x, False
    return (x.t(), True) if x.stride(0) == 1 or x.shape[0] == 1 else (x.contiguous(), False)


def empty_codes(
    matrix: torch.Tensor, rows: bool, columns: bool
) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """Allocate codes in both layouts, uint8."""
    (m, n), device = matrix.shape, matrix.device
    codes = torch.empty(m, n, dtype=torch.uint8, device=device) if rows else None
    return codes, torch.empty(n, m, dtype=torch.uint8, device=device) if columns else None


def layouts(
    codes, scale_inv, transposed, transposed_scale_inv, fmt: Format, turned: bool, amax=None
) -> Layouts:
    """Assemble the layouts of x from codes of `row_major(x)`."""
    plain = (None, None) if codes is None else (codes.view(fmt.dtype), scale_inv)
    other = (
        (None, None) if transposed is None else (transposed.view(fmt.dtype), transposed_scale_inv)
    )
    return Layouts(*other, *plain, amax) if turned else Layouts(*plain, *other, amax)


def tiles_of(rows: int, columns: int, tile: Tile) -> int:
    return ceil_div(rows, tile.rows) * ceil_div(columns, tile.columns)


def limits(tile: Tile) -> dict[str, object]:
    """Return the options of every launch."""
    most = {} if tile.registers is None else {"maxnreg": tile.registers}
    return {"num_warps": tile.warps, **most, **OPTIONS}


@functools.cache
def tiling(tile: Tile) -> dict[str, object]:
    """Return the options of every launch, and the tile."""
    return {"TILE_ROWS": tile.rows, "TILE_COLUMNS": tile.columns, **limits(tile)}


def casting(matrix: torch.Tensor, fmt: Format) -> dict[str, object]:
    """Return the arguments of every cast."""
    return {"FORMAT": fmt.name, "HAS_FP8_CASTS": devices.has_fp8_casts(matrix)}


def _partial_amaxes(matrix: torch.Tensor, keep_nan: bool, tile: Tile | None = None) -> torch.Tensor:
    """Return bits of the maxima of parts of a matrix: int32, at most AMAX_PROGRAMS."""
    (rows, columns), row_stride = matrix.shape, matrix.stride(0)
    if matrix.is_contiguous():
        rows, columns, row_stride = 1, rows * columns, rows * columns
    tile = tile or (AMAX_TILE if rows == 1 else AMAX_ROW_TILE)
    tiles = tiles_of(rows, columns, tile)
    at_a_time = _AMAX_PROGRAMS_AT_A_TIME * devices.multiprocessors(matrix)
    programs = max(min(tiles, at_a_time, AMAX_PROGRAMS), 1)
    partials = torch.empty(programs, dtype=torch.int32, device=matrix.device)
    arguments = matrix, partials, rows, columns, row_stride, tiles, keep_nan
    launch(amax_kernel, programs, arguments, tiling(tile))
    return partials


_thread = threading.local()
"""Zeroed results by device and stream of this thread's launches."""


def _zeroed_result(matrix: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return a zeroed scale_inv and amax: FP32, 0-dim, adjacent, in 16 bytes."""
    stream = devices.stream_of(matrix)
    if stream is None:
        return _zeroed_results(matrix.device, 1)[0]
    stock, key = _thread.__dict__, (matrix.get_device(), stream)
    if not stock.get(key):
        stock[key] = _zeroed_results(matrix.device, _RESULTS)
    return stock[key].pop()


@torch.inference_mode(False)  # a training forward may get the others
def _zeroed_results(device: torch.device, count: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    scales_inv, amaxes, *_ = torch.zeros(count, 4, dtype=torch.float32, device=device).unbind(1)
    # `data` has its own version counter. Views share one, and multiplying one scale in place, such
    # as a gradient's, would invalidate others saved for backward
    return [
        (scale_inv.data, amax.data)
        for scale_inv, amax in zip(scales_inv.unbind(), amaxes.unbind(), strict=True)
    ]


@triton.jit
def place_of(tile, columns, TILE_COLUMNS: tl.constexpr):
    """Return row and column of a tile, numbered row by row."""
    across = tl.maximum((columns - 1) // TILE_COLUMNS + 1, 1)  # without overflow near 2**31
    return tile // across, tile % across


@triton.jit
def load_tile(
    x_ptr,
    rows,
    columns,
    row_stride,
    at_row,
    at_column,
    TILE_ROWS: tl.constexpr,
    TILE_COLUMNS: tl.constexpr,
):
    """Load a tile in FP32, zero outside of the matrix. Returns it with its row and column
    numbers."""
    i = at_row.to(tl.int64) * TILE_ROWS + tl.arange(0, TILE_ROWS)
    j = at_column.to(tl.int64) * TILE_COLUMNS + tl.arange(0, TILE_COLUMNS)
    inside = (i < rows)[:, None] & (j < columns)[None, :]
    x = tl.load(x_ptr + i[:, None] * row_stride + j[None, :], mask=inside, other=0.0)
    return as_fp32(x), i, j


@triton.jit
def store_tile(ptr, values, i, j, rows, columns):
    """Store values into a contiguous matrix [rows, columns]."""
    inside = (i < rows)[:, None] & (j < columns)[None, :]
    tl.store(ptr + i[:, None] * columns + j[None, :], values, mask=inside)


@triton.jit
def _magnitude_bits(x, KEEP_NAN: tl.constexpr):
    """Return the bits of |x|; NaN is the largest integer."""
    if KEEP_NAN:
        return as_bits(x) & 0x7FFFFFFF
    else:
        return as_bits(magnitude(x))


@triton.jit(do_not_specialize=["rows", "tiles"])
def amax_kernel(
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
    """Find the amax of every n-th tile of n programs."""
    largest = tl.zeros((TILE_ROWS, TILE_COLUMNS), dtype=tl.int32)
    tile = tl.program_id(0)
    while tile < tiles:
        at_row, at_column = place_of(tile, columns, TILE_COLUMNS)
        x, _, _ = load_tile(
            x_ptr, rows, columns, row_stride, at_row, at_column, TILE_ROWS, TILE_COLUMNS
        )
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
    """Raise int32 bits of an amax in place. NaN is the largest, or ignored."""
    bits = as_bits(amax)
    if not KEEP_NAN:
        bits = tl.where(amax == amax, bits, 0)
    tl.atomic_max(record_ptr, bits, sem="relaxed")


@triton.jit(
    do_not_specialize=["partials"],
    do_not_specialize_on_alignment=["given_ptr", "record_ptr", "stored_scale_inv_ptr"],
)
def cast_kernel(
    x_ptr,
    codes_ptr,  # uint8 [rows, columns], or None
    transposed_ptr,  # uint8 [columns, rows], or None
    result_ptr,  # FP32 [2]: aligned scale_inv, amax; zeros for "given"
    given_ptr,  # FP32 scale; or state of the window rule, int32 [2 + WINDOW]; or None
    partial_ptr,  # int32 [partials]; None for "given"
    record_ptr,  # int32 bits of an amax, or None
    stored_scale_inv_ptr,  # FP32, or None
    partials,
    rows,
    columns,
    row_stride,
    RULE: tl.constexpr,  # "given", or a rule of `layouts`
    KEEP_NAN: tl.constexpr,
    FORMAT: tl.constexpr,
    HAS_FP8_CASTS: tl.constexpr,
    TILE_ROWS: tl.constexpr,
    TILE_COLUMNS: tl.constexpr,
):
    """Read, scale and cast one tile, and store it in both layouts."""
    tile = tl.program_id(0)
    if RULE != "given":  # backwards: the end is still in cache
        tile = tl.num_programs(0) - 1 - tile
    at_row, at_column = place_of(tile, columns, TILE_COLUMNS)
    x, i, j = load_tile(
        x_ptr, rows, columns, row_stride, at_row, at_column, TILE_ROWS, TILE_COLUMNS
    )
    stored_scale_inv = 1.0
    if stored_scale_inv_ptr is not None:
        stored_scale_inv = tl.load(stored_scale_inv_ptr)
    if RULE == "given":
        scale = tl.load(given_ptr)
        if KEEP_NAN:
            amax = from_bits(tl.max(_magnitude_bits(x, True)))
        else:
            amax = amax_along(x, None)
        amax *= stored_scale_inv
        result_bits_ptr = result_ptr.to(tl.pointer_type(tl.int32), bitcast=True)
        tl.atomic_max(result_bits_ptr + 1, as_bits(amax), sem="relaxed")
        # NaN has the largest bits, so one inf shows
        if (tl.program_id(0) == 0) | (not is_finite(amax)):
            tl.atomic_max(result_bits_ptr, as_bits(scale_inv_of(scale, amax)), sem="relaxed")
        if record_ptr is not None:
            record_amax(record_ptr, amax, KEEP_NAN)
    else:
        at = tl.arange(0, _PARTIALS)
        amax_bits = tl.max(tl.load(partial_ptr + at, mask=at < partials, other=0))
        amax = from_bits(amax_bits) * stored_scale_inv
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
