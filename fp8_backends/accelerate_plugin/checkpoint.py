"""Scaling state in checkpoints, beside what stock Accelerate writes there.

`save_state` adds `fp8_backend.json`, which has the recipe of each prepared model, and `fp8_scaling_<rank>.safetensors`
with the tensors, one file a rank, since each rank has seen its own amax values. There is none where no rule keeps state
(`dynamic`). Loops that save optimizers but never call `save_state`, such as that of `transformers.Trainer`, find the
same in the optimizer's state dict, under a key that stock PyTorch passes over.

What `load_state` is given is looked at before anything is loaded: the scaling states of all models, and the states of
optimizers that a level has converted.
"""

from __future__ import annotations

import contextlib
import json
import logging
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
from accelerate import Accelerator
from accelerate.utils import gather_object, load
from accelerate.utils.constants import OPTIMIZER_NAME
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import nn

from ..compute.interface import scaling_state
from ..errors import FP8BackendError
from ..numerics.modules import plain_name
from ..recipes.comparison import as_json, differences
from ..recipes.handlers import Recipe
from ..states.checks import check_states
from ..states.scaled_states import ScaledStates
from ..training import manifest, preparation
from ..training.conversion import Prepared, prepared_roots
from ..training.manifest import METADATA
from . import tensor_parallel

logger = logging.getLogger("fp8_backends")

OPTIMIZER_KEY = "fp8_scaling"
_FORMAT = 2
"""Of `fp8_backend.json`."""
_DAMAGED = "the checkpoint is damaged; load an earlier one"


class ScalingState(NamedTuple):
    """What a checkpoint says about prepared models. The key of a root is two numbers, `model.root`, by order: wrappers
    such as DDP change names, and not the order."""

    backends: dict[str, str]
    """The canonical backend string of each root key."""
    tensors: dict[str, torch.Tensor]
    """The tensors of the scaling state, by "root key/name"."""
    recipes: dict[str, dict[str, Any]]
    """`comparison.as_json` of the recipe of each root key."""

    @classmethod
    def of(cls, saved: Any, source: str) -> ScalingState | None:
        """What was saved as a dict; None where nothing was. Raises `FP8BackendError` for another thing."""
        if not saved:
            return None
        kinds = {"backends": str, "tensors": torch.Tensor, "recipes": dict}
        for name, kind in kinds.items():
            values = saved.get(name) if isinstance(saved, dict) else None
            if not isinstance(values, dict) or not all(
                isinstance(key, str) and isinstance(value, kind) for key, value in values.items()
            ):
                raise FP8BackendError(f"{source}: the {name} of its FP8 scaling state cannot be read: {_DAMAGED}")
        return cls(**{name: saved[name] for name in kinds})

    def backend_of(self, key: str) -> str:
        """The backend of a root, in words."""
        return self.backends.get(key, "no FP8 backend")

    def tensors_of(self, key: str) -> dict[str, torch.Tensor]:
        """The tensors of a root, by name."""
        prefix = f"{key}/"
        return {name.removeprefix(prefix): each for name, each in self.tensors.items() if name.startswith(prefix)}

    def differences(self, key: str, recipe: Recipe) -> str:
        """In which fields the saved recipe of a root differs from another; empty where nothing is known of it."""
        differing = differences(self.recipes.get(key, {}), as_json(recipe))
        return ", ".join(f"{name} was {old!r} and is {new!r} now" for name, (old, new) in differing.items())


def collect(models: list[nn.Module]) -> ScalingState:
    """Read the present scaling state of these models."""
    state = ScalingState({}, {}, {})
    for key, root, prepared in _roots(models):
        state.backends[key], state.recipes[key] = prepared.recipe.name, as_json(prepared.recipe)
        for name, tensor in scaling_state(prepared.compute, root).items():
            state.tensors[f"{key}/{name}"] = tensor.cpu().contiguous()
    return state


def restore(models: list[nn.Module], saved: ScalingState | None, source: str) -> None:
    """Put a saved scaling state back into these models.

    Warns where the checkpoint has none, or was saved with another recipe. Raises what `check` raises, and changes
    nothing then.
    """
    check(models, saved, source)
    _write(models, saved, source)


