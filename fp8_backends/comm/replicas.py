"""Ask all ranks: count shared backward passes, sum findings, and compare replicas.

The collectives run at an optimizer's step, in the groups of DDP, FSDP2 or tensor parallelism, idle
at that time.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import nn

from ..tensors.scaled_tensor import ScaledTensor, stored_parts
from ..tensors.sharded_tensor import agreed_over, is_distributed, local_part
from ..torch_tools.modules import plain_name
from .backward import BackwardPass, mesh_groups
from .ddp import wrappers
from .fsdp2 import outermost

_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
"""Integers by their size in bytes."""


class SharedBackwards:
    """Count backward passes with a reduction: one of the `collectives`, without a message."""

    def __init__(self) -> None:
        self.count = 0

    def finish(self, contributes: bool = True) -> None:
        self.count += 1

    def reset(self) -> None:
        pass

    @classmethod
    def of(cls, model: nn.Module) -> list[SharedBackwards]:
        """Return the counters of the wrappers in a model, created on the first call."""
        counters = []
        sharded = outermost(model) or ([model] if mesh_groups(model) else [])
        for modules in filter(None, [*([ddp] for ddp in wrappers(model)), sharded]):
            collectives = BackwardPass.of(modules).collectives
            counter = next((one for one in collectives if isinstance(one, cls)), None)
            if counter is None:
                collectives.append(counter := cls())
            counters.append(counter)
        return counters


def rank_groups(model: nn.Module) -> list[dist.ProcessGroup]:
    """Return the groups in which, one after another, a sum reaches all ranks of a model; none on
    one process."""
    groups = [ddp.process_group for ddp in wrappers(model)[:1]] or mesh_groups(model)
    return [group for group in groups if group.size() > 1]


def sum_over(tensor: torch.Tensor, groups: Iterable[dist.ProcessGroup]) -> torch.Tensor:
    """Sum a tensor over the ranks in place, and return it."""
    for group in groups:
        dist.all_reduce(tensor, group=group)
    return tensor


class Held(NamedTuple):
    """A replicated tensor."""

    name: str
    tensor: torch.Tensor
    group: dist.ProcessGroup


def held_alike(model: nn.Module, states: Iterable[tuple[str, torch.Tensor]]) -> Iterator[Held]:
    """Yield the storage of a model's replicated weights and the (name, live state) of scaling
    rules. Ignored parameters are left out, and so are buffers, which DDP copies by its own
    rules."""
    groups = rank_groups(model)
    ignored = set()
    for wrapper in wrappers(model):
        ignored |= set(wrapper.parameters_to_ignore)
    for full_name, p in model.named_parameters():
        local, name = local_part(p), plain_name(full_name).removeprefix("module.")
        if is_distributed(p):
            mesh = p.device_mesh
            alike = [
                i
                for i, place in enumerate(p.placements)
                if place.is_replicate() and mesh.size(i) > 1
            ]
            groups_of = [mesh.get_group(i) for i in alike]
        else:
            is_theirs = full_name.removeprefix("module.") in ignored and not isinstance(
                p, ScaledTensor
            )
            groups_of = [] if is_theirs else groups
        is_whole = isinstance(local, ScaledTensor) and not local.shared_out
        for part in stored_parts(local, exact=is_whole):
            yield from (Held(name, part, group) for group in groups_of)
    for name, state in states:
        yield from (Held(f"{name}, its scaling state", state, group) for group in groups)


@torch.no_grad()
def checksums(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """Sum the bits of each tensor as integers: int64 [tensors], in any order. One differing bit
    always shows."""
    sums = []
    for tensor in tensors:
        plain = torch.view_as_real(tensor.detach()) if tensor.is_complex() else tensor.detach()
        sums.append(plain.view(_BITS[plain.element_size()]).sum(dtype=torch.int64))
    return torch.stack([value.to(sums[0].device) for value in sums])


def apart(held: Sequence[Held]) -> dict[str, list[int]]:
    """Map the names of tensors that differ within their groups to the ranks with other values than
    the first rank. All ranks call it. One all-reduce for each group, and a gather if something
    differs."""
    differing: dict[str, list[int]] = {}
    by_group: dict[dist.ProcessGroup, list[Held]] = {}
    for tensor in held:
        by_group.setdefault(tensor.group, []).append(tensor)
    for group, members in by_group.items():
        sums = checksums([member.tensor for member in members])
        largest, negated_smallest = agreed_over(torch.stack([sums, -sums]), [group])
        if not bool((largest != -negated_smallest).any()):
            continue
        by_rank = sums.new_empty(group.size(), len(sums))
        dist.all_gather(list(by_rank.unbind()), sums, group=group)
        for member, values in zip(members, by_rank.t().tolist(), strict=True):
            others = [
                dist.get_global_rank(group, i)
                for i, value in enumerate(values)
                if value != values[0]
            ]
            if others:
                differing[member.name] = sorted({*differing.get(member.name, ()), *others})
    return differing
