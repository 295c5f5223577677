"""Round FP32 values to a format on their bits, with hashed random bits for stochastic rounding.

Integer operations are vectorized on every CPU and available on GPUs without FP8 casts. `adam.cpp`
and `triton_tiles.py` do the same, to the bit.
"""

import torch

from ..formats.formats import E4M11, ROOT8, Format

# Fields of an element's 32 random bits, (lowest bit, bits). Formats drop 12 (E4M11), 13 (FP16), 16
# (BF16) or 20 (E4M3) bits. The fields overlap: the last bits of one rounding are the first of
# another, but the first 12 bits of a weight in FP16 or E4M11, 4 of exp_avg and all of exp_avg_sq
# are exclusive.
WEIGHT_BITS, EXP_AVG_BITS, EXP_AVG_SQ_BITS = (16, 16), (4, 20), (3, 13)

SEED_FACTOR = 0x9E3779B1
"""Spreads small seeds over 32 bits."""


def codes_of(
    values: torch.Tensor,
    fmt: Format,
    random: torch.Tensor | None = None,
    field: tuple[int, int] = (0, 0),
    above_zero: bool = False,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Round scaled FP32 values, saturating. Returns data of the format's dtype (uint8 for eight
    bits) and None, or for E4M11 the nearest E4M3 codes, uint8 (of two equally near ones the
    larger), and residuals, int8.

    Args:
        random: int32, an element's random bits; rounding uses those of `field`. None: to nearest,
            ties to even.
        above_zero: values are not negative, and positive ones do not round to 0.
    """
    bits, shift = (
        _nearest(values, fmt) if random is None else _stochastic(values, fmt, random, *field)
    )
    if fmt.dtype.itemsize > 1:
        magnitude = bits.view(torch.float32) - shift
        if above_zero:
            least = torch.where(values > 0, fmt.smallest, torch.zeros_like(values))
            return torch.maximum(magnitude, least).to(fmt.dtype), None
        return (_bits(magnitude) | (_bits(values) & -(2**31))).view(torch.float32).to(
            fmt.dtype
        ), None
    code = (bits - _zero_exponent(fmt) - ((shift > 0).to(torch.int32) << 23)) >> fmt.dropped_bits
    sign = (_bits(values) >> 24) & 0x80
    if fmt is E4M11:
        nearest = (code + 0x80) >> 8
        return (nearest | sign).to(torch.uint8), (code - (nearest << 8)).to(torch.int8)
    if above_zero:
        return torch.maximum(code, (values > 0).to(torch.int32)).to(torch.uint8), None
    return (code | sign).to(torch.uint8), None


def decoded(data: torch.Tensor, fmt: Format, residual: torch.Tensor | None = None) -> torch.Tensor:
    """Return FP32 values of stored data. A NaN of an eight-bit format becomes a number: its scale
    is NaN.

    Args:
        data: of the format's dtype; uint8 for eight-bit formats and for the E4M3 codes of E4M11.
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


def _bits(values: torch.Tensor) -> torch.Tensor:
    return values.view(torch.int32)


def _magnitude(values: torch.Tensor, fmt: Format) -> tuple[torch.Tensor, torch.Tensor]:
    """Return min(|x|, max) and a shift: the format's smallest normal number for values below it,
    else 0.

    In their sum, exactly the format's mantissa bits precede the dropped ones.
    """
    # clamped as integers, in one instruction
    magnitude = (_bits(values) & 0x7FFFFFFF).clamp(max=fmt.max_bits).view(torch.float32)
    return magnitude, torch.where(
        magnitude < fmt.smallest_normal, fmt.smallest_normal, torch.zeros_like(magnitude)
    )


def _stochastic(values: torch.Tensor, fmt: Format, random: torch.Tensor, low: int, bits: int):
    """Round up with the probability of the dropped fraction, as the carry of added random bits.

    Returns the bits of |x| + shift on the format's grid, and the shift.
    """
    dropped = fmt.dropped_bits
    magnitude, shift = _magnitude(values, fmt)
    used = min(bits, dropped)
    addend = ((random >> (low + bits - used)) & (2**used - 1)) << (dropped - used)
    if used < dropped:
        addend = addend + 2 ** (dropped - used - 1)  # the middle of the missing bits: no bias
    return (_bits(magnitude + shift) + addend) & -(2**dropped), shift


def _nearest(values: torch.Tensor, fmt: Format):
    """Round to nearest, ties to even. Returns as `_stochastic`."""
    dropped = fmt.dropped_bits
    magnitude, shift = _magnitude(values, fmt)
    bits = _bits(magnitude)
    normal = bits + ((bits >> dropped) & 1) + (2 ** (dropped - 1) - 1)
    # at this size an FP32 addition rounds to the smallest number of the format
    step = fmt.smallest * 2.0**23
    subnormal = _bits(((magnitude + step) - step) + shift)
    return torch.where(shift > 0, subnormal, normal) & -(2**dropped), shift


def _zero_exponent(fmt: Format) -> int:
    """Return the FP32 bits of the power of two with a stored exponent of 0."""
    return (127 - fmt.bias) << 23


def random_key(seed: int, step: torch.Tensor) -> torch.Tensor:
    """Hash a parameter's seed and its step, FP32 0-dim, to an int32 key for `random_bits`."""
    return mixed(mixed(step.to(torch.int32)) + _int32(seed * SEED_FACTOR))


def random_bits(key: torch.Tensor, first: int, count: int) -> torch.Tensor:
    """Hash the indices `first`, `first + 1`, … to 32 bits each, int32 [count], equal on every
    device."""
    return mixed((torch.arange(count, dtype=torch.int32, device=key.device) + _int32(first)) ^ key)


def mixed(x: torch.Tensor) -> torch.Tensor:
    """Mix the bits of an int32: the finalizer "lowbias32" of Chris Wellons' hash-prospector."""
    x = x ^ ((x >> 16) & 0xFFFF)  # torch shifts the sign in
    x = x * _int32(0x7FEB352D)
    x = x ^ ((x >> 15) & 0x1FFFF)
    x = x * _int32(0x846CA68B)
    return x ^ ((x >> 16) & 0xFFFF)


def _int32(number: int) -> int:
    """Return the lowest 32 bits as a signed number."""
    return (number + 2**31) % 2**32 - 2**31
