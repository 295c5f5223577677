"""Messages: gradients on their way between ranks, E4M3 codes and the exponents of their scales, as bytes.

What travels is a matrix of values, one row for each rank, and a message is a row of it:

    row of `columns` values  ──►  columns codes | ceil(columns / BLOCK) exponents          129 bytes for 128 values

Each step of a reduction is one pass over memory. `pack` reads gradients where they lie and writes messages, `reduce`
adds up what arrived and writes the message of the sum, `reduce_values` the sum itself, and `unpack` writes averages
where they are wanted. `reference.py` defines the numbers in a few operations of PyTorch, each of which makes tensors of
its own. On a CPU the same operations run in chunks that stay in its caches (`cpu.py`), and on a GPU each step is a
Triton kernel (`triton_messages.py`). All give the same bits.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ..eager import is_eager
from ..triton_gate import usable
from . import cpu, reference
from .reference import Part

# One pass each


def pack(
    parts: Sequence[Part], rows: int, columns: int, rank: int, rounded: bool = False
) -> tuple[torch.Tensor, torch.Tensor]:
    """Messages for all ranks, and what stays on this one: (uint8, [rows, columns + columns / BLOCK]; FP32, [columns]).

    Args:
        parts: on one device, in the order of their starts; at least one.
        columns: values in a row, a multiple of BLOCK. Rows stand for ranks.
        rank: the row that stays, as FP32. Nobody reads its message, which is not written unless it is rounded.
        rounded: what stays is rounded as if it had travelled.
    """
    return _implementation(parts[0].values).pack(parts, rows, columns, rank, rounded)


def encode(rows: torch.Tensor, own_row: int | None = None) -> torch.Tensor:
    """Messages of values in any floating-point dtype, [rows, columns], with any number of columns. uint8.

    Args:
        own_row: number of the row that stays on this rank. Nobody reads its message, which may not be written.
    """
    return _implementation(rows).encode(rows, own_row)


def reduce(received: torch.Tensor, own: torch.Tensor, rank: int, divisor: int) -> torch.Tensor:
    """The message of what `received` adds up to, over `divisor`. uint8, [1, bytes].

    Args:
        received: uint8, [ranks, bytes]. Row `rank` is not read: `own`, [columns] in any dtype, takes its place.
    """
    return _implementation(received).reduce(received, own, rank, divisor)


def reduce_values(
    received: torch.Tensor, own: torch.Tensor, rank: int, out: torch.Tensor, divisor: int = 1, factor: float = 1.0
) -> torch.Tensor:
    """`out`, FP32, bf16 or fp16: the sum of `received` over `divisor` times `factor`, as in `reduce`. `own` and `out`
    may end before the messages do."""
    _implementation(received).reduce_values(received, own, rank, out, divisor, factor)
    return out


def unpack(messages: torch.Tensor, parts: Sequence[Part]) -> None:
    """The values of messages with whole blocks, written into the parts: FP32, bf16 or fp16, without a scale."""
    _implementation(messages).unpack(messages, parts)


def decode(messages: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Messages, uint8 -> (codes, E4M3 [rows, columns]; scale_inv, FP32 [rows, ceil(columns / BLOCK)])."""
    return _implementation(messages).decode(messages)


def dequantize(codes: torch.Tensor, scale_inv: torch.Tensor) -> torch.Tensor:
    """The values of codes, [numel], with a scale for each BLOCK of them: FP32."""
    return _implementation(codes).dequantize(codes, scale_inv)


def _implementation(tensor: torch.Tensor):
    if usable(tensor):
        from . import triton_messages  # Triton takes a second to load

        return triton_messages
    return cpu if is_eager(tensor) and tensor.device.type == "cpu" else reference
