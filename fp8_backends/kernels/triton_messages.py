"""Process messages on a GPU: one Triton kernel for each pass of `messages.py`, reading and writing
every byte once.

A program processes a tile of whole blocks, [TILE, BLOCK], of one part, located by a table
(`tables`). Results equal `messages.py` on a CPU to the bit: true division, and ranks added in
PyTorch's vector order, by sixteens, for up to 255 ranks. After the last whole vector of a row
PyTorch adds more than three ranks in another order, so the FP32 sum may differ there in its last
place.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
import triton
import triton.language as tl

from ..formats.formats import E4M3
from .devices import has_fp8_casts, on_device, on_device_of
from .layouts import MESSAGE_BLOCK, Part, columns_of, shape_of
from .triton_common import (
    OPTIONS,
    TYPES,
    as_bits,
    as_fp32,
    ceil_div,
    format_max,
    from_bits,
    from_codes,
    power_of_two_scale,
    scale_inv_of,
    to_codes,
    to_nearest,
)

TILE = 32
"""Blocks of a program: 4096 elements."""
MESSAGE_WARPS = 4
VECTOR = 16
"""Bytes of a thread's vector access; addresses must be multiples."""
TOGETHER = 16
"""Ranks summed before the next ones, as in PyTorch's cascade sum."""
_BLOCK = tl.constexpr(MESSAGE_BLOCK)
_POINTER, _SCALE, _TILE, _START, _LENGTH, _END = (tl.constexpr(i) for i in range(6))
"""Fields of `Row`."""


def pack(
    parts: Sequence[Part], rows: int, columns: int, rank: int, rounded: bool = False
) -> tuple[torch.Tensor, torch.Tensor]:
    device = parts[0].values.device
    messages = torch.empty(shape_of(rows, columns), dtype=torch.uint8, device=device)
    own = torch.empty(columns, dtype=torch.float32, device=device)
    _pack(parts, messages, own, columns, rank, OWN_ROW=True, KEPT=not rounded)
    return messages, own


def encode(rows: torch.Tensor, own_row: int | None = None) -> torch.Tensor:
    messages = torch.empty(shape_of(*rows.shape), dtype=torch.uint8, device=rows.device)
    own_row = -1 if own_row is None else own_row
    parts = _parts_of(rows.contiguous(), messages)
    _pack(parts, messages, messages, rows.shape[1], own_row, OWN_ROW=False, KEPT=True)
    return messages


def reduce(received: torch.Tensor, own: torch.Tensor, rank: int, divisor: int) -> torch.Tensor:
    message = torch.empty_like(received[:1])
    _sum(received, own, rank, message, divisor, 1.0, ENCODED=True)
    return message


def reduce_values(
    received: torch.Tensor,
    own: torch.Tensor,
    rank: int,
    out: torch.Tensor,
    divisor: int = 1,
    factor: float = 1.0,
) -> torch.Tensor:
    _sum(received, own, rank, out, divisor, factor, ENCODED=False)
    return out


def unpack(messages: torch.Tensor, parts: Sequence[Part]) -> None:
    columns = columns_of(messages)
    for dtype in dict.fromkeys(part.values.dtype for part in parts):
        of_dtype = [part for part in parts if part.values.dtype == dtype]
        _launch_parts(unpack_kernel, of_dtype, messages, messages, columns, CODES=False)


