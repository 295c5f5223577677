"""Encode gradients as messages between ranks: bytes of E4M3 codes and the exponents of their
scales.

Values form a matrix with one row for each rank, and a message is a row of it:

    row of `columns` values  ──►  columns codes | ceil(columns / MESSAGE_BLOCK) exponents  129 bytes for 128 values

PyTorch operations process chunks that stay in a CPU core's cache; on a GPU the function of the same
name in `triton_messages.py` gives the same bits in one pass over memory. Codes are decoded with
integer operations, and arbitrarily in a non-finite block, with its scale of NaN.
"""

import bisect
import functools
from collections.abc import Callable, Iterator, Sequence

import torch

from ..formats.formats import E4M3, FP16
from ..formats.scaling import e8m0_values, power_of_two_scale
from .layouts import MESSAGE_BLOCK, Part, columns_of, exponents_of, shape_of
from .triton_gate import is_fake, usable

CHUNK = 2**18
"""Elements of a chunk, 1 MB in FP32. In smaller ones, calls take longer than the work."""


def _with_kernel(function: Callable) -> Callable:
    """Call the function of this name in `triton_messages` for tensors on a GPU."""

    @functools.wraps(function)
    def fastest(first, *arguments, **options):
        if usable(first if isinstance(first, torch.Tensor) else first[0].values):
            from . import triton_messages  # Triton takes a second to load

            return getattr(triton_messages, function.__name__)(first, *arguments, **options)
        return function(first, *arguments, **options)

    return fastest


