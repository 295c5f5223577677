"""Test the statistics, checks and verdict of a comparison."""

from __future__ import annotations

import math
import random
import statistics

import pytest
from tools.comparing import recorded

from fp8_backends.tools.compare.summary import (
    Gap,
    checks,
    paired_gap,
    reference_spread,
    t_quantile,
    verdict,
)
from fp8_backends.tools.terminal import change, with_minus_signs


def test_only_common_seeds_are_paired():
    gap = paired_gap({0: 2.02, 1: 2.11, 5: 9.0}, {0: 2.0, 1: 2.1, 2: 7.0})
    assert (gap.mean, gap.pairs) == (pytest.approx(0.015), 2)
    assert gap.half_width == pytest.approx(12.7062 * math.sqrt(((0.005) ** 2 * 2) / 2))
    assert paired_gap({0: 1.0}, {1: 1.0}) is None
    gap = paired_gap({0: 1.5}, {0: 1.0})
    assert (gap.mean, gap.half_width, gap.verdict()) == (0.5, None, "not resolved")


@pytest.mark.parametrize(
    ("mean", "half_width", "verdict"),
    [
        (0.002, 0.003, "within"),
        (0.002, 0.02, "not resolved"),
        (0.05, 0.01, "not within"),
        (-0.4, 0.1, "within"),
    ],
)
def test_verdict_compares_the_whole_interval(mean, half_width, verdict):
    assert Gap(mean, half_width, 5).verdict(0.01) == verdict


def test_non_finite_loss_is_never_within():
    assert paired_gap({0: math.nan, 1: 1.0}, {0: 1.0, 1: 1.0}).verdict() == "not within"


def test_intervals_cover_the_true_gap_in_95_of_100_cases():
    # 4000 draws: the share of covering intervals has a standard error of 0.0035
    generator, covered, draws = random.Random(0), 0, 4000
    for _ in range(draws):
        pairs = {seed: generator.gauss(0.3, 1.0) for seed in range(5)}
        gap = paired_gap(pairs, dict.fromkeys(range(5), 0.0))
        covered += gap.low <= 0.3 <= gap.high
    assert covered / draws == pytest.approx(0.95, abs=0.012)


def test_quantiles_approach_the_normal_quantile():
    values = [t_quantile(degrees) for degrees in range(1, 200)]
    assert values == sorted(values, reverse=True)
    assert t_quantile(10**6) == pytest.approx(1.95996, abs=1e-4)
    with pytest.raises(ValueError, match="at least two"):
        t_quantile(0)


HELD_OUT = "held-out loss at most 0.01 nats above fp32's"
GRADIENTS = "gradients at the initial weights point where fp32's do"


@pytest.fixture
def results():
    return recorded("native:dynamic")


def set_gaps(results, *gaps):
    """Shift the held-out losses by one gap per seed."""
    found = results["backends"]
    first = {name: found[name]["runs"][0] for name in ("fp32", "native:dynamic")}
    for name, run in first.items():
        added = gaps if name == "native:dynamic" else (0.0,) * len(gaps)
        found[name]["runs"] = [
            {**run, "seed": seed, "held_out_loss": 2.0 + gap} for seed, gap in enumerate(added)
        ]
    results["settings"]["seeds"] = len(gaps)


def test_spread_is_the_deviation_over_seeds_and_needs_two(results):
    results["settings"]["reference"] = "native:dynamic"
    set_gaps(results, 1.0)
    assert reference_spread(results) is None
    set_gaps(results, 1.0, 2.0, 4.0)
    expected = {"standard_deviation": statistics.stdev([1, 2, 4]), "range": 3.0}
    assert reference_spread(results) == expected


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
def test_the_interval_decides_and_a_far_gap_fails_without_one(results, gaps, expected):
    set_gaps(results, *gaps)
    assert outcome(results, HELD_OUT).passed is expected


def test_all_checks_passed_is_good(results):
    set_gaps(results, 0.001, 0.002, 0.001)
    found = verdict(results)
    assert (found.mood, found.headline, found.details) == ("good", "All 8 checks passed.", [])


