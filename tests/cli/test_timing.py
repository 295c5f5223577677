from __future__ import annotations

from dataclasses import replace

import pytest
from cli.comparing import tiny_settings
from hypothesis import given
from hypothesis import strategies as st

from fp8_backends.cli.compare.comparison import FEWEST_STEPS, Timetable, fit
from fp8_backends.cli.terminal import duration
from fp8_backends.errors import RecipeError


@pytest.mark.parametrize(
    ("seconds", "fitting"),
    [
        (1000, (80, 5)),  # all that was asked for
        (400, (80, 5)),
        (399, (80, 4)),
        (240, (80, 3)),
        (239, (79, 3)),  # steps are given up for three seeds
        (60, (20, 3)),
        (59, (20, 2)),  # seeds only then
        (20, (20, 1)),
        (19, (20, 0)),
        (-50, (20, 0)),  # turn 0 took longer than there was
    ],
)
def test_steps_are_given_up_for_three_seeds_and_seeds_for_the_fewest_steps(seconds, fitting):
    assert fit(seconds, 80, 5, lambda steps: steps) == fitting


def test_a_user_who_asks_for_few_steps_or_seeds_gets_no_more():
    assert fit(1000, 5, 2, lambda steps: steps) == (5, 2)
    assert fit(9, 5, 2, lambda steps: steps) == (5, 1)


@given(st.floats(-100, 1e5), st.integers(1, 500), st.integers(1, 20), st.floats(0.001, 10), st.floats(0, 50))
def test_what_fits_fits_and_nothing_that_ranks_before_it_would(seconds, steps, seeds, step_seconds, start):
    def takes(count):
        return start + step_seconds * count

    wanted = min(3, seeds)
    found_steps, found_seeds = fit(seconds, steps, seeds, takes)
    assert min(FEWEST_STEPS, steps) <= found_steps <= steps and 0 <= found_seeds <= seeds
    assert found_seeds * takes(found_steps) <= max(0, seconds) * (1 + 1e-9)
    if found_steps < steps:
        assert wanted * takes(found_steps + 1) > seconds
    if found_seeds < seeds:
        assert (found_seeds + 1) * takes(found_steps) > seconds - 1e-6
    if found_seeds < wanted:
        assert found_steps == min(FEWEST_STEPS, steps)


@pytest.fixture
def settings(tmp_path):
    return tiny_settings(tmp_path, steps=40, seeds=5, batch=4, held_out_share=0.3, minutes=1.0)


@pytest.fixture
def timetable():
    """A round takes 2 + 1.5 s and, with the evaluation of 0.3 windows, a third of a step each, 1.1 x 0.5 s a step."""
    timetable = Timetable()
    timetable.paces |= {"bf16": (2.0, 0.2), "native:dynamic": (1.5, 0.3)}
    return timetable


def test_a_run_takes_its_start_its_steps_and_its_evaluation_until_runs_have_been_measured(settings, timetable):
    assert timetable.round_seconds(settings) == pytest.approx(3.5 + 0.5 * 44)
    timetable.measured["bf16"] += [4.0, 6.0]
    assert timetable.run_seconds("bf16", settings) == 5.0
    del timetable.paces["bf16"]
    assert timetable.round_seconds(settings) == pytest.approx(1.5 + 0.3 * 44)


def test_what_has_passed_is_no_longer_there_to_be_used(settings, timetable):
    fitted = timetable.fitted(settings, elapsed=0.0)
    later = timetable.fitted(settings, elapsed=10.0)
    assert (fitted.steps, fitted.seeds) == (26, 3) and (later.steps, later.seeds) == (20, 3)
    assert timetable.another_round_fits(settings, elapsed=28.0)
    assert not timetable.another_round_fits(settings, elapsed=29.0)
    assert timetable.another_round_fits(replace(settings, minutes=None), elapsed=1e9)


def test_too_few_minutes_are_an_error_that_says_how_many_are_needed(settings, timetable):
    with pytest.raises(
        RecipeError, match=r"--minutes 0\.2 is too little for one seed of 20 steps with 2 backends: give"
    ):
        timetable.fitted(replace(settings, minutes=0.2), elapsed=1.0)
    with pytest.raises(RecipeError, match="give --minutes ([0-9.]+)") as error:
        timetable.fitted(replace(settings, minutes=0.2), elapsed=1.0)
    needed = float(str(error.value).split("give --minutes ")[1].split()[0])
    assert timetable.fitted(replace(settings, minutes=needed), elapsed=1.0).seeds == 1
    with pytest.raises(RecipeError):
        timetable.fitted(replace(settings, minutes=needed - 0.1), elapsed=1.0)


def test_durations_read_as_people_say_them():
    assert [duration(s) for s in (0.4, 59.6, 99.4, 100, 3599, 3601, 7500)] == [
        "0 s",
        "60 s",
        "99 s",
        "2 min",
        "1 h 0 min",
        "1 h 0 min",
        "2 h 5 min",
    ]