def check(models: list[nn.Module], saved: ScalingState | None, source: str) -> None:
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


def _write(models: list[nn.Module], saved: ScalingState | None, source: str) -> None:
    """`restore`, after `check`."""
    if saved is None:
        if any(scaling_state(prepared.compute, root) for _, root, prepared in _roots(models)):
            logger.warning("%s was saved without FP8 scaling state: the scales of this run start afresh", source)
        return
    for change, keys in _changes(models, saved).items():
        logger.warning("%s: model %s %s", source, ", ".join(keys), change)
    for key, root, prepared in _restorable(models, saved):
        prepared.compute.load_scaling_state(root, saved.tensors_of(key))


def _changes(models: list[nn.Module], saved: ScalingState) -> dict[str, list[str]]:
    """How the recipes of models differ from those they were saved with, in words: the root keys by what is to say."""
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


def _restorable(models: list[nn.Module], saved: ScalingState | None) -> Iterator[tuple[str, nn.Module, Prepared]]:
    """The roots with a scaling state that were saved with the backend that they have now."""
    for key, root, prepared in _roots(models) if saved is not None else ():
        if saved.backend_of(key) == prepared.recipe.name and scaling_state(prepared.compute, root):
            yield key, root, prepared


def _roots(models: list[nn.Module]) -> Iterator[tuple[str, nn.Module, Prepared]]:
    for i, model in enumerate(models):
        for j, (_, root, prepared) in enumerate(prepared_roots(model)):
            yield f"{i}.{j}", root, prepared


# Hooks of `save_state` and `load_state`: `functools.partial` binds the accelerator, and so Accelerators pickle.


def save_scaling(accelerator: Accelerator, models: list[nn.Module], weights: list[dict], output_dir: str) -> None:
    """Hook of `Accelerator.register_save_state_pre_hook`."""
    folder, state = Path(output_dir), collect(accelerator._models)
    if accelerator.writes_files:
        metadata = {"format": _FORMAT, "backend": accelerator.fp8_recipe.name, "models": state.backends}
        metadata["recipes"] = state.recipes
        metadata["manifest"] = manifest.NAME  # without it this checkpoint is incomplete
        (folder / METADATA).write_text(json.dumps(metadata, indent=2) + "\n")
    if state.tensors:
        save_file(state.tensors, folder / _tensor_file(accelerator.process_index))


def load_scaling(accelerator: Accelerator, models: list[nn.Module], input_dir: str) -> None:
    """Hook of `Accelerator.register_load_state_pre_hook`."""
    saved = check_folder(accelerator, input_dir)
    _write(accelerator._models, saved, input_dir)


def check_folder(accelerator: Accelerator, input_dir: str) -> ScalingState | None:
    """Look at what a folder of `save_state` holds for the prepared models and optimizers, before any of it is loaded.
    All ranks call it. Returns the scaling state, None where there is none.

    Raises:
        FP8BackendError: on all ranks, where one of them cannot go on from it. Nothing has changed.
    """
    folder = Path(input_dir).expanduser()
    with _refused_by_all():
        saved = _read(folder, accelerator.process_index)
        check(accelerator._models, saved, str(folder))
        looks = accelerator.is_local_main_process or tensor_parallel.shares_layers(accelerator)  # they ask each other
        if looks and accelerator.has_whole_weights:
            _check_optimizer_files(accelerator, folder)
    return saved


@contextlib.contextmanager
def _refused_by_all() -> Iterator[None]:
    """Let all ranks refuse what one refuses inside: the others would go on, and wait for it."""
    error = None
    try:
        yield
    except Exception as refusal:
        error = refusal
    refusals = gather_object([error and str(error)])
    if error is not None:
        raise error
    for rank, text in enumerate(refusals):
        if text is not None:
            raise FP8BackendError(f"rank {rank} refuses the checkpoint: {text}")


