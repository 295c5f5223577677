"""Messages of gradients: their layout, and the passes of `dispatch.py` as a few operations on whole tensors.

They define the numbers, and work on any device, on tensors without memory and under tracing."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

from ...formats import E4M3, saturating_cast
from ...scaling import power_of_two_scale, scale_inv_of

BLOCK = 128
"""Elements that share a scale on the wire."""


class Part(NamedTuple):
    """Values that lie in one piece in memory, and where they stand among the values of all rows, row after row.

    What no part covers counts as zero.
    """

    values: torch.Tensor
    """[numel], contiguous; FP32, bf16, fp16, or whatever else a cast to FP32 reads."""
    start: int
    """Index among the values of the flattened rows; a multiple of BLOCK. The last block may be cut off."""
    scale_inv: torch.Tensor | None = None
    """The values are multiplied by it: FP32, 0-dimensional."""


def shape_of(rows: int, columns: int) -> tuple[int, int]:
    """The shape of messages for so many rows and columns of values."""
    return rows, columns + -(-columns // BLOCK)


def columns_of(messages: torch.Tensor) -> int:
    """How many of the bytes of a message are codes."""
    return messages.shape[1] - -(-messages.shape[1] // (BLOCK + 1))


def pack(parts: Sequence[Part], rows: int, columns: int, rank: int, rounded: bool) -> tuple[torch.Tensor, torch.Tensor]:
    values = _joined(parts, rows * columns).view(rows, columns)
    messages = encode(values, None)
    return messages, (values_of(messages) if rounded else values).select(0, rank).clone()


def encode(rows: torch.Tensor, own_row: int | None) -> torch.Tensor:
    columns = rows.shape[1]
    blocks = torch.nn.functional.pad(rows.float(), (0, -columns % BLOCK)).view(rows.shape[0], -1, BLOCK)
    amax = blocks.abs().amax(-1)
    scale = power_of_two_scale(amax, E4M3)
    codes = saturating_cast(blocks * scale.unsqueeze(-1), E4M3).view(rows.shape[0], -1).narrow(1, 0, columns)
    return torch.cat([codes.view(torch.uint8), exponents_of(scale, amax)], 1)


def reduce(received: torch.Tensor, own: torch.Tensor, rank: int, divisor: int) -> torch.Tensor:
    return encode((_sum(received, own, rank) / divisor).unsqueeze(0), None)


def reduce_values(
    received: torch.Tensor, own: torch.Tensor, rank: int, out: torch.Tensor, divisor: int, factor: float
) -> None:
    out.copy_(_sum(received, own, rank) / divisor * factor)


def unpack(messages: torch.Tensor, parts: Sequence[Part]) -> None:
    values = values_of(messages).view(-1)
    for part in parts:
        part.values.copy_(values.narrow(0, part.start, part.values.numel()))


def decode(messages: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    columns = columns_of(messages)
    codes = messages.narrow(1, 0, columns).clone(memory_format=torch.contiguous_format)
    return codes.view(E4M3.dtype), scales_of(messages.narrow(1, columns, messages.shape[1] - columns))


def dequantize(codes: torch.Tensor, scale_inv: torch.Tensor) -> torch.Tensor:
    return codes.float() * scale_inv.repeat_interleave(BLOCK).narrow(0, 0, codes.numel())


# what a message holds


def values_of(messages: torch.Tensor) -> torch.Tensor:
    """The values of messages: FP32, [rows, columns]."""
    codes, scale_inv = decode(messages)
    return codes.float() * scale_inv.repeat_interleave(BLOCK, 1).narrow(1, 0, codes.shape[1])


def exponents_of(scale: torch.Tensor, amax: torch.Tensor) -> torch.Tensor:
    """The inverse of scales as E8M0: uint8, 255 where the amax was not finite."""
    return (scale_inv_of(scale, amax).view(torch.int32) >> 23 & 0xFF).to(torch.uint8)


def scales_of(exponents: torch.Tensor) -> torch.Tensor:
    """The inverse scales of exponents: FP32, NaN of 255."""
    exponents = exponents.to(torch.int32)
    scale_inv = (exponents << 23).view(torch.float32)
    return torch.where(exponents == 0xFF, torch.full_like(scale_inv, float("nan")), scale_inv)


def _sum(received: torch.Tensor, own: torch.Tensor, rank: int) -> torch.Tensor:
    contributions = list(values_of(received).narrow(1, 0, own.shape[0]).unbind(0))
    contributions[rank] = own.float()
    return torch.stack(contributions).sum(0)


def _joined(parts: Sequence[Part], numel: int) -> torch.Tensor:
    """Parts in their places among so many elements, with zeros between them; FP32."""
    pieces, filled = [], 0
    for part in parts:
        gap = torch.zeros(part.start - filled, dtype=torch.float32, device=part.values.device)
        values = part.values.float()
        pieces += [gap, values if part.scale_inv is None else values * part.scale_inv]
        filled = part.start + part.values.numel()
    return torch.nn.functional.pad(torch.cat(pieces), (0, numel - filled))
