"""Save scaling states beside the files of stock Accelerate, and check a folder before anything of it is loaded.

`save_state` adds `fp8_backend.json` with the recipe of each prepared model, and `fp8_scaling_<rank>.safetensors` with
the tensors: one file a rank, since each rank has seen its own amax values. Rules without state (`dynamic`) have no such
file. Loops without `save_state` find the same in the optimizer's state dict (`training.scaling_state`).

`load_state` first checks the scaling states of all models and the states of converted optimizers.
"""

from __future__ import annotations

import json
import os
import zipfile
from pathlib import Path
from typing import Any

from accelerate import Accelerator
from accelerate.utils import load
from accelerate.utils.constants import OPTIMIZER_NAME
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from ..errors import FP8BackendError, on_all_ranks
from ..numerics.modules import plain_name
from ..states.checkpoint import check_states
from ..states.scaled_states import ScaledStates
from ..training import manifest, preparation, scaling_state
from ..training.manifest import METADATA
from ..training.scaling_state import DAMAGED, ScalingState
from . import tensor_parallel

_FORMAT = 2
"""Of `fp8_backend.json`."""


def save_scaling(accelerator: Accelerator, output_dir: str) -> None:
    """Write the scaling states of the prepared models into a folder of `save_state`."""
    folder, state = Path(output_dir), scaling_state.collect(accelerator._models)
    if accelerator.writes_files:
        metadata = {"format": _FORMAT, "backend": accelerator.fp8_recipe.name, "models": state.backends}
        metadata["recipes"] = state.recipes
        metadata["manifest"] = manifest.NAME  # without it this checkpoint is incomplete
        (folder / METADATA).write_text(json.dumps(metadata, indent=2) + "\n")
    if state.tensors:
        save_file(state.tensors, folder / _tensor_file(accelerator.process_index))


def load_scaling(accelerator: Accelerator, input_dir: str | os.PathLike) -> None:
    """Check all that a folder of `save_state` holds for the prepared models and optimizers, then load its scaling
    states. All ranks call it.

    Raises:
        FP8BackendError: on all ranks, where one of them cannot go on from it. Nothing has changed.
    """
    folder = Path(input_dir)

    def check() -> None:
        nonlocal saved
        saved = _read(folder, accelerator.process_index)
        scaling_state.check(accelerator._models, saved, str(folder))
        looks = accelerator.is_local_main_process or tensor_parallel.shares_layers(accelerator)  # they ask each other
        if looks and accelerator.has_whole_weights:
            _check_optimizer_files(accelerator, folder)

    saved: ScalingState | None = None
    on_all_ranks(f"loading {folder}", check)
    scaling_state.write(accelerator._models, saved, str(folder))


def _check_optimizer_files(accelerator: Accelerator, folder: Path) -> None:
    """Check the files of converted optimizers: Accelerate loads them after the models."""
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
    """Read a file of `torch.save` without a copy in memory; return None if only the user's `load_kwargs` can load it.
    Raise `FP8BackendError` for a damaged file."""
    try:
        return load(path, map_location="cpu", mmap=zipfile.is_zipfile(path))
    except FP8BackendError:
        raise
    except Exception as error:  # a damaged file leads PyTorch anywhere
        if "Unsupported global" in str(error):
            return None
        raise FP8BackendError(f"it cannot be read ({error!r}): {DAMAGED}") from None


def _read(folder: Path, rank: int) -> ScalingState | None:
    """Read the scaling states in a folder; return None without any. Raise `FP8BackendError` for damaged files."""
    path = folder / METADATA
    if not path.exists():
        return None
    try:
        metadata = json.loads(path.read_text())
        written_as, backends, recipes = metadata["format"], metadata["models"], metadata["recipes"]
    except (OSError, ValueError, LookupError, TypeError, AttributeError) as error:
        raise FP8BackendError(f"{path} cannot be read ({error!r}): {DAMAGED}") from None
    if written_as != _FORMAT:
        raise FP8BackendError(
            f"{path} has format {written_as!r}, and this version of fp8_backends reads {_FORMAT}: "
            f"load it with the version that wrote it"
        )
    # a run with fewer ranks has saved fewer files
    for name in (_tensor_file(rank), _tensor_file(0)):
        if (folder / name).exists():
            try:
                tensors = load_file(folder / name)
            except (OSError, SafetensorError) as error:
                raise FP8BackendError(f"{folder / name} cannot be read ({error}): {DAMAGED}") from None
            break
    else:
        tensors = {}
    return ScalingState.of({"backends": backends, "tensors": tensors, "recipes": recipes}, str(folder))


def _tensor_file(rank: int) -> str:
    return f"fp8_scaling_{rank}.safetensors"
