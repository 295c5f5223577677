"""Scaling state in checkpoints, beside what stock Accelerate writes there.

`save_state` adds `fp8_backend.json`, which names the backend of each prepared model, and
`fp8_scaling_<rank>.safetensors` with the tensors, one file a rank, since each rank has seen its own amax values. There
is none where no rule keeps state (`dynamic`). Loops that save optimizers but never call `save_state`, such as that of
`transformers.Trainer`, find the same in the optimizer's state dict, under a key that stock PyTorch passes over.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
from accelerate import Accelerator
from safetensors.torch import load_file, save_file
from torch import nn

from ..compute.interface import scaling_state
from ..errors import FP8BackendError
from ..training import manifest
from ..training.conversion import Prepared, prepared_roots
from ..training.manifest import METADATA

logger = logging.getLogger("fp8_backends")

OPTIMIZER_KEY = "fp8_scaling"
_FORMAT = 1


class ScalingState(NamedTuple):
    """What a checkpoint says about prepared models. The key of a root is two numbers, `model.root`, by order: wrappers
    such as DDP change names, and not the order."""

    backends: dict[str, str]
    """The canonical backend string of each root key."""
    tensors: dict[str, torch.Tensor]
    """The tensors of the scaling state, by "root key/name"."""


def collect(models: list[nn.Module]) -> ScalingState:
    """Read the present scaling state of these models."""
    state = ScalingState({}, {})
    for key, root, prepared in _roots(models):
        state.backends[key] = prepared.recipe.name
        for name, tensor in scaling_state(prepared.compute, root).items():
            state.tensors[f"{key}/{name}"] = tensor.cpu().contiguous()
    return state


def restore(models: list[nn.Module], saved: ScalingState | None, source: str) -> None:
    """Put a saved scaling state back into these models.

    Warns where the checkpoint has none, or that of another backend. Raises `FP8BackendError` where it has the state of
    this backend and that does not fit the model.
    """
    for key, root, prepared in _roots(models):
        has_state = bool(scaling_state(prepared.compute, root))
        if saved is None:
            if has_state:
                logger.warning("%s was saved without FP8 scaling state: the scales of this run start afresh", source)
            continue
        # the first edition wrote the long form of a name
        saved_with = saved.backends.get(key, "no FP8 backend").replace("native:window+msamp:", "msamp:")
        if saved_with != prepared.recipe.name:
            logger.warning(
                f"{source}: model {key} was saved with {saved_with} and is now prepared "
                f"with {prepared.recipe.name}: its weights are loaded, its scales start afresh"
            )
            continue
        prefix = f"{key}/"
        tensors = {name.removeprefix(prefix): t for name, t in saved.tensors.items() if name.startswith(prefix)}
        if has_state and not tensors:
            raise FP8BackendError(f"{source} names {prepared.recipe.name} but has no scaling state: it is incomplete")
        if has_state:
            prepared.compute.load_scaling_state(root, tensors)


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
        metadata["manifest"] = manifest.NAME  # without it this checkpoint is incomplete
        (folder / METADATA).write_text(json.dumps(metadata, indent=2) + "\n")
    if state.tensors:
        save_file(state.tensors, folder / _tensor_file(accelerator.process_index))


def load_scaling(accelerator: Accelerator, models: list[nn.Module], input_dir: str) -> None:
    """Hook of `Accelerator.register_load_state_pre_hook`."""
    folder, saved = Path(input_dir), None
    if (folder / METADATA).exists():
        metadata = json.loads((folder / METADATA).read_text())
        saved = ScalingState(metadata["models"], _read_tensors(folder, accelerator.process_index))
    restore(accelerator._models, saved, str(folder))


def _tensor_file(rank: int) -> str:
    return f"fp8_scaling_{rank}.safetensors"


def _read_tensors(folder: Path, rank: int) -> dict[str, torch.Tensor]:
    """This rank's file, or that of rank 0 when the run had fewer ranks; empty without one."""
    paths = (folder / _tensor_file(candidate) for candidate in (rank, 0))
    return next((load_file(path) for path in paths if path.exists()), {})


# Hooks of one optimizer, idle inside `save_state` and `load_state`, which keep a file for each rank


def save_scaling_with_optimizer(
    accelerator: Accelerator, optimizer: torch.optim.Optimizer, state_dict: dict[str, Any]
) -> None:
    """Post-hook of `Optimizer.state_dict`."""
    state = collect(accelerator.models_of(optimizer))
    if state.tensors and not accelerator.fp8_state_in_files:
        state_dict[OPTIMIZER_KEY] = state._asdict()


def load_scaling_with_optimizer(
    accelerator: Accelerator, optimizer: torch.optim.Optimizer, state_dict: dict[str, Any]
) -> None:
    """Pre-hook of `Optimizer.load_state_dict`."""
    if not accelerator.fp8_state_in_files:
        saved = state_dict.get(OPTIMIZER_KEY)
        state = ScalingState(**saved) if saved else None
        restore(accelerator.models_of(optimizer), state, "the optimizer's checkpoint")
