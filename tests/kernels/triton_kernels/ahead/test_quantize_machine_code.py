"""Check the casting kernels for a Hopper GPU: nothing in local memory, enough wide accesses."""

from __future__ import annotations

import re

import pytest
from ahead_of_time import MachineCode, compiled

from fp8_backends.formats.scaling import MX, SQUARES, VECTORS
from fp8_backends.kernels import triton_blocks as blocks
from fp8_backends.kernels import triton_matrix as tensorwise
from fp8_backends.kernels.triton_matrix import AMAX_ROW_TILE, AMAX_TILE, CAST_TILE, limits

LARGE = {"rows": "i32:16", "columns": "i32:16", "row_stride": "i32:16"}
ODD = {"rows": "i32", "columns": "i32", "row_stride": "i32"}
BOTH = {"codes_ptr": "*u8", "transposed_ptr": "*u8"}
SCALES = {"scale_inv_ptr": "*fp32", "transposed_scale_inv_ptr": "*fp32"}
E8M0 = {"scale_inv_ptr": "*u8", "transposed_scale_inv_ptr": "*u8"}
CASTS = {"FORMAT": "e4m3", "HAS_FP8_CASTS": True, "stored_scale_inv_ptr": None}
RECORDS = {"record_ptr": "*i32"}

GIVEN = {"given": "*fp32", "window": "*i32"}
"""Other inputs of a rule, besides the amax."""

IN_FLIGHT = 30_000
"""Bytes requested by each of 132 multiprocessors at any time: 4.8 TB/s for memory's latency of 0.8
microseconds."""


def cast(dtype: str, rule: str, sizes: dict = LARGE, fmt: str = "e4m3", **changed) -> MachineCode:
    """sizes: types, or constants. changed: constants, or the types of pointers."""
    arguments = (
        BOTH | sizes | {"result_ptr": "*fp32", "record_ptr": None, "RULE": rule, "KEEP_NAN": False}
    )
    arguments |= CASTS | {"FORMAT": fmt}
    arguments |= {"given_ptr": GIVEN.get(rule), "partial_ptr": "*i32", "partials": "i32"}
    arguments |= {"partial_ptr": None, "partials": 0} if rule == "given" else {}
    types, constants = split(arguments | changed)
    return of(tensorwise.cast_kernel, dtype, CAST_TILE, types, constants)


def split(arguments: dict) -> tuple[dict, dict]:
    """Separate parameters with a type from constants."""
    types = {
        name: value
        for name, value in arguments.items()
        if name.islower() and isinstance(value, str)
    }
    return types, {name: value for name, value in arguments.items() if name not in types}


def of(
    kernel, dtype, tile, signature, constants=None, names=("TILE_ROWS", "TILE_COLUMNS")
) -> MachineCode:
    tiles = dict(zip(names, tile[:2], strict=True))
    return compiled(
        kernel,
        {"x_ptr": dtype, **signature},
        {**(constants or {}), **tiles},
        **limits(tile),
    )


def vectors(dtype: str, kind) -> MachineCode:
    constants = CASTS | ({} if kind is SQUARES else {"LENGTH": kind.columns, "E8M0": kind is MX})
    kernel = blocks.squares_kernel if kind is SQUARES else blocks.vectors_kernel
    signature = BOTH | LARGE | (E8M0 if kind is MX else SCALES)
    return of(kernel, dtype, blocks.BANDS[kind], signature, constants, ("BAND", "SIDE"))


LINES = {"row_bits_ptr": "*i32", "column_bits_ptr": "*i32", **LARGE}
SWEEP = {"codes_ptr": "*u8", "scale_inv_ptr": "*fp32", **LARGE}
MATRICES = {
    "cast, dynamic": (CAST_TILE, lambda dtype: cast(dtype, "dynamic")),
    "cast, given": (
        CAST_TILE,
        lambda dtype: cast(dtype, "given", fmt="e5m2", **RECORDS),
    ),
    "vectors": (blocks.BANDS[VECTORS], lambda dtype: vectors(dtype, VECTORS)),
    "squares": (blocks.BANDS[SQUARES], lambda dtype: vectors(dtype, SQUARES)),
    "mx": (blocks.BANDS[MX], lambda dtype: vectors(dtype, MX)),
    "rows and columns": (
        CAST_TILE,
        lambda dtype: of(blocks.line_cast_kernel, dtype, CAST_TILE, BOTH | SCALES | LINES, CASTS),
    ),
    "rows": (
        blocks.SWEEP_TILE,
        lambda dtype: of(blocks.sweep_kernel, dtype, blocks.SWEEP_TILE, SWEEP, CASTS),
    ),
}


