"""Sums of `torch._scaled_mm` on an H200, recorded by benchmarks/gpu/sums.py, against `tensor_cores.product`."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from fp8_backends.compute.tensor_cores import product

RECORDED = load_file(Path(__file__).with_name("recordings") / "h200_scaled_mm.safetensors")
CASES = sorted({key.rpartition(" ")[0] for key in RECORDED})
FORMATS = {"e4m3": torch.float8_e4m3fn, "e5m2": torch.float8_e5m2}


def results_of(case: str, chip: str, fast_accumulation: bool) -> torch.Tensor:
    """Return the product of the recorded codes [M, N] with the sums of a chip, scaled as the GPU scales."""
    _, a_format, b_format, _, scales, _ = case.split()
    a, b = (RECORDED[f"{case} {name}"].view(FORMATS[fmt]) for name, fmt in (("a", a_format), ("b", b_format)))
    values = product(a, b, chip, fast_accumulation)
    scale_a, scale_b = (RECORDED[f"{case} scale_{name}"] for name in "ab")
    if scales == "rowwise":
        return (values * scale_a * scale_b).bfloat16()
    return values * (scale_a * scale_b)


@pytest.mark.parametrize("accumulation", ["fast", "slow"])
@pytest.mark.parametrize("case", CASES)
def test_emulated_sums_equal_those_of_an_h200(case, accumulation):
    assert torch.equal(results_of(case, "h200", accumulation == "fast"), RECORDED[f"{case} {accumulation}"])


def test_fast_accumulation_loses_a_fifth_of_long_positive_sums():
    (case,) = (case for case in CASES if case.endswith("positive one 14336"))
    fast, exact = RECORDED[f"{case} fast"].double(), results_of(case, "exact", False).double()
    assert ((fast / exact - 1 + 0.2).abs() < 0.02).all()
    assert not torch.equal(RECORDED[f"{case} fast"], RECORDED[f"{case} slow"])
