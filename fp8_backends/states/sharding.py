"""Optimizer states of parameters that lie on several ranks (FSDP2's DTensors), and the numbers the ranks agree on.

A state is a DTensor that lies as its parameter does. Its local part is FP32, or a `ScaledTensor` with the scale of the
whole tensor; where blocks have scales (`exp_avg_scaling="block"`), a block lies on one rank and needs no agreement.
In state dicts it is a DTensor with FP32 values, which `torch.distributed.checkpoint` can shard anew.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from ..numerics.kernels.adam.dispatch import AdamSteps
from ..numerics.scaled_tensor import ScaledTensor, quantize
from ..numerics.sharded_tensor import (
    agreed_amax,
    dequantize_shards,
    is_distributed,
    local_part,
    quantize_shards,
    shard_groups,
    with_local,
)


def several_ranks() -> bool:
    """Whether this process trains together with others."""
    return dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1


# Agreement


def agree(values: Sequence[torch.Tensor], shards: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """The maximum of each value over the ranks that share the DTensor at its place in `shards`; one all-reduce for each
    group of ranks.

    Args:
        values: FP32, 0-dim. What is not finite comes out as inf.
    """
    agreed = list(values)
    groups: dict[tuple[int, ...], list[int]] = {}
    for i, shard in enumerate(shards):
        groups.setdefault(tuple(map(id, shard_groups(shard))), []).append(i)
    for members in groups.values():
        shard = shards[members[0]]
        on_device = [values[i].to(shard.device_mesh.device_type) for i in members]  # offloaded shards are on the CPU
        for i, value in zip(members, agreed_amax(torch.stack(on_device), shard).unbind(), strict=True):
            agreed[i] = value.to(values[i].device)
    return agreed


def agree_on_amaxes(amaxes: list[list[torch.Tensor | None]], shards: list[torch.Tensor]) -> None:
    """In place, of lists of amaxes for each DTensor: those of whole tensors (0-dim) become the largest of all ranks;
    None and the amaxes of blocks, [blocks], stay."""
    places = [(i, j) for i, of in enumerate(amaxes) for j, amax in enumerate(of) if amax is not None and not amax.dim()]
    agreed = agree([amaxes[i][j] for i, j in places], [shards[i] for i, _ in places])
    for (i, j), amax in zip(places, agreed, strict=True):
        amaxes[i][j] = amax


def finite_everywhere(finite: Sequence[torch.Tensor], shards: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Whether what is `finite` (bool, 0-dim) on this rank is so on all ranks that share each DTensor."""
    return [broken == 0 for broken in agree([(~each).float() for each in finite], shards)]


def first_element(p: torch.Tensor) -> int:
    """Index of this rank's first element in the whole of a DTensor whose rows are sharded.

    Of one that is sharded otherwise, a number that differs between the shards and not between replicas: random bits
    are another draw there than on one rank.
    """
    mesh, rows, first = p.device_mesh, p.shape[0], 0
    sharded = [(i, placed) for i, placed in enumerate(p.placements) if placed.is_shard()]
    if len(sharded) == 1 and sharded[0][1].is_shard(0):
        index, count = mesh.get_local_rank(sharded[0][0]), mesh.size(sharded[0][0])
        return min(index * -(-rows // count), rows) * math.prod(p.shape[1:])
    for i, _ in sharded:
        first = first * mesh.size(i) + mesh.get_local_rank(i)
    return first * p.numel()


# Steps


def run_shards(steps: AdamSteps, shards: list[torch.Tensor]) -> None:
    """Steps of shards, one of each DTensor. Between the parts of a step the ranks agree on the amaxes of all parameters
    at once."""
    amaxes = steps.amaxes()
    agree_on_amaxes(amaxes, shards)
    stored = [[amax] for amax in steps.write(amaxes)]
    agree_on_amaxes(stored, shards)
    steps.write_copies([amax for (amax,) in stored])


# States


def zeros(p: torch.Tensor, dtype: torch.dtype, block_size: int) -> torch.Tensor:
    """The state of a DTensor parameter before its first step."""
    local = torch.zeros_like(local_part(p), dtype=torch.float32, memory_format=torch.contiguous_format)
    return with_local(p, _stored(local, dtype, block_size, torch.zeros((), device=local.device)))


def stored(p: torch.Tensor, value: torch.Tensor, dtype: torch.dtype, block_size: int) -> torch.Tensor:
    """A state of the DTensor parameter `p` from its values: another DTensor, or a whole tensor that every rank has."""
    local = local_part(value)
    if is_distributed(value) and isinstance(local, ScaledTensor) and _lies_as(value, p):
        if (local._data.dtype, local.block_size) == (dtype, block_size):
            return with_local(p, _partial(local.to(local_part(p).device).clone()))
    values = shards_of(value, p)
    local = local_part(values)
    amax = None
    if dtype != torch.float32 and not block_size:
        largest = local.abs().amax() if local.numel() else local.new_zeros(())
        amax = agree([largest], [values])[0]
    return with_local(p, _stored(local, dtype, block_size, amax))


def _stored(local: torch.Tensor, dtype: torch.dtype, block_size: int, amax: torch.Tensor | None) -> torch.Tensor:
    if dtype == torch.float32:
        return local.clone()
    return _partial(quantize(local, dtype, torch.float32, block_size, None if block_size else amax))


def _partial(local: ScaledTensor) -> ScaledTensor:
    local.partial = True
    return local


def shards_of(value: torch.Tensor, p: torch.Tensor) -> torch.Tensor:
    """Values, FP32, as a DTensor that lies as `p` does; on its device."""
    if is_distributed(value):
        value = dequantize_shards(value, torch.float32)
        value = value if _lies_as(value, p) else value.redistribute(p.device_mesh, p.placements)
    else:
        from torch.distributed.tensor import distribute_tensor

        value = value.dequantize(torch.float32) if isinstance(value, ScaledTensor) else value
        value = value.to(p.device_mesh.device_type, torch.float32)
        value = distribute_tensor(value, p.device_mesh, p.placements, src_data_rank=None)
    local = local_part(value).to(local_part(p).device, torch.float32).contiguous()
    return with_local(p, local)


def _lies_as(value: torch.Tensor, p: torch.Tensor) -> bool:
    return (value.device_mesh, tuple(value.placements)) == (p.device_mesh, tuple(p.placements))


def write_weight(p: torch.Tensor, value: torch.Tensor) -> None:
    """New values into a scaled weight that is a DTensor; with a master, these are the master's."""
    local = local_part(p.detach())
    new = shards_of(value, p)
    for target in (local.master, local):
        if target is not None:
            new = quantize_shards(new, target._data.dtype, torch.float32)
            target._data.copy_(local_part(new)._data)
            target._scale_inv.copy_(local_part(new)._scale_inv)
            new = dequantize_shards(new, torch.float32)


def whole(value: torch.Tensor) -> torch.Tensor:
    """All values of a tensor, on every rank."""
    return dequantize_shards(value, torch.float32).full_tensor() if is_distributed(value) else value


def as_saved(states: dict[str, Any]) -> dict[str, Any]:
    """States as a state dict has them: DTensors with FP32 values, all others as they are stored."""
    return {
        name: dequantize_shards(each, torch.float32) if is_distributed(each) else each for name, each in states.items()
    }
