"""Check the cross-entropy kernel for a Hopper GPU: nothing in local memory, wide accesses, two
programs at a time on a multiprocessor."""

from __future__ import annotations

import pytest
from ahead_of_time import compiled

from fp8_backends.kernels import triton_backward

POINTERS = {"label_ptr": "*i64", "loss_ptr": "*fp32"}
NUMBERS = {
    "words": "i32:16",
    "row_stride": "i32:16",
    "ignore_index": "i32",
    "on_label": "fp32",
    "on_all": "fp32",
}


@pytest.mark.parametrize("is_smooth", [False, True])
@pytest.mark.parametrize("dtype", ["*bf16", "*fp32"])
def test_row_loss_machine_code(dtype, is_smooth):
    signature = {"x_ptr": dtype, "gradient_ptr": dtype, **POINTERS, **NUMBERS}
    block = triton_backward.SMOOTH_BLOCK if is_smooth else triton_backward.LOGITS_BLOCK
    constants = {"IS_SMOOTH": is_smooth, "BLOCK": block}
    code = compiled(
        triton_backward.cross_entropy_kernel,
        signature,
        constants,
        num_warps=triton_backward.LOGITS_WARPS,
    )
    assert code.stack == 0, "registers are spilled"
    assert max(code.widths("ld")) == max(code.widths("st")) == 128
    assert 65_536 // (-(-code.registers // 8) * 8 * 32 * triton_backward.LOGITS_WARPS) >= 2, (
        code.registers
    )
