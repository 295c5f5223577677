"""The ranks of a mesh: which tensors they share, who has parts of one, and the maximum of what they saw."""

from __future__ import annotations

import sys
from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import nn


def is_distributed(tensor: torch.Tensor) -> bool:
    """Whether this is a DTensor, such as FSDP2 makes of a Parameter."""
    if type(tensor) in (torch.Tensor, nn.Parameter):  # compiled code must not watch the modules that are loaded
        return False
    loaded = sys.modules.get("torch.distributed.tensor")  # half a second, for those who shard
    return loaded is not None and isinstance(tensor, loaded.DTensor)


def shard_groups(tensor: torch.Tensor) -> list[dist.ProcessGroup]:
    """The groups of ranks that hold different parts of this DTensor; none for any other tensor."""
    if not is_distributed(tensor):
        return []
    mesh = tensor.device_mesh
    return [
        mesh.get_group(i)
        for i, placed in enumerate(tensor.placements)
        if not placed.is_replicate() and mesh.size(i) > 1  # FSDP2 over tensor parallelism shards in strides
    ]


def agreed_over(values: torch.Tensor, groups: Sequence[dist.ProcessGroup | None]) -> torch.Tensor:
    """Return the elementwise maximum over the ranks of these groups (None: all ranks) as a new tensor of the same
    shape: integers in their dtype, other values in FP32. NaN becomes inf, since a maximum may lose a NaN."""
    if values.is_meta:
        return values
    if values.is_floating_point():
        agreed = values.detach().float().nan_to_num(nan=torch.inf, posinf=torch.inf, neginf=-torch.inf)
    else:
        agreed = values.clone()
    for group in groups:
        dist.all_reduce(agreed, op=dist.ReduceOp.MAX, group=group)
    return agreed
