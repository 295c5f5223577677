from __future__ import annotations

import math
import random
import statistics

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fp8_backends.cli.compare.summary import Gap, paired_gap, spread, t_quantile


def test_pairs_only_seeds_that_both_have_run():
    gap = paired_gap({0: 2.02, 1: 2.11, 5: 9.0}, {0: 2.0, 1: 2.1, 2: 7.0})
    assert gap.pairs == 2 and gap.mean == pytest.approx(0.015)
    assert gap.half_width == pytest.approx(12.7062 * math.sqrt(((0.005) ** 2 * 2) / 2))


def test_no_common_seed_has_no_gap_and_one_has_no_interval():
    assert paired_gap({0: 1.0}, {1: 1.0}) is None
    gap = paired_gap({0: 1.5}, {0: 1.0})
    assert (gap.mean, gap.half_width, gap.verdict()) == (0.5, None, "not resolved")


@pytest.mark.parametrize(
    ("mean", "half_width", "verdict"),
    [(0.002, 0.003, "within"), (0.002, 0.02, "not resolved"), (0.05, 0.01, "not within"), (-0.4, 0.1, "within")],
)
def test_verdict_says_where_the_whole_interval_lies(mean, half_width, verdict):
    assert Gap(mean, half_width, 5).verdict(0.01) == verdict


def test_a_loss_that_is_not_finite_is_never_within():
    assert paired_gap({0: math.nan, 1: 1.0}, {0: 1.0, 1: 1.0}).verdict() == "not within"


def test_intervals_cover_the_true_gap_in_95_of_100_cases():
    # 4000 draws: the share of covering intervals has a standard error of 0.0035
    generator, covered, draws = random.Random(0), 0, 4000
    for _ in range(draws):
        pairs = {seed: generator.gauss(0.3, 1.0) for seed in range(5)}
        gap = paired_gap(pairs, dict.fromkeys(range(5), 0.0))
        covered += gap.low <= 0.3 <= gap.high
    assert covered / draws == pytest.approx(0.95, abs=0.012)


def test_quantiles_fall_towards_the_normal_one():
    values = [t_quantile(degrees) for degrees in range(1, 200)]
    assert values == sorted(values, reverse=True)
    assert t_quantile(10**6) == pytest.approx(1.95996, abs=1e-4)
    with pytest.raises(ValueError, match="at least two"):
        t_quantile(0)


@given(st.lists(st.floats(0.5, 9, allow_nan=False), min_size=2, max_size=9), st.floats(-1, 1))
def test_a_constant_difference_is_found_exactly_whatever_the_seeds_do(losses, difference):
    reference = dict(enumerate(losses))
    gap = paired_gap({seed: loss + difference for seed, loss in reference.items()}, reference)
    assert gap.mean == pytest.approx(difference, abs=1e-9) and gap.half_width == pytest.approx(0, abs=1e-9)


def test_spread_is_the_deviation_over_seeds_and_needs_two():
    assert spread({0: 1.0}) is None
    found = spread({0: 1.0, 1: 2.0, 2: 4.0})
    assert found == {"standard_deviation": statistics.stdev([1, 2, 4]), "range": 3.0}