@_with_kernel
def pack(
    parts: Sequence[Part], rows: int, columns: int, rank: int, rounded: bool = False
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return messages for all ranks, uint8 [rows, columns + columns / MESSAGE_BLOCK], and the own
    row, FP32 [columns].

    Args:
        parts: at least one, on one device, ordered by start.
        columns: values in a row, a multiple of MESSAGE_BLOCK. Rows stand for ranks.
        rank: row of this rank. Its message is written only if `rounded`.
        rounded: round the own row as if it had been sent.
    """
    device = parts[0].values.device
    messages = torch.empty(shape_of(rows, columns), dtype=torch.uint8, device=device)
    own, scratch, ends = (
        torch.empty(columns, device=device),
        _scratch(2, columns, device),
        _ends(parts),
    )
    for row, first, last in _chunks(messages, rows, columns):
        values = own[first:last] if row == rank and not rounded else scratch[0, : last - first]
        _gather(parts, ends, row * columns + first, row * columns + last, values)
        if row != rank or rounded:
            _encode(values, messages[row], columns, first, scratch[1])
        if row == rank and rounded:
            _decode(messages[row : row + 1], columns, first, own[first:last].unsqueeze(0))
    return messages, own


@_with_kernel
def encode(rows: torch.Tensor, own_row: int | None = None) -> torch.Tensor:
    """Return messages, uint8, of floating-point values [rows, columns]. May not write the message
    of `own_row`."""
    messages = torch.empty(shape_of(*rows.shape), dtype=torch.uint8, device=rows.device)
    columns, scratch = rows.shape[1], _scratch(2, rows.shape[1], rows.device)
    for row, first, last in _chunks(messages, *rows.shape):
        if row != own_row:
            values = scratch[0, : last - first].copy_(rows[row, first:last])
            _encode(values, messages[row], columns, first, scratch[1])
    return messages


@_with_kernel
def reduce(received: torch.Tensor, own: torch.Tensor, rank: int, divisor: int) -> torch.Tensor:
    """Return the message, uint8 [1, bytes], of the sum of `received`, uint8 [ranks, bytes], over
    `divisor`. `own`, [columns] in any dtype, replaces row `rank`."""
    message = torch.empty_like(received[:1])
    for first, total, spare in _sums(received, own, rank):
        _encode(total.div_(divisor), message[0], own.shape[0], first, spare)
    return message


@_with_kernel
def reduce_values(
    received: torch.Tensor,
    own: torch.Tensor,
    rank: int,
    out: torch.Tensor,
    divisor: int = 1,
    factor: float = 1.0,
) -> torch.Tensor:
    """Write the sum of `received` over `divisor` times `factor` into `out`, FP32, bf16 or fp16;
    arguments as `reduce`. `own` and `out` may be shorter than the messages."""
    for first, total, _ in _sums(received, own, rank):
        out[first : first + len(total)] = total.div_(divisor).mul_(factor)
    return out


@_with_kernel
def unpack(messages: torch.Tensor, parts: Sequence[Part]) -> None:
    """Write the values of messages with whole blocks into the parts: FP32, bf16 or fp16, without a
    scale."""
    columns, ends = columns_of(messages), _ends(parts)
    scratch = _scratch(1, columns, messages.device)
    for row, first, last in _chunks(messages, messages.shape[0], columns):
        values = scratch[:, : last - first]
        _decode(messages[row : row + 1], columns, first, values)
        for part, elements, place in _overlaps(
            parts, ends, row * columns + first, row * columns + last
        ):
            part.values[elements] = values[0, place]


@_with_kernel
def decode(messages: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Split messages, uint8, into (E4M3 codes [rows, columns], FP32 scale_inv [rows, ceil(columns /
    MESSAGE_BLOCK)])."""
    columns = columns_of(messages)
    codes = messages.narrow(1, 0, columns).clone(memory_format=torch.contiguous_format)
    return codes.view(E4M3.dtype), e8m0_values(
        messages.narrow(1, columns, messages.shape[1] - columns)
    )


@_with_kernel
def dequantize(codes: torch.Tensor, scale_inv: torch.Tensor) -> torch.Tensor:
    """Return the FP32 values of codes, [numel], with a scale for each MESSAGE_BLOCK of them."""
    values = torch.empty(1, codes.numel(), dtype=torch.float32, device=codes.device)
    for _, first, last in _chunks(values, 1, codes.numel()):
        scales = scale_inv[first // MESSAGE_BLOCK : -(-last // MESSAGE_BLOCK)]
        _dequantize(codes[first:last].unsqueeze(0), scales.unsqueeze(0), values[:, first:last])
    return values[0]


def _scratch(rows: int, columns: int, device: torch.device) -> torch.Tensor:
    """Allocate FP32 memory for chunks of rows, whole blocks each."""
    return torch.empty(
        rows,
        min(-(-columns // MESSAGE_BLOCK) * MESSAGE_BLOCK, CHUNK),
        dtype=torch.float32,
        device=device,
    )


def _chunks(
    result: torch.Tensor, rows: int, columns: int, length: int | None = None
) -> Iterator[tuple[int, int, int]]:
    """Yield (row, first column, end) of chunks that begin at a multiple of MESSAGE_BLOCK; none of a
    result without values."""
    if is_fake(result):
        return
    length = length or CHUNK
    for row in range(rows):
        for first in range(0, columns, length):
            yield row, first, min(first + length, columns)


def _ends(parts: Sequence[Part]) -> list[int]:
    return [part.start + part.values.numel() for part in parts]


def _overlaps(
    parts: Sequence[Part], ends: list[int], begin: int, end: int
) -> Iterator[tuple[Part, slice, slice]]:
    """Yield the parts with elements in `begin:end`: (part, its elements, their place after
    `begin`)."""
    for i in range(
        bisect.bisect_right(ends, begin),
        bisect.bisect_left(parts, end, key=lambda part: part.start),
    ):
        first, last = max(parts[i].start, begin), min(ends[i], end)
        yield (
            parts[i],
            slice(first - parts[i].start, last - parts[i].start),
            slice(first - begin, last - begin),
        )


def _gather(
    parts: Sequence[Part], ends: list[int], begin: int, end: int, out: torch.Tensor
) -> None:
    """Write the elements `begin:end` into `out`, with zeros between parts."""
    filled = 0
    for part, elements, place in _overlaps(parts, ends, begin, end):
        out[filled : place.start].zero_()
        if part.scale_inv is None:
            out[place] = part.values[elements]
        else:
            torch.mul(part.values[elements].float(), part.scale_inv, out=out[place])
        filled = place.stop
    out[filled:].zero_()


def _encode(
    values: torch.Tensor, message: torch.Tensor, columns: int, first: int, spare: torch.Tensor
) -> None:
    """Write FP32 values from column `first` on into a message of `columns` values. Overwrites the
    values."""
    numel, blocks = len(values), -(-len(values) // MESSAGE_BLOCK)
    if numel % MESSAGE_BLOCK:  # the last of a row
        values = torch.nn.functional.pad(values, (0, -numel % MESSAGE_BLOCK))
    values = values.view(blocks, MESSAGE_BLOCK)
    amax = torch.abs(values, out=spare[: values.numel()].view(blocks, MESSAGE_BLOCK)).amax(1)
    scale = power_of_two_scale(amax, E4M3)
    values.mul_(scale.unsqueeze(1)).clamp_(-E4M3.max, E4M3.max)
    message[first : first + numel].view(E4M3.dtype).copy_(values.view(-1)[:numel])
    place = columns + first // MESSAGE_BLOCK
    message[place : place + blocks] = exponents_of(scale, amax)


def _decode(messages: torch.Tensor, columns: int, first: int, out: torch.Tensor) -> None:
    """Write values from column `first` on into `out`, FP32 [messages, elements]."""
    place, blocks = columns + first // MESSAGE_BLOCK, -(-out.shape[1] // MESSAGE_BLOCK)
    _dequantize(
        messages[:, first : first + out.shape[1]],
        e8m0_values(messages[:, place : place + blocks]),
        out,
    )


def _dequantize(codes: torch.Tensor, scale_inv: torch.Tensor, out: torch.Tensor) -> None:
    """Write values of E4M3 codes or their bits, [n, elements], with scale_inv [n, blocks], into
    FP32 `out`."""
    # shifted up by seven, a code is an FP16 number but for the exponent's bias
    half = (
        codes.view(torch.int8)
        .to(torch.int16)
        .bitwise_left_shift_(7)
        .bitwise_and_(-0x4001)
        .view(torch.float16)
    )
    out.copy_(half).mul_(2.0 ** (FP16.bias - E4M3.bias))
    whole = out.shape[1] // MESSAGE_BLOCK * MESSAGE_BLOCK
    out[:, :whole].unflatten(1, (-1, MESSAGE_BLOCK)).mul_(
        scale_inv[:, : whole // MESSAGE_BLOCK].unsqueeze(-1)
    )
    if whole < out.shape[1]:
        out[:, whole:].mul_(scale_inv[:, -1:])


def _sums(
    received: torch.Tensor, own: torch.Tensor, rank: int
) -> Iterator[tuple[int, torch.Tensor, torch.Tensor]]:
    """Yield (first column, FP32 sum of the contributions, spare memory of the same size) of each
    chunk."""
    size, columns, numel = received.shape[0], columns_of(received), own.shape[0]
    length = min(max(CHUNK // size // MESSAGE_BLOCK, 8), -(-numel // MESSAGE_BLOCK)) * MESSAGE_BLOCK
    contributions, room = torch.empty(
        size + 2, length, dtype=torch.float32, device=received.device
    ).split([size, 2])
    for _, first, last in _chunks(contributions, 1, numel, length):
        part = contributions[:, : last - first]
        for others in (slice(0, rank), slice(rank + 1, size)):
            if others.start < others.stop:
                _decode(received[others], columns, first, part[others])
        part[rank] = own[first:last]
        yield first, torch.sum(part, 0, out=room[0, : last - first]), room[1]
