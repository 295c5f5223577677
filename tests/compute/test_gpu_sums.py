"""Sums of `torch._scaled_mm` on an H200, recorded by benchmarks/gpu/sums.py, against
`scaled_product`."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from fp8_backends.compute.products import scaled_product
from fp8_backends.formats.scaling import Quantized

RECORDED = load_file(Path(__file__).with_name("recordings") / "h200_scaled_mm.safetensors")
CASES = sorted({key.rpartition(" ")[0] for key in RECORDED})
FORMATS = {"e4m3": torch.float8_e4m3fn, "e5m2": torch.float8_e5m2}


def operands(case: str) -> tuple[Quantized, Quantized]:
    """Return the recorded codes [M, K] and [N, K] with their scales."""
    _, a_format, b_format, *_ = case.split()
    a, b = (
        RECORDED[f"{case} {name}"].view(FORMATS[fmt])
        for name, fmt in (("a", a_format), ("b", b_format))
    )
    return Quantized(a, RECORDED[f"{case} scale_a"]), Quantized(b, RECORDED[f"{case} scale_b"].t())


@pytest.mark.parametrize("accumulation", ["fast", "slow"])
@pytest.mark.parametrize("case", CASES)
def test_emulated_sums_equal_those_of_an_h200(case, accumulation):
    recorded = RECORDED[f"{case} {accumulation}"]
    made = scaled_product(*operands(case), recorded.dtype, accumulation == "fast", sums="h100")
    assert made.dtype == recorded.dtype and torch.equal(made, recorded)


def test_fast_accumulation_loses_a_fifth_of_long_positive_sums():
    (case,) = (case for case in CASES if case.endswith("positive one 14336"))
    a, b = operands(case)
    fast, exact = RECORDED[f"{case} fast"].double(), a.codes.double() @ b.codes.double().t()
    assert ((fast / exact - 1 + 0.2).abs() < 0.02).all()
    assert not torch.equal(RECORDED[f"{case} fast"], RECORDED[f"{case} slow"])
