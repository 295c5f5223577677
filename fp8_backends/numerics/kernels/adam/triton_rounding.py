"""`rounding.py` for kernels, to the bit the same: formats are decoded, rounded to and encoded, and bits are random.

FORMAT is "fp32", "bf16" or "fp16"; or "e4m3", "e5m2", "e4m11" or "root8", whose codes are uint8 in memory, as are the
residuals of "e4m11".
"""

from __future__ import annotations

import triton
import triton.language as tl

from ..triton_common import (
    as_bits,
    bits_of,
    dropped_bits,
    format_max,
    from_bits,
    from_codes,
    from_magnitude_codes,
    magnitude_codes,
    power_of_two_scale,
    smallest_normal,
)


@triton.jit
def pointer_to(address, FORMAT: tl.constexpr, ALIGNED: tl.constexpr):
    """An address as a pointer to numbers of a format."""
    if FORMAT == "fp32":
        pointer = address.to(tl.pointer_type(tl.float32))
    elif FORMAT == "bf16":
        pointer = address.to(tl.pointer_type(tl.bfloat16))
    elif FORMAT == "fp16":
        pointer = address.to(tl.pointer_type(tl.float16))
    else:
        pointer = address.to(tl.pointer_type(tl.uint8))
    if ALIGNED:  # several elements of a thread are one access
        pointer = tl.multiple_of(pointer, 16)
    return pointer


@triton.jit
def decoded(data, FORMAT: tl.constexpr, HAS_FP8_CASTS: tl.constexpr):
    """FP32 values of stored data. A NaN of an eight-bit format need not be seen, its scale tells of it."""
    if HAS_FP8_CASTS and FORMAT == "e4m3":
        return data.to(tl.float8e4nv, bitcast=True).to(tl.float32)
    elif FORMAT == "e4m3" or FORMAT == "e5m2":
        return from_codes(data, FORMAT)
    elif FORMAT == "root8":
        return from_magnitude_codes(data.to(tl.int32), FORMAT)
    else:
        return data.to(tl.float32)


@triton.jit
def decoded_pair(codes, residuals):
    """FP32 values of E4M3 codes and residuals, which are E4M11."""
    bits = codes.to(tl.int32)
    values = from_magnitude_codes(((bits & 0x7F) << 8) + residuals.to(tl.int8, bitcast=True).to(tl.int32), "e4m11")
    return from_bits(as_bits(values) | ((bits & 0x80) << 24))


@triton.jit
def rounded(
    x,
    random,
    FORMAT: tl.constexpr,
    HAS_FP8_CASTS: tl.constexpr,
    STOCHASTIC: tl.constexpr,
    LOW: tl.constexpr,
    BITS: tl.constexpr,
    WITHIN: tl.constexpr,
):
    """|x| as the format has it, FP32. The sum of |x| and a shift, the smallest normal number where |x| is below it, has
    exactly the mantissa bits that the format stores in front of those that are dropped.

    WITHIN: nothing is above the format's largest number."""
    dropped: tl.constexpr = dropped_bits(FORMAT)
    smallest: tl.constexpr = smallest_normal(FORMAT)
    magnitude = tl.abs(x)
    if not WITHIN:
        magnitude = from_bits(tl.minimum(as_bits(magnitude), bits_of(format_max(FORMAT))))  # of a NaN, too
    if not STOCHASTIC and FORMAT == "fp16":
        return magnitude.to(tl.float16).to(tl.float32)
    elif not STOCHASTIC and FORMAT == "e4m3" and HAS_FP8_CASTS:
        return magnitude.to(tl.float8e4nv).to(tl.float32)
    else:
        shift = tl.where(magnitude < smallest, smallest, 0.0)
        if STOCHASTIC:
            used: tl.constexpr = BITS if BITS < dropped else dropped
            addend = ((random >> (LOW + BITS - used)) & (2**used - 1)) << (dropped - used)
            if used < dropped:
                addend |= 2 ** (dropped - used - 1)
            bits = as_bits(magnitude + shift) + addend
        else:
            step: tl.constexpr = smallest * 2.0**dropped
            normal = as_bits(magnitude) + ((as_bits(magnitude) >> dropped) & 1) + (2 ** (dropped - 1) - 1)
            bits = tl.where(shift > 0, as_bits(((magnitude + step) - step) + smallest), normal)
        return from_bits(bits & -(2**dropped)) - shift


@triton.jit
def with_sign_of(magnitude, x):
    return from_bits(as_bits(magnitude) | (as_bits(x) & -0x80000000))


@triton.jit
def encoded(x, FORMAT: tl.constexpr, HAS_FP8_CASTS: tl.constexpr):
    """Numbers that the format has, as it stores them; uint8 for those of eight bits."""
    if FORMAT == "fp16":
        return x.to(tl.float16)
    elif FORMAT == "bf16":
        return (as_bits(x) >> 16).to(tl.int16).to(tl.bfloat16, bitcast=True)
    elif HAS_FP8_CASTS and FORMAT == "e4m3":
        return x.to(tl.float8e4nv).to(tl.uint8, bitcast=True)
    elif FORMAT == "root8":
        return magnitude_codes(x, FORMAT).to(tl.uint8)
    else:
        return (magnitude_codes(tl.abs(x), FORMAT) | ((as_bits(x) >> 24) & 0x80)).to(tl.uint8)


@triton.jit
def encoded_pair(x):
    """Numbers that "e4m11" has, as E4M3 codes and residuals: `rounding.encoded_pair`."""
    magnitude = magnitude_codes(tl.abs(x), "e4m11")
    code = (magnitude + 0x80) >> 8
    return (code | ((as_bits(x) >> 24) & 0x80)).to(tl.uint8), magnitude.to(tl.uint8)


@triton.jit
def scale_of(amax, FORMAT: tl.constexpr):
    """`scaling.power_of_two_scale`; 1 for formats that have no scale."""
    if FORMAT == "fp32" or FORMAT == "bf16":
        return tl.zeros_like(amax) + 1.0
    else:
        return power_of_two_scale(amax, format_max(FORMAT), 126)


@triton.jit
def mixed(x):
    """32 mixed bits of a uint32."""
    x ^= x >> 16
    x *= 0x7FEB352D
    x ^= x >> 15
    x *= 0x846CA68B
    return x ^ (x >> 16)
