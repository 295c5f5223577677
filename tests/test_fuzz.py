"""Run the fuzzer: no fault in its quick run, planted faults found, and reproducible cases."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).resolve().parents[1] / "benchmarks" / "reliability"))
import fuzz  # noqa: E402
import fuzz_cases  # noqa: E402

from fp8_backends.recipes.fields import FIELDS  # noqa: E402


def parse_as(monkeypatch, field, parse):
    monkeypatch.setitem(FIELDS[field].__dict__, "parse", parse)


def explode(value):
    raise KeyError(value)


@pytest.mark.nightly
def test_200_cases_work_or_are_refused():
    with fuzz.quiet():
        fuzz.warm_up()
        counts, faults = fuzz.run_all(fuzz_cases.cases(200, seed=0), shown=3)
    assert not faults, fuzz.report(counts, faults)
    assert set(counts) == set(fuzz.RUN) and sum(found["worked"] for found in counts.values()) > 20


@pytest.mark.parametrize(
    ("parse", "outcome"),
    [(lambda value: 0, "ignored"), (explode, "internal"), (FIELDS["margin"].parse, "worked")],
)
def test_planted_field_fault_is_found_and_shrunk(parse, outcome, monkeypatch):
    parse_as(monkeypatch, "margin", parse)
    fields = {"backend": "native:delayed", "margin": 3, "interval": 2}
    case = {"area": "recipes", "handler": "dict", "fields": fields}
    assert fuzz.result_of(case).outcome == outcome
    if outcome == "internal":
        assert fuzz.shrunk(case, outcome)["fields"] == {"margin": 3}


def test_an_endless_case_and_an_unclear_refusal_are_faults(monkeypatch):
    def spin(case):
        while True:
            pass

    monkeypatch.setattr(fuzz, "SECONDS", 0.05)
    monkeypatch.setitem(fuzz.RUN, "strings", spin)
    assert "Hang" in fuzz.result_of({"area": "strings"}).message

    def babble(text):
        raise fuzz.FP8BackendError(text)

    for text in ("x" * 3000, "something is wrong"):
        with pytest.raises(fuzz.Unclear):
            fuzz.named(babble, (text,), "margin")
    with pytest.raises(fuzz.FP8BackendError, match="margin"):
        fuzz.named(babble, ("margin must be better",), "margin")


def test_cases_of_a_seed_are_reproducible_and_serializable():
    cases = fuzz_cases.cases(60, seed=4)
    assert cases == fuzz_cases.cases(60, seed=4) != fuzz_cases.cases(60, seed=5)
    assert json.loads(json.dumps(cases)) == cases
