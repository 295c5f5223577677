"""The outcomes of checks, and the verdict in words, over the results of one small comparison."""

from __future__ import annotations

import copy

import pytest
from cli.comparing import compared

from fp8_backends.cli.compare.summary import checks, verdict
from fp8_backends.cli.terminal import change, duration, with_minus_signs

HELD_OUT = "held-out loss at most 0.01 nats above bf16's"
GRADIENTS = "gradients at the initial weights point where bf16's do"


@pytest.fixture(scope="module")
def measured(tmp_path_factory):
    return compared(tmp_path_factory.mktemp("checks"), "native:dynamic", steps=2).results


@pytest.fixture
def results(measured):
    return copy.deepcopy(measured)


def set_gaps(results, *gaps):
    """Let the held-out losses of as many seeds differ by so much."""
    found = results["backends"]
    first = {name: found[name]["runs"][0] for name in ("bf16", "native:dynamic")}
    for name, run in first.items():
        added = gaps if name == "native:dynamic" else (0.0,) * len(gaps)
        found[name]["runs"] = [{**run, "seed": seed, "held_out_loss": 2.0 + gap} for seed, gap in enumerate(added)]
    results["settings"]["seeds"] = len(gaps)


def outcome(results, name):
    return next(check for check in checks(results)["native:dynamic"] if check.name == name)


@pytest.mark.parametrize(
    ("gaps", "expected"),
    [
        ((0.001, 0.002, 0.001), True),
        ((0.05, 0.051, 0.052), False),
        ((0.001, 0.02), None),
        ((0.001,), None),
        ((0.02,), None),
        ((0.2,), False),  # far beyond: no noise of a paired run
        ((0.0, 0.9), False),
        ((float("nan"),), False),
    ],
)
def test_the_interval_decides_on_the_gap_and_a_far_gap_fails_without_one(results, gaps, expected):
    set_gaps(results, *gaps)
    assert outcome(results, HELD_OUT).passed is expected


def test_what_passed_wholly_is_good(results):
    set_gaps(results, 0.001, 0.002, 0.001)
    found = verdict(results)
    assert (found.mood, found.headline, found.details) == ("good", "All 8 checks passed.", [])


def test_what_is_not_resolved_is_named_not_counted_as_passed_and_told_how_many_seeds_it_takes(results):
    set_gaps(results, 0.001)
    found = verdict(results)
    assert (found.mood, found.headline) == ("open", "All 7 checks that could be judged passed; 1 is not resolved.")
    assert found.details == [
        f"Not resolved: {HELD_OUT} (native:dynamic).",
        "More seeds or steps would resolve the held-out loss: --seeds 5.",
    ]
    # deviation 0.00635, mean 0.00533 below the bound: t(6) 0.00635 / √7 = 0.00587, t(7) 0.00635 / √8 = 0.00531
    set_gaps(results, 0.001, 0.012, 0.001)
    results["settings"]["minutes"] = 5.0
    assert verdict(results).details[-1].endswith("--seeds 8 with more --minutes.")
    set_gaps(results, 0.009, 0.0109)
    assert verdict(results).details[-1].endswith("--seeds 30 with more --minutes.")  # too near to the bound


def test_failed_checks_are_counted_and_named(results):
    cosines = results["backends"]["native:dynamic"]["inspection"]["first_gradient_cosines"]
    cosines["lm_head.weight"] = -0.99
    set_gaps(results, 0.001)
    found = verdict(results)
    assert (found.mood, found.headline) == ("bad", "1 of 8 checks failed, and 1 is not resolved.")
    assert found.details[0] == (
        f"Failed: native:dynamic: {GRADIENTS} (least cosine -0.9900 (lm_head.weight), bound 0.9)."
    )


def test_gradients_of_which_none_outlasts_rounding_are_not_resolved(results):
    inspection = results["backends"]["native:dynamic"]["inspection"]
    inspection["reference_gradient_cosines"] = dict.fromkeys(inspection["first_gradient_cosines"], 0.998)
    check = outcome(results, GRADIENTS)
    assert check.passed is None and "model.layers.*.self_attn.q_proj.weight (×2)" in check.detail


def test_a_gradient_that_is_not_finite_fails(results):
    inspection = results["backends"]["native:dynamic"]["inspection"]
    inspection["first_gradient_cosines"]["lm_head.weight"] = None
    assert outcome(results, GRADIENTS).passed is False


@pytest.mark.parametrize(("note", "reason"), [("interrupted by SIGINT", ": interrupted by SIGINT"), ("", "")])
def test_a_run_that_ended_early_is_never_good_and_says_why_and_what_there_is(results, note, reason):
    set_gaps(results, 0.001, 0.002, 0.001)
    results |= {"status": "terminated", "note": note}
    del results["backends"]["native:dynamic"]["runs"][1:]
    results["backends"]["native:dynamic"]["inspection"] = None
    found = verdict(results)
    assert found.mood == "open" and found.headline.startswith(f"Terminated early{reason}. So far all 5 checks ")
    assert found.details[0] == "Finished, of 3 seeds each: bf16 3, native:dynamic 1."
    for backend in results["backends"].values():
        backend |= {"runs": [], "inspection": None}
    assert verdict(results).headline == f"Terminated early{reason}. So far no check could be made."


def test_one_check_is_no_plural(results):
    results["backends"]["native:dynamic"] |= {"status": "failed", "message": "out of memory"}
    del results["backends"]["bf16"]
    results["settings"]["reference"] = "native:dynamic"
    assert verdict(results).headline == "1 of 1 check failed."


def test_only_one_itself_is_no_change():
    ratios = (1.0, 1.0003, 0.9997, 1.094, 0.41)
    assert [change(ratio) for ratio in ratios] == ["±0 %", "+<0.1 %", "-<0.1 %", "+9.4 %", "-59.0 %"]


def test_minus_signs_are_for_numbers_alone():
    text = "held-out -0.0003 (-5.9 %), -<0.1 %, --seeds 5, bf16-exact, 2-rank"
    assert with_minus_signs(text) == "held-out −0.0003 (−5.9 %), −<0.1 %, --seeds 5, bf16-exact, 2-rank"
    assert duration(40) == "40 s"
