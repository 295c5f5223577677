"""Check the Adam step's kernels for a Hopper GPU: nothing in local memory, wide accesses, rounding
as specified."""

from __future__ import annotations

import pytest
import torch
from ahead_of_time import MachineCode, compiled

from fp8_backends.kernels import triton_adam
from fp8_backends.kernels.adam_table import Kind

E4M3, FP16, BF16, FP32 = torch.float8_e4m3fn, torch.float16, torch.bfloat16, torch.float32
ROOT8 = torch.uint8
PLAIN, ALL, ADAMW = (
    (False,) * 4,
    (True,) * 4,
    {"decoupled": True, "maximize": False, "stochastic": True},
)
OF_O2 = {"dtypes": (FP16, E4M3, E4M3, FP16), "scaled": ALL, "finite_is_told": False}
KINDS = {
    "O1": Kind(
        (FP16, E4M3, FP32, FP32),
        (True, True, False, False),
        PLAIN,
        0,
        None,
        **ADAMW,
        finite_is_told=False,
    ),
    "O2": Kind(**OF_O2, blocked=PLAIN, block_size=0, copy=None, **ADAMW),
    "O3": Kind(**OF_O2, blocked=PLAIN, block_size=0, copy=E4M3, **ADAMW),
    "O2, blocks of 128": Kind(
        **OF_O2, blocked=(False, False, True, False), block_size=128, copy=None, **ADAMW
    ),
    "O2, nearest": Kind(
        **OF_O2, blocked=PLAIN, block_size=0, copy=None, **ADAMW | {"stochastic": False}
    ),
    "O4": Kind(
        (E4M3, E4M3, E4M3, ROOT8),
        ALL,
        (False, False, True, True),
        128,
        None,
        **ADAMW,
        finite_is_told=False,
        split=True,
    ),
    "an embedding": Kind(
        (FP32, FP32, E4M3, FP16),
        (False, False, True, True),
        PLAIN,
        0,
        None,
        **ADAMW,
        finite_is_told=True,
    ),
}
KINDS = {name: kind._replace(bounded=True) for name, kind in KINDS.items()}
KINDS |= {"bf16": Kind((BF16,) * 4, PLAIN, PLAIN, 0, None, **ADAMW, finite_is_told=True)}
SIGNATURE = {
    "table": "*i64",
    "parameters": "*i32",
    "bounds_ptr": "*fp32",
    "old_ptr": "*fp32",
    "grad_amax_ptr": "*fp32",
}
GRADIENTS = {**SIGNATURE, "grad_amax_ptr": "*i32"}
OF_A_MULTIPROCESSOR, PROGRAMS = 65_536, 2
"""Registers, and how many programs are to run at a time."""


def of(kernel, kind: str, tmp_path, aligned: bool = True, fp8_casts: bool = True) -> MachineCode:
    constants = {
        "KIND": triton_adam.TritonKernels(KINDS[kind], fp8_casts).constants,
        "ALIGNED": aligned,
    }
    constants = {name: value for name, value in constants.items() if name in kernel.arg_names}
    types = GRADIENTS if kernel is triton_adam.gradient_kernel else SIGNATURE
    signature = {name: type_ for name, type_ in types.items() if name in kernel.arg_names}
    return compiled(kernel, signature, constants, tmp_path, **triton_adam.LIMITS)


@pytest.mark.parametrize("kind", KINDS)
def test_no_spills_and_several_programs_per_sm(kind, tmp_path):
    made = of(triton_adam.write_kernel, kind, tmp_path)
    assert made.stack == 0
    assert made.registers * 32 * triton_adam.LIMITS["num_warps"] * PROGRAMS <= OF_A_MULTIPROCESSOR
    assert 64 in made.widths("ld") or kind == "O4"  # with bytes as elements
    assert "fma.rn" not in _outside_divisions(made.ptx)


@pytest.mark.parametrize(
    "kernel,kind", [("gradient_kernel", "an embedding"), ("bounds_kernel", "O2")]
)
def test_small_kernels_compile(kernel, kind, tmp_path):
    made = of(getattr(triton_adam, kernel), kind, tmp_path)
    assert made.stack == 0


def test_wide_accesses_require_alignment(tmp_path):
    wide, narrow = (
        of(triton_adam.write_kernel, "O2", tmp_path, aligned) for aligned in (True, False)
    )
    assert 64 in wide.widths("st") and max(narrow.widths("st")) == 32  # 32: scales


def test_fp8_conversion_uses_native_instruction(tmp_path):
    new, old = (
        of(triton_adam.write_kernel, "O2", tmp_path, fp8_casts=casts) for casts in (True, False)
    )
    assert "e4m3x2" in new.ptx and "e4m3x2" not in old.ptx


def _outside_divisions(ptx: str) -> str:
    """Return PTX without its correctly rounded divisions and roots, single instructions there."""
    return "\n".join(
        line for line in ptx.splitlines() if "div.rn" not in line and "sqrt.rn" not in line
    )
