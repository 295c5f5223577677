"""Process messages on a CPU in chunks that stay in a core's cache, with the operations and bits of `messages.py`.

Whole-tensor operations write and reread fresh memory each time, which costs more than the arithmetic. Codes are decoded
with integer operations in vector registers, and arbitrarily in a non-finite block, with its scale of NaN.
"""

from __future__ import annotations

import bisect
from collections.abc import Iterator, Sequence

import torch

from ..formats.formats import E4M3, FP16
from ..formats.scaling import power_of_two_scale
from .layouts import BLOCK, Part, columns_of, exponents_of, scales_of, shape_of

CHUNK = 2**18
"""Elements of a chunk, 1 MB in FP32. In smaller ones, calls take longer than the work."""


def pack(
    parts: Sequence[Part], rows: int, columns: int, rank: int, rounded: bool = False
) -> tuple[torch.Tensor, torch.Tensor]:
    messages, own = torch.empty(shape_of(rows, columns), dtype=torch.uint8), torch.empty(columns)
    scratch, ends = _scratch(2, columns), _ends(parts)
    for row, first, last in _chunks(rows, columns):
        values = own[first:last] if row == rank and not rounded else scratch[0, : last - first]
        _gather(parts, ends, row * columns + first, row * columns + last, values)
        if row != rank or rounded:
            _encode(values, messages[row], columns, first, scratch[1])
        if row == rank and rounded:
            _decode(messages[row : row + 1], columns, first, own[first:last].unsqueeze(0))
    return messages, own


def encode(rows: torch.Tensor, own_row: int | None = None) -> torch.Tensor:
    messages = torch.empty(shape_of(*rows.shape), dtype=torch.uint8)
    columns, scratch = rows.shape[1], _scratch(2, rows.shape[1])
    for row, first, last in _chunks(*rows.shape):
        if row != own_row:
            values = scratch[0, : last - first].copy_(rows[row, first:last])
            _encode(values, messages[row], columns, first, scratch[1])
    return messages


def reduce(received: torch.Tensor, own: torch.Tensor, rank: int, divisor: int) -> torch.Tensor:
    message = torch.empty_like(received[:1])
    for first, total, spare in _sums(received, own, rank):
        _encode(total.div_(divisor), message[0], own.shape[0], first, spare)
    return message


def reduce_values(
    received: torch.Tensor, own: torch.Tensor, rank: int, out: torch.Tensor, divisor: int = 1, factor: float = 1.0
) -> torch.Tensor:
    for first, total, _ in _sums(received, own, rank):
        out[first : first + len(total)] = total.div_(divisor).mul_(factor)
    return out


def unpack(messages: torch.Tensor, parts: Sequence[Part]) -> None:
    columns, ends = columns_of(messages), _ends(parts)
    scratch = _scratch(1, columns)
    for row, first, last in _chunks(messages.shape[0], columns):
        values = scratch[:, : last - first]
        _decode(messages[row : row + 1], columns, first, values)
        for part, elements, place in _overlaps(parts, ends, row * columns + first, row * columns + last):
            part.values[elements] = values[0, place]


