"""Kernels that Inductor compiles with FP8 results have no `min.NaN` and `max.NaN`. The texts are of
torch 2.14."""

from __future__ import annotations

import pytest
import torch
from torch.torch_version import TorchVersion

from fp8_backends.errors import FP8BackendError
from fp8_backends.torch_tools import inductor

KERNEL = """import triton
import triton.language as tl

@triton_heuristics.reduction(
    triton_meta={{'signature': {{'in_ptr0': '*bf16', 'out_ptr0': '{out}', 'xnumel': 'i32'}}}},
)
@triton.jit
def triton_(in_ptr0, out_ptr0, xnumel, XBLOCK : tl.constexpr, R0_BLOCK : tl.constexpr):
    tmp2 = tl.maximum(tmp0, tmp1, tl.PropagateNan.ALL)
    tmp3 = triton_helpers.max2(tmp2, 1)[:, None]
    tmp5 = tl.minimum(tmp3, tmp4, tl.PropagateNan.ALL)
    tmp6 = triton_helpers.min2_strict(tmp5, 1)[:, None]
    tmp7 = tl.maximum(tmp6, tmp5)
    tl.store(out_ptr0 + (x0), tmp7, None)
"""


@pytest.mark.parametrize("out", ["*fp8e4nv", "*fp8e5", "*u8"])
def test_minima_and_maxima_beside_one_byte_results_are_rewritten(out):
    rewritten = inductor.without_nan_instructions(KERNEL.format(out=out))
    body = rewritten.partition("def triton_(")[2]
    assert "PropagateNan" not in rewritten and "triton_helpers" not in rewritten
    for line in (
        "tmp2 = where_maximum(tmp0, tmp1)",
        "tmp3 = where_max2(tmp2, 1)[:, None]",
        "tmp5 = where_minimum(tmp3, tmp4)",
        "tmp6 = where_min2(tmp5, 1)[:, None]",
        "tmp7 = tl.maximum(tmp6, tmp5)",  # never had the instruction
    ):
        assert f"    {line}\n" in body
    assert rewritten.count("def where_") == 4
    assert inductor.without_nan_instructions(rewritten) == rewritten


def test_other_kernels_stay_as_they_are():
    for out in ("*bf16", "*fp32", "*i32"):
        source = KERNEL.format(out=out)
        assert inductor.without_nan_instructions(source) == source


@pytest.mark.parametrize(
    "line",
    [
        "triton_helpers.online_softmax_combine(a, b, True)",
        "tl.maximum(f(a), b, tl.PropagateNan.ALL)",
    ],
)
def test_unknown_maximum_beside_fp8_is_refused(line):
    source = KERNEL.format(out="*fp8e5").replace("tl.maximum(tmp6, tmp5)", line)
    with pytest.raises(
        FP8BackendError, match="triton#11111.*online_softmax = False, train without torch.compile"
    ):
        inductor.without_nan_instructions(source)


def test_guard_wraps_once_and_refuses_another_signature(monkeypatch):
    from torch._inductor.codegen.triton import TritonScheduling as scheduling

    # restored at the end
    monkeypatch.setattr(scheduling, "define_kernel", scheduling.define_kernel)
    monkeypatch.setattr(torch, "__version__", TorchVersion("2.13.0"))
    before = scheduling.define_kernel
    inductor.guard_byte_stores()
    assert scheduling.define_kernel is before
    monkeypatch.setattr(torch, "__version__", TorchVersion("2.14.0"))

    def define_kernel(self, src_code, node_schedule, kernel):
        return src_code

    scheduling.define_kernel = define_kernel
    for _ in range(2):
        inductor.guard_byte_stores()
        assert scheduling.define_kernel.__wrapped__ is define_kernel
    source = KERNEL.format(out="*fp8e5")
    assert (
        scheduling.define_kernel(None, source, [], None)
        == inductor.without_nan_instructions(source)
        != source
    )
    scheduling.define_kernel = lambda self, node_schedule, kernel: None
    with pytest.raises(
        FP8BackendError, match="another TritonScheduling.define_kernel.*install torch 2.13"
    ):
        inductor.guard_byte_stores()
