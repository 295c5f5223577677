"""What several ranks share, and the numbers that they agree on.

Under FSDP2 a parameter is a DTensor, and a rank has some of its rows; its states lie as it does. Where a state has one
scale for the whole tensor, its ranks agree on the amax. Where blocks have scales (O4), a block
lies on one rank and needs no agreement. Under DDP at levels O3 and O4, a rank owns whole weights (`Owners`).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Protocol

import torch

from ..numerics.kernels.adam import Slot, is_finite
from ..numerics.meshes import agreed_over
from ..numerics.sharded_tensor import is_distributed, local_part, shard_groups, with_local


class Owners(Protocol):
    """Scaled weights whose masters and states lie on one rank each."""

    weights: list[torch.Tensor]

    def owns(self, p: torch.Tensor) -> bool:
        """Whether the master and the states of `p` lie on this rank; True for a parameter that is not shared out."""

    def share(self) -> None:
        """Send every weight that trains, as its owner has it now, to all ranks. All ranks call it after a step."""

    def drop(self, p: torch.Tensor) -> None:
        """Forget the master of a weight that another rank owns. Repeating it does nothing."""

    def send_to_all(self, p: torch.Tensor, tensors: Sequence[torch.Tensor]) -> None:
        """Copy the owner's tensors (the master of `p`, its states) into those of all other ranks. All ranks call it."""


def first_element(p: torch.Tensor) -> int:
    """Index of this rank's first element in the whole of a DTensor whose rows are sharded, by FSDP2, tensor parallelism
    or both.

    For a DTensor that is sharded otherwise, it is a number that differs between the shards and not between replicas:
    its random bits are another draw than on one rank.
    """
    mesh, first, rows = p.device_mesh, 0, p.shape[0]
    sharded = [i for i, placement in enumerate(p.placements) if not placement.is_replicate()]
    if all(p.placements[i].dim == 0 for i in sharded):
        for i in reversed(sharded):  # FSDP2 shards what tensor parallelism has left to a rank
            most = -(-rows // mesh.size(i))
            before = min(mesh.get_local_rank(i) * most, rows)
            first, rows = first + before, min(most, rows - before)
        return first * math.prod(p.shape[1:])
    for i in sharded:
        first = first * mesh.size(i) + mesh.get_local_rank(i)
    return first * p.numel()


def agree(values: Sequence[torch.Tensor], shards: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """The maximum of each value over the ranks that share the DTensor at its place in `shards`. Each group of ranks
    makes one all-reduce.

    Args:
        values: FP32, 0-dim. A value that is not finite comes out as inf.
    """
    agreed = list(values)
    groups: dict[tuple[int, ...], list[int]] = {}
    for i, shard in enumerate(shards):
        groups.setdefault(tuple(map(id, shard_groups(shard))), []).append(i)
    for members in groups.values():
        shard = shards[members[0]]
        on_device = [values[i].to(shard.device_mesh.device_type) for i in members]  # offloaded shards are on the CPU
        for i, value in zip(members, agreed_over(torch.stack(on_device), shard_groups(shard)).unbind(), strict=True):
            agreed[i] = value.to(values[i].device)
    return agreed


def gathered(p: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    """Plain values that lie as those of `p` do, whole on each rank. All ranks call it where `p` is a DTensor."""
    return with_local(p, values).full_tensor() if is_distributed(p) else values


def shard_of(p: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    """What lies on this rank of whole values, placed as `p` is: the reverse of `gathered`."""
    if not is_distributed(p):
        return values
    from torch.distributed.tensor import distribute_tensor  # half a second, for those who shard

    return local_part(distribute_tensor(values, p.device_mesh, p.placements, src_data_rank=None))


def finite_everywhere(gradients: Sequence[Slot], parameters: Sequence[torch.Tensor]) -> list[torch.Tensor | None]:
    """Whether each gradient is finite on all ranks that share the parameter; bool, 0-dim. None for a parameter that is
    no DTensor: the step looks at its gradient itself."""
    found: list[torch.Tensor | None] = [None] * len(parameters)
    places = [i for i, p in enumerate(parameters) if is_distributed(p)]
    not_finite = _spoiled([gradients[i] for i in places])
    for i, amax in zip(places, agree(not_finite, [parameters[i] for i in places]), strict=True):
        found[i] = amax == 0
    return found


def _spoiled(gradients: Sequence[Slot]) -> list[torch.Tensor]:
    """1 for each gradient that is not finite, else 0: FP32, 0-dim. Where a gradient's only scale tells, those of one
    device are looked at together."""
    told: dict[torch.device, list[int]] = {}
    for i, slot in enumerate(gradients):
        if slot.scale_inv is not None and not slot.block_size and slot.data.dtype.itemsize == 1:
            told.setdefault(slot.data.device, []).append(i)
    found = {}
    for members in told.values():
        scales = torch.stack([gradients[i].scale_inv.detach() for i in members])
        found |= zip(members, (~torch.isfinite(scales)).float().unbind(), strict=True)
    return [found[i] if i in found else (~is_finite(slot)).float() for i, slot in enumerate(gradients)]


class Steps(Protocol):
    """A step of several parameters in three parts, as `AdamSteps` has them."""

    def amaxes(self) -> list[list[torch.Tensor | None]]: ...

    def write(self, amaxes: list[list[torch.Tensor | None]]) -> list[torch.Tensor | None]: ...

    def write_copies(self, amaxes: list[torch.Tensor | None]) -> None: ...


def run_agreed(steps: Steps, parameters: Sequence[torch.Tensor]) -> None:
    """Run steps of parameters some of which are DTensors. Between the parts of a step the ranks agree on the amaxes of
    all these at once."""
    amaxes = steps.amaxes()
    _agree_on_amaxes(amaxes, parameters)
    stored = [[amax] for amax in steps.write(amaxes)]
    _agree_on_amaxes(stored, parameters)
    steps.write_copies([amax for (amax,) in stored])


def _agree_on_amaxes(amaxes: list[list[torch.Tensor | None]], parameters: Sequence[torch.Tensor]) -> None:
    """Replace each DTensor's amaxes of whole tensors (0-dim) by the largest of all ranks. None stays, and so do the
    amaxes of blocks, [blocks]."""
    places = [
        (i, j)
        for i, p in enumerate(parameters)
        for j, amax in enumerate(amaxes[i])
        if is_distributed(p) and amax is not None and not amax.dim()
    ]
    agreed = agree([amaxes[i][j] for i, j in places], [parameters[i] for i, _ in places])
    for (i, j), amax in zip(places, agreed, strict=True):
        amaxes[i][j] = amax
