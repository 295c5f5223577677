"""Tensor parallelism: what the ranks that share the layers of a model agree on beside what its products do.

Weights are DTensors there, and gradients are whole on each rank or lie as the weights do, so nothing of them travels
after backward. Where FSDP2 shards the shared layers once more, `fsdp2.connect` agrees over the ranks of both.
"""

from __future__ import annotations

from torch import nn

from ..numerics.sharded_tensor import is_distributed
from .backward import States, agree_after_backward, mesh_groups
from .fsdp2 import fsdp_modules


def ranks(model: nn.Module) -> int:
    """How many ranks share a layer of this model by tensor parallelism; 1 where none do.

    Under FSDP2 DTensors are its own, and tensor parallelism shows by the name "tp" of a dimension of their mesh, which
    transformers and Accelerate give.
    """
    meshes = [p.device_mesh for p in model.parameters() if is_distributed(p)]
    if not fsdp_modules(model):
        return max((mesh.size() for mesh in meshes), default=1)
    named = [dict(zip(mesh.mesh_dim_names or (), mesh.shape, strict=False)) for mesh in meshes]
    return max((sizes.get("tp", 1) for sizes in named), default=1)


def connect(model: nn.Module, scaling_states: States) -> None:
    """Let the ranks agree on scaling states after each backward pass. Repeating it does nothing."""
    if scaling_states():
        agree_after_backward(model, scaling_states, mesh_groups(model))
