"""Encode gradients as messages between ranks: bytes of E4M3 codes and the exponents of their scales.

Values form a matrix with one row for each rank, and a message is a row of it:

    row of `columns` values  ──►  columns codes | ceil(columns / BLOCK) exponents          129 bytes for 128 values

The functions here define the numbers, with PyTorch operations for any device, fake and traced tensors. Eager CPU
tensors go to the function of the same name in `cpu_messages.py`, in chunks that stay in cache; GPU tensors to a Triton
kernel (`triton_messages.py`), one pass over memory each. All give the same bits.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence

import torch
from torch.nn.functional import pad

from ..formats.formats import E4M3, saturating_cast
from ..formats.scaling import power_of_two_scale
from .layouts import BLOCK, Part, columns_of, exponents_of, scales_of
from .triton_gate import is_eager, usable


def _dispatched(reference: Callable) -> Callable:
    """Call the function of this name in `triton_messages` or `cpu_messages` for tensors they serve.

    `__wrapped__` is the function itself.
    """

    @functools.wraps(reference)
    def fastest(first, *arguments, **options):
        tensor, module = first if isinstance(first, torch.Tensor) else first[0].values, None
        if usable(tensor):
            from . import triton_messages as module  # Triton takes a second to load
        elif is_eager(tensor) and tensor.device.type == "cpu":
            from . import cpu_messages as module
        return getattr(module, reference.__name__, reference)(first, *arguments, **options)

    return fastest


@_dispatched
def pack(
    parts: Sequence[Part], rows: int, columns: int, rank: int, rounded: bool = False
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return messages for all ranks, uint8 [rows, columns + columns / BLOCK], and the own row, FP32 [columns].

    Args:
        parts: at least one, on one device, ordered by start.
        columns: values in a row, a multiple of BLOCK. Rows stand for ranks.
        rank: row of this rank. Its message is written only if `rounded`.
        rounded: round the own row as if it had been sent.
    """
    pieces, filled = [], 0
    for part in parts:
        gap = torch.zeros(part.start - filled, dtype=torch.float32, device=part.values.device)
        values = part.values.float()
        pieces += [gap, values if part.scale_inv is None else values * part.scale_inv]
        filled = part.start + part.values.numel()
    values = pad(torch.cat(pieces), (0, rows * columns - filled)).view(rows, columns)
    messages = encode.__wrapped__(values)
    return messages, (values_of(messages) if rounded else values).select(0, rank).clone()


@_dispatched
def encode(rows: torch.Tensor, own_row: int | None = None) -> torch.Tensor:
    """Return messages, uint8, of floating-point values [rows, columns]. May not write the message of `own_row`."""
    columns = rows.shape[1]
    blocks = pad(rows.float(), (0, -columns % BLOCK)).view(rows.shape[0], -1, BLOCK)
    amax = blocks.abs().amax(-1)
    scale = power_of_two_scale(amax, E4M3)
    codes = saturating_cast(blocks * scale.unsqueeze(-1), E4M3).view(rows.shape[0], -1).narrow(1, 0, columns)
    return torch.cat([codes.view(torch.uint8), exponents_of(scale, amax)], 1)


@_dispatched
def reduce(received: torch.Tensor, own: torch.Tensor, rank: int, divisor: int) -> torch.Tensor:
    """Return the message of the sum of `received` over `divisor`, uint8 [1, bytes].

    Args:
        received: uint8 [ranks, bytes]. `own`, [columns] in any dtype, replaces row `rank`.
    """
    return encode.__wrapped__((_sum(received, own, rank) / divisor).unsqueeze(0))


@_dispatched
def reduce_values(
    received: torch.Tensor, own: torch.Tensor, rank: int, out: torch.Tensor, divisor: int = 1, factor: float = 1.0
) -> torch.Tensor:
    """Write the sum of `received` over `divisor` times `factor` into `out`, FP32, bf16 or fp16; arguments as `reduce`.
    `own` and `out` may be shorter than the messages."""
    return out.copy_(_sum(received, own, rank) / divisor * factor)


@_dispatched
def unpack(messages: torch.Tensor, parts: Sequence[Part]) -> None:
    """Write the values of messages with whole blocks into the parts: FP32, bf16 or fp16, without a scale."""
    values = values_of(messages).view(-1)
    for part in parts:
        part.values.copy_(values.narrow(0, part.start, part.values.numel()))


@_dispatched
def decode(messages: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Split messages, uint8, into (E4M3 codes [rows, columns], FP32 scale_inv [rows, ceil(columns / BLOCK)])."""
    columns = columns_of(messages)
    codes = messages.narrow(1, 0, columns).clone(memory_format=torch.contiguous_format)
    return codes.view(E4M3.dtype), scales_of(messages.narrow(1, columns, messages.shape[1] - columns))


@_dispatched
def dequantize(codes: torch.Tensor, scale_inv: torch.Tensor) -> torch.Tensor:
    """Return the FP32 values of codes, [numel], with a scale for each BLOCK of them."""
    return codes.float() * scale_inv.repeat_interleave(BLOCK).narrow(0, 0, codes.numel())


def values_of(messages: torch.Tensor) -> torch.Tensor:
    """Return the values of messages: FP32 [rows, columns]."""
    codes, scale_inv = decode.__wrapped__(messages)
    return codes.float() * scale_inv.repeat_interleave(BLOCK, 1).narrow(1, 0, codes.shape[1])


def _sum(received: torch.Tensor, own: torch.Tensor, rank: int) -> torch.Tensor:
    contributions = list(values_of(received).narrow(1, 0, own.shape[0]).unbind(0))
    contributions[rank] = own.float()
    return torch.stack(contributions).sum(0)
