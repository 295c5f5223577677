"""Sums over ranks that travel in FP8: the two-shot all-reduce and its first half, the reduce-scatter.

    rank r:  values ──► N shards ──► E4M3 ──all-to-all──► N contributions to shard r ──► FP32 sum ──► E4M3
                                                                                                       │
             the whole sum, the same bytes on every rank  ◄──────────────all-gather────────────────────┘

No value is ever added in FP8. A ring of FP8 additions rounds N times and must leave room for the sum (FP8-LM's
1/sqrt(N), arXiv:2310.18313): 0.12 to 0.30 relative L2 error at 32 ranks. The two-shot form rounds each value once on
its way to its owner and once on its way back, 0.026 each, whatever N is. The owner does not round what it contributes
itself.

Each block of `BLOCK` elements has a scale, not the tensor. E4M3 spans 2**18, and the rows of a gradient may differ by
more, as those of an embedding or a head do: then one scale for the tensor turns half of it to zero, while blocks keep
it. A scale is a power of two and travels as its exponent, one byte (E8M0): 129 bytes for 128 elements. A block with an
inf or a NaN has the scale NaN, on every rank.

Everything travels as bytes: gloo refuses float8, and NCCL has no need to know. `numerics/kernels` makes and reads
the bytes, with one pass over memory for each arrow above.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist

from ..numerics.formats import E4M3
from ..numerics.kernels import messages as wire
from ..numerics.kernels.layouts import BLOCK, Part
from ..numerics.kernels.messages import decode, encode

LONG = 2**18
"""From so many values on, a message may end with zeros, 0.8 % at most."""


class Reduced(NamedTuple):
    """A sum or mean over ranks as it came from the wire: `codes * scale_inv`, equal to the bit on every rank."""

    codes: torch.Tensor
    """E4M3, [numel]."""
    scale_inv: torch.Tensor
    """FP32, [ceil(numel / BLOCK)]; a power of two, or NaN where a value was not finite."""

    def values(self) -> torch.Tensor:
        """FP32, [numel]."""
        return wire.dequantize(self.codes, self.scale_inv)


class AllReduce:
    """One two-shot all-reduce in flight. Making the object starts the first shot. Every rank gets the same bytes,
    with a relative error of about 0.037 (two roundings to E4M3).

    Collectives of a process group must start in the same order on every rank. So the second shot does not start when
    the first one happens to end, but when the caller says so: call `start_second_shot` at the same place on every rank.

    Args:
        values: FP32, bf16 or fp16, of the same size on every rank; or parts of what travels, on one device, which are
            read where they lie. They may be changed afterwards.
        group: the ranks (default: all).
        mean: divide the sum by the number of ranks.
        rounded: round every contribution once, also the one of the shard's owner. Then the result does not depend on
            which rank owns a shard.
    """

    def __init__(
        self,
        values: torch.Tensor | Sequence[Part],
        group: dist.ProcessGroup | None = None,
        mean: bool = True,
        rounded: bool = False,
    ):
        parts = [Part(values.detach().reshape(-1), 0)] if isinstance(values, torch.Tensor) else values
        self.group, self.numel = group, parts[-1].start + parts[-1].values.numel()
        self.rank, self.size = dist.get_rank(group), dist.get_world_size(group)
        self.divisor = self.size if mean else 1
        self.device = parts[0].values.device
        self.first_shot: _Pending | None = None
        self.second_shot: _Pending | None = None
        if self.numel:
            columns = -(-self.numel // (self.size * BLOCK)) * BLOCK
            columns = _for_vectors(columns) if rounded else columns  # longer shards would have other owners
            sent, self.own = wire.pack(parts, self.size, columns, self.rank, rounded)
            self.first_shot = _all_to_all(sent, group)

    def start_second_shot(self) -> None:
        """Wait for the first shot, sum this rank's shard in FP32 and send the sum to all ranks. Repeating it does
        nothing."""
        if self.second_shot is not None or not self.numel:
            return
        message = wire.reduce(self.first_shot.wait(), self.own, self.rank, self.divisor)
        self.first_shot = self.own = None
        gathered = message.new_empty(self.size, message.shape[1])
        work = all_gather(gathered, message, group=self.group, async_op=True)
        self.second_shot = _Pending(work, gathered, message)

    def wait(self) -> Reduced:
        """Wait for the result. Starts the second shot where that has not happened."""
        if not self.numel:
            empty = torch.empty(0, dtype=E4M3.dtype, device=self.device)
            return Reduced(empty, empty.float())
        self.start_second_shot()
        codes, scale_inv = decode(self.second_shot.wait())
        return Reduced(codes.view(-1)[: self.numel], scale_inv.view(-1)[: -(-self.numel // BLOCK)])

    def write(self, parts: Sequence[Part]) -> None:
        """Wait for the result, and write its values, or some of them, into parts of any floating-point dtype. Starts
        the second shot where that has not happened."""
        if self.numel:
            self.start_second_shot()
            wire.unpack(self.second_shot.wait(), parts)


def reduce_scatter(
    rows: torch.Tensor,
    group: dist.ProcessGroup | None = None,
    mean: bool = False,
    out: torch.Tensor | None = None,
    factor: float = 1.0,
) -> torch.Tensor:
    """The sum (or mean) of what all ranks contribute to this one, times `factor`, [columns]. Contributions travel in
    E4M3; the sum is FP32 and is not rounded to E4M3 again.

    Args:
        rows: [ranks, columns]; row r is what this rank contributes to rank r.
        out: receives the result (default: a new tensor, FP32).
    """
    size, columns = rows.shape
    out = torch.empty(columns, dtype=torch.float32, device=rows.device) if out is None else out
    if columns == 0:
        return out  # every rank sees that there is nothing to send
    rows, rank, travel = rows.detach(), dist.get_rank(group), _for_vectors(columns)
    if travel == columns:
        sent, own = encode(rows, own_row=rank), rows[rank]
    else:
        parts = [Part(row, index * travel) for index, row in enumerate(rows.contiguous().unbind(0))]
        sent, own = wire.pack(parts, size, travel, rank)
    received = _all_to_all(sent, group).wait()
    return wire.reduce_values(received, own[:columns], rank, out, size if mean else 1, factor)


class _Pending(NamedTuple):
    work: dist.Work
    received: torch.Tensor
    sent: torch.Tensor  # must live until it is sent

    def wait(self) -> torch.Tensor:
        self.work.wait()
        return self.received


def _for_vectors(columns: int) -> int:
    """The length of a row of a message with so many values. A long row gets a few zeros more: its bytes are then a
    multiple of 16, and GPUs read and write whole vectors of every row."""
    return columns if columns < LONG else -(-columns // (16 * BLOCK)) * 16 * BLOCK


def all_gather(*args, **kwargs) -> dist.Work | None:
    """`torch.distributed.all_gather_single`, in every version of torch."""
    gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor  # its name before torch 2.13
    return gather(*args, **kwargs)


def _all_to_all(sent: torch.Tensor, group: dist.ProcessGroup | None) -> _Pending:
    received = torch.empty_like(sent)
    return _Pending(dist.all_to_all_single(received, sent, group=group, async_op=True), received, sent)