def decode(messages: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    rows, columns = messages.shape[0], columns_of(messages)
    blocks = messages.shape[1] - columns
    codes = torch.empty(rows, columns, dtype=torch.uint8, device=messages.device)
    scale_inv = torch.empty(rows, blocks, dtype=torch.float32, device=messages.device)
    parts = _parts_of(codes, messages)
    _launch_parts(unpack_kernel, parts, messages, scale_inv, columns, CODES=True)
    return codes.view(E4M3.dtype), scale_inv


def dequantize(codes: torch.Tensor, scale_inv: torch.Tensor) -> torch.Tensor:
    values = torch.empty(codes.shape, dtype=torch.float32, device=codes.device)
    grid = ceil_div(codes.numel(), TILE * MESSAGE_BLOCK)
    _launch(dequantize_kernel, grid, codes.view(torch.uint8), scale_inv, values, codes.numel())
    return values


def _parts_of(rows: torch.Tensor, messages: torch.Tensor) -> list[Part]:
    """Return the rows as parts. Each begins a block of the messages."""
    length = (messages.shape[1] - rows.shape[1]) * MESSAGE_BLOCK
    return [Part(row, index * length) for index, row in enumerate(rows.unbind(0))]


def _in_one_dtype(parts: Sequence[Part]) -> list[Part]:
    """Convert parts to FP32 if their dtypes differ or a kernel cannot read them."""
    parts = [part for part in parts if part.values.numel()] or list(parts)
    dtypes = {part.values.dtype for part in parts}
    if len(dtypes) == 1 and dtypes <= TYPES.keys():
        return parts
    return [part._replace(values=part.values.float()) for part in parts]


def _pack(
    parts: Sequence[Part],
    messages: torch.Tensor,
    own: torch.Tensor,
    columns: int,
    rank: int,
    **what,
) -> None:
    parts = _in_one_dtype(parts)
    what["SCALED"] = any(part.scale_inv is not None for part in parts)
    blocks = messages.shape[0] * (messages.shape[1] - columns)
    _launch_parts(pack_kernel, parts, messages, own, columns, rank, blocks=blocks, **what)


def _sum(received, own, rank, out, divisor: int, factor: float, ENCODED: bool) -> None:
    numel, columns = own.shape[0], columns_of(received)
    grid = ceil_div(numel, TILE * MESSAGE_BLOCK)
    arguments = (
        received,
        own,
        out,
        numel,
        columns,
        received.stride(0),
        rank,
        float(divisor),
        factor,
    )
    _launch(
        sum_kernel, grid, *arguments, RANKS=received.shape[0], TOGETHER=TOGETHER, ENCODED=ENCODED
    )


def _launch_parts(
    kernel,
    parts: Sequence[Part],
    messages: torch.Tensor,
    result: torch.Tensor,
    columns: int,
    *arguments,
    blocks: int = 0,
    **constants,
) -> None:
    """Launch a kernel over parts of one dtype, once for each table of them.

    Args:
        result: second tensor of the kernel, besides the messages.
        columns: values in a row.
        blocks: as for `tables`.
    """
    sizes = columns, messages.stride(0), *arguments
    constants["DTYPE"] = TYPES[parts[0].values.dtype]
    for table in tables(parts, TILE, blocks):
        constants |= {"ALIGNED": table.aligned, "STEPS": table.steps}
        rows = table.on(messages.device), len(table.rows)
        _launch(kernel, table.tiles, *rows, messages, result, *sizes, **constants)


def _launch(kernel, programs: int, first: torch.Tensor, *arguments, **constants) -> None:
    if programs == 0:
        return
    if kernel in (pack_kernel, sum_kernel):
        constants["HAS_FP8_CASTS"] = has_fp8_casts(first)
    with on_device_of(first):
        kernel[(programs,)](
            first, *arguments, **constants, TILE=TILE, num_warps=MESSAGE_WARPS, **OPTIONS
        )


class Row(NamedTuple):
    """A row of the device's table: a part, or blocks outside all parts. One launch processes a
    whole bucket."""

    address: int
    scale_address: int
    """0: no scale."""
    first_tile: int
    first_block: int
    numel: int
    """0: blocks of zeros."""
    end_block: int

    @property
    def aligned(self) -> bool:
        return self.address % VECTOR == 0 and self.numel % VECTOR == 0


class Table(NamedTuple):
    rows: list[Row]
    tiles: int
    aligned: bool
    """True if all rows permit vector accesses."""

    @property
    def steps(self) -> int:
        """Count the steps of a binary search for a row."""
        return (len(self.rows) - 1).bit_length()

    def on(self, device: torch.device) -> torch.Tensor:
        """Copy to the device as int64 [fields, rows], without waiting."""
        return on_device(list(zip(*self.rows, strict=True)), torch.int64, device)


def tables(parts: Sequence[Part], tile: int, blocks: int = 0) -> Iterator[Table]:
    """Yield a table of the parts with aligned addresses, and one of the others, if any.

    Args:
        tile: blocks in a tile; a tile belongs to one part.
        blocks: blocks in all rows, to fill gaps between parts with zeros; 0: leave the gaps.
    """
    rows = list(_rows(parts, blocks))
    for aligned in (True, False):
        chosen, tiles = [], 0
        for row in rows:
            if row.aligned == aligned:
                chosen.append(row._replace(first_tile=tiles))
                tiles += -(-(row.end_block - row.first_block) // tile)
        if chosen:
            yield Table(chosen, tiles, aligned)


def _rows(parts: Sequence[Part], blocks: int) -> Iterator[Row]:
    filled = 0
    for part in parts:
        first, end = (
            part.start // MESSAGE_BLOCK,
            -(-(part.start + part.values.numel()) // MESSAGE_BLOCK),
        )
        if blocks and filled < first:
            yield Row(0, 0, 0, filled, 0, first)
        if first < end:
            scale = 0 if part.scale_inv is None else part.scale_inv.data_ptr()
            yield Row(part.values.data_ptr(), scale, 0, first, part.values.numel(), end)
        filled = max(filled, end)
    if filled < blocks:
        yield Row(0, 0, 0, filled, 0, blocks)


@triton.jit
def _part_of(table_ptr, parts, tile, STEPS: tl.constexpr):
    """Find a tile's part: the last with its first tile at or before this one."""
    part = tl.full((), 0, tl.int32)
    for step in tl.static_range(STEPS):
        probe = part + (1 << (STEPS - 1 - step))
        first = tl.load(table_ptr + _TILE * parts + tl.minimum(probe, parts - 1))
        part = tl.where((probe < parts) & (first <= tile), probe, part)
    return part


@triton.jit
def _place(table_ptr, parts, part, tile, ALIGNED: tl.constexpr, TILE: tl.constexpr):
    """Locate a tile of a part: (block numbers in the message [TILE], their mask; element numbers in
    the part [TILE, BLOCK], their mask)."""
    start = tl.load(table_ptr + _START * parts + part).to(tl.int32)
    end = tl.load(table_ptr + _END * parts + part).to(tl.int32)
    length = tl.load(table_ptr + _LENGTH * parts + part)
    if ALIGNED:
        length = tl.multiple_of(length, 16)
    first = (tile - tl.load(table_ptr + _TILE * parts + part).to(tl.int32)) * TILE
    within = first + tl.arange(0, TILE)
    blocks = start + within
    elements = within.to(tl.int64)[:, None] * _BLOCK + tl.arange(0, _BLOCK)[None, :]
    return blocks, blocks < end, elements, elements < length


@triton.jit
def _address(table_ptr, parts, part, DTYPE: tl.constexpr, ALIGNED: tl.constexpr):
    address = tl.load(table_ptr + _POINTER * parts + part).to(tl.pointer_type(DTYPE))
    if ALIGNED:
        address = tl.multiple_of(address, 16)
    return address


@triton.jit
def _in_messages(blocks, columns, stride):
    """Return row, first column, place of the codes and place of the exponent of blocks, [TILE]."""
    blocks_of_row = (columns - 1) // _BLOCK + 1
    row = blocks // blocks_of_row
    block = (blocks - row * blocks_of_row).to(tl.int64)
    begin = row.to(tl.int64) * stride
    return row, block * _BLOCK, begin + block * _BLOCK, begin + columns + block


@triton.jit
def _scale_of(exponents):
    """Decode uint8 exponents to FP32; 255 is NaN."""
    bits = exponents.to(tl.int32)
    return tl.where(bits == 255, float("nan"), from_bits(bits << 23))


@triton.jit
def _quantized(values, HAS_FP8_CASTS: tl.constexpr):
    """Quantize blocks, [TILE, BLOCK], to (codes, exponents [TILE], scale_inv [TILE])."""
    bits = as_bits(values) & 0x7FFFFFFF  # their maximum is the amax, NaN above inf
    amax = from_bits(tl.max(bits, axis=1))
    scale = power_of_two_scale(amax, format_max("e4m3"), 126)
    scale_inv = scale_inv_of(scale, amax)
    codes = to_codes(values * scale[:, None], "e4m3", HAS_FP8_CASTS)
    return codes, (as_bits(scale_inv) >> 23).to(tl.uint8), scale_inv


@triton.jit(do_not_specialize=["parts", "rank"])
def pack_kernel(
    table_ptr,
    parts,
    messages_ptr,
    own_ptr,
    columns,
    stride,
    rank,
    DTYPE: tl.constexpr,
    SCALED: tl.constexpr,
    ALIGNED: tl.constexpr,
    STEPS: tl.constexpr,
    OWN_ROW: tl.constexpr,  # written as FP32
    KEPT: tl.constexpr,  # the own row is neither rounded nor encoded
    HAS_FP8_CASTS: tl.constexpr,
    TILE: tl.constexpr,
):
    tile = tl.program_id(0)
    part = _part_of(table_ptr, parts, tile, STEPS)
    blocks, inside, elements, there = _place(table_ptr, parts, part, tile, ALIGNED, TILE)
    address = _address(table_ptr, parts, part, DTYPE, ALIGNED)
    values = tl.load(address + elements, mask=there, other=0.0)
    values = as_fp32(values)
    if SCALED:
        scale_address = tl.load(table_ptr + _SCALE * parts + part)
        factor = tl.load(
            scale_address.to(tl.pointer_type(tl.float32)), mask=scale_address != 0, other=1.0
        )
        values = values * factor
    row, column, begin, exponent = _in_messages(blocks, columns, stride)
    codes, exponents, scale_inv = _quantized(values, HAS_FP8_CASTS)
    sent = inside
    if KEPT:
        sent = inside & (row != rank)
    j = tl.arange(0, _BLOCK)[None, :]
    written = sent[:, None] & (column[:, None] + j < columns)
    tl.store(messages_ptr + begin[:, None] + j, codes, mask=written)
    tl.store(messages_ptr + exponent, exponents, mask=sent)
    if OWN_ROW:
        if not KEPT:
            values = from_codes(codes, "e4m3") * scale_inv[:, None]
        stays = inside & (row == rank)
        tl.store(own_ptr + column[:, None] + j, values, mask=stays[:, None])


@triton.jit(do_not_specialize=["rank"])
def sum_kernel(
    received_ptr,
    own_ptr,
    out_ptr,
    numel,
    columns,
    stride,
    rank,
    divisor,
    factor,
    RANKS: tl.constexpr,
    TOGETHER: tl.constexpr,
    ENCODED: tl.constexpr,
    HAS_FP8_CASTS: tl.constexpr,
    TILE: tl.constexpr,
):
    blocks = tl.program_id(0) * TILE + tl.arange(0, TILE)
    at = blocks.to(tl.int64)[:, None] * _BLOCK + tl.arange(0, _BLOCK)[None, :]
    inside, there = blocks.to(tl.int64) * _BLOCK < numel, at < numel
    own = as_fp32(tl.load(own_ptr + at, mask=there, other=0.0))
    total = tl.zeros((TILE, _BLOCK), tl.float32)
    message_ptr = received_ptr
    for group in tl.static_range(0, RANKS, TOGETHER):
        some = tl.zeros((TILE, _BLOCK), tl.float32)
        for sender in range(group, min(group + TOGETHER, RANKS)):
            codes = tl.load(message_ptr + at, mask=there, other=0)
            scale_inv = _scale_of(tl.load(message_ptr + columns + blocks, mask=inside, other=0))
            some += tl.where(sender == rank, own, from_codes(codes, "e4m3") * scale_inv[:, None])
            message_ptr += stride
        total += some
    mean = tl.div_rn(total, tl.zeros_like(total) + divisor) * factor
    if ENCODED:
        codes, exponents, _ = _quantized(tl.where(there, mean, 0.0), HAS_FP8_CASTS)
        tl.store(out_ptr + at, codes, mask=there)
        tl.store(out_ptr + columns + blocks, exponents, mask=inside)
    else:
        tl.store(out_ptr + at, to_nearest(mean, out_ptr.dtype.element_ty), mask=there)


@triton.jit(do_not_specialize=["parts"])
def unpack_kernel(
    table_ptr,
    parts,
    messages_ptr,
    scale_inv_ptr,  # FP32, written with CODES
    columns,
    stride,
    DTYPE: tl.constexpr,
    CODES: tl.constexpr,  # copied as uint8
    ALIGNED: tl.constexpr,
    STEPS: tl.constexpr,
    TILE: tl.constexpr,
):
    tile = tl.program_id(0)
    part = _part_of(table_ptr, parts, tile, STEPS)
    blocks, inside, elements, there = _place(table_ptr, parts, part, tile, ALIGNED, TILE)
    _, column, begin, exponent = _in_messages(blocks, columns, stride)
    j = tl.arange(0, _BLOCK)[None, :]
    codes = tl.load(messages_ptr + begin[:, None] + j, mask=there, other=0)
    scale_inv = _scale_of(tl.load(messages_ptr + exponent, mask=inside, other=0))
    out = _address(table_ptr, parts, part, DTYPE, ALIGNED) + elements
    if CODES:
        tl.store(out, codes, mask=there)
        tl.store(scale_inv_ptr + blocks, scale_inv, mask=inside)
    else:
        tl.store(out, to_nearest(from_codes(codes, "e4m3") * scale_inv[:, None], DTYPE), mask=there)


@triton.jit
def dequantize_kernel(codes_ptr, scale_inv_ptr, values_ptr, numel, TILE: tl.constexpr):
    blocks = tl.program_id(0).to(tl.int64) * TILE + tl.arange(0, TILE)
    at = blocks[:, None] * _BLOCK + tl.arange(0, _BLOCK)[None, :]
    there = at < numel
    codes = tl.load(codes_ptr + at, mask=there, other=0)
    scale_inv = tl.load(scale_inv_ptr + blocks, mask=blocks * _BLOCK < numel, other=0.0)
    tl.store(values_ptr + at, from_codes(codes, "e4m3") * scale_inv[:, None], mask=there)
