"""Who builds an Accelerator, where that says something about FP8 which no argument says. It is read off the functions
that are running (`_frames`); docs/patches.rst says which other ways were tried.

**A transformers `Trainer`.** `TrainingArguments` has no field for FP8. Its `mixed_precision` is that of the environment
until `bf16=True`, which TRL sets by default, or `fp16=True` takes its place: an FP8 launch would train in bf16, and
nobody would say so. These flags tell of the precision around FP8, and so they are read here. An Accelerator that a
script builds itself is another matter: its `mixed_precision` is an argument that somebody wrote there.

**A function under `notebook_launcher`.** It takes `mixed_precision`, and leaves it in a variable that nothing reads
(`MIXED_PRECISION`), or nowhere: `Accelerator()` inside would train in FP32.
"""

from __future__ import annotations

import inspect
import os
import sys
from collections.abc import Iterator, Mapping
from types import FrameType
from typing import Any

from ..announcement import announce
from ..errors import RecipeError
from ..recipes.handlers import Recipe
from ..recipes.precision_plan import plan


def precision_of_trainer(arguments: Mapping[str, Any]) -> str | None:
    """The mixed precision that a Trainer hands on from its TrainingArguments to the Accelerator that is being built;
    None where the value comes from elsewhere.

    A Trainer is known by being the first argument of a function that is running: subclasses build Accelerators in
    methods of their own (TRL, sentence-transformers), and Axolotl in a function that it compiles from the text of
    Trainer's, so neither module nor function name can be relied on. Its own argument is known by its value.
    """
    given = arguments.get("mixed_precision")
    if given is None or str(given) != getattr(getattr(running_trainer(), "args", None), "mixed_precision", None):
        return None
    return str(given)


def _frames() -> Iterator[FrameType]:
    """The functions that run in this thread, the innermost first."""
    frame = inspect.currentframe()
    while frame is not None:
        yield frame
        frame = frame.f_back


def running_trainer() -> Any:
    """The Trainer that is nearest in the stack, if any."""
    trainer_class = getattr(sys.modules.get("transformers.trainer"), "Trainer", None)
    if trainer_class is None:
        return None
    firsts = (frame.f_locals.get(frame.f_code.co_varnames[0]) for frame in _frames() if frame.f_code.co_argcount)
    return next((first for first in firsts if isinstance(first, trainer_class)), None)


def for_trainer(recipe: Recipe, wraps_in_ddp: bool) -> Recipe:
    """`with_whole_states`, where a Trainer trains under DDP: it saves the optimizer on rank 0 alone, which has only its
    own part of sharded states."""
    whole = with_whole_states(recipe)
    if whole is recipe or not wraps_in_ddp or running_trainer() is None:
        return recipe
    announce(
        f"{recipe.name}: Trainer saves the optimizer on one rank, so under DDP each rank keeps all of {recipe.level}'s "
        f"states: {plan(recipe).bytes_per_element:g} bytes a weight element; FSDP2 shards them"
    )
    return whole


def with_whole_states(recipe: Recipe) -> Recipe:
    """The recipe with the states of O3 and O4 whole on every rank. A `shard_states` that was given stays."""
    if not recipe.shares_states or "shard_states" in recipe.given:
        return recipe
    return type(recipe)(**{**recipe.to_kwargs(), "shard_states": False})


def precision_of_notebook() -> str | None:
    """`mixed_precision` as `notebook_launcher` was given it; None outside of one.

    Its processes are forks and have its call in their stack. Those that are spawned, on other devices than CPU and
    CUDA, have not.
    """
    launcher = getattr(sys.modules.get("accelerate.launchers"), "notebook_launcher", None)
    code = getattr(launcher, "__code__", None)
    calls = (frame.f_locals for frame in _frames() if frame.f_code is code)
    return next((str(call.get("mixed_precision")).lower() for call in calls), None)


def around_fp8(recipe: Recipe, precision: str, arguments: Mapping[str, Any]) -> Recipe:
    """The recipe, with the precision around FP8 that `bf16=True` or `fp16=True` in TrainingArguments ask for.

    Raises:
        RecipeError: the recipe's `autocast_dtype` says otherwise, or an engine is in use that has bf16 around FP8.
    """
    if precision not in ("bf16", "fp16"):
        return recipe
    if "autocast_dtype" in recipe.given and recipe.autocast_dtype != precision:
        raise RecipeError(
            f"autocast_dtype={recipe.autocast_dtype!r} and {precision}=True in TrainingArguments disagree about what "
            f"runs around FP8: leave autocast_dtype out, or set {precision}=False (TRL's configurations set bf16=True "
            f"unless they are told otherwise)"
        )
    for engine in ("DeepSpeed", "FSDP"):  # they shard the model, and set the precision by their own configuration
        by_launcher = os.environ.get(f"ACCELERATE_USE_{engine.upper()}", "false").lower() == "true"
        if by_launcher or arguments.get(f"{engine.lower()}_plugin") is not None:
            if precision == "bf16":
                return recipe
            raise RecipeError(
                f"fp16=True in TrainingArguments: under {engine} bf16 runs around FP8; set bf16=True instead"
            )
    return type(recipe)(**{**recipe.to_kwargs(), "autocast_dtype": precision})
