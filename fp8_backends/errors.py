"""The errors of this package."""

from collections.abc import Callable
from typing import NamedTuple, TypeVar

import torch.distributed as dist

Result = TypeVar("Result")


class FP8BackendError(Exception):
    """A refusal, or missing proof. The text names the field or layer, and the fix."""


class RecipeError(FP8BackendError, ValueError):
    """An unsupported backend string or recipe field."""


class BackendUnavailableError(FP8BackendError, ImportError):
    """A valid backend without support on this machine or in this version."""


class NoMemoryError(FP8BackendError, RuntimeError):
    """Direct access to the memory of a tensor without memory for its values, where PyTorch raises
    RuntimeErrors."""


class Refusal(NamedTuple):
    """Text shared by a rule before training and a layer at run time: `RecipeError(refusal)`."""

    reason: str
    fix: str

    def __str__(self) -> str:
        return f"{self.reason}. Fix: {self.fix}"


def on_all_ranks(doing: str, function: Callable[[], Result | None]) -> list[Result | None]:
    """Run a function and return its results by rank. An error on any rank becomes one
    `FP8BackendError` on all, with the name of the task (`doing`), so the function must not
    communicate after it raises."""
    result, error = None, None
    try:
        result = function()
    except BaseException as caught:
        # FSDP2's error for sharded files is no Exception, and its module takes seconds to import
        if not isinstance(caught, Exception) and type(caught).__name__ != "CheckpointException":
            raise
        error = caught
    text = (
        None if error is None else str(error) if isinstance(error, FP8BackendError) else repr(error)
    )
    if not (dist.is_available() and dist.is_initialized()):
        outcomes = [(result, text)]
    else:
        outcomes = [None] * dist.get_world_size()
        try:
            dist.all_gather_object(outcomes, (result, text))
        except Exception as silence:
            if error is None:
                raise
            raise FP8BackendError(
                f"{doing} failed: {text}; and other ranks do not answer: {silence!r}"
            ) from error
    for rank, (_, text) in enumerate(outcomes):
        if text is not None:
            where = f" on rank {rank}" if len(outcomes) > 1 else ""
            raise FP8BackendError(f"{doing} failed{where}: {text}") from error
    return [result for result, _ in outcomes]
