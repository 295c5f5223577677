"""Accelerate over tensor parallelism without FSDP2: checkpoints hold whole values.

Stock Accelerate writes what rank 0 holds, and there that is a part of each shared layer. Here all ranks gather DTensors
when a file is written, and take their own part of what they load. So what N ranks saved, M ranks or one process load.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from accelerate import Accelerator
from torch import nn
from torch.utils._pytree import tree_map

from ..numerics.scaled_tensor import dequantize_shards
from ..numerics.sharded_tensor import is_distributed, local_part, with_local
from ..states.sharding import shard_of


def shares_layers(accelerator: Accelerator) -> bool:
    """Whether ranks share layers of the models, and FSDP2, which has state dicts of its own, does not shard them."""
    parallelism = accelerator.parallelism_config
    return parallelism is not None and parallelism.tp_enabled and not accelerator.is_fsdp2


def whole(state_dict: dict[str, Any]) -> dict[str, Any]:
    """A state dict with whole plain tensors on the CPU in the place of DTensors; tied ones stay tied. All ranks call
    it."""
    gathered: dict[tuple[int, Any], torch.Tensor] = {}

    def whole_of(value: Any) -> Any:
        if not is_distributed(value):
            return value
        plain = dequantize_shards(value)
        key = (local_part(plain).data_ptr(), plain.shape)
        if key not in gathered:
            gathered[key] = plain.full_tensor().cpu()
        return gathered[key]

    return tree_map(whole_of, state_dict)


@contextlib.contextmanager
def whole_files(accelerator: Accelerator) -> Iterator[None]:
    """Around stock `save_state` and `load_state`: optimizers give and take whole states, models take whole weights."""
    if not shares_layers(accelerator):
        yield
        return
    optimizers = list(accelerator._optimizers)
    accelerator._optimizers[:] = map(_WholeStates, optimizers)
    handles = [model.register_load_state_dict_pre_hook(_take_parts) for model in accelerator._models]
    handles += [model.register_state_dict_post_hook(_give_whole) for model in accelerator._models]
    try:
        yield
    finally:
        accelerator._optimizers[:] = optimizers
        for handle in handles:
            handle.remove()


class _WholeStates:
    """Stands for an optimizer while its state dict is written or loaded."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.optimizer = optimizer

    def state_dict(self) -> dict[str, Any]:
        return whole(self.optimizer.state_dict())

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        keys = [key for group in state_dict["param_groups"] for key in group["params"]]
        parameters = [p for group in self.optimizer.param_groups for p in group["params"]]
        states = dict(state_dict["state"])
        for key, p in zip(keys, parameters, strict=True):
            states[key] = {name: _part(value, p) for name, value in states.get(key, {}).items()}
        self.optimizer.load_state_dict({**state_dict, "state": {key: state for key, state in states.items() if state}})


def _give_whole(model: nn.Module, state_dict: dict[str, Any], prefix: str, local_metadata: dict) -> None:
    """State-dict hook of a model: also what reads a file looks at names and addresses in a state dict."""
    state_dict.update(whole(state_dict))


def _take_parts(model: nn.Module, state_dict: dict[str, Any], prefix: str, *_) -> None:
    """Load hook of a model: this rank's parts of whole weights, as DTensors."""
    for name, p in model.named_parameters(prefix=prefix.removesuffix("."), remove_duplicate=False):
        if name in state_dict:
            state_dict[name] = _part(state_dict[name], p)


def _part(value: Any, p: torch.Tensor) -> Any:
    """A whole tensor of the shape of a DTensor `p` as a DTensor that lies as `p` does; anything else as it is."""
    if not is_distributed(p) or is_distributed(value) or getattr(value, "shape", None) != p.shape or not p.dim():
        return value
    return with_local(p, shard_of(p, value))
