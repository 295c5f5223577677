"""Agree on numbers over the ranks that share parameters.

Under FSDP2 a parameter is a DTensor: each rank has some of its rows, and its states have the same
layout. For a state with one scale, the ranks agree on the amax; with block scales (O4) a block is
on one rank. Under DDP at levels O3 and O4, each rank owns whole weights (`comm.ddp.SharedOut`).
"""

import math
from collections.abc import Sequence
from typing import Any

import torch

from ..kernels.adam import Slot, is_finite
from ..tensors.scaled_tensor import ScaledTensor
from ..tensors.sharded_tensor import (
    agreed_over,
    is_distributed,
    local_part,
    shard_groups,
    with_local,
)


def slot_of(tensor: torch.Tensor) -> Slot:
    """Return this rank's part of a tensor for a step."""
    tensor = local_part(tensor)
    if isinstance(tensor, ScaledTensor):
        tensor.settle()
        return Slot(tensor.codes, tensor.scale_inv, tensor.block_size, tensor.residual)
    return Slot(tensor.detach())


def first_element(p: torch.Tensor) -> int:
    """Return the index of this rank's first element in the whole of a DTensor sharded by rows, by
    FSDP2, tensor parallelism or both.

    For other placements, return a number that differs between shards and is equal on replicas:
    their random bits differ from one rank's.
    """
    mesh, first, rows = p.device_mesh, 0, p.shape[0]
    sharded = [i for i, placement in enumerate(p.placements) if not placement.is_replicate()]
    if all(p.placements[i].dim == 0 for i in sharded):
        for i in reversed(sharded):  # FSDP2 shards the rows that tensor parallelism left to a rank
            most = -(-rows // mesh.size(i))
            before = min(mesh.get_local_rank(i) * most, rows)
            first, rows = first + before, min(most, rows - before)
        return first * math.prod(p.shape[1:])
    for i in sharded:
        first = first * mesh.size(i) + mesh.get_local_rank(i)
    return first * p.numel()


def agree(values: Sequence[torch.Tensor], shards: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Return the maximum of each value (FP32, 0-dim; inf if not finite) over the ranks of the
    DTensor at its place in `shards`: one all-reduce for each group of ranks."""
    agreed = list(values)
    groups: dict[tuple[int, ...], list[int]] = {}
    for i, shard in enumerate(shards):
        groups.setdefault(tuple(map(id, shard_groups(shard))), []).append(i)
    for members in groups.values():
        shard = shards[members[0]]
        # offloaded shards are on the CPU
        on_device = [values[i].to(shard.device_mesh.device_type) for i in members]
        for i, value in zip(
            members, agreed_over(torch.stack(on_device), shard_groups(shard)).unbind(), strict=True
        ):
            agreed[i] = value.to(values[i].device)
    return agreed


def gathered(p: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    """Return whole values from plain ones in the layout of `p`. All ranks call this if `p` is a
    DTensor."""
    return with_local(p, values).full_tensor() if is_distributed(p) else values


def shard_of(p: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    """Return this rank's part of whole values in the layout of `p`: the reverse of `gathered`."""
    if not is_distributed(p):
        return values
    from torch.distributed.tensor import distribute_tensor  # half a second to import

    return local_part(distribute_tensor(values, p.device_mesh, p.placements, src_data_rank=None))


def finite_everywhere(
    gradients: Sequence[Slot], parameters: Sequence[torch.Tensor]
) -> list[torch.Tensor | None]:
    """Return for each DTensor whether its gradient is finite on all ranks: bool, 0-dim. None for
    other parameters."""
    finite: list[torch.Tensor | None] = [None] * len(parameters)
    places = [i for i, p in enumerate(parameters) if is_distributed(p)]
    by_device: dict[torch.device, list[int]] = {}  # single scales, to be read together
    for i in places:
        slot = gradients[i]
        if slot.scale_inv is not None and not slot.block_size and slot.data.dtype.itemsize == 1:
            by_device.setdefault(slot.data.device, []).append(i)
    flags = {}
    for members in by_device.values():
        scales = torch.stack([gradients[i].scale_inv.detach() for i in members])
        flags |= zip(members, (~torch.isfinite(scales)).float().unbind(), strict=True)
    not_finite = [flags[i] if i in flags else (~is_finite(gradients[i])).float() for i in places]
    for i, amax in zip(places, agree(not_finite, [parameters[i] for i in places]), strict=True):
        finite[i] = amax == 0
    return finite


def run_agreed(steps: Any, parameters: Sequence[torch.Tensor]) -> None:
    """Run the three parts of a step, such as `AdamSteps`, over DTensors. Between them, the ranks
    agree on amaxes."""
    amaxes = steps.amaxes()
    _agree_on_amaxes(amaxes, parameters)
    stored = [[amax] for amax in steps.write(amaxes)]
    _agree_on_amaxes(stored, parameters)
    steps.write_copies([amax for (amax,) in stored])


def _agree_on_amaxes(
    amaxes: list[list[torch.Tensor | None]], parameters: Sequence[torch.Tensor]
) -> None:
    """Replace DTensors' whole-tensor amaxes (0-dim) by the maximum over ranks. None and block
    amaxes stay."""
    places = [
        (i, j)
        for i, p in enumerate(parameters)
        for j, amax in enumerate(amaxes[i])
        if is_distributed(p) and amax is not None and not amax.dim()
    ]
    agreed = agree([amaxes[i][j] for i, j in places], [parameters[i] for i, _ in places])
    for (i, j), amax in zip(places, agreed, strict=True):
        amaxes[i][j] = amax