def programs_at_a_time(code: MachineCode, tile) -> int:
    """Return how many programs fit a multiprocessor."""
    threads = 32 * tile.warps
    registers = 65_536 // (-(-code.registers // 8) * 8 * threads)
    return min(registers, 227 * 1024 // (code.shared + 1024), 2048 // threads)


def assert_fast(code: MachineCode, tile, dtype: str) -> None:
    assert code.stack == 0, "registers are spilled"
    assert max(code.widths("ld")) == 128
    programs = programs_at_a_time(code, tile)
    assert programs * tile.rows * tile.columns * {"*bf16": 2, "*fp32": 4}[dtype] >= IN_FLIGHT, (
        programs,
        code.registers,
    )


def assert_rounds_as_the_reference(code: MachineCode) -> None:
    assert not any(word in code.ptx for word in (".ftz", ".approx", "div.full"))


@pytest.mark.parametrize(
    "dtype, name", [*(("*bf16", name) for name in MATRICES), ("*fp32", "cast, dynamic")]
)
def test_cast_machine_code(name, dtype):
    tile, made = MATRICES[name]
    code = made(dtype)
    assert_fast(code, tile, dtype)
    assert_rounds_as_the_reference(code)
    assert max(code.widths("st")) == 128
    assert f"cvt.rn.satfinite.{'e5m2' if name == 'cast, given' else 'e4m3'}x2.f32" in code.ptx


def test_second_sweep_finds_the_rows_in_cache():
    """Rows of 14,336 bf16 numbers, in half of the L2 cache of an H200: 50 MB."""
    tile, made = MATRICES["rows"]
    rows = 132 * programs_at_a_time(made("*bf16"), tile) * tile.rows
    assert rows * 14_336 * 2 <= 25e6


@pytest.mark.parametrize("name", ["cast, given", "vectors", "squares", "rows"])
def test_maxima_drop_nan_without_an_instruction_an_element(name):
    tile, made = MATRICES[name]
    tests_for_nan = re.findall(r"setp\.(?:num|nan)(?:\.ftz)?\.f32", made("*bf16").ptx)
    assert len(tests_for_nan) < tile.rows * tile.columns / (32 * tile.warps) / 2


@pytest.mark.parametrize("tile", [AMAX_TILE, AMAX_ROW_TILE])
@pytest.mark.parametrize("keep_nan", [False, True])
def test_amax_machine_code(tile, keep_nan):
    sizes = LARGE | {"tiles": "i32"}
    code = of(
        tensorwise.amax_kernel,
        "*bf16",
        tile,
        {"partial_ptr": "*i32", **sizes},
        {"KEEP_NAN": keep_nan},
    )
    assert_fast(code, tile, "*bf16")
    assert "atom" not in code.ptx


def test_row_and_column_amax_machine_code():
    """Maxima of columns by way of shared memory were eight and eleven accesses in one, and had
    thirty of them."""
    tile = blocks.LINE_TILE
    code = of(blocks.line_amax_kernel, "*bf16", tile, LINES, {"STEPS": blocks.LINE_STEPS})
    assert_fast(code, tile, "*bf16")
    assert len(re.findall(r"\b(?:ld|st|ldmatrix|stmatrix)\.[\w.]*shared", code.ptx)) <= 16


def test_sizes_not_divisible_by_16_compile():
    """Compiled for one element at a time, since rows start anywhere."""
    code = cast("*bf16", "dynamic", ODD)
    assert code.stack == 0 and max(code.widths("st")) < 128


VARIANTS = {
    "a stored weight": {"dtype": "*fp16", "rule": "power_of_two", "stored_scale_inv_ptr": "*fp32"},
    "window": {"dtype": "*bf16", "rule": "window", "KEEP_NAN": True, **RECORDS},
    "an older GPU": {"dtype": "*bf16", "rule": "given", "HAS_FP8_CASTS": False},
    "one number": {
        "dtype": "*fp32",
        "rule": "dynamic",
        "sizes": {"rows": 1, "columns": 1, "row_stride": 1},
    },
    "one layout": {"dtype": "*bf16", "rule": "dynamic", "transposed_ptr": None},
}


@pytest.mark.parametrize("name", VARIANTS)
def test_variants_compile_without_spills(name):
    """Make sizes of 1 constants, like Triton's launcher."""
    code = cast(**VARIANTS[name])
    assert code.stack == 0
    assert ("satfinite" in code.ptx) == (name != "an older GPU")


def test_one_element_matrix_compiles():
    """Weights may have this shape."""
    constants = CASTS | {"LENGTH": 128, "E8M0": False, "rows": 1, "columns": 1, "row_stride": 1}
    del constants["stored_scale_inv_ptr"]
    signature, tile = BOTH | SCALES | {"stored_scale_inv_ptr": "*fp32"}, blocks.BANDS[VECTORS]
    code = of(blocks.vectors_kernel, "*fp16", tile, signature, constants, ("BAND", "SIDE"))
    assert "satfinite" in code.ptx
