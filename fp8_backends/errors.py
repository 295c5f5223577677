"""The errors of this package: what is wrong, which field or layer, and what to do."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple, TypeVar

import torch.distributed as dist

Result = TypeVar("Result")


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


def on_all_ranks(doing: str, function: Callable[[], Result | None]) -> list[Result | None]:
    """Run a function that does not communicate, or has stopped to when it raises; return its results by rank. An error
    on any rank is one `FP8BackendError` on all.

    Args:
        doing: what the error says has failed.
    """
    result, error = None, None
    try:
        result = function()
    except BaseException as caught:
        # FSDP2's error for sharded files is no Exception; its module takes seconds to import
        if not isinstance(caught, Exception) and type(caught).__name__ != "CheckpointException":
            raise
        error = caught
    text = None if error is None else str(error) if isinstance(error, FP8BackendError) else repr(error)
    if not (dist.is_available() and dist.is_initialized()):
        outcomes = [(result, text)]
    else:
        outcomes = [None] * dist.get_world_size()
        try:
            dist.all_gather_object(outcomes, (result, text))
        except Exception as silence:
            if error is None:
                raise
            raise FP8BackendError(f"{doing} failed: {text}; and other ranks do not answer: {silence!r}") from error
    for rank, (_, text) in enumerate(outcomes):
        if text is not None:
            where = f" on rank {rank}" if len(outcomes) > 1 else ""
            raise FP8BackendError(f"{doing} failed{where}: {text}") from error
    return [result for result, _ in outcomes]
