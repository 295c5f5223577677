"""Check the kernels that quantize groups of rows and experts for a Hopper GPU: nothing in local
memory, enough wide accesses for any groups."""

from __future__ import annotations

import pytest
from ahead_of_time import MachineCode, compiled
from test_quantize_machine_code import (
    CASTS,
    SCALES,
    assert_fast,
    assert_rounds_as_the_reference,
    split,
)

from fp8_backends.kernels import triton_groups
from fp8_backends.kernels.triton_matrix import AMAX_ROW_TILE, CAST_TILE, limits

SIZES = ("rows", "columns", "places", "padded_columns", "matrix_stride", "row_stride")
LARGE = dict.fromkeys(SIZES, "i32:16")
ODD = LARGE | dict.fromkeys(("rows", "columns", "row_stride", "matrix_stride"), "i32")
OWNERS = {
    "groups": {"owners_ptr": "*i32", "sources_ptr": "*i32"},
    "experts": {"owners_ptr": None, "sources_ptr": None},
}
KINDS = pytest.mark.parametrize("kind", OWNERS)
LINES = pytest.mark.parametrize("lines", [False, True], ids=["one scale", "lines"])


def amax(dtype: str, kind: str, lines: bool) -> MachineCode:
    arguments = {"x_ptr": dtype, "bits_ptr": "*i32", **OWNERS[kind], **LARGE, "LINES": lines}
    scales = {"row_scale_ptr": "*fp32", "scale_inv_ptr": "*fp32"}
    arguments |= {"FORMAT": "e4m3"} | (scales if lines else dict.fromkeys(scales))
    return of(triton_groups.amax_kernel, AMAX_ROW_TILE, arguments)


def cast(dtype: str, kind: str, lines: bool, **changed) -> MachineCode:
    arguments = {
        "x_ptr": dtype,
        "codes_ptr": "*u8",
        "transposed_ptr": "*u8",
        **SCALES,
        "bits_ptr": "*i32",
    }
    arguments |= {
        "given_ptr": None,
        "given_stride": 0,
        "row_scale_ptr": "*fp32" if lines else None,
        "LINES": lines,
    }
    arguments |= {**OWNERS[kind], **LARGE, "groups": "i32", "tiles": "i32", **CASTS, **changed}
    del arguments["stored_scale_inv_ptr"]
    return of(triton_groups.cast_kernel, CAST_TILE, arguments)


def of(kernel, tile, arguments: dict) -> MachineCode:
    types, constants = split(arguments)
    tiles = {"TILE_ROWS": tile.rows, "TILE_COLUMNS": tile.columns}
    return compiled(kernel, types, constants | tiles, **limits(tile))


@KINDS
@LINES
def test_amax_machine_code(kind, lines):
    code = amax("*bf16", kind, lines)
    assert_fast(code, AMAX_ROW_TILE, "*bf16")
    assert_rounds_as_the_reference(code)


@KINDS
@LINES
def test_cast_machine_code(kind, lines):
    code = cast("*bf16", kind, lines)
    assert_fast(code, CAST_TILE, "*bf16")
    assert_rounds_as_the_reference(code)
    assert max(code.widths("st")) == 128 and "cvt.rn.satfinite.e4m3x2.f32" in code.ptx


VARIANTS = {
    "a given scale": {"given_ptr": "*fp32", "given_stride": "i32"},
    "FP32": {"dtype": "*fp32"},
    "an older GPU": {"HAS_FP8_CASTS": False},
    "rows alone": {"transposed_ptr": None, "transposed_scale_inv_ptr": None},
    "columns alone": {"codes_ptr": None, "scale_inv_ptr": None},
    "odd sizes": ODD,
}


@pytest.mark.parametrize("name", VARIANTS)
def test_variants_compile_without_spills(name):
    code = cast(**{"dtype": "*bf16", "kind": "groups", "lines": False, **VARIANTS[name]})
    assert code.stack == 0
