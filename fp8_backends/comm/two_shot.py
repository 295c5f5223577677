"""Sums over ranks that travel in FP8: the two-shot all-reduce and its first half, the reduce-scatter.

    rank r:  values ──► N shards ──► E4M3 ──all-to-all──► N contributions to shard r ──► FP32 sum ──► E4M3
                                                                                                       │
             the whole sum, the same bytes on every rank  ◄──────────────all-gather────────────────────┘

No value is ever added in FP8. A ring of FP8 additions rounds N times and must leave room for the sum (FP8-LM's
1/sqrt(N), arXiv:2310.18313): 0.12 to 0.30 relative L2 error at 32 ranks. Here each value is rounded once on its way to
its owner and once on its way back, 0.026 each, whatever N is; what the owner itself contributes is not rounded on the
way.

The unit of scaling is a block of `BLOCK` elements, not the tensor: E4M3 spans 2**18, and where the rows of a
gradient differ by more, as those of an embedding or a head do, one scale for the tensor turns half of it to zero, while
blocks keep it. A scale is a power of two and travels as its exponent, one byte (E8M0): 129 bytes for 128 elements.
A block with an inf or a NaN has the scale NaN, on every rank.

Everything travels as bytes: gloo refuses float8, and NCCL has no need to know.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.distributed as dist

from ..formats import E4M3, saturating_cast
from ..scaling import power_of_two_scale, scale_inv_of

BLOCK = 128
"""Elements that share a scale on the wire."""


class Reduced(NamedTuple):
    """A sum or mean over ranks as it came from the wire: `codes * scale_inv`, equal to the bit on every rank."""

    codes: torch.Tensor
    """E4M3, [numel]."""
    scale_inv: torch.Tensor
    """FP32, [ceil(numel / BLOCK)]; a power of two, or NaN where a value was not finite."""

    def values(self) -> torch.Tensor:
        """FP32, [numel]."""
        spread = self.scale_inv.repeat_interleave(BLOCK)[: self.codes.numel()]
        return self.codes.float() * spread


class AllReduce:
    """One two-shot all-reduce on its way; making it starts the first shot.

    Collectives of a process group must start in the same order on every rank, so the second shot starts when the owner
    says so, and not when the first one happens to end: call `start_second_shot` at the same place on every rank.

    Args:
        values: [numel], FP32, bf16 or fp16, of the same size on every rank; free to be changed afterwards.
        group: the ranks (default: all).
        mean: divide the sum by the number of ranks.
    """

    def __init__(self, values: torch.Tensor, group: dist.ProcessGroup | None = None, mean: bool = True):
        self.group, self.numel = group, values.numel()
        self.size = dist.get_world_size(group)
        self.divisor = self.size if mean else 1
        columns = -(-self.numel // (self.size * BLOCK)) * BLOCK
        rows = _padded(values.detach().reshape(-1), self.size * columns).view(self.size, columns)
        self.own = rows[dist.get_rank(group)].float().clone()
        self.first_shot = _all_to_all(encode(rows), group) if self.numel else None
        self.second_shot: _Pending | None = None

    def start_second_shot(self) -> None:
        """Sum this rank's shard in FP32 and send it to everyone. Waits for the first shot. Once; repeating it does
        nothing."""
        if self.second_shot is not None or not self.numel:
            return
        total = _sum(self.first_shot.wait(), self.own, self.group) / self.divisor
        self.first_shot = self.own = None
        message = encode(total.unsqueeze(0))
        gathered = message.new_empty(self.size, message.shape[1])
        work = all_gather(gathered, message, group=self.group, async_op=True)
        self.second_shot = _Pending(work, gathered, message)

    def wait(self) -> Reduced:
        """The result. Starts the second shot where that has not happened."""
        if not self.numel:
            empty = torch.empty(0, dtype=E4M3.dtype, device=self.own.device)
            return Reduced(empty, empty.float())
        self.start_second_shot()
        codes, scale_inv = decode(self.second_shot.wait())
        blocks = -(-self.numel // BLOCK)
        return Reduced(codes.reshape(-1)[: self.numel], scale_inv.reshape(-1)[:blocks])


def all_reduce(values: torch.Tensor, group: dist.ProcessGroup | None = None, mean: bool = True) -> torch.Tensor:
    """The mean (or sum) over the ranks of `values`, any shape, FP32, bf16 or fp16; returned in its shape and dtype.

    Every rank gets the same bytes. Relative error about 0.037 (two roundings to E4M3); non-finite values turn their
    block of `BLOCK` elements into NaN, on every rank.
    """
    reduced = AllReduce(values, group, mean).wait()
    return reduced.values().view(values.shape).to(values.dtype)


def reduce_scatter(rows: torch.Tensor, group: dist.ProcessGroup | None = None, mean: bool = False) -> torch.Tensor:
    """Of `rows`, [ranks, columns], row r is what this rank contributes to rank r; returns the sum (or mean) of all
    contributions to this rank, FP32, [columns]. They travel in E4M3; the sum is FP32 and is not rounded again."""
    size, columns = rows.shape
    own = rows[dist.get_rank(group)].float()
    if columns == 0:
        return own  # every rank sees that there is nothing to send
    total = _sum(_all_to_all(encode(rows.detach()), group).wait(), own, group)
    return total / size if mean else total


# Messages: [rows, columns + ceil(columns / BLOCK)] bytes; in a row the codes come first, then the scales' exponents


def encode(rows: torch.Tensor) -> torch.Tensor:
    """[rows, columns] in any floating-point dtype -> messages, uint8."""
    columns = rows.shape[1]
    blocks = _padded(rows.float(), -(-columns // BLOCK) * BLOCK).view(rows.shape[0], -1, BLOCK)
    amax = blocks.abs().amax(-1)
    scale = power_of_two_scale(amax, E4M3)
    codes = saturating_cast(blocks * scale.unsqueeze(-1), E4M3).view(rows.shape[0], -1).narrow(1, 0, columns)
    exponents = (scale_inv_of(scale, amax).view(torch.int32) >> 23 & 0xFF).to(torch.uint8)
    return torch.cat([codes.view(torch.uint8), exponents], 1)


def decode(messages: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Messages, uint8 -> (codes, E4M3 [rows, columns]; scale_inv, FP32 [rows, ceil(columns / BLOCK)])."""
    columns = _columns(messages.shape[1])
    exponents = messages.narrow(1, columns, messages.shape[1] - columns).to(torch.int32)
    scale_inv = (exponents << 23).view(torch.float32)
    scale_inv = torch.where(exponents == 0xFF, torch.full_like(scale_inv, float("nan")), scale_inv)
    codes = messages.narrow(1, 0, columns).clone(memory_format=torch.contiguous_format)
    return codes.view(E4M3.dtype), scale_inv


