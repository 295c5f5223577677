"""The kernels of norms and gated activations as a Hopper GPU gets them: nothing spilled, wide accesses."""

from __future__ import annotations

import pytest
from ahead_of_time import compiled

from fp8_backends.numerics.kernels.fused import LONGEST_ROW, triton_gated, triton_norm
from fp8_backends.numerics.kernels.fused.triton_gated import BLOCK, WARPS

FORWARD = triton_gated._forward_kernel, ("gate_ptr", "up_ptr"), ("values_ptr",), ("partial_ptr",)
BACKWARD = (
    triton_gated._backward_kernel,
    ("grad_ptr", "gate_ptr", "up_ptr"),
    ("gate_grad_ptr", "up_grad_ptr"),
    ("gate_partial_ptr", "up_partial_ptr"),
)
IN_FLIGHT = 30_000
"""Bytes that each multiprocessor must have asked for at any time, as in `test_quantize_machine_code`."""


@pytest.mark.parametrize("activation, dtype, width", [("silu", "*bf16", 2), ("gelu_tanh", "*fp32", 4)])
@pytest.mark.parametrize("parts", [FORWARD, BACKWARD], ids=["forward", "backward"])
def test_gated(parts, activation, dtype, width, tmp_path):
    kernel, inputs, outputs, partials = parts
    types = {**dict.fromkeys([*inputs, *outputs], dtype), **dict.fromkeys(partials, "*i32"), "elements": "i32:16"}
    constants = {"ACTIVATION": activation, "KEEP_NAN": False, "ON_GPU": True, "BLOCK": BLOCK}
    code = compiled(kernel, types, constants, tmp_path, num_warps=WARPS)
    assert code.stack == 0, "registers are spilled"
    assert max(code.widths("ld")) == 128 and max(code.widths("st")) == 128
    programs = min(65_536 // (-(-code.registers // 8) * 8 * 32 * WARPS), triton_gated._PROGRAMS_AT_A_TIME)
    assert programs * BLOCK * len(inputs) * width >= IN_FLIGHT, (programs, code.registers)
    assert "div.full" not in code.ptx and "atom" not in code.ptx


NORM = triton_norm._forward_kernel, {"partial_ptr": "*i32"}, ("x_ptr", "values_ptr"), {"KEEP_NAN": False}
NORM_BACKWARD = triton_norm._backward_kernel, {"weight_grad_ptr": "*fp32"}, ("grad_ptr", "x_ptr", "x_grad_ptr"), {}


@pytest.mark.parametrize("columns, dtype", [(128, "*bf16"), (4096, "*bf16"), (LONGEST_ROW, "*fp32")])
@pytest.mark.parametrize("parts", [NORM, NORM_BACKWARD], ids=["forward", "backward"])
def test_norm(parts, columns, dtype, tmp_path):
    kernel, others, matrices, constants = parts
    rows, across, warps = triton_norm.tile_of(columns)
    types = {**dict.fromkeys(matrices, dtype), **others, "weight_ptr": "*fp32", "eps": "fp32"}
    types |= {"rows": "i32", "columns": "i32:16"}
    constants = {"CENTERED": columns == 128, "ON_GPU": True, "TILE_ROWS": rows, "TILE_COLUMNS": across, **constants}
    code = compiled(kernel, types, constants, tmp_path, num_warps=warps)
    assert code.stack == 0, "registers are spilled"
    assert max(code.widths("ld")) == 128 and max(code.widths("st")) == 128
    assert 32 * warps * code.registers <= 65_536
    assert "div.full" not in code.ptx and "atom" not in code.ptx
