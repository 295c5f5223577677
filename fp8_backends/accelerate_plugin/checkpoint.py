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
from ..training.conversion import Prepared, prepared_roots

logger = logging.getLogger("fp8_backends")

METADATA = "fp8_backend.json"
OPTIMIZER_KEY = "fp8_scaling"
_FORMAT = 1


class ScalingState(NamedTuple):
    """What a checkpoint says about prepared models. A root's key is `model.root`, by order: wrappers such as DDP
    change names, and not the order."""

    backends: dict[str, str]
    """Root key -> canonical backend string."""
    tensors: dict[str, torch.Tensor]
    """"root key/name" -> a tensor of `Compute.scaling_state`."""


def collect(models: list[nn.Module]) -> ScalingState:
    """The present scaling state of these models."""
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
        if saved.backends.get(key) != prepared.recipe.name:
            logger.warning(
                "%s: model %s was saved with %s and is now prepared with %s: its weights are loaded, "
                "its scales start afresh",
                source,
                key,
                saved.backends.get(key, "no FP8 backend"),
                prepared.recipe.name,
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


# save_state and load_state. Hooks are classes and not closures, so that Accelerators pickle.


class SaveScalingState:
    """Hook of `Accelerator.register_save_state_pre_hook`."""

    def __init__(self, accelerator: Accelerator) -> None:
        self.accelerator = accelerator

    def __call__(self, models: list[nn.Module], weights: list[dict], output_dir: str) -> None:
        accelerator, folder = self.accelerator, Path(output_dir)
        state = collect(accelerator._models)
        on_each_node = accelerator.project_configuration.save_on_each_node
        if accelerator.is_local_main_process if on_each_node else accelerator.is_main_process:
            metadata = {"format": _FORMAT, "backend": accelerator.fp8_recipe.name, "models": state.backends}
            (folder / METADATA).write_text(json.dumps(metadata, indent=2) + "\n")
        if state.tensors:
            save_file(state.tensors, folder / _tensor_file(accelerator.process_index))


class LoadScalingState:
    """Hook of `Accelerator.register_load_state_pre_hook`."""

    def __init__(self, accelerator: Accelerator) -> None:
        self.accelerator = accelerator

    def __call__(self, models: list[nn.Module], input_dir: str) -> None:
        folder, saved = Path(input_dir), None
        if (folder / METADATA).exists():
            metadata = json.loads((folder / METADATA).read_text())
            saved = ScalingState(metadata["models"], _read_tensors(folder, self.accelerator.process_index))
        restore(self.accelerator._models, saved, str(folder))


def _tensor_file(rank: int) -> str:
    return f"fp8_scaling_{rank}.safetensors"


def _read_tensors(folder: Path, rank: int) -> dict[str, torch.Tensor]:
    """This rank's file, or that of rank 0 when the run had fewer ranks; empty without one."""
    for candidate in (rank, 0):
        path = folder / _tensor_file(candidate)
        if path.exists():
            return load_file(path)
    return {}


# The optimizer's state dict


class ScalingInOptimizer:
    """Hooks of one optimizer. Inert inside `save_state` and `load_state`, which keep a file for each rank."""

    def __init__(self, accelerator: Accelerator) -> None:
        self.accelerator = accelerator

    def install(self, optimizer: torch.optim.Optimizer) -> None:
        optimizer.register_state_dict_post_hook(self.save)
        optimizer.register_load_state_dict_pre_hook(self.load)

    def save(self, optimizer: torch.optim.Optimizer, state_dict: dict[str, Any]) -> None:
        state = collect(self.accelerator.models_of(optimizer))
        if state.tensors and not self.accelerator.fp8_state_in_files:
            state_dict[OPTIMIZER_KEY] = state._asdict()

    def load(self, optimizer: torch.optim.Optimizer, state_dict: dict[str, Any]) -> None:
        if self.accelerator.fp8_state_in_files:
            return
        saved = state_dict.get(OPTIMIZER_KEY)
        source = "the optimizer's checkpoint"
        restore(self.accelerator.models_of(optimizer), ScalingState(**saved) if saved else None, source)
