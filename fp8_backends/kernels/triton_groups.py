"""Triton kernels quantizing many matrices at once: groups of rows of one matrix, and stacks of
matrices.

One launch finds all amaxes and one casts to both layouts, moving groups of rows to their places,
with codes of zero between the groups; only the kernels read the groups' bounds. Results equal
`scaling` and `formats`, to the bit.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from ..formats.formats import Format
from . import devices
from .layouts import Layouts
from .triton_common import (
    amax_along,
    as_bits,
    as_fp32,
    ceil_div,
    format_max,
    from_bits,
    larger,
    scale_and_inverse,
    scale_from_amax,
    scale_inv_of,
    to_codes,
)
from .triton_matrix import AMAX_ROW_TILE, CAST_TILE, casting, layouts, place_of, tiling

BAND = 16
"""Groups begin at multiples of this, and codes are padded to multiples of it."""
COLUMN_SCALES = 1024
"""Scales of columns stored by one program."""

_BAND, _COLUMN_SCALES = tl.constexpr(BAND), tl.constexpr(COLUMN_SCALES)


def quantize_groups(
    x: torch.Tensor,
    owners: torch.Tensor,
    sources: torch.Tensor,
    groups: int,
    fmt: Format,
    scale: torch.Tensor | None = None,
    rows: bool = True,
    columns: bool = True,
    *,
    lines: bool = False,
) -> Layouts:
    """Quantize groups of the rows of a matrix, each at its places.

    Args:
        x: [rows, columns], bf16, fp16 or FP32.
        owners: int32 [places], the group of each place. Their number is a multiple of BAND. The
            places of a group are consecutive and begin at a multiple of BAND.
        sources: int32 [places], the row for each place; -1: none, for codes of zero.
        groups: number of groups.
        scale: FP32 [groups]; None: derived from the amaxes.
        rows, columns: requested layouts: `codes`, `transposed`.
        lines: a scale for each row, and in `transposed` for each column of a group, instead of one
        for each group.

    Returns:
        codes [places, columns'] and scale_inv [places]; transposed [columns', places] and
        transposed_scale_inv [groups, columns'], with columns' the next multiple of BAND. Outside
        the matrix codes are zero and scales 1. amax: FP32 [groups], ignoring NaN, 0 for an empty
        group; None with `lines`.
    """
    x = x if x.stride(1) == 1 else x.contiguous()
    return _quantize(x.unsqueeze(0), groups, owners, sources, fmt, scale, rows, columns, lines)


def quantize_matrices(
    weight: torch.Tensor,
    fmt: Format,
    scale: torch.Tensor | None = None,
    rows: bool = True,
    columns: bool = True,
    *,
    lines: bool = False,
) -> Layouts:
    """Quantize matrices as one group each: weight [matrices, rows, columns]. Returns
    `quantize_groups` of each matrix: codes [matrices, rows', columns'], scale_inv [matrices,
    rows']; transposed [matrices, columns', rows'], and its scale_inv [matrices, columns']."""
    weight = weight if weight.stride(2) == 1 else weight.contiguous()
    return _quantize(weight, len(weight), None, None, fmt, scale, rows, columns, lines)


def _padded(length: int) -> int:
    return ceil_div(length, BAND) * BAND


def _quantize(
    x, groups: int, owners, sources, fmt: Format, scale, rows: bool, columns: bool, lines: bool
) -> Layouts:
    """Quantize x [matrices, rows, columns], contiguous in the last dimension. No owners: a matrix
    is a group."""
    places = _padded(x.shape[1]) if owners is None else len(owners)
    matrices, _, width = x.shape
    padded, device = _padded(width), x.device
    each = () if owners is not None else (matrices,)

    def empty(
        *shape: int, dtype: torch.dtype = torch.float32, wanted: bool = True
    ) -> torch.Tensor | None:
        return torch.empty(shape, dtype=dtype, device=device) if wanted else None

    codes = empty(*each, places, padded, dtype=torch.uint8, wanted=rows)
    scale_inv = empty(*each, places, wanted=rows)
    transposed = empty(*each, padded, places, dtype=torch.uint8, wanted=columns)
    transposed_scale_inv = empty(groups, padded, wanted=columns)
    outputs = codes, scale_inv, transposed, transposed_scale_inv
    row_scale = empty(*each, places, wanted=rows and lines)
    shape = (groups, padded) if lines else (groups,)
    bits = torch.zeros(shape, dtype=torch.int32, device=device) if columns or not lines else None
    matrix_stride = x.stride(0) if matrices > 1 else 0  # constant for tokens, to avoid recompiling
    sizes = (*x.shape[1:], places, padded, matrix_stride, x.stride(1))
    tiles = ceil_div(places, CAST_TILE.rows) * ceil_div(padded, CAST_TILE.columns)
    of_columns = ceil_div(groups // matrices * padded, COLUMN_SCALES) if columns else 0
    with devices.on_device_of(x):
        arguments = x, bits, row_scale, scale_inv, owners, sources, *sizes
        amax_kernel[(places // BAND, matrices)](
            *arguments, LINES=lines, FORMAT=fmt.name, **tiling(AMAX_ROW_TILE)
        )
        scales = bits, scale, 0 if scale is None else scale.stride(0), row_scale
        arguments = x, *outputs, *scales, owners, sources, *sizes, groups // matrices, tiles
        cast_kernel[(tiles + of_columns, matrices)](
            *arguments, LINES=lines, **casting(x, fmt), **tiling(CAST_TILE)
        )
    return layouts(*outputs, fmt, False, None if lines else bits.view(torch.float32))


@triton.jit
def _sources_of(sources_ptr, i, rows, places):
    """Return the rows at places i, int64, and their mask."""
    if sources_ptr is None:
        return i, i < rows
    else:
        source = tl.load(sources_ptr + i, mask=i < places, other=-1).to(tl.int64)
        return source, source >= 0


@triton.jit
def _load(x_ptr, i, j, exists, columns, row_stride):
    """Load rows i in FP32, zero outside the mask."""
    inside = exists[:, None] & (j < columns)[None, :]
    return as_fp32(tl.load(x_ptr + i[:, None] * row_stride + j[None, :], mask=inside, other=0.0))


@triton.jit
def _owners_of(owners_ptr, i, places, matrix):
    """Return the groups of places i, int64."""
    if owners_ptr is None:
        return tl.zeros_like(i) + matrix
    else:
        return tl.load(owners_ptr + i, mask=i < places, other=0).to(tl.int64)


@triton.jit(do_not_specialize=["rows"])
def amax_kernel(
    x_ptr,
    bits_ptr,  # int32, zeros: [groups]; LINES: [groups, padded_columns], or None
    row_scale_ptr,  # FP32 [matrices, places], with LINES, or None
    scale_inv_ptr,  # FP32 [matrices, places], written if the one above is
    owners_ptr,
    sources_ptr,
    rows,
    columns,
    places,
    padded_columns,
    matrix_stride,
    row_stride,
    LINES: tl.constexpr,
    FORMAT: tl.constexpr,
    TILE_ROWS: tl.constexpr,  # BAND
    TILE_COLUMNS: tl.constexpr,
):
    """Process a band of places of one group over all columns."""
    matrix = tl.program_id(1).to(tl.int64)
    i = tl.program_id(0).to(tl.int64) * TILE_ROWS + tl.arange(0, TILE_ROWS)
    owner = tl.max(_owners_of(owners_ptr, i, places, matrix))
    source, inside = _sources_of(sources_ptr, i, rows, places)
    largest = tl.zeros((TILE_ROWS, TILE_COLUMNS), dtype=tl.float32)
    at = tl.program_id(0) * 0
    while at < columns:
        j = at.to(tl.int64) + tl.arange(0, TILE_COLUMNS)
        x = _load(x_ptr + matrix * matrix_stride, source, j, inside, columns, row_stride)
        largest = larger(largest, x)
        if LINES and bits_ptr is not None:
            amax_bits = as_bits(amax_along(x, 0))
            tl.atomic_max(
                bits_ptr + owner * padded_columns + j, amax_bits, mask=j < columns, sem="relaxed"
            )
        at += TILE_COLUMNS
    if not LINES:
        tl.atomic_max(bits_ptr + owner, tl.max(as_bits(largest)), sem="relaxed")
    if row_scale_ptr is not None:
        scale, scale_inv = scale_and_inverse(tl.max(largest, axis=1), FORMAT)
        tl.store(row_scale_ptr + matrix * places + i, scale, mask=i < places)
        tl.store(scale_inv_ptr + matrix * places + i, scale_inv, mask=i < places)


@triton.jit
def _scale_of(bits_ptr, given_ptr, given_stride, at, mask, FORMAT: tl.constexpr):
    """Return scales and amaxes at these places."""
    amax = from_bits(tl.load(bits_ptr + at, mask=mask, other=0))
    if given_ptr is None:
        scale = scale_from_amax(amax, format_max(FORMAT))
    else:
        scale = tl.load(given_ptr + at * given_stride, mask=mask, other=1.0)
    return scale, amax


@triton.jit(do_not_specialize=["rows", "groups", "tiles"])
def cast_kernel(
    x_ptr,
    codes_ptr,  # uint8 [matrices, places, padded_columns], or None as the three below
    scale_inv_ptr,  # FP32 [matrices, places]
    transposed_ptr,  # uint8 [matrices, padded_columns, places]
    transposed_scale_inv_ptr,  # FP32 [groups, padded_columns]
    bits_ptr,  # as in `amax_kernel`, and the one below
    given_ptr,  # FP32 [groups], or None
    given_stride,
    row_scale_ptr,
    owners_ptr,
    sources_ptr,
    rows,
    columns,
    places,
    padded_columns,
    matrix_stride,
    row_stride,
    groups,  # of one matrix
    tiles,  # of one matrix; further programs store scales of columns
    LINES: tl.constexpr,
    FORMAT: tl.constexpr,
    HAS_FP8_CASTS: tl.constexpr,
    TILE_ROWS: tl.constexpr,
    TILE_COLUMNS: tl.constexpr,
):
    """Read, scale and cast one tile, and store it in both layouts. Further programs store scales of
    columns."""
    matrix, program = tl.program_id(1).to(tl.int64), tl.program_id(0)
    if transposed_ptr is not None:
        if program >= tiles:
            at = (program - tiles).to(tl.int64) * _COLUMN_SCALES + tl.arange(0, _COLUMN_SCALES)
            exists = at < groups * padded_columns
            at += matrix * groups * padded_columns
            group = at if LINES else at // padded_columns
            scale, amax = _scale_of(bits_ptr, given_ptr, given_stride, group, exists, FORMAT)
            scale_inv = tl.where(at % padded_columns < columns, scale_inv_of(scale, amax), 1.0)
            tl.store(transposed_scale_inv_ptr + at, scale_inv, mask=exists)
            return
    at_row, at_column = place_of(program, padded_columns, TILE_COLUMNS)
    i = at_row.to(tl.int64) * TILE_ROWS + tl.arange(0, TILE_ROWS)
    j = at_column.to(tl.int64) * TILE_COLUMNS + tl.arange(0, TILE_COLUMNS)
    source, inside = _sources_of(sources_ptr, i, rows, places)
    x = _load(x_ptr + matrix * matrix_stride, source, j, inside, columns, row_stride)
    exists, stored = i < places, (i < places)[:, None] & (j < padded_columns)[None, :]
    first = matrix * places * padded_columns
    if not LINES:
        scale, amax = _scale_of(
            bits_ptr,
            given_ptr,
            given_stride,
            _owners_of(owners_ptr, i, places, matrix),
            exists,
            FORMAT,
        )
        codes = to_codes(x * scale[:, None], FORMAT, HAS_FP8_CASTS)
        if codes_ptr is not None:
            scale_inv = tl.where(inside, scale_inv_of(scale, amax), 1.0)
            tl.store(scale_inv_ptr + matrix * places + i, scale_inv, mask=exists & (at_column == 0))
    elif codes_ptr is not None:
        scale = tl.load(row_scale_ptr + matrix * places + i, mask=exists, other=1.0)
        codes = to_codes(x * scale[:, None], FORMAT, HAS_FP8_CASTS)
    if codes_ptr is not None:
        tl.store(codes_ptr + first + i[:, None] * padded_columns + j[None, :], codes, mask=stored)
    if transposed_ptr is not None:
        if LINES:
            bands: tl.constexpr = TILE_ROWS // _BAND
            band = at_row.to(tl.int64) * TILE_ROWS + tl.arange(0, bands) * _BAND
            at = _owners_of(owners_ptr, band, places, matrix)[:, None] * padded_columns + j[None, :]
            column_scale, _ = _scale_of(bits_ptr, None, 0, at, (j < columns)[None, :], FORMAT)
            scaled = tl.reshape(x, (bands, _BAND, TILE_COLUMNS)) * column_scale[:, None, :]
            codes = tl.reshape(to_codes(scaled, FORMAT, HAS_FP8_CASTS), (TILE_ROWS, TILE_COLUMNS))
        at = first + j[:, None] * places + i[None, :]
        tl.store(transposed_ptr + at, tl.trans(codes), mask=tl.trans(stored))
