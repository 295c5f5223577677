"""Save and load the scaling states of prepared models: in the optimizer's state dict, under a key
ignored by stock PyTorch, or in files of `Accelerator.save_state`
(`accelerate_plugin.checkpoints`)."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

import torch
from torch import nn

from ..announcement import logger
from ..convert import features
from ..convert.conversion import Prepared, prepared_roots
from ..errors import FP8BackendError
from ..recipes.handlers import Recipe, as_json, differences
from ..states.scaled_states import ScaledStates
from ..torch_tools.modules import plain_name

OPTIMIZER_KEY = "fp8_scaling"
IN_FILES = "fp8_state_in_files"
"""Mark of optimizers and engines during `save_state` and `load_state`."""
DAMAGED = "the checkpoint is damaged; load an earlier one"


class ScalingState(NamedTuple):
    """The scaling states of prepared models. The key of a root is two numbers, `model.root`, by
    order: wrappers such as DDP change names, but not the order."""

    backends: dict[str, str]
    tensors: dict[str, torch.Tensor]
    """The tensors of the scaling state, by "root key/name"."""
    recipes: dict[str, dict[str, Any]]
    """`handlers.as_json` of the recipe of each root key."""
    steps: dict[str, int]
    """Optimizer steps of each root key with a schedule."""

    @classmethod
    def of(cls, saved: Any, source: str) -> ScalingState | None:
        """Return a state saved as a dict; None without one. Raise `FP8BackendError` for anything
        else."""
        if not saved:
            return None
        kinds = {"backends": str, "tensors": torch.Tensor, "recipes": dict, "steps": int}
        for name, kind in kinds.items():
            values = saved.get(name) if isinstance(saved, dict) else None
            if not isinstance(values, dict) or not all(
                isinstance(key, str) and isinstance(value, kind) for key, value in values.items()
            ):
                raise FP8BackendError(
                    f"{source}: the {name} of its FP8 scaling state cannot be read: {DAMAGED}"
                )
        return cls(**{name: saved[name] for name in kinds})

    def tensors_of(self, key: str) -> dict[str, torch.Tensor]:
        named = ((name.partition("/"), tensor) for name, tensor in self.tensors.items())
        return {plain_name(name): tensor for (root, _, name), tensor in named if root == key}

    def differences(self, key: str, recipe: Recipe) -> str:
        """List the fields that differ between a root's saved recipe and another; empty without a
        saved one."""
        differing = differences(self.recipes.get(key, {}), as_json(recipe))
        return ", ".join(
            f"{name} was {old!r} and is {new!r} now" for name, (old, new) in differing.items()
        )


def collect(models: Iterable[nn.Module]) -> ScalingState:
    state = ScalingState({}, {}, {}, {})
    for key, root, prepared in _roots(models):
        state.backends[key], state.recipes[key] = prepared.recipe.name, as_json(prepared.recipe)
        for name, tensor in prepared.compute.scaling_state(root).items():
            state.tensors[f"{key}/{name}"] = tensor.cpu().contiguous()
        if prepared.recipe.schedule:
            state.steps[key] = prepared.steps
    return state


def restore(models: Iterable[nn.Module], saved: ScalingState | None, source: str) -> None:
    """Load a saved scaling state into these models, after `check`. Warn about a missing state or
    another recipe."""
    check(models, saved, source)
    write(models, saved, source)


def check(
    models: Iterable[nn.Module],
    saved: ScalingState | None,
    source: str,
    in_saved_phase: bool = False,
) -> None:
    """Raise `FP8BackendError` if a checkpoint's scaling state for the backend of one of these
    models does not match the model, or is damaged. Nothing changes. `in_saved_phase`: schedules
    have resumed."""
    for key, root, prepared in _restorable(models, saved):
        tensors = saved.tensors_of(key)
        if not tensors and prepared.recipe.schedule and not in_saved_phase:
            continue  # a phase of another rule has no states
        if not tensors:
            raise FP8BackendError(
                f"{source} names {prepared.recipe.name} but has no scaling state: it is incomplete"
            )
        try:
            prepared.compute.check_scaling_state(root, tensors)
        except FP8BackendError as error:
            differing = saved.differences(key, prepared.recipe)
            recipes = f" (of the recipe that it was saved with, {differing})" if differing else ""
            raise FP8BackendError(f"{source}: model {key}: {error}{recipes}") from None


def write(models: Iterable[nn.Module], saved: ScalingState | None, source: str) -> None:
    """Do as `restore`, after `check`."""
    for key, root, prepared in _roots(models):
        if prepared.recipe.schedule:
            _resume_schedule(
                root, prepared, saved.steps.get(key) if saved is not None else None, source
            )
    if saved is None:
        if any(prepared.compute.scaling_state(root) for _, root, prepared in _roots(models)):
            logger.warning(
                "%s was saved without FP8 scaling state: the scales of this run start afresh",
                source,
            )
        return
    check(models, saved, source, in_saved_phase=True)
    changes: dict[str, list[str]] = {}
    for key, _, prepared in _roots(models):
        name, before = prepared.recipe.name, saved.backends.get(key, "no FP8 backend")
        if before != name:
            change = (
                f"was saved with {before} and is now prepared with {name}: its weights are loaded, "
                "its scales start afresh"
            )
        elif differing := saved.differences(key, prepared.recipe):
            change = (
                f"was saved with another recipe of the name {name}: {differing}. Its scales are "
                "restored as saved; optimizer states keep their values, rounded once if their "
                "format changed"
            )
        else:
            continue
        changes.setdefault(change, []).append(key)
    for change, keys in changes.items():
        logger.warning("%s: model %s %s", source, ", ".join(keys), change)
    for key, root, prepared in _restorable(models, saved):
        prepared.compute.load_scaling_state(root, saved.tensors_of(key))


def _resume_schedule(root: nn.Module, prepared: Prepared, steps: int | None, source: str) -> None:
    if steps is None:
        logger.warning("%s was saved without schedule: its steps are counted from here on", source)
    prepared.steps = steps or 0
    features.wanted("schedule", prepared.recipe).follow(root, prepared)


def _restorable(
    models: Iterable[nn.Module], saved: ScalingState | None
) -> Iterator[tuple[str, nn.Module, Prepared]]:
    for key, root, prepared in _roots(models) if saved is not None else ():
        if saved.backends.get(key) == prepared.recipe.name and prepared.compute.scaling_state(root):
            yield key, root, prepared


def _roots(models: Iterable[nn.Module]) -> Iterator[tuple[str, nn.Module, Prepared]]:
    for i, model in enumerate(models):
        for j, (_, root, prepared) in enumerate(prepared_roots(model)):
            yield f"{i}.{j}", root, prepared


# In the state dict of an optimizer


def save(
    models: Iterable[nn.Module], optimizer: torch.optim.Optimizer, state_dict: dict[str, Any]
) -> None:
    """Add the scaling states of these models to an optimizer's new state dict (a post-hook)."""
    state = collect(models)
    is_needed = state.tensors or state.steps or isinstance(optimizer, ScaledStates)
    if is_needed and not hasattr(optimizer, IN_FILES):
        state_dict[OPTIMIZER_KEY] = state._asdict()


def load(
    models: Iterable[nn.Module], optimizer: torch.optim.Optimizer, state_dict: dict[str, Any]
) -> None:
    """Restore the scaling states of these models from a state dict about to be loaded (a
    pre-hook)."""
    groups = (optimizer.param_groups, state_dict["param_groups"])
    sizes, saved_sizes = ([len(group["params"]) for group in side] for side in groups)
    # PyTorch refuses other sizes next
    if sizes == saved_sizes and not hasattr(optimizer, IN_FILES):
        source = "the optimizer's checkpoint"
        restore(models, ScalingState.of(state_dict.get(OPTIMIZER_KEY), source), source)


@contextlib.contextmanager
def in_files(owners: Iterable[Any]) -> Iterator[None]:
    """Leave scaling states out of the state dicts of optimizers and engines inside: each rank
    writes its own file."""
    for owner in owners:
        setattr(owner, IN_FILES, True)
    try:
        yield
    finally:
        for owner in owners:
            owner.__dict__.pop(IN_FILES, None)
