"""Sums of tensor cores: recordings of chips, mmaemu, and the C++ form against the reference."""

import base64
import functools
import json
import random
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from mmaemu.model.chain import chain_gemm
from mmaemu.model.plan import execute_plan, make_plan
from widths import nightly

from fp8_backends.compute import tensor_cores
from fp8_backends.compute.tensor_cores import CHIPS, product
from fp8_backends.errors import RecipeError
from fp8_backends.formats.formats import E4M3, E5M2

RECORDED = json.loads(
    Path(__file__).with_name("recordings").joinpath("tensor_cores.json").read_text()
)
MMAEMU = {"h100": "hopper", "ada": "ada"}


def same(x, y):
    """True for equal bits; every NaN counts as the same."""
    x, y = (z.where(~z.isnan(), torch.tensor(7.25)).view(torch.int32) for z in (x, y))
    return torch.equal(x, y)


def by_reference(a, b, chip, fast_accumulation):
    zeros = torch.zeros(a.shape[0], b.shape[0])
    return tensor_cores.by_reference(a, b, CHIPS[chip], fast_accumulation, zeros)


def decoded(text, dtype):
    return torch.frombuffer(bytearray(base64.b64decode(text)), dtype=dtype)


@pytest.mark.parametrize("fmt", [E4M3, E5M2], ids=lambda fmt: fmt.name)
@pytest.mark.parametrize("chip", RECORDED["results"])
def test_recorded_results_are_equal_to_the_bit(chip, fmt):
    name = fmt.name.upper()
    a, b = (decoded(RECORDED["operands"][name][x], fmt.dtype).view(-1, 1, 32) for x in "ab")
    result = RECORDED["results"][chip][name]
    d = decoded(result["d"], torch.float32)
    # H100: C = 0
    c = decoded(result["c"], torch.float32).view(-1, 1, 1) if "c" in result else [None] * len(d)
    rows = list(zip(a, b, c, strict=True))
    assert len(d) == 300 and same(
        torch.cat([product(a, b, chip, c=c).view(1) for a, b, c in rows]), d
    )
    exact = torch.cat([product(a, b, "exact", c=c).view(1) for a, b, c in rows])
    assert same(exact, d) == (chip == "B200")


def codes(generator, kind, rows, k, fmt):
    """Codes of every kind: all bits, normal, positive, of many sizes."""
    if kind == "bits":
        return torch.randint(0, 256, (rows, k), generator=generator).to(torch.uint8).view(fmt.dtype)
    x = torch.randn(rows, k, generator=generator)
    if kind == "positive":
        x = x.abs()
    if kind == "wide":
        x = x * torch.exp(3 * torch.randn(rows, k, generator=generator))
    return x.clamp(-fmt.max, fmt.max).to(fmt.dtype)


KINDS = ("bits", "normal", "positive", "wide")


@given(
    st.sampled_from(list(CHIPS)), st.booleans(), st.integers(0, 70), st.integers(0, 70), st.integers(0, 300),
    st.sampled_from([(E4M3, E4M3), (E4M3, E5M2), (E5M2, E4M3), (E5M2, E5M2)]), st.sampled_from(KINDS),
    st.integers(0, 2**31),
)  # fmt: skip
def test_the_compiled_form_equals_the_reference(
    chip, fast_accumulation, m, n, k, formats, kind, seed
):
    generator = torch.Generator().manual_seed(seed)
    a, b = (codes(generator, kind, rows, k, fmt) for rows, fmt in zip((m, n), formats, strict=True))
    assert same(product(a, b, chip, fast_accumulation), by_reference(a, b, chip, fast_accumulation))


def compare_with_mmaemu(shapes, seed):
    """Compare random products, 32 to 4,096 long, both accumulations, on both chips."""
    generator, pick = torch.Generator().manual_seed(seed), random.Random(seed)
    for _ in range(shapes):
        m, n, k = (
            pick.randint(1, 6),
            pick.randint(1, 6),
            pick.choice([pick.randrange(32, 4097, 16), 128, 4096]),
        )
        formats = pick.choice([(E4M3, E4M3), (E5M2, E4M3), (E4M3, E5M2)])
        a, b = (
            codes(generator, pick.choice(KINDS), r, k, f)
            for r, f in zip((m, n), formats, strict=True)
        )
        names = dict(zip(("fmt_a", "fmt_b"), (fmt.name for fmt in formats), strict=True))
        for chip, preset in MMAEMU.items():
            for fast in (True, False):
                chain = functools.partial(chain_gemm, **names, preset=preset)
                plan = make_plan(k, fast=fast, preset=preset)
                theirs = execute_plan(
                    plan, a.view(torch.uint8), b.view(torch.uint8), **names, chain_fn=chain
                )
                assert same(product(a, b, chip, fast), theirs), (m, n, k, formats, chip, fast)


@pytest.mark.parametrize("shapes", [20, nightly(200)])
def test_products_equal_those_of_mmaemu(shapes):
    """Four products a shape. A thousand shapes take five minutes, and were equal."""
    compare_with_mmaemu(shapes, seed=shapes)


def test_without_a_compiler_the_reference_computes_part_by_part(monkeypatch):
    generator = torch.Generator().manual_seed(0)
    a, b = codes(generator, "normal", 700, 32, E4M3), codes(generator, "normal", 600, 32, E4M3)
    compiled = product(a, b, "h100")
    monkeypatch.setattr(tensor_cores.library(), "loaded", lambda: None)
    assert same(product(a, b, "h100"), compiled)


def test_fast_accumulation_loses_what_parts_in_fp32_keep():
    a = torch.full((1, 4096), 1.125).to(E4M3.dtype)
    exact = product(a, a, "exact").item()
    fast, slow = (
        product(a, a, "h100", fast_accumulation).item() for fast_accumulation in (True, False)
    )
    assert exact == 4096 * 1.125**2 == slow and fast < 0.99 * exact
    assert product(a, a, "b200").item() == exact


def test_names_of_chips_and_a_chip_without_recordings():
    a = torch.ones(1, 32).to(E4M3.dtype)
    for name in ("H100", "h20", "H200", "L40S", "RTX 4090", "b200", "Exact"):
        assert product(a, a, name).item() == 32
    with pytest.raises(RecipeError, match="no recorded sums of 'mi300x'.*h100, ada, b200"):
        product(a, a, "mi300x")


def test_compiled_code_calls_it_as_one_operator():
    generator = torch.Generator().manual_seed(0)
    a, b = codes(generator, "normal", 5, 96, E4M3), codes(generator, "normal", 7, 96, E5M2)
    compiled = torch.compile(
        lambda a, b: product(a, b, "ada", False) * 2, backend="aot_eager", fullgraph=True
    )
    assert same(compiled(a, b), product(a, b, "ada", False) * 2)
