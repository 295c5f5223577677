"""Compare `benchmarks/tensor_cores/emulation.py` with recordings of chips, to the bit."""

from __future__ import annotations

import base64
import json
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from fp8_backends.formats.formats import E4M3, E5M2
from fp8_backends.formats.scaling import Quantized

FOLDER = Path(__file__).resolve().parents[1] / "benchmarks" / "tensor_cores"
sys.path.append(str(FOLDER.parent))
from tensor_cores.emulation import CHIPS, by_reference, product, scaled_product  # noqa: E402

pytestmark = pytest.mark.nightly

INSTRUCTIONS = json.loads((FOLDER / "recordings" / "instructions.json").read_text())
PRODUCTS = load_file(FOLDER / "recordings" / "h200_scaled_mm.safetensors")
CASES = sorted({key.rpartition(" ")[0] for key in PRODUCTS})
FORMATS = {fmt.name: fmt.dtype for fmt in (E4M3, E5M2)}


def same(x, y):
    """True for equal bits; every NaN counts as the same."""
    x, y = (z.where(~z.isnan(), torch.tensor(7.25)).view(torch.int32) for z in (x, y))
    return torch.equal(x, y)


def decoded(text, dtype):
    return torch.frombuffer(bytearray(base64.b64decode(text)), dtype=dtype)


@pytest.mark.parametrize("fmt", [E4M3, E5M2], ids=lambda fmt: fmt.name)
@pytest.mark.parametrize("chip", INSTRUCTIONS["results"])
def test_instructions_are_equal_to_the_bit(chip, fmt):
    name = fmt.name.upper()
    a, b = (decoded(INSTRUCTIONS["operands"][name][x], fmt.dtype).view(-1, 1, 32) for x in "ab")
    result = INSTRUCTIONS["results"][chip][name]
    d = decoded(result["d"], torch.float32)
    # H100: C = 0
    c = decoded(result["c"], torch.float32).view(-1, 1, 1) if "c" in result else [None] * len(d)
    rows = list(zip(a, b, c, strict=True))
    assert len(d) == 300 and same(
        torch.cat([product(a, b, chip, c=c).view(1) for a, b, c in rows]), d
    )
    exact = torch.cat([product(a, b, "exact", c=c).view(1) for a, b, c in rows])
    assert same(exact, d) == (chip == "B200")


def operands(case):
    """Return the recorded codes [M, K] and [N, K] with their scales."""
    _, a_format, b_format, *_ = case.split()
    a = PRODUCTS[f"{case} a"].view(FORMATS[a_format])
    b = PRODUCTS[f"{case} b"].view(FORMATS[b_format])
    return Quantized(a, PRODUCTS[f"{case} scale_a"]), Quantized(b, PRODUCTS[f"{case} scale_b"].t())


@pytest.mark.parametrize("accumulation", ["fast", "slow"])
@pytest.mark.parametrize("case", CASES)
def test_products_of_an_h200_are_equal_to_the_bit(case, accumulation):
    recorded = PRODUCTS[f"{case} {accumulation}"]
    made = scaled_product(*operands(case), recorded.dtype, "h100", accumulation == "fast")
    assert made.dtype == recorded.dtype and torch.equal(made, recorded)


@pytest.mark.parametrize("fast_accumulation", [True, False])
@pytest.mark.parametrize("chip", CHIPS)
def test_the_compiled_form_equals_the_reference(chip, fast_accumulation):
    for case in CASES:
        a, b = (operand.codes[:5, :1024] for operand in operands(case))
        reference = by_reference(a, b, CHIPS[chip], fast_accumulation, torch.zeros(len(a), len(b)))
        assert same(product(a, b, chip, fast_accumulation), reference), case


def test_fast_accumulation_loses_a_fifth_of_long_positive_sums():
    (case,) = (case for case in CASES if case.endswith("positive one 14336"))
    a, b = operands(case)
    fast, exact = PRODUCTS[f"{case} fast"].double(), a.codes.double() @ b.codes.double().t()
    assert ((fast / exact - 1 + 0.2).abs() < 0.02).all()
    assert not torch.equal(PRODUCTS[f"{case} fast"], PRODUCTS[f"{case} slow"])