def _columns(message: int) -> int:
    """How many of the bytes of a message are codes."""
    return message - -(-message // (BLOCK + 1))


def _values(messages: torch.Tensor) -> torch.Tensor:
    codes, scale_inv = decode(messages)
    return codes.float() * scale_inv.repeat_interleave(BLOCK, 1)[:, : codes.shape[1]]


def _sum(messages: torch.Tensor, own: torch.Tensor, group) -> torch.Tensor:
    """FP32 [columns]: what the ranks sent, with this rank's own contribution as it was before it was rounded."""
    contributions = _values(messages)
    contributions[dist.get_rank(group)] = own
    return contributions.sum(0)


class _Pending(NamedTuple):
    work: dist.Work
    received: torch.Tensor
    sent: torch.Tensor  # alive until it is sent

    def wait(self) -> torch.Tensor:
        self.work.wait()
        return self.received


def all_gather(*args, **kwargs) -> dist.Work | None:
    """`torch.distributed.all_gather_single`, in every version of torch."""
    gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor  # its name before torch 2.13
    return gather(*args, **kwargs)


def _all_to_all(messages: torch.Tensor, group) -> _Pending:
    received = torch.empty_like(messages)
    return _Pending(dist.all_to_all_single(received, messages, group=group, async_op=True), received, messages)


def _padded(values: torch.Tensor, length: int) -> torch.Tensor:
    """Zeros behind the last dimension, up to `length`."""
    missing = length - values.shape[-1]
    return torch.nn.functional.pad(values, (0, missing)) if missing else values
