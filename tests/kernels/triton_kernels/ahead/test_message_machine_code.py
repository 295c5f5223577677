"""Check the machine code of message kernels: whole vectors of 16 bytes, nothing spilled."""

from __future__ import annotations

import pytest
import triton.language as tl
from ahead_of_time import compiled

from fp8_backends.kernels import triton_messages

TABLE = {"table_ptr": "*i64", "parts": "i32", "messages_ptr": "*u8"}
SIZES = {"columns": "i32:16", "stride": "i32:16"}
"""Aligned as in messages of a multiple of 16 bytes, which all but the smallest buckets have."""
PACK = {**TABLE, "own_ptr": "*fp32", **SIZES, "rank": "i32"}
UNPACK = {**TABLE, "scale_inv_ptr": "*fp32", **SIZES}
SUM = {
    "received_ptr": "*u8",
    "own_ptr": "*fp32",
    "numel": "i32:16",
    **SIZES,
    "rank": "i32",
    "divisor": "fp32",
    "factor": "fp32",
}
OF_PARTS = {"ALIGNED": True, "STEPS": 3, "TILE": triton_messages.TILE}
OF_VALUES = {"HAS_FP8_CASTS": True, "TILE": triton_messages.TILE}


def wide(kernel, signature: dict, constants: dict):
    """Compile a kernel. Values, codes and local data must move in vectors of 16 bytes; exponents,
    one for 128 values, move in bytes."""
    code = compiled(kernel, signature, constants, num_warps=triton_messages.MESSAGE_WARPS)
    assert max(code.widths("ld")) == max(code.widths("st")) == 128
    assert code.widths("st") <= {128, 32, 8}  # 32: the scales
    assert code.stack == 0 and code.registers <= 128
    assert ".ftz" not in code.ptx  # subnormal numbers stay unchanged
    return code


@pytest.mark.parametrize("dtype", [tl.bfloat16, tl.float32])
def test_packing_machine_code(dtype):
    kept = {"DTYPE": dtype, "SCALED": False, "OWN_ROW": True, "KEPT": True}
    code = wide(triton_messages.pack_kernel, PACK, kept | OF_PARTS | OF_VALUES)
    assert "cvt.rn.satfinite.e4m3x2" in code.ptx


@pytest.mark.parametrize("out, encoded", [("*u8", True), ("*bf16", False)])
def test_summing_machine_code(out, encoded):
    constants = {"RANKS": 8, "TOGETHER": triton_messages.TOGETHER, "ENCODED": encoded}
    wide(triton_messages.sum_kernel, {**SUM, "out_ptr": out}, constants | OF_VALUES)


@pytest.mark.parametrize("dtype, codes", [(tl.bfloat16, False), (tl.uint8, True)])
def test_unpacking_machine_code(dtype, codes):
    constants = {"DTYPE": dtype, "CODES": codes, **OF_PARTS}
    wide(triton_messages.unpack_kernel, UNPACK, constants)
