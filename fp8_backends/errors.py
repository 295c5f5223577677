"""The errors of this package: what is wrong, which field or layer, and what to do."""

from __future__ import annotations

from typing import NamedTuple


class FP8BackendError(Exception):
    """Anything that this package refuses or finds unproven."""


class RecipeError(FP8BackendError, ValueError):
    """A backend string or a recipe field that cannot be honoured."""


class BackendUnavailableError(FP8BackendError, ImportError):
    """A valid backend that cannot run on this machine, or not yet in this version."""


class Refusal(NamedTuple):
    """What a rule refuses before training, and a layer that meets it while it runs: `RecipeError(refusal)`."""

    reason: str
    fix: str

    def __str__(self) -> str:
        return f"{self.reason}. Fix: {self.fix}"