def test_unresolved_check_is_named_with_required_seeds(results):
    set_gaps(results, 0.001)
    found = verdict(results)
    assert (found.mood, found.headline) == (
        "open",
        "All 7 checks that could be judged passed; 1 is not resolved.",
    )
    assert found.details == [
        f"Not resolved: {HELD_OUT} (native:dynamic).",
        "More seeds or steps would resolve the held-out loss: --seeds 5.",
    ]
    # deviation 0.00635, mean 0.00533 below the bound: t(6) 0.00635 / √7 = 0.00587, t(7) 0.00635 /
    # √8 = 0.00531
    set_gaps(results, 0.001, 0.012, 0.001)
    results["settings"]["minutes"] = 5.0
    assert verdict(results).details[-1].endswith("--seeds 8 with more --minutes.")
    set_gaps(results, 0.009, 0.0109)
    # too near to the bound
    assert verdict(results).details[-1].endswith("--seeds 30 with more --minutes.")


def test_failed_checks_are_counted_and_named(results):
    cosines = results["backends"]["native:dynamic"]["inspection"]["first_gradient_cosines"]
    cosines["lm_head.weight"] = -0.99
    set_gaps(results, 0.001)
    found = verdict(results)
    assert (found.mood, found.headline) == ("bad", "1 of 8 checks failed, and 1 is not resolved.")
    assert found.details[0] == (
        f"Failed: native:dynamic: {GRADIENTS} (least cosine -0.9900 (lm_head.weight), bound 0.9)."
    )


def test_gradients_lost_in_rounding_are_not_resolved(results):
    inspection = results["backends"]["native:dynamic"]["inspection"]
    inspection["reference_gradient_cosines"] = dict.fromkeys(
        inspection["first_gradient_cosines"], 0.998
    )
    check = outcome(results, GRADIENTS)
    assert check.passed is None and "model.layers.*.self_attn.q_proj.weight (x3)" in check.detail
    inspection["reference_gradient_cosines"]["lm_head.weight"] = 1.0
    inspection["first_gradient_cosines"]["lm_head.weight"] = None  # not finite
    assert outcome(results, GRADIENTS).passed is False


@pytest.mark.parametrize(
    ("note", "reason"), [("interrupted by SIGINT", ": interrupted by SIGINT"), ("", "")]
)
def test_a_terminated_run_is_open_with_its_reason_and_progress(results, note, reason):
    set_gaps(results, 0.001, 0.002, 0.001)
    results |= {"status": "terminated", "note": note}
    assert verdict(results).mood == "open"  # although every check passed
    del results["backends"]["native:dynamic"]["runs"][1:]
    results["backends"]["native:dynamic"]["inspection"] = None
    found = verdict(results)
    assert found.mood == "open" and found.headline.startswith(
        f"Terminated early{reason}. So far all 5 checks "
    )
    assert found.details[0] == "Finished, of 3 seeds each: fp32 3, native:dynamic 1."
    for backend in results["backends"].values():
        backend |= {"runs": [], "inspection": None}
    assert verdict(results).headline == f"Terminated early{reason}. So far no check could be made."


def test_one_check_is_singular(results):
    results["backends"] = {"fp32": {**results["backends"]["fp32"], "status": "failed"}}
    assert verdict(results).headline == "1 of 1 check failed."


def test_only_a_ratio_of_one_is_no_change():
    ratios = (1.0, 1.0003, 0.9997, 1.094, 0.41)
    assert [change(ratio) for ratio in ratios] == [
        "±0 %",
        "+<0.1 %",
        "-<0.1 %",
        "+9.4 %",
        "-59.0 %",
    ]


def test_minus_signs_precede_only_numbers():
    text = "held-out -0.0003 (-5.9 %), -<0.1 %, --seeds 5, bf16-exact, 2-rank"
    assert (
        with_minus_signs(text)
        == "held-out −0.0003 (−5.9 %), −<0.1 %, --seeds 5, bf16-exact, 2-rank"
    )
