"""Tensor parallelism: what the ranks that share the layers of a model agree on beside what its products do.

Weights are DTensors there, and gradients are whole on each rank or lie as the weights do, so nothing of them travels
after backward. Where FSDP2 shards the shared layers once more, `fsdp2.connect` agrees over the ranks of both.
"""

from __future__ import annotations

from torch import nn

from ..numerics.sharded_tensor import is_distributed
from .backward import States, agree_after_backward, mesh_groups
from .fsdp2 import fsdp_modules


def is_shared(model: nn.Module) -> bool:
    """Whether ranks share layers of this model by tensor parallelism, and FSDP2 has not sharded it."""
    return not fsdp_modules(model) and any(map(is_distributed, model.parameters()))


def connect(model: nn.Module, scaling_states: States) -> None:
    """Let the ranks agree on scaling states after each backward pass. Repeating it does nothing."""
    if scaling_states():
        agree_after_backward(model, scaling_states, mesh_groups(model))