def _check_optimizer_files(accelerator: Accelerator, folder: Path) -> None:
    """Look at the files of optimizers that a level has converted: Accelerate loads them after the models."""
    names = {id(p): plain_name(name) for model in accelerator._models for name, p in model.named_parameters()}
    for i, optimizer in enumerate(map(preparation.unwrapped, accelerator._optimizers)):
        if isinstance(optimizer, ScaledStates):
            path = folder / (f"{OPTIMIZER_NAME}_{i}.bin" if i else f"{OPTIMIZER_NAME}.bin")
            try:
                if state_dict := _read_optimizer(path):
                    check_states(optimizer, state_dict, names)
                    optimizer.fp8_checked = True
            except FP8BackendError as error:
                raise FP8BackendError(f"{path}: {error}") from None


def _read_optimizer(path: Path) -> dict[str, Any] | None:
    """What Accelerate will load from a file of `torch.save`, without a copy in memory; None where that takes
    `load_kwargs` of the user's. Raises `FP8BackendError`."""
    try:
        return load(path, map_location="cpu", mmap=zipfile.is_zipfile(path))
    except FP8BackendError:
        raise
    except Exception as error:  # a damaged file leads PyTorch anywhere
        if "Unsupported global" in str(error):
            return None
        raise FP8BackendError(f"it cannot be read ({error!r}): {_DAMAGED}") from None


def _read(folder: Path, rank: int) -> ScalingState | None:
    """What the files in a folder say; None where this package wrote none. Raises `FP8BackendError`."""
    path = folder / METADATA
    if not path.exists():
        return None
    try:
        metadata = json.loads(path.read_text())
        written_as, backends, recipes = metadata["format"], metadata["models"], metadata["recipes"]
    except (OSError, ValueError, LookupError, TypeError, AttributeError) as error:
        raise FP8BackendError(f"{path} cannot be read ({error!r}): {_DAMAGED}") from None
    if written_as != _FORMAT:
        raise FP8BackendError(
            f"{path} has format {written_as!r}, and this version of fp8_backends reads {_FORMAT}: "
            f"load it with the version that wrote it"
        )
    tensors = _read_tensors(folder, rank)
    return ScalingState.of({"backends": backends, "tensors": tensors, "recipes": recipes}, str(folder))


def _tensor_file(rank: int) -> str:
    return f"fp8_scaling_{rank}.safetensors"


def _read_tensors(folder: Path, rank: int) -> dict[str, torch.Tensor]:
    """This rank's file, or that of rank 0 when the run had fewer ranks; empty without one."""
    for path in (folder / _tensor_file(rank), folder / _tensor_file(0)):
        if path.exists():
            try:
                return load_file(path)
            except (OSError, SafetensorError) as error:
                raise FP8BackendError(f"{path} cannot be read ({error}): {_DAMAGED}") from None
    return {}


# Hooks of one optimizer, idle inside `save_state` and `load_state`, which keep a file for each rank


def save_scaling_with_optimizer(
    accelerator: Accelerator, optimizer: torch.optim.Optimizer, state_dict: dict[str, Any]
) -> None:
    """Post-hook of `Optimizer.state_dict`."""
    state = collect(accelerator.models_of(optimizer))
    if (state.tensors or isinstance(optimizer, ScaledStates)) and not accelerator.fp8_state_in_files:
        state_dict[OPTIMIZER_KEY] = state._asdict()


def load_scaling_with_optimizer(
    accelerator: Accelerator, optimizer: torch.optim.Optimizer, state_dict: dict[str, Any]
) -> None:
    """Pre-hook of `Optimizer.load_state_dict`."""
    fits = _sizes(optimizer.param_groups) == _sizes(state_dict["param_groups"])  # else PyTorch refuses it next
    if fits and not accelerator.fp8_state_in_files:
        source = "the optimizer's checkpoint"
        restore(accelerator.models_of(optimizer), ScalingState.of(state_dict.get(OPTIMIZER_KEY), source), source)


def _sizes(groups: list[dict[str, Any]]) -> list[int]:
    return [len(group["params"]) for group in groups]
