"""The scaling states of prepared models as a checkpoint holds them.

They travel in the optimizer's state dict, under a key that stock PyTorch passes over; a model's state dict has the
names and tensors of the plain model. `Accelerator.save_state` writes its own files (`accelerate_plugin.checkpoints`).
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

import torch
from torch import nn

from ..errors import FP8BackendError
from ..numerics.modules import plain_name
from ..recipes.handlers import Recipe, as_json, differences
from ..states.scaled_states import ScaledStates
from .conversion import Prepared, prepared_roots

logger = logging.getLogger("fp8_backends")

OPTIMIZER_KEY = "fp8_scaling"
IN_FILES = "fp8_state_in_files"
"""Marks optimizers and engines while `save_state` or `load_state` runs."""
DAMAGED = "the checkpoint is damaged; load an earlier one"


class ScalingState(NamedTuple):
    """The scaling states of prepared models in a checkpoint. The key of a root is two numbers, `model.root`, by order:
    wrappers such as DDP change names, and not the order."""

    backends: dict[str, str]
    """The canonical backend string of each root key."""
    tensors: dict[str, torch.Tensor]
    """The tensors of the scaling state, by "root key/name"."""
    recipes: dict[str, dict[str, Any]]
    """`handlers.as_json` of the recipe of each root key."""

    @classmethod
    def of(cls, saved: Any, source: str) -> ScalingState | None:
        """Return the state that was saved as a dict; None without one. Raise `FP8BackendError` for anything else."""
        if not saved:
            return None
        kinds = {"backends": str, "tensors": torch.Tensor, "recipes": dict}
        for name, kind in kinds.items():
            values = saved.get(name) if isinstance(saved, dict) else None
            if not isinstance(values, dict) or not all(
                isinstance(key, str) and isinstance(value, kind) for key, value in values.items()
            ):
                raise FP8BackendError(f"{source}: the {name} of its FP8 scaling state cannot be read: {DAMAGED}")
        return cls(**{name: saved[name] for name in kinds})

    def backend_of(self, key: str) -> str:
        """The backend of a root, in words."""
        return self.backends.get(key, "no FP8 backend")

    def tensors_of(self, key: str) -> dict[str, torch.Tensor]:
        """The tensors of a root, by name."""
        prefix = f"{key}/"
        return {
            plain_name(name.removeprefix(prefix)): each
            for name, each in self.tensors.items()
            if name.startswith(prefix)
        }

    def differences(self, key: str, recipe: Recipe) -> str:
        """List the fields in which the saved recipe of a root differs from another; empty without a saved one."""
        differing = differences(self.recipes.get(key, {}), as_json(recipe))
        return ", ".join(f"{name} was {old!r} and is {new!r} now" for name, (old, new) in differing.items())


def collect(models: Iterable[nn.Module]) -> ScalingState:
    """Read the present scaling state of these models."""
    state = ScalingState({}, {}, {})
    for key, root, prepared in _roots(models):
        state.backends[key], state.recipes[key] = prepared.recipe.name, as_json(prepared.recipe)
        for name, tensor in prepared.compute.scaling_state(root).items():
            state.tensors[f"{key}/{name}"] = tensor.cpu().contiguous()
    return state


def restore(models: Iterable[nn.Module], saved: ScalingState | None, source: str) -> None:
    """Put a saved scaling state back into these models.

    Warns where the checkpoint has none, or was saved with another recipe. Raises what `check` raises, and changes
    nothing then.
    """
    check(models, saved, source)
    write(models, saved, source)


def check(models: Iterable[nn.Module], saved: ScalingState | None, source: str) -> None:
    """Raise `FP8BackendError` where a checkpoint has the scaling state of the backend of one of these models, and it
    does not fit, or is damaged. Nothing is changed."""
    for key, root, prepared in _restorable(models, saved):
        tensors = saved.tensors_of(key)
        if not tensors:
            raise FP8BackendError(f"{source} names {prepared.recipe.name} but has no scaling state: it is incomplete")
        try:
            prepared.compute.check_scaling_state(root, tensors)
        except FP8BackendError as error:
            differing = saved.differences(key, prepared.recipe)
            recipes = f" (of the recipe that it was saved with, {differing})" if differing else ""
            raise FP8BackendError(f"{source}: model {key}: {error}{recipes}") from None


def write(models: Iterable[nn.Module], saved: ScalingState | None, source: str) -> None:
    """`restore`, after `check`."""
    if saved is None:
        if any(prepared.compute.scaling_state(root) for _, root, prepared in _roots(models)):
            logger.warning("%s was saved without FP8 scaling state: the scales of this run start afresh", source)
        return
    for change, keys in _changes(models, saved).items():
        logger.warning("%s: model %s %s", source, ", ".join(keys), change)
    for key, root, prepared in _restorable(models, saved):
        prepared.compute.load_scaling_state(root, saved.tensors_of(key))


def _changes(models: Iterable[nn.Module], saved: ScalingState) -> dict[str, list[str]]:
    """Describe how the recipes of models differ from the saved ones: the root keys by description."""
    found: dict[str, list[str]] = {}
    for key, _, prepared in _roots(models):
        name, differing = prepared.recipe.name, saved.differences(key, prepared.recipe)
        if saved.backend_of(key) != name:
            change = (
                f"was saved with {saved.backend_of(key)} and is now prepared with {name}: its weights are loaded, its "
                f"scales start afresh"
            )
        elif differing:
            change = (
                f"was saved with another recipe of the name {name}: {differing}. Its scales go on as they were saved; "
                f"optimizer states keep their values, and are rounded once where they are stored in another way now"
            )
        else:
            continue
        found.setdefault(change, []).append(key)
    return found


def _restorable(models: Iterable[nn.Module], saved: ScalingState | None) -> Iterator[tuple[str, nn.Module, Prepared]]:
    """Yield the roots with a scaling state whose backend is still the saved one."""
    for key, root, prepared in _roots(models) if saved is not None else ():
        if saved.backend_of(key) == prepared.recipe.name and prepared.compute.scaling_state(root):
            yield key, root, prepared


def _roots(models: Iterable[nn.Module]) -> Iterator[tuple[str, nn.Module, Prepared]]:
    for i, model in enumerate(models):
        for j, (_, root, prepared) in enumerate(prepared_roots(model)):
            yield f"{i}.{j}", root, prepared


# In the state dict of an optimizer


class StateDictHooks:
    """Hooks of an optimizer: its state dict holds the scaling states of the models that it trains."""

    def __init__(self, optimizer: torch.optim.Optimizer, models: Iterable[nn.Module]) -> None:
        self.models = models
        if isinstance(optimizer, torch.optim.Optimizer):  # DeepSpeed's engine has checkpoints of its own
            optimizer.register_state_dict_post_hook(self.save)
            optimizer.register_load_state_dict_pre_hook(self.load)

    def save(self, optimizer: torch.optim.Optimizer, state_dict: dict[str, Any]) -> None:
        state = collect(self.models)
        if (state.tensors or isinstance(optimizer, ScaledStates)) and not hasattr(optimizer, IN_FILES):
            state_dict[OPTIMIZER_KEY] = state._asdict()

    def load(self, optimizer: torch.optim.Optimizer, state_dict: dict[str, Any]) -> None:
        fits = _sizes(optimizer.param_groups) == _sizes(state_dict["param_groups"])  # else PyTorch refuses it next
        if fits and not hasattr(optimizer, IN_FILES):
            source = "the optimizer's checkpoint"
            restore(self.models, ScalingState.of(state_dict.get(OPTIMIZER_KEY), source), source)


@contextlib.contextmanager
def in_files(owners: Iterable[Any]) -> Iterator[None]:
    """Leave scaling states out of the state dicts of optimizers and engines inside: each rank has a file for them."""
    for owner in owners:
        setattr(owner, IN_FILES, True)
    try:
        yield
    finally:
        for owner in owners:
            owner.__dict__.pop(IN_FILES, None)


def _sizes(groups: list[dict[str, Any]]) -> list[int]:
    return [len(group["params"]) for group in groups]