def dequantize(codes: torch.Tensor, scale_inv: torch.Tensor) -> torch.Tensor:
    values = torch.empty(1, codes.numel(), dtype=torch.float32)
    for _, first, last in _chunks(1, codes.numel()):
        scales = scale_inv[first // BLOCK : -(-last // BLOCK)]
        _dequantize(codes[first:last].unsqueeze(0), scales.unsqueeze(0), values[:, first:last])
    return values[0]


def _scratch(rows: int, columns: int) -> torch.Tensor:
    """Allocate FP32 memory for chunks of rows, whole blocks each."""
    return torch.empty(rows, min(-(-columns // BLOCK) * BLOCK, CHUNK), dtype=torch.float32)


def _chunks(rows: int, columns: int, length: int | None = None) -> Iterator[tuple[int, int, int]]:
    """Yield (row, first column, end) of chunks that begin at a multiple of BLOCK."""
    length = length or CHUNK
    for row in range(rows):
        for first in range(0, columns, length):
            yield row, first, min(first + length, columns)


def _ends(parts: Sequence[Part]) -> list[int]:
    return [part.start + part.values.numel() for part in parts]


def _overlaps(parts: Sequence[Part], ends: list[int], begin: int, end: int) -> Iterator[tuple[Part, slice, slice]]:
    """Yield the parts with elements in `begin:end`: (part, its elements, their place after `begin`)."""
    for i in range(bisect.bisect_right(ends, begin), bisect.bisect_left(parts, end, key=lambda part: part.start)):
        first, last = max(parts[i].start, begin), min(ends[i], end)
        yield parts[i], slice(first - parts[i].start, last - parts[i].start), slice(first - begin, last - begin)


def _gather(parts: Sequence[Part], ends: list[int], begin: int, end: int, out: torch.Tensor) -> None:
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


def _encode(values: torch.Tensor, message: torch.Tensor, columns: int, first: int, spare: torch.Tensor) -> None:
    """Write FP32 values from column `first` on into a message of `columns` values. Overwrites the values."""
    numel, blocks = len(values), -(-len(values) // BLOCK)
    if numel % BLOCK:  # the last of a row
        values = torch.nn.functional.pad(values, (0, -numel % BLOCK))
    values = values.view(blocks, BLOCK)
    amax = torch.abs(values, out=spare[: values.numel()].view(blocks, BLOCK)).amax(1)
    scale = power_of_two_scale(amax, E4M3)
    values.mul_(scale.unsqueeze(1)).clamp_(-E4M3.max, E4M3.max)
    message[first : first + numel].view(E4M3.dtype).copy_(values.view(-1)[:numel])
    place = columns + first // BLOCK
    message[place : place + blocks] = exponents_of(scale, amax)


def _decode(messages: torch.Tensor, columns: int, first: int, out: torch.Tensor) -> None:
    """Write values from column `first` on into `out`, FP32 [messages, elements]."""
    place, blocks = columns + first // BLOCK, -(-out.shape[1] // BLOCK)
    _dequantize(messages[:, first : first + out.shape[1]], scales_of(messages[:, place : place + blocks]), out)


def _dequantize(codes: torch.Tensor, scale_inv: torch.Tensor, out: torch.Tensor) -> None:
    """Write values of E4M3 codes or their bits, [n, elements], with scale_inv [n, blocks], into FP32 `out`."""
    # shifted up by seven, a code is an FP16 number but for the exponent's bias
    half = codes.view(torch.int8).to(torch.int16).bitwise_left_shift_(7).bitwise_and_(-0x4001).view(torch.float16)
    out.copy_(half).mul_(2.0 ** (FP16.bias - E4M3.bias))
    whole = out.shape[1] // BLOCK * BLOCK
    out[:, :whole].unflatten(1, (-1, BLOCK)).mul_(scale_inv[:, : whole // BLOCK].unsqueeze(-1))
    if whole < out.shape[1]:
        out[:, whole:].mul_(scale_inv[:, -1:])


def _sums(received: torch.Tensor, own: torch.Tensor, rank: int) -> Iterator[tuple[int, torch.Tensor, torch.Tensor]]:
    """Yield (first column, FP32 sum of the contributions, spare memory of the same size) of each chunk."""
    size, columns, numel = received.shape[0], columns_of(received), own.shape[0]
    length = min(max(CHUNK // size // BLOCK, 8), -(-numel // BLOCK)) * BLOCK
    contributions, room = (torch.empty(rows, length, dtype=torch.float32) for rows in (size, 2))
    for _, first, last in _chunks(1, numel, length):
        part = contributions[:, : last - first]
        for others in (slice(0, rank), slice(rank + 1, size)):
            if others.start < others.stop:
                _decode(received[others], columns, first, part[others])
        part[rank] = own[first:last]
        yield first, torch.sum(part, 0, out=room[0, : last - first]), room[1]
