"""What a guard asks of the ranks: whether a backward pass was theirs together, sums of its findings over all of them,
and whether what they should hold alike is alike.

The collectives happen at an optimizer's step, in the groups of DDP, FSDP2 or tensor parallelism, where nothing else is
under way then.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from ..numerics.modules import plain_name
from ..numerics.scaled_tensor import ScaledTensor, stored_parts
from ..numerics.sharded_tensor import agreed_over, is_distributed, local_part
from .backward import BackwardPass, mesh_groups
from .ddp import DDPBackward
from .fsdp2 import fsdp_modules

_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
"""Integers by their size in bytes."""


class SharedBackwards:
    """Counts the backward passes of a model whose gradients travelled: a `backward.Collective` that sends nothing."""

    def __init__(self) -> None:
        self.count = 0

    def finish(self, contributes: bool = True) -> None:
        self.count += 1

    def reset(self) -> None:
        pass

    @classmethod
    def of(cls, model: nn.Module) -> list[SharedBackwards]:
        """Those of the wrappers in a model by which it trains on several ranks. Repeating it gives the same."""
        found = []
        for wrapper in _wrappers(model):
            backward = BackwardPass.find(wrapper)
            if backward is None:
                is_ddp = isinstance(wrapper, DistributedDataParallel)
                backward = DDPBackward() if is_ddp else BackwardPass(lambda module: True)
                wrapper.register_forward_hook(backward)
            counter = next((each for each in backward.collectives if isinstance(each, cls)), None)
            if counter is None:
                backward.collectives.append(counter := cls())
            found.append(counter)
        return found


def _wrappers(model: nn.Module) -> list[nn.Module]:
    """Each DDP in a model, and the outermost FSDP2 module, or the model itself where ranks share its layers by tensor
    parallelism alone."""
    outermost = list(fsdp_modules(model).values())[:1] or ([model] if mesh_groups(model) else [])
    return [each for each in model.modules() if isinstance(each, DistributedDataParallel)] + outermost


def rank_groups(model: nn.Module) -> list[dist.ProcessGroup]:
    """The groups over which a sum, one after another, is a sum over all ranks that train a model together; none on one
    process."""
    for wrapper in _wrappers(model):
        if isinstance(wrapper, DistributedDataParallel):
            return [wrapper.process_group] if wrapper.process_group.size() > 1 else []
        return [group for group in mesh_groups(wrapper) if group.size() > 1]
    return []


def sum_over(tensor: torch.Tensor, groups: Iterable[dist.ProcessGroup]) -> torch.Tensor:
    """The tensor, summed over the ranks in place."""
    for group in groups:
        dist.all_reduce(tensor, group=group)
    return tensor


class Held(NamedTuple):
    """A tensor that all ranks of a group should hold alike."""

    name: str
    tensor: torch.Tensor
    group: dist.ProcessGroup


def held_alike(model: nn.Module, states: Iterable[tuple[str, torch.Tensor]]) -> Iterator[Held]:
    """The weights of a model of which several ranks have the same elements, as they are stored, and its scaling states.
    What the user told DDP to ignore is left out, and so are buffers, which DDP copies by rules of its own.

    Args:
        states: names and live states of scaling rules.
    """
    groups = rank_groups(model)
    ignored = set()
    for wrapper in _wrappers(model):
        ignored |= set(getattr(wrapper, "parameters_to_ignore", ()))
    for full_name, p in model.named_parameters():
        local, name = local_part(p), plain_name(full_name).removeprefix("module.")
        if is_distributed(p):
            mesh = p.device_mesh
            alike = [i for i, place in enumerate(p.placements) if place.is_replicate() and mesh.size(i) > 1]
            groups_of = [mesh.get_group(i) for i in alike]
        else:
            is_theirs = full_name.removeprefix("module.") in ignored and not isinstance(p, ScaledTensor)
            groups_of = [] if is_theirs else groups
        is_whole = isinstance(local, ScaledTensor) and not local.shared_out
        for part in stored_parts(local, exact=is_whole):
            yield from (Held(name, part, group) for group in groups_of)
    for name, state in states:
        yield from (Held(f"{name}, its scaling state", state, group) for group in groups)


@torch.no_grad()
def checksums(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """The sum over the bits of each tensor, taken for integers: int64 [tensors], whatever the order of the elements. A
    bit that differs always shows."""
    sums = []
    for tensor in tensors:
        plain = torch.view_as_real(tensor.detach()) if tensor.is_complex() else tensor.detach()
        sums.append(plain.view(_BITS[plain.element_size()]).sum(dtype=torch.int64))
    return torch.stack([each.to(sums[0].device) for each in sums])


def apart(held: Sequence[Held]) -> dict[str, list[int]]:
    """Which of these tensors differ between the ranks of their groups, by name, with the ranks that hold something else
    than the first of the group. All ranks call it. One all-reduce for each group; a second round only where something
    differs."""
    found: dict[str, list[int]] = {}
    by_group: dict[dist.ProcessGroup, list[Held]] = {}
    for each in held:
        by_group.setdefault(each.group, []).append(each)
    for group, members in by_group.items():
        own = checksums([each.tensor for each in members])
        largest, smallest = agreed_over(torch.stack([own, -own]), [group])  # the smallest with its sign changed
        if not bool((largest != -smallest).any()):
            continue
        of_ranks = own.new_empty(group.size(), len(own))
        dist.all_gather(list(of_ranks.unbind()), own, group=group)
        for each, sums in zip(members, of_ranks.t().tolist(), strict=True):
            others = [dist.get_global_rank(group, i) for i, value in enumerate(sums) if value != sums[0]]
            if others:
                found[each.name] = sorted({*found.get(each.name, ()), *others})
    return found
