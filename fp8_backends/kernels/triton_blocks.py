"""Triton kernels quantizing a matrix with a scale for each row or block, along either dimension.

A program's tile is whole in blocks along both dimensions and gives codes and scales of x and of
x.t(). For scales of whole rows, a first pass finds the maxima of rows and columns at once; without
x.t(), one program sweeps twice over a row, the second time from cache. Results equal
`scaling.Blocks.quantize`, to the bit.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from ..formats.formats import Format
from ..formats.scaling import MX, ROWS, SQUARES, VECTORS, Blocks
from . import devices
from .layouts import Layouts
from .triton_common import (
    amax_along,
    as_bits,
    format_max,
    from_bits,
    larger,
    launch,
    magnitude,
    power_of_two_scale,
    scale_and_inverse,
    scale_inv_of,
    to_codes,
)
from .triton_matrix import (
    CAST_TILE,
    Tile,
    casting,
    empty_codes,
    layouts,
    limits,
    load_tile,
    place_of,
    row_major,
    store_tile,
    tiles_of,
    tiling,
)

BANDS = {VECTORS: Tile(32, 128, 4, 128), SQUARES: Tile(64, 128, 4), MX: Tile(64, 64, 4, 80)}
"""A program processes a square of whole blocks, band after band. The registers of a whole square of
128 would leave one program on a multiprocessor, without overlap of loads."""
SWEEP_TILE = Tile(1, 4096, 8)
"""A program sweeps twice over one row: those of all programs at a time fit a Hopper GPU's cache."""
LINE_TILE, LINE_STEPS = Tile(4, 512, 2), 8
"""For maxima of rows and columns: tile, and tiles of one program, one below the other. Maxima of a
thread's columns stay in registers; maxima of rows go through shared memory, one number a warp."""


def quantize_blocks(
    x: torch.Tensor,
    blocks: Blocks,
    fmt: Format,
    rows: bool = True,
    columns: bool = True,
    *,
    stored_scale_inv: torch.Tensor | None = None,
    tile: Tile | None = None,
) -> Layouts:
    """Run `quantize.quantize_blocks`. tile: of one program; None: suited to the blocks."""
    matrix, turned = row_major(x)
    rows, columns = (columns, rows) if turned else (rows, columns)
    codes, transposed = empty_codes(matrix, rows, columns)
    scale_inv = _empty_scales(matrix, blocks) if rows else None
    transposed_scale_inv = _empty_scales(matrix.t(), blocks) if columns else None
    outputs = (codes, scale_inv, transposed, transposed_scale_inv)
    with devices.on_device_of(matrix):
        if blocks is ROWS:
            _quantize_lines(matrix, fmt, outputs, stored_scale_inv, tile)
        else:
            _quantize_squares(matrix, blocks, fmt, outputs, stored_scale_inv, tile)
    return layouts(*outputs, fmt, turned)


