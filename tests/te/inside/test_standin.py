"""The stand-in: only TransformerEngine sees a GPU, with the refusals of a real one."""

from __future__ import annotations

import sys

import pytest
import torch
import transformer_engine.pytorch as te
import transformer_engine_torch as tex
from standin import compute_capability
from standin.reading import ABSENT
from transformer_engine.common.recipe import DelayedScaling, Float8CurrentScaling


def test_only_transformer_engine_sees_a_gpu():
    assert te.is_fp8_available() and te.get_device_compute_capability() == (9, 0)
    assert not te.is_mxfp8_available()
    with compute_capability(10, 0):
        assert te.is_mxfp8_available()
    assert not te.is_mxfp8_available()
    assert torch.cuda.is_available is not te.utils.cuda_of_te.is_available


def test_placeholders_stay_private():
    """Others look for these names: torch compiles for a GPU if it finds triton."""
    found = [sys.modules[name].__name__ for name in ABSENT if name in sys.modules]
    assert not any(name.startswith("standin") for name in found)


def test_unemulated_functions_raise():
    with pytest.raises(NotImplementedError, match="transformer_engine_torch.fused_rope_forward"):
        tex.fused_rope_forward(torch.zeros(1))


def test_token_counts_not_divisible_by_16_fail_in_backward():
    layer, x = te.Linear(32, 16, device="cpu"), torch.randn(8, 32)
    with te.autocast(recipe=DelayedScaling()):
        y = layer(x)
    with pytest.raises(RuntimeError, match="Caller must pad"):
        y.sum().backward()


@pytest.mark.parametrize("capability, transposed", [((9, 0), True), ((10, 0), False)])
def test_transposes_are_kept_on_single_layout_devices(capability, transposed):
    with compute_capability(*capability):
        quantized = te.Float8CurrentScalingQuantizer(te.DType.kFloat8E4M3, "cpu")(
            torch.randn(16, 32)
        )
    assert (quantized._transpose is not None) == transposed


def test_products_ignore_autocast():
    """A kernel gets its operands as they are: with autocast there is one rounding more, the
    result's."""
    layer, x = te.Linear(64, 32, bias=False, device="cpu"), torch.randn(16, 64)
    with torch.no_grad(), te.autocast(recipe=Float8CurrentScaling()):
        plain = layer(x)
        with torch.autocast("cpu", torch.bfloat16):
            rounded = layer(x)
    assert torch.equal(rounded, plain.bfloat16())
