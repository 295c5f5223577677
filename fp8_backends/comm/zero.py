"""Weights in E4M3 under DDP: optimizer states, and what makes weights exact, shared out over the ranks, as in ZeRO-1.

Each rank owns whole weights, about as many elements as any other. It alone keeps their FP16 master (level O3) or their
residual (O4) and their Adam states, and makes their steps; then the new E4M3 weights and their scales travel to
everyone, one byte an element. A rank holds weight and gradient of all, and the rest of its own: 2 + 5/N bytes an
element at O3, 2 + 3/N at O4.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
import torch.distributed as dist

from ..errors import FP8BackendError
from ..numerics.scaled_tensor import Elsewhere, stored_parts
from .two_shot import all_gather

MESSAGE = 2**24
"""Bytes that a rank sends in one all-gather, at most; each rank receives as many from every other."""


def assign(sizes: Sequence[int], ranks: int) -> list[int]:
    """The owner of each weight. The largest come first; each goes to the rank that has the fewest elements so far."""
    owners, load = [0] * len(sizes), [0] * ranks
    for i in sorted(range(len(sizes)), key=lambda i: -sizes[i]):
        owners[i] = load.index(min(load))
        load[owners[i]] += sizes[i]
    return owners


class SharedOut:
    """Weights whose rest (`ScaledTensor.rest`) and optimizer states lie on one rank each: `fp8_owners` of an
    optimizer. All ranks make it, with the same weights in the same order. It drops the rest of other ranks'
    weights at once.

    Args:
        weights: parameters whose data are E4M3, with equal values on all ranks.
        group: the ranks; used by nothing else while an optimizer steps.
    """

    def __init__(self, weights: Sequence[torch.Tensor], group: dist.ProcessGroup) -> None:
        self.group, self.rank = group, dist.get_rank(group)
        self.weights = list(weights)
        owners = assign([weight.numel() for weight in weights], dist.get_world_size(group))
        self.at_home = False
        """Whether gradients are here that have not travelled to the owners."""
        self._owner = {id(weight): owner for weight, owner in zip(weights, owners, strict=True)}
        for weight in self.weights:
            weight.settle()
            weight.shared_out = True
            self.drop(weight)

    def owns(self, weight: torch.Tensor) -> bool:
        return self._owner.get(id(weight), self.rank) == self.rank

    def refuse_local_step(self, *_) -> None:
        """Step pre-hook of the optimizer. Raises `FP8BackendError` where gradients stayed on their ranks: the owner of
        a weight would step with its own gradient alone, and everyone else's work would be lost."""
        if self.at_home and any(weight.grad is not None for weight in self.weights):
            raise FP8BackendError(
                "the gradients of this step have not travelled between the ranks (no_sync, which LocalSGD uses), and "
                "each rank makes the steps of the weights that it owns (shard_states): prepare with "
                "shard_states=False, where every rank makes all of them, or let the last backward before each step "
                "synchronize"
            )

    def drop(self, weight: torch.Tensor) -> None:
        if self.owns(weight):
            return
        storage = weight.elsewhere.storage if weight.rest is None else stored_parts(weight.rest)[0].dtype
        weight.rest = None
        weight.elsewhere = Elsewhere(dist.get_global_rank(self.group, self._owner[id(weight)]), storage)

    @torch.no_grad()
    def share(self) -> None:
        streams: list[list[torch.Tensor]] = [[] for _ in range(dist.get_world_size(self.group))]
        for weight in self.weights:
            if weight.requires_grad:
                streams[self._owner[id(weight)]] += _bytes_of(weight.detach())
        longest = max(sum(map(len, stream)) for stream in streams)
        for start in range(0, longest, MESSAGE):
            self._all_gather(streams, start, min(MESSAGE, longest - start))

    def _all_gather(self, streams: list[list[torch.Tensor]], start: int, length: int) -> None:
        sent = torch.zeros(length, dtype=torch.uint8, device=self.weights[0].device)
        _copy([(sent[place], stored) for stored, place in _overlaps(streams[self.rank], start, length)])
        received = sent.new_empty(len(streams) * length)
        all_gather(received, sent, group=self.group)
        messages = enumerate(received.view(len(streams), length))
        others = [(rank, message) for rank, message in messages if rank != self.rank]
        _copy(
            [
                (stored, message[place])
                for rank, message in others
                for stored, place in _overlaps(streams[rank], start, length)
            ]
        )

    @torch.no_grad()
    def send_to_all(self, weight: torch.Tensor, tensors: Sequence[torch.Tensor]) -> None:
        stored = [part for tensor in tensors for part in _bytes_of(tensor)]
        message = torch.cat([part.to(weight.device) for part in stored])
        dist.broadcast(message, dist.get_global_rank(self.group, self._owner[id(weight)]), group=self.group)
        if not self.owns(weight):
            for part, received in zip(stored, message.split([len(part) for part in stored]), strict=True):
                part.copy_(received)


def _copy(pairs: list[tuple[torch.Tensor, torch.Tensor]]) -> None:
    """Copy into the first of each pair what is in the second, in a few launches."""
    if pairs:
        torch._foreach_copy_(*map(list, zip(*pairs, strict=True)))


def _bytes_of(tensor: torch.Tensor) -> list[torch.Tensor]:
    """Views of the bytes that a tensor stores, [n] each."""
    return [part.reshape(-1).view(torch.uint8) for part in stored_parts(tensor)]


def _overlaps(stream: list[torch.Tensor], start: int, length: int) -> Iterator[tuple[torch.Tensor, slice]]:
    """Views of the bytes of a stream from `start` on, and the place of each in a message."""
    begin = 0
    for stored in stream:
        first, last = max(start, begin), min(start + length, begin + len(stored))
        if first < last:
            yield stored[first - begin : last - begin], slice(first - start, last - start)
        begin += len(stored)
