"""Accelerate over FSDP2: what the plugin does there beside converting the model.

Stock Accelerate finds an optimizer's parameters again, after sharding has swapped them, by the address of their
data. Wrapper tensors (`ScaledTensor`, TorchAO's weights) have none: all of them would become the same parameter. Here
they are found by name, and the states of an optimizer that has taken steps are sharded with them.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from ..errors import FP8BackendError
from ..numerics.modules import plain_name
from ..numerics.parameter_swap import swap
from ..numerics.scaled_tensor import ScaledTensor, dequantize_shards
from ..numerics.sharded_tensor import is_distributed
from ..words import counted


@torch.no_grad()
def upcast(model: nn.Module) -> None:
    """Cast trainable parameters to FP32, from which FSDP2's mixed-precision policy makes what computes. Stock
    Accelerate does the same later, when weights may be stored in ways that a plain cast does not know."""
    for name, parameter in model.named_parameters():
        if parameter.requires_grad and parameter.dtype != torch.float32 and parameter.dtype.is_floating_point:
            if isinstance(parameter, ScaledTensor):
                swap(parameter, parameter.to(torch.float32).detach(), name)
            else:
                parameter.data = parameter.data.to(torch.float32)


@contextlib.contextmanager
def optimizers_follow_by_name(models: list[nn.Module], optimizers: list[torch.optim.Optimizer]) -> Iterator[None]:
    """Around stock `_prepare_fsdp2`: optimizers hold no parameter inside, and afterwards the parameters of the sharded
    model that have the names of those they held. The optimizer objects, their groups and states stay."""
    if not models:
        yield
        return
    # the model object stays, in whatever wrapper it ends up; the parameters must not be kept alive from here
    (model,) = models
    held = [_Held(optimizer, model) for optimizer in optimizers]
    try:
        yield
    finally:
        by_name = {plain_name(name): p for name, p in model.named_parameters(remove_duplicate=False)}
        for each in held:
            each.give_back(by_name)
    for each in held:
        each.shard_states()


class _Held:
    """The parameters of an optimizer, by name, and its states."""

    def __init__(self, optimizer: torch.optim.Optimizer, model: nn.Module) -> None:
        names = {id(p): plain_name(name) for name, p in model.named_parameters()}
        foreign = sum(id(p) not in names for group in optimizer.param_groups for p in group["params"])
        if foreign:
            raise FP8BackendError(
                f"the optimizer holds {counted(foreign, 'parameter')} that the model prepared with it does not have: "
                "FSDP2 shards one model, and an optimizer of it can hold no others"
            )
        self.optimizer = optimizer
        self.names = [[names[id(p)] for p in group["params"]] for group in optimizer.param_groups]
        self.states: dict[str, dict[str, Any]] = {names[id(p)]: state for p, state in optimizer.state.items() if state}
        optimizer.state.clear()
        for group in optimizer.param_groups:
            group["params"] = []

    def give_back(self, by_name: dict[str, nn.Parameter]) -> None:
        for group, names in zip(self.optimizer.param_groups, self.names, strict=True):
            group["params"] = [by_name[name] for name in names]

    def shard_states(self) -> None:
        """Load the states by the optimizer's own `load_state_dict`, which stores them as its weights are."""
        if not self.states:
            return
        state_dict = self.optimizer.state_dict()
        keys = [key for group in state_dict["param_groups"] for key in group["params"]]
        parameters = [p for group in self.optimizer.param_groups for p in group["params"]]
        names = [name for group in self.names for name in group]
        for key, name, p in zip(keys, names, parameters, strict=True):
            if name in self.states:
                state_dict["state"][key] = {part: _shard(value, p) for part, value in self.states.pop(name).items()}
        self.optimizer.load_state_dict(state_dict)


def _shard(value: Any, parameter: torch.Tensor) -> Any:
    """A state that has the parameter's shape, as a DTensor with the parameter's placements; any other as it is."""
    if not isinstance(value, torch.Tensor) or value.shape != parameter.shape or not value.dim():
        return value
    from torch.distributed.tensor import distribute_tensor

    if is_distributed(value):  # of a parameter that ranks share by tensor parallelism
        value = dequantize_shards(value).full_tensor()
    value = value.exact() if isinstance(value, ScaledTensor) else value
    return distribute_tensor(value, parameter.device_mesh, parameter.placements)
