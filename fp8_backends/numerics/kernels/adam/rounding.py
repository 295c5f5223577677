"""Rounds FP32 values to the numbers of a format, on their bits, and makes the random bits for it.

Formats of eight bits are decoded and encoded with integer operations: these run in vector registers on every CPU, and
on GPUs that have no FP8 casts. `cpu.cpp` and `triton_rounding.py` do the same, to the bit.
"""

from __future__ import annotations

import torch

from ...formats import E4M11, ROOT8, Format

# Fields of the random bits of one element, (lowest bit, bits): as many as the formats drop, E4M11 12, FP16 13, BF16 16
# and E4M3 20. They overlap, so that the last bits of one rounding are others' first bits: the first 12 bits of a weight
# in FP16 or E4M11, 4 of exp_avg and all of exp_avg_sq are one's alone.
WEIGHT_BITS, EXP_AVG_BITS, EXP_AVG_SQ_BITS = (16, 16), (4, 20), (3, 13)

SEED_FACTOR = 0x9E3779B1
"""Spreads seeds, which are small numbers, over 32 bits."""


def _bits(values: torch.Tensor) -> torch.Tensor:
    return values.view(torch.int32)


def _magnitude(values: torch.Tensor, fmt: Format) -> tuple[torch.Tensor, torch.Tensor]:
    """min(|x|, max) and a shift: 0, or the smallest normal number of the format for what is below it.

    The sum of both has exactly the mantissa bits that the format stores in front of those that are dropped.
    """
    # as integers, the minimum is one instruction
    magnitude = (_bits(values) & 0x7FFFFFFF).clamp(max=fmt.max_bits).view(torch.float32)
    return magnitude, torch.where(magnitude < fmt.smallest_normal, fmt.smallest_normal, torch.zeros_like(magnitude))


def stochastic(values: torch.Tensor, fmt: Format, random: torch.Tensor, low: int, bits: int):
    """Round up with the probability of the fraction that is cut off: adding random bits carries with that probability.

    Returns the bits of |x| + shift, a number of the format, and the shift.
    """
    dropped = fmt.dropped_bits
    magnitude, shift = _magnitude(values, fmt)
    used = min(bits, dropped)
    addend = ((random >> (low + bits - used)) & (2**used - 1)) << (dropped - used)
    if used < dropped:
        addend = addend + 2 ** (dropped - used - 1)  # the middle of what the fewer bits leave open: no bias
    return (_bits(magnitude + shift) + addend) & -(2**dropped), shift


def nearest(values: torch.Tensor, fmt: Format):
    """Round to nearest, ties to even. Returns what `stochastic` does."""
    dropped = fmt.dropped_bits
    magnitude, shift = _magnitude(values, fmt)
    bits = _bits(magnitude)
    normal = bits + ((bits >> dropped) & 1) + (2 ** (dropped - 1) - 1)
    step = fmt.smallest * 2.0**23  # at this size an FP32 addition rounds to the smallest number of the format
    subnormal = _bits(((magnitude + step) - step) + shift)
    return torch.where(shift > 0, subnormal, normal) & -(2**dropped), shift


def encoded(bits: torch.Tensor, shift: torch.Tensor, signs: torch.Tensor, fmt: Format, above_zero=False):
    """The codes of what `stochastic` or `nearest` returned: the format's dtype, or uint8 for formats of eight bits.

    above_zero: positive values were rounded, and none of them may become 0.
    """
    if fmt.dtype.itemsize > 1:
        magnitude = bits.view(torch.float32) - shift
        if above_zero:
            return torch.maximum(magnitude, torch.where(signs > 0, fmt.smallest, torch.zeros_like(signs))).to(fmt.dtype)
        return (_bits(magnitude) | (_bits(signs) & -(2**31))).view(torch.float32).to(fmt.dtype)
    code = _magnitude_code(bits, shift, fmt)
    if above_zero:
        return torch.maximum(code, (signs > 0).to(torch.int32)).to(torch.uint8)
    return (code | _sign_bit(signs)).to(torch.uint8)


