"""Find the caller that builds an Accelerator, if it implies something about FP8 that no argument
says.

`bf16=True` (TRL's default) or `fp16=True` in `TrainingArguments` would replace an FP8 launch; here
they mean the precision around FP8. `notebook_launcher` stores its `mixed_precision` where
`Accelerator()` does not read it. The running functions are searched; docs/patches.rst lists the
alternatives.
"""

import copy
import os
import sys
import traceback
from collections.abc import Mapping
from typing import Any

from ..announcement import announce
from ..errors import RecipeError
from ..recipes.handlers import Recipe
from ..recipes.precision_plan import plan
from ..torch_tools.optimizers import running_trainer

ENGINES = ("DeepSpeed", "FSDP")


def asks_for(engine: str) -> bool:
    """Return True if a launcher asks for one of `ENGINES`, or an Accelerator has been given its
    plug-in."""
    return os.environ.get(f"ACCELERATE_USE_{engine.upper()}", "false").lower() == "true"


def precision_of_trainer(arguments: Mapping[str, Any]) -> str | None:
    """Return the mixed precision that a Trainer passes from its TrainingArguments to an
    Accelerator, else None.

    A Trainer is the first argument of a running function: names of modules and functions differ by
    library.
    """
    given = arguments.get("mixed_precision")
    if given is None or str(given) != getattr(
        getattr(running_trainer(), "args", None), "mixed_precision", None
    ):
        return None
    return str(given)


def log_by_trainer(trainer: Any, values: Mapping[str, float]) -> None:
    """Log scalars of the running step to the trackers of a Trainer's `report_to`."""
    from transformers.integrations import get_reporting_integration_callbacks

    trackers = tuple(get_reporting_integration_callbacks("all"))
    state = copy.copy(trainer.state)
    state.global_step += 1  # it counts a step when it has ended
    for callback in trainer.callback_handler.callbacks:
        if isinstance(callback, trackers):
            callback.on_log(
                trainer.args, state, trainer.control, logs=dict(values), model=trainer.model
            )


def for_trainer(recipe: Recipe, wraps_in_ddp: bool) -> Recipe:
    """Return `with_whole_states` for a Trainer under DDP, where only rank 0 saves the optimizer."""
    whole = with_whole_states(recipe)
    if whole is recipe or not wraps_in_ddp or running_trainer() is None:
        return recipe
    announce(
        f"{recipe.name}: Trainer saves the optimizer on one rank, so under DDP each rank keeps all "
        f"of {recipe.level}'s states: {plan(recipe).bytes_per_element:g} bytes a weight element; "
        "FSDP2 shards them"
    )
    return whole


def with_whole_states(recipe: Recipe) -> Recipe:
    """Turn sharding of states at O3 and O4 off, unless `shard_states` was given."""
    if not recipe.shares_states or "shard_states" in recipe.given:
        return recipe
    return recipe.replace(shard_states=False)


def precision_of_notebook() -> str | None:
    """Return the `mixed_precision` of a running `notebook_launcher`, found in the stack of its
    forked processes."""
    launcher = getattr(sys.modules.get("accelerate.launchers"), "notebook_launcher", None)
    code = getattr(launcher, "__code__", None)
    calls = (frame.f_locals for frame, _ in traceback.walk_stack(None) if frame.f_code is code)
    return next((str(call.get("mixed_precision")).lower() for call in calls), None)


def around_fp8(recipe: Recipe, precision: str, arguments: Mapping[str, Any]) -> Recipe:
    """Apply `bf16=True` or `fp16=True` in TrainingArguments as the precision around FP8, or refuse
    a contradiction."""
    if precision not in ("bf16", "fp16"):
        return recipe
    if "autocast_dtype" in recipe.given and recipe.autocast_dtype != precision:
        raise RecipeError(
            f"autocast_dtype={recipe.autocast_dtype!r} and {precision}=True in TrainingArguments "
            "disagree about what runs around FP8: leave autocast_dtype out, or set "
            f"{precision}=False (TRL's configurations set bf16=True unless they are told otherwise)"
        )
    for engine in ENGINES:  # they shard the model, and configure the precision themselves
        is_asked = asks_for(engine) or arguments.get(f"{engine.lower()}_plugin") is not None
        if precision == "fp16" and is_asked:
            raise RecipeError(
                f"fp16=True in TrainingArguments: under {engine} bf16 runs around FP8; set "
                "bf16=True"
            )
    return recipe.replace(autocast_dtype=precision)
