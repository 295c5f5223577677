"""Parts of layers that ranks share by tensor parallelism: PyTorch's `parallelize_module`, transformers' `tp_plan`."""

from __future__ import annotations

from torch import nn

from ..numerics.sharded_tensor import is_distributed


def is_parallel(layer: nn.Module) -> bool:
    """Whether PyTorch's styles or transformers' have made this layer a part of several ranks' work."""
    return any(getattr(layer, mark, False) for mark in ("_distribute_module_applied", "_is_hooked"))


def part_obstacle(layer: nn.Module, multiple: int, otherwise: str) -> str | None:
    """Why the parts of a layer cannot be multiplied, or None.

    Args:
        multiple: of how many features the products take multiples.
        otherwise: what follows from others, and what to do.
    """
    if not is_parallel(layer) or not is_distributed(weight := layer.weight):
        return None
    mesh = weight.device_mesh
    names = mesh.mesh_dim_names or ("",) * mesh.ndim
    for placed, ranks, name in zip(weight.placements, mesh.shape, names, strict=True):
        is_fsdp = mesh.ndim > 1 and name != "tp"  # which gathers its shards before they are multiplied
        if placed.is_replicate() or ranks == 1 or is_fsdp:
            continue
        size = weight.shape[placed.dim] // getattr(placed, "split_factor", 1)  # of each of the weights that are packed
        part = -(-size // ranks)
        if part % multiple:
            return f"tensor parallelism gives each rank {part} of {size} features, {otherwise}"
        if part * (ranks - 1) >= size:
            return f"tensor parallelism leaves a rank without any of {size} features"
    return None
