"""Rounding FP32 values to the numbers of a format, on their bits, and random bits to do it with.

Formats of eight bits are decoded and encoded with integer operations: these run in vector registers on every CPU, and
on GPUs that have no FP8 casts. `adam_cpu.cpp` and `triton_adam.py` do the same, to the bit.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch

from ...formats import FORMAT_OF

# Fields of the random bits of one element, (lowest bit, bits): an FP16 weight drops 13 bits, a BF16 weight 16. The
# states need fewer, because their updates are not small against their own rounding.
WEIGHT_BITS, EXP_AVG_BITS, EXP_AVG_SQ_BITS = (16, 16), (8, 8), (0, 8)

SEED_FACTOR = 0x9E3779B1
"""Spreads seeds, which are small numbers, over 32 bits."""


class _Grid(NamedTuple):
    """The numbers of a format: multiples of `2**(exponent - mantissa_bits)`, the exponent at least `min_exponent`."""

    dropped: int  # mantissa bits that FP32 has and the format has not
    min_exponent: int
    max_bits: int  # the largest number, as FP32 bits
    smallest: float


def _grid_of(dtype: torch.dtype) -> _Grid:
    info = torch.finfo(dtype)
    mantissa_bits, min_exponent = -int(math.log2(info.eps)), int(math.log2(info.smallest_normal))
    max_bits = torch.tensor(info.max, dtype=torch.float32).view(torch.int32).item()
    return _Grid(23 - mantissa_bits, min_exponent, max_bits, 2.0 ** (min_exponent - mantissa_bits))


_GRIDS = {dtype: _grid_of(dtype) for dtype in (*FORMAT_OF, torch.bfloat16)}


def _bits(values: torch.Tensor) -> torch.Tensor:
    return values.view(torch.int32)


def _magnitude(values: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """min(|x|, max) and a shift: 0, or the smallest normal number of the format for what is below it.

    The sum of both has just the mantissa bits in front of `dropped` that the format stores, subnormal or not.
    """
    grid = _GRIDS[dtype]
    # as integers, the minimum is one instruction
    magnitude = (_bits(values) & 0x7FFFFFFF).clamp(max=grid.max_bits).view(torch.float32)
    return magnitude, torch.where(magnitude < 2.0**grid.min_exponent, 2.0**grid.min_exponent, 0.0)


def stochastic(values: torch.Tensor, dtype: torch.dtype, random: torch.Tensor, low: int, bits: int):
    """Up with the probability of the fraction that is cut off: adding random bits carries with just that probability.

    Returns the bits of |x| + shift, on the grid, and the shift.
    """
    dropped = _GRIDS[dtype].dropped
    magnitude, shift = _magnitude(values, dtype)
    used = min(bits, dropped)
    addend = ((random >> (low + bits - used)) & (2**used - 1)) << (dropped - used)
    if used < dropped:
        addend = addend + 2 ** (dropped - used - 1)  # the middle of what the fewer bits leave open: no bias
    return (_bits(magnitude + shift) + addend) & -(2**dropped), shift


def nearest(values: torch.Tensor, dtype: torch.dtype):
    """To nearest, ties to even. Returns the bits of |x| + shift, on the grid, and the shift."""
    grid = _GRIDS[dtype]
    magnitude, shift = _magnitude(values, dtype)
    bits = _bits(magnitude)
    normal = bits + ((bits >> grid.dropped) & 1) + (2 ** (grid.dropped - 1) - 1)
    step = grid.smallest * 2.0**23  # at this size an FP32 addition rounds to the smallest number of the format
    subnormal = _bits(((magnitude + step) - step) + shift)
    return torch.where(shift > 0, subnormal, normal) & -(2**grid.dropped), shift


def encoded(bits: torch.Tensor, shift: torch.Tensor, signs: torch.Tensor, dtype: torch.dtype, above_zero=False):
    """What `stochastic` or `nearest` returned, as `dtype`; as uint8 for formats of eight bits.

    above_zero: positive values were rounded, and none of them may become 0.
    """
    grid = _GRIDS[dtype]
    if dtype.itemsize > 1:
        magnitude = bits.view(torch.float32) - shift
        if above_zero:
            return torch.maximum(magnitude, torch.where(signs > 0, grid.smallest, 0.0)).to(dtype)
        return (_bits(magnitude) | (_bits(signs) & -(2**31))).view(torch.float32).to(dtype)
    code = (bits - ((grid.min_exponent + 126) << 23) - ((shift > 0).to(torch.int32) << 23)) >> grid.dropped
    if above_zero:
        return torch.maximum(code, (signs > 0).to(torch.int32)).to(torch.uint8)
    return (code | ((_bits(signs) >> 24) & 0x80)).to(torch.uint8)


def decoded(data: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """FP32 values of stored data; a NaN of an eight-bit format is not seen, its scale tells of it."""
    if dtype.itemsize > 1:
        return data.float()
    grid = _GRIDS[dtype]
    code = data.to(torch.int32)
    magnitude = code & 0x7F
    normal = ((magnitude << grid.dropped) + ((grid.min_exponent + 126) << 23)).view(torch.float32)
    values = torch.where(magnitude < 2 ** (23 - grid.dropped), magnitude.float() * grid.smallest, normal)
    return torch.where(code >= 128, -values, values)


# A hash of a counter: the same bits on every device


class RandomBits:
    """Random bits of one parameter's step, in rows of `width`.

    Args:
        seed: of the parameter.
        step: FP32, 0-dim.
        first: what the parameter's first element counts as.
    """

    def __init__(self, seed: int, step: torch.Tensor, width: int, first: int = 0):
        self.first = first
        self.key = mixed(mixed(step.to(torch.int32)) + int32(seed * SEED_FACTOR))
        self.index = torch.arange(width, dtype=torch.int32, device=step.device)

    def of_part(self, start: int, stop: int) -> tuple[torch.Tensor, torch.Tensor]:
        """[key, index of the first element], and 0, 1, 2, ... of a row."""
        key = torch.stack([self.key, torch.full_like(self.key, int32(self.first + start))])
        return key, self.index[: stop - start].data


def random_bits(rows: int, key: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
    """32 bits for each element of `rows` rows, int32 [rows, width]. key, index: from `RandomBits.of_part`."""
    width = index.shape[0]
    first = torch.arange(rows, dtype=torch.int32, device=index.device) * width + key[1]
    return mixed((first.unsqueeze(1) + index) ^ key[0])


def mixed(x: torch.Tensor) -> torch.Tensor:
    """32 mixed bits of an int32: the finaliser "lowbias32" of Chris Wellons' hash-prospector."""
    x = x ^ ((x >> 16) & 0xFFFF)  # torch shifts the sign in
    x = x * int32(0x7FEB352D)
    x = x ^ ((x >> 15) & 0x1FFFF)
    x = x * int32(0x846CA68B)
    return x ^ ((x >> 16) & 0xFFFF)


def int32(number: int) -> int:
    """The lowest 32 bits as a signed number."""
    return (number + 2**31) % 2**32 - 2**31
