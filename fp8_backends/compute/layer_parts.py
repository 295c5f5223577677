"""Parts of layers that ranks share by tensor parallelism: PyTorch's `parallelize_module`, transformers' `tp_plan`.

A layer that is cut after it was prepared is refused: its scales, states, stored weights and optimizer are of the whole
weight. The parts would get other codes, and an optimizer would keep Parameters that the model no longer has.
"""

from __future__ import annotations

import torch
from torch import nn

from ..errors import FP8BackendError
from ..numerics.sharded_tensor import is_distributed


def is_parallel(layer: nn.Module) -> bool:
    """Return True if a style of PyTorch or transformers shares this layer out over ranks."""
    return any(getattr(layer, mark, False) for mark in ("_distribute_module_applied", "_is_hooked"))


def part_obstacle(layer: nn.Module, multiple: int, otherwise: str) -> str | None:
    """Return the reason why the parts of a layer cannot be multiplied, or None.

    Args:
        multiple: products take features in multiples of this.
        otherwise: the consequence for other sizes, and the remedy.
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


def note_whether_cut(layer: nn.Module) -> None:
    """Record on a prepared layer if its weight is distributed by now."""
    layer.fp8_prepared_cut = is_distributed(layer.weight)


def refuse_cut_since(layer: nn.Module, seen: torch.Tensor) -> None:
    """Raise `FP8BackendError` if `seen`, an input or a state, is a DTensor, and the weight became one after `prepare`.
    The weight alone may be one of FSDP2's."""
    if is_distributed(seen) and is_distributed(layer.weight) and not layer.fp8_prepared_cut:
        raise FP8BackendError(
            f"an FP8 layer {layer.in_features} -> {layer.out_features} was cut over ranks after it was prepared: call "
            "parallelize_module, or load by tp_plan, first; then make the optimizer, and prepare both"
        )
