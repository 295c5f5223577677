"""How long a comparison takes, and how much of one fits into a given time."""

from __future__ import annotations

import bisect
import statistics
from collections.abc import Callable
from dataclasses import replace

from ...errors import RecipeError
from .settings import Settings

FORWARD = 1 / 3
"""Of the time of a training step: what its forward pass takes, and the evaluation of as many windows."""
FEWEST_STEPS = 20
"""A shorter run tells little; only a user who asks for fewer gets fewer."""
WANTED_SEEDS = 3
"""The fewest with a confidence interval of use; steps are given up for them."""
USABLE = 0.9
"""Of the minutes given: a run may take longer than the one before, and loading and ending take seconds."""


def fit(seconds: float, steps: int, seeds: int, round_seconds: Callable[[int], float]) -> tuple[int, int]:
    """Steps and seeds, at most those asked for, that fit: all steps for as many seeds as possible, with three at least;
    where they do not fit with all steps, fewer steps; where they do not fit with the fewest, fewer seeds.

    Args:
        seconds: what there is.
        steps, seeds: what was asked for.
        round_seconds: from a number of steps to what one seed takes, over all backends.

    Returns:
        Steps and seeds; no seeds if not one fits.
    """
    wanted, fewest = min(WANTED_SEEDS, seeds), min(FEWEST_STEPS, steps)
    choices = range(fewest, steps + 1)
    fitting = choices[: bisect.bisect_right(choices, seconds, key=lambda count: wanted * round_seconds(count))]
    chosen = fitting[-1] if fitting else fewest
    return chosen, max(0, min(seeds, int(seconds // round_seconds(chosen))))


class Timetable:
    """What each backend's runs take: by steps that were timed, and by its runs once there are any."""

    def __init__(self) -> None:
        self.paces: dict[str, tuple[float, float]] = {}
        """Of each backend, seconds to begin a run and seconds for a step."""
        self.measured: dict[str, list[float]] = {}

    def steps_timed(self, backend: str, start: float, step: float) -> None:
        self.paces[backend] = (start, step)

    def run_timed(self, backend: str, seconds: float) -> None:
        self.measured.setdefault(backend, []).append(seconds)

    def leave_out(self, backend: str) -> None:
        """It has failed."""
        self.paces.pop(backend, None)

    def run_seconds(self, backend: str, settings: Settings) -> float:
        if backend in self.measured:
            return statistics.fmean(self.measured[backend])
        start, step = self.paces[backend]
        return start + step * steps_with_evaluation(settings)

    def round_seconds(self, settings: Settings) -> float:
        """One seed of every backend."""
        return sum(self.run_seconds(backend, settings) for backend in self.paces)

    def fitted(self, settings: Settings, elapsed: float) -> Settings:
        """With the steps and seeds that fit into the minutes of these settings.

        Raises:
            RecipeError: not one seed fits.
        """
        steps, seeds = fit(
            60 * USABLE * settings.minutes - elapsed,
            settings.steps,
            settings.seeds,
            lambda count: self.round_seconds(replace(settings, steps=count)),
        )
        found = replace(settings, steps=steps, seeds=seeds)
        if not seeds:
            needed = (elapsed + self.round_seconds(found)) / USABLE / 60
            raise RecipeError(
                f"--minutes {settings.minutes:g} is too little for one seed of {steps} steps with {len(self.paces)} "
                f"backends: give --minutes {needed + 0.05:.1f} or more, or fewer backends, or a smaller --batch or "
                "--sequence"
            )
        return found

    def another_round_fits(self, settings: Settings, elapsed: float) -> bool:
        return settings.minutes is None or elapsed + self.round_seconds(settings) <= 60 * USABLE * settings.minutes


def steps_with_evaluation(settings: Settings) -> float:
    """A run, in training steps."""
    return settings.steps + FORWARD * settings.held_out_windows / settings.batch


def duration(seconds: float) -> str:
    """Such as `40 s`, `4 min`, `2 h 5 min`."""
    if seconds < 99.5:
        return f"{seconds:.0f} s"
    hours, minutes = divmod(round(seconds / 60), 60)
    return f"{hours} h {minutes} min" if hours else f"{minutes} min"
