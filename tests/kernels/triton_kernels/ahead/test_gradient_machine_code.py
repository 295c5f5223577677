"""Check the kernels over E4M3 gradients for a Hopper GPU: nothing in local memory, wide
accesses."""

from __future__ import annotations

import pytest
from ahead_of_time import compiled

from fp8_backends.kernels import triton_backward as kernels


@pytest.mark.parametrize("dtype, widest", [("*bf16", 128), ("*fp32", 128)])
def test_sum_uses_vector_accesses(dtype, widest):
    signature = {
        "codes_ptr": "*u8",
        "scale_inv_ptr": "*fp32",
        "addend_ptr": dtype,
        "total_ptr": "*fp32",
    }
    signature |= {"numel": "i32:16"}
    code = compiled(
        kernels.accumulate_kernel,
        signature,
        {"BLOCK": kernels.ADDED_AT_ONCE},
        num_warps=kernels.ADDING_WARPS,
    )
    assert code.stack == 0 and code.registers <= 128
    assert code.widths("st") == {128} and widest in code.widths("ld")


def test_norm_uses_vector_loads():
    signature = {"codes_ptr": "*u8", "partial_ptr": "*fp32", "numel": "i32:16", "blocks": "i32"}
    code = compiled(
        *(
            kernels.squares_kernel,
            signature,
            {"BLOCK": kernels.SQUARED, "HAS_FP8_CASTS": True},
        ),
        num_warps=kernels.SQUARING_WARPS,
    )
    assert code.stack == 0 and code.registers <= 64
    assert 128 in code.widths("ld")


def test_final_norm_sum_fits_in_registers():
    signature = {
        "partial_ptr": "*fp32",
        "partials": "i32",
        "scale_inv_ptr": "*fp32",
        "norm_ptr": "*fp32",
    }
    code = compiled(kernels.norm_kernel, signature, {}, num_warps=4)
    assert code.stack == 0