def encoded_pair(bits: torch.Tensor, shift: torch.Tensor, signs: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The E4M3 codes, uint8, and residuals, int8, of what `stochastic` or `nearest` returned for E4M11. The code is the
    nearest one, of two equally near ones the larger."""
    magnitude = _magnitude_code(bits, shift, E4M11)
    code = (magnitude + 0x80) >> 8
    return (code | _sign_bit(signs)).to(torch.uint8), (magnitude - (code << 8)).to(torch.int8)


def codes_of(
    values: torch.Tensor,
    fmt: Format,
    random: torch.Tensor | None = None,
    field: tuple[int, int] = (0, 0),
    above_zero: bool = False,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Scaled FP32 values as the format stores them: what `encoded` returns and None, or of E4M11 what `encoded_pair`
    returns.

    Args:
        random: an element's random bits, int32, of which rounding takes those of `field`; None rounds to nearest.
        above_zero: as in `encoded`.
    """
    rounded = nearest(values, fmt) if random is None else stochastic(values, fmt, random, *field)
    return encoded_pair(*rounded, values) if fmt is E4M11 else (encoded(*rounded, values, fmt, above_zero), None)


def _magnitude_code(bits: torch.Tensor, shift: torch.Tensor, fmt: Format) -> torch.Tensor:
    """Exponent and mantissa as the format stores them, int32."""
    return (bits - _zero_exponent(fmt) - ((shift > 0).to(torch.int32) << 23)) >> fmt.dropped_bits


def _sign_bit(signs: torch.Tensor) -> torch.Tensor:
    return (_bits(signs) >> 24) & 0x80


def decoded(data: torch.Tensor, fmt: Format, residual: torch.Tensor | None = None) -> torch.Tensor:
    """FP32 values of stored data; a NaN of an eight-bit format is not seen, its scale tells of it.

    Args:
        data: of the format's dtype; uint8 for formats of eight bits, and of the E4M3 codes of E4M11.
        residual: int8, for E4M11.
    """
    if fmt.dtype.itemsize > 1:
        return data.float()
    code = data.to(torch.int32)
    magnitude = code if fmt is ROOT8 else code & 0x7F
    if residual is not None:
        magnitude = (magnitude << 8) + residual.to(torch.int32)
    normal = ((magnitude << fmt.dropped_bits) + _zero_exponent(fmt)).view(torch.float32)
    values = torch.where(magnitude < 2**fmt.mantissa_bits, magnitude.float() * fmt.smallest, normal)
    return values if fmt is ROOT8 else torch.where(code >= 128, -values, values)


def _zero_exponent(fmt: Format) -> int:
    """FP32 bits of the power of two for which the format would store the exponent 0."""
    return (127 - fmt.bias) << 23


# A hash of a counter: the same bits on every device


class RandomBits:
    """The random bits of one parameter's step, in rows of `width`.

    Args:
        seed: of the parameter.
        step: FP32, 0-dim.
        first: the index that the parameter's first element counts as.
    """

    def __init__(self, seed: int, step: torch.Tensor, width: int, first: int = 0):
        self.first = first
        self.key = mixed(mixed(step.to(torch.int32)) + int32(seed * SEED_FACTOR))
        self.index = torch.arange(width, dtype=torch.int32, device=step.device)

    def part(self, start: int, stop: int) -> tuple[torch.Tensor, torch.Tensor]:
        """[key, index of the first element], and 0, 1, 2, ... for the elements of a row."""
        key = torch.stack([self.key, torch.full_like(self.key, int32(self.first + start))])
        return key, self.index[: stop - start].data


def random_bits(rows: int, key: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
    """32 bits for each element of `rows` rows, int32 [rows, width]. key, index: from `RandomBits.part`."""
    width = index.shape[0]
    first = torch.arange(rows, dtype=torch.int32, device=index.device) * width + key[1]
    return mixed((first.unsqueeze(1) + index) ^ key[0])


def mixed(x: torch.Tensor) -> torch.Tensor:
    """32 mixed bits of an int32: the finalizer "lowbias32" of Chris Wellons' hash-prospector."""
    x = x ^ ((x >> 16) & 0xFFFF)  # torch shifts the sign in
    x = x * int32(0x7FEB352D)
    x = x ^ ((x >> 15) & 0x1FFFF)
    x = x * int32(0x846CA68B)
    return x ^ ((x >> 16) & 0xFFFF)


def int32(number: int) -> int:
    """The lowest 32 bits as a signed number."""
    return (number + 2**31) % 2**32 - 2**31
