"""Check the Adam step's kernels for a Hopper GPU: nothing in local memory, wide accesses, rounding
as specified."""

from __future__ import annotations

import pytest
from adam_cases import jobs
from ahead_of_time import MachineCode, compiled

from fp8_backends.kernels import triton_adam
from fp8_backends.kernels.adam_table import Kind


def kind_of(case: str, copied: bool = False) -> Kind:
    return jobs(case, copied=copied, sizes=(1,))[0].kind


KINDS = {
    "O1": kind_of("O1"),
    "O2": kind_of("O2"),
    "O3": kind_of("O2", copied=True),
    "O2, blocks of 128": kind_of("O2 blocks")._replace(block_size=128),
    "O2, nearest": kind_of("O2")._replace(stochastic=False),
    "O4": kind_of("O4"),
    "an embedding": kind_of("embedding"),
    "bf16": kind_of("bf16"),
}
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


def of(kernel, kind: str, aligned: bool = True, fp8_casts: bool = True) -> MachineCode:
    constants = {
        "KIND": triton_adam.TritonKernels(KINDS[kind], fp8_casts).constants,
        "ALIGNED": aligned,
    }
    constants = {name: value for name, value in constants.items() if name in kernel.arg_names}
    types = GRADIENTS if kernel is triton_adam.gradient_kernel else SIGNATURE
    signature = {name: type_ for name, type_ in types.items() if name in kernel.arg_names}
    return compiled(kernel, signature, constants, **triton_adam.LIMITS)


@pytest.mark.parametrize("kind", KINDS)
def test_no_spills_and_several_programs_per_sm(kind):
    made = of(triton_adam.write_kernel, kind)
    assert made.stack == 0
    assert made.registers * 32 * triton_adam.LIMITS["num_warps"] * PROGRAMS <= OF_A_MULTIPROCESSOR
    assert 64 in made.widths("ld") or kind == "O4"  # with bytes as elements
    assert "fma.rn" not in _outside_divisions(made.ptx)


@pytest.mark.parametrize(
    "kernel,kind", [("gradient_kernel", "an embedding"), ("bounds_kernel", "O2")]
)
def test_small_kernels_compile(kernel, kind):
    made = of(getattr(triton_adam, kernel), kind)
    assert made.stack == 0


def test_wide_accesses_require_alignment():
    wide, narrow = (of(triton_adam.write_kernel, "O2", aligned) for aligned in (True, False))
    assert 64 in wide.widths("st") and max(narrow.widths("st")) == 32  # 32: scales


def test_fp8_conversion_uses_native_instruction():
    new, old = (of(triton_adam.write_kernel, "O2", fp8_casts=casts) for casts in (True, False))
    assert "e4m3x2" in new.ptx and "e4m3x2" not in old.ptx


def _outside_divisions(ptx: str) -> str:
    """Return PTX without its correctly rounded divisions and roots, single instructions there."""
    return "\n".join(
        line for line in ptx.splitlines() if "div.rn" not in line and "sqrt.rn" not in line
    )