def _empty_scales(matrix: torch.Tensor, blocks: Blocks) -> torch.Tensor:
    rows, columns = matrix.shape
    shape = -(-rows // blocks.rows), -(-columns // blocks.columns) if blocks.columns else 1
    return torch.empty(
        shape, dtype=torch.uint8 if blocks is MX else torch.float32, device=matrix.device
    )


def _quantize_squares(matrix, blocks, fmt, outputs, stored_scale_inv, band):
    band = band or BANDS[blocks]
    if matrix.numel() == 0:
        return
    kernel, constants = squares_kernel, {}
    if blocks is not SQUARES:
        kernel, constants = vectors_kernel, {"LENGTH": blocks.columns, "E8M0": blocks is MX}
    constants |= {**casting(matrix, fmt), "BAND": band.rows, "SIDE": band.columns, **limits(band)}
    arguments = matrix, *outputs, stored_scale_inv, *matrix.shape, matrix.stride(0)
    launch(kernel, tiles_of(*matrix.shape, band._replace(rows=band.columns)), arguments, constants)


def _quantize_lines(matrix, fmt, outputs, stored_scale_inv, tile):
    codes, scale_inv, transposed, transposed_scale_inv = outputs
    rows, columns = matrix.shape
    shape = rows, columns, matrix.stride(0)
    tile = tile or (SWEEP_TILE if transposed is None else CAST_TILE)
    options = casting(matrix, fmt) | tiling(tile)
    if transposed is None:
        arguments = matrix, codes, scale_inv, stored_scale_inv, *shape
        launch(sweep_kernel, max(-(-rows // tile.rows), 1), arguments, options)
        return
    # features first: more often multiples of 16 than tokens, and Triton specializes on the
    # alignment of pointers
    column_bits, row_bits = torch.zeros(
        rows + columns, dtype=torch.int32, device=matrix.device
    ).split([columns, rows])
    row_bits = None if codes is None else row_bits
    strips = max(tiles_of(rows, columns, LINE_TILE._replace(rows=LINE_TILE.rows * LINE_STEPS)), 1)
    arguments = matrix, row_bits, column_bits, *shape, LINE_STEPS
    launch(line_amax_kernel, strips, arguments, tiling(LINE_TILE))
    pointers = (
        matrix,
        codes,
        scale_inv,
        row_bits,
        transposed,
        transposed_scale_inv,
        column_bits,
        stored_scale_inv,
    )
    launch(line_cast_kernel, max(tiles_of(rows, columns, tile), 1), (*pointers, *shape), options)


@triton.jit
def _stored_scale_inv(ptr):
    if ptr is None:
        return 1.0
    else:
        return tl.load(ptr)


@triton.jit
def _mx_exponent(amax, FORMAT_MAX: tl.constexpr):
    """Return the biased exponent, 0 to 254, of the inverse of `scaling.mx_scale`, in E8M0."""
    reciprocal: tl.constexpr = 1.0 / FORMAT_MAX
    bits = as_bits(amax * reciprocal)
    exponent, mantissa = bits >> 23, bits & 0x7FFFFF
    # a subnormal number rounds up only above 2**-127, the value of exponent 0
    upwards = (mantissa > 0) & ((exponent > 0) | (mantissa > 0x400000))
    return tl.minimum(exponent + upwards.to(tl.int32), 254)


@triton.jit
def _block_scale(amax, FORMAT: tl.constexpr, E8M0: tl.constexpr):
    """Return the scale of blocks, and its stored inverse."""
    if E8M0:
        exponent = _mx_exponent(amax, format_max(FORMAT))
        # 2**-127, the inverse of the largest, is subnormal in FP32
        scale = from_bits(tl.where(exponent == 254, 0x400000, (254 - exponent) << 23))
        stored = exponent.to(tl.uint8)
    else:
        scale = power_of_two_scale(amax, format_max(FORMAT), 127)
        stored = scale_inv_of(scale, amax)
    return scale, stored


@triton.jit(do_not_specialize_on_alignment=["stored_scale_inv_ptr"])
def vectors_kernel(
    x_ptr,
    codes_ptr,  # uint8 [rows, columns], or None
    scale_inv_ptr,  # FP32 or uint8 [rows, blocks in a row], or None
    transposed_ptr,  # of x.t() the same two
    transposed_scale_inv_ptr,
    stored_scale_inv_ptr,  # FP32, or None
    rows,
    columns,
    row_stride,
    LENGTH: tl.constexpr,  # of a block
    E8M0: tl.constexpr,  # `mx_scale`, else `block_scale`
    FORMAT: tl.constexpr,
    HAS_FP8_CASTS: tl.constexpr,
    BAND: tl.constexpr,
    SIDE: tl.constexpr,
):
    """Process one square: bands of its rows, then bands of its columns, from cache."""
    bands: tl.constexpr = SIDE // BAND
    blocks: tl.constexpr = SIDE // LENGTH
    factor = _stored_scale_inv(stored_scale_inv_ptr)
    at_row, at_column = place_of(tl.program_id(0), columns, SIDE)
    if codes_ptr is not None:
        j_block = at_column * blocks + tl.arange(0, blocks)
        for band in range(bands):
            x, i, j = load_tile(
                x_ptr, rows, columns, row_stride, at_row * bands + band, at_column, BAND, SIDE
            )
            x = tl.reshape(x, (BAND, blocks, LENGTH))
            scale, scale_inv = _block_scale(amax_along(x, 2) * factor, FORMAT, E8M0)
            codes = to_codes(x * (scale * factor)[:, :, None], FORMAT, HAS_FP8_CASTS)
            store_tile(codes_ptr, tl.reshape(codes, (BAND, SIDE)), i, j, rows, columns)
            store_tile(scale_inv_ptr, scale_inv, i, j_block, rows, tl.cdiv(columns, LENGTH))
    if transposed_ptr is not None:
        i_block = at_row * blocks + tl.arange(0, blocks)
        for band in range(bands):
            x, i, j = load_tile(
                x_ptr, rows, columns, row_stride, at_row, at_column * bands + band, SIDE, BAND
            )
            x = tl.reshape(x, (blocks, LENGTH, BAND))
            scale, scale_inv = _block_scale(amax_along(x, 1) * factor, FORMAT, E8M0)
            codes = to_codes(x * (scale * factor)[:, None, :], FORMAT, HAS_FP8_CASTS)
            store_tile(
                transposed_ptr, tl.trans(tl.reshape(codes, (SIDE, BAND))), j, i, columns, rows
            )
            store_tile(
                transposed_scale_inv_ptr,
                tl.trans(scale_inv),
                j,
                i_block,
                columns,
                tl.cdiv(rows, LENGTH),
            )


@triton.jit(do_not_specialize_on_alignment=["stored_scale_inv_ptr"])
def squares_kernel(
    x_ptr,
    codes_ptr,  # uint8 [rows, columns], or None
    scale_inv_ptr,  # FP32 [rows of blocks, blocks in a row], or None
    transposed_ptr,  # of x.t() the same two
    transposed_scale_inv_ptr,
    stored_scale_inv_ptr,  # FP32, or None
    rows,
    columns,
    row_stride,
    FORMAT: tl.constexpr,
    HAS_FP8_CASTS: tl.constexpr,
    BAND: tl.constexpr,
    SIDE: tl.constexpr,
):
    """Process one square: its amax, band by band, then its codes."""
    bands: tl.constexpr = SIDE // BAND
    factor = _stored_scale_inv(stored_scale_inv_ptr)
    at_row, at_column = place_of(tl.program_id(0), columns, SIDE)
    largest = tl.zeros((BAND, SIDE), dtype=tl.float32)
    for band in range(bands):
        x, _, _ = load_tile(
            x_ptr, rows, columns, row_stride, at_row * bands + band, at_column, BAND, SIDE
        )
        largest = larger(largest, x)
    scale, scale_inv = _block_scale(tl.max(largest) * factor, FORMAT, False)
    down, across = tl.cdiv(rows, SIDE), tl.cdiv(columns, SIDE)
    if codes_ptr is not None:
        tl.store(scale_inv_ptr + at_row * across + at_column, scale_inv)
    if transposed_ptr is not None:
        tl.store(transposed_scale_inv_ptr + at_column * down + at_row, scale_inv)
    for band in range(bands):
        x, i, j = load_tile(
            x_ptr, rows, columns, row_stride, at_row * bands + band, at_column, BAND, SIDE
        )
        codes = to_codes(x * (scale * factor), FORMAT, HAS_FP8_CASTS)
        if codes_ptr is not None:
            store_tile(codes_ptr, codes, i, j, rows, columns)
        if transposed_ptr is not None:
            store_tile(transposed_ptr, tl.trans(codes), j, i, columns, rows)


@triton.jit(do_not_specialize=["rows"])
def line_amax_kernel(
    x_ptr,
    row_bits_ptr,  # int32 [rows], zeros, or None
    column_bits_ptr,  # int32 [columns], zeros
    rows,
    columns,
    row_stride,
    STEPS: tl.constexpr,
    TILE_ROWS: tl.constexpr,
    TILE_COLUMNS: tl.constexpr,
):
    """Find the maxima of rows and columns, as bits."""
    at_row, at_column = place_of(tl.program_id(0), columns, TILE_COLUMNS)
    largest = tl.zeros((TILE_ROWS, TILE_COLUMNS), dtype=tl.int32)
    for step in range(STEPS):
        at = at_row * STEPS + step
        x, i, _ = load_tile(
            x_ptr, rows, columns, row_stride, at, at_column, TILE_ROWS, TILE_COLUMNS
        )
        bits = as_bits(magnitude(x))
        largest = tl.maximum(largest, bits)
        if row_bits_ptr is not None:
            tl.atomic_max(row_bits_ptr + i, tl.max(bits, axis=1), mask=i < rows, sem="relaxed")
    j = at_column.to(tl.int64) * TILE_COLUMNS + tl.arange(0, TILE_COLUMNS)
    tl.atomic_max(column_bits_ptr + j, tl.max(largest, axis=0), mask=j < columns, sem="relaxed")


@triton.jit
def _line_scale(bits_ptr, at, length, factor, FORMAT: tl.constexpr):
    """Return the scales of rows or columns, and their inverses."""
    amax = from_bits(tl.load(bits_ptr + at, mask=at < length, other=0)) * factor
    return scale_and_inverse(amax, FORMAT)


@triton.jit(do_not_specialize_on_alignment=["stored_scale_inv_ptr"])
def line_cast_kernel(
    x_ptr,
    codes_ptr,  # uint8 [rows, columns], or None as the two below
    scale_inv_ptr,  # FP32 [rows, 1]
    row_bits_ptr,  # int32 [rows]
    transposed_ptr,  # uint8 [columns, rows]
    transposed_scale_inv_ptr,  # FP32 [columns, 1]
    column_bits_ptr,  # int32 [columns]
    stored_scale_inv_ptr,  # FP32, or None
    rows,
    columns,
    row_stride,
    FORMAT: tl.constexpr,
    HAS_FP8_CASTS: tl.constexpr,
    TILE_ROWS: tl.constexpr,
    TILE_COLUMNS: tl.constexpr,
):
    """Cast one tile with a scale for each row, and again, from cache, with a scale for each
    column."""
    factor = _stored_scale_inv(stored_scale_inv_ptr)
    at_row, at_column = place_of(tl.program_id(0), columns, TILE_COLUMNS)
    if codes_ptr is not None:
        x, i, j = load_tile(
            x_ptr, rows, columns, row_stride, at_row, at_column, TILE_ROWS, TILE_COLUMNS
        )
        scale, scale_inv = _line_scale(row_bits_ptr, i, rows, factor, FORMAT)
        codes = to_codes(x * (scale * factor)[:, None], FORMAT, HAS_FP8_CASTS)
        store_tile(codes_ptr, codes, i, j, rows, columns)
        if at_column == 0:
            tl.store(scale_inv_ptr + i, scale_inv, mask=i < rows)
    x, i, j = load_tile(
        x_ptr, rows, columns, row_stride, at_row, at_column, TILE_ROWS, TILE_COLUMNS
    )
    scale, scale_inv = _line_scale(column_bits_ptr, j, columns, factor, FORMAT)
    codes = to_codes(x * (scale * factor)[None, :], FORMAT, HAS_FP8_CASTS)
    store_tile(transposed_ptr, tl.trans(codes), j, i, columns, rows)
    if at_row == 0:
        tl.store(transposed_scale_inv_ptr + j, scale_inv, mask=j < columns)


@triton.jit(do_not_specialize=["rows"], do_not_specialize_on_alignment=["stored_scale_inv_ptr"])
def sweep_kernel(
    x_ptr,
    codes_ptr,  # uint8 [rows, columns]
    scale_inv_ptr,  # FP32 [rows, 1]
    stored_scale_inv_ptr,  # FP32, or None
    rows,
    columns,
    row_stride,
    FORMAT: tl.constexpr,
    HAS_FP8_CASTS: tl.constexpr,
    TILE_ROWS: tl.constexpr,
    TILE_COLUMNS: tl.constexpr,
):
    """Cast whole rows, read from cache the second time."""
    factor = _stored_scale_inv(stored_scale_inv_ptr)
    at_row, across = tl.program_id(0), tl.cdiv(columns, TILE_COLUMNS)
    largest = tl.zeros((TILE_ROWS, TILE_COLUMNS), dtype=tl.float32)
    tile = at_row * 0
    while tile < across:
        x, _, _ = load_tile(x_ptr, rows, columns, row_stride, at_row, tile, TILE_ROWS, TILE_COLUMNS)
        largest = larger(largest, x)
        tile += 1
    scale, scale_inv = scale_and_inverse(tl.max(largest, axis=1) * factor, FORMAT)
    i = at_row.to(tl.int64) * TILE_ROWS + tl.arange(0, TILE_ROWS)
    tl.store(scale_inv_ptr + i, scale_inv, mask=i < rows)
    tile = at_row * 0
    while tile < across:
        x, i, j = load_tile(x_ptr, rows, columns, row_stride, at_row, tile, TILE_ROWS, TILE_COLUMNS)
        codes = to_codes(x * (scale * factor)[:, None], FORMAT, HAS_FP8_CASTS)
        store_tile(codes_ptr, codes, i, j, rows, columns)
        tile += 1
