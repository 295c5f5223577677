"""`rounding.py` for kernels: formats decoded, rounded to and encoded, and random bits, to the bit the same.

FORMAT is "fp32", "bf16", "fp16", "e4m3" or "e5m2", the latter two uint8 in memory.
"""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl

from ..triton_common import as_bits, from_bits, power_of_two_scale


@triton.constexpr_function
def _max_of(fmt):
    return {"bf16": torch.finfo(torch.bfloat16).max, "fp16": 65504.0, "e4m3": 448.0, "e5m2": 57344.0}[fmt]


@triton.constexpr_function
def _smallest(fmt):
    """The smallest normal number."""
    return {"bf16": 2.0**-126, "fp16": 2.0**-14, "e4m3": 2.0**-6, "e5m2": 2.0**-14}[fmt]


@triton.constexpr_function
def _dropped(fmt):
    """Mantissa bits that FP32 has and the format has not."""
    return {"bf16": 16, "fp16": 13, "e4m3": 20, "e5m2": 21}[fmt]


@triton.constexpr_function
def least_bits(fmt):
    """The smallest number as FP32 bits. Of bf16 it is no normal FP32 number, of which Triton would make FP64."""
    smallest = {"fp16": 2.0**-24, "e4m3": 2.0**-9, "e5m2": 2.0**-16}
    return 1 << 16 if fmt == "bf16" else (math.frexp(smallest[fmt])[1] + 126) << 23


@triton.constexpr_function
def _bits(number):
    """FP32 bits of a number that FP32 has."""
    fraction, exponent = math.frexp(number)
    return (exponent + 126 << 23) + int((2 * fraction - 1) * 2**23)


@triton.jit
def pointer_to(address, FORMAT: tl.constexpr, ALIGNED: tl.constexpr):
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
    """FP32. A NaN of an eight-bit format need not be seen, its scale tells of it."""
    if FORMAT == "e4m3" or FORMAT == "e5m2":
        if HAS_FP8_CASTS and FORMAT == "e4m3":
            return data.to(tl.float8e4nv, bitcast=True).to(tl.float32)
        else:
            code = data.to(tl.int32)
            magnitude = from_bits((code & 0x7F) << _dropped(FORMAT)) * (_smallest(FORMAT) / 2.0**-126)
            return from_bits(as_bits(magnitude) | ((code & 0x80) << 24))
    else:
        return data.to(tl.float32)


@triton.jit
def rounded(x, random, FORMAT: tl.constexpr, STOCHASTIC: tl.constexpr, LOW: tl.constexpr, BITS: tl.constexpr):
    """x as the format has it, FP32: |x| plus a shift, the smallest normal number where |x| is below it, has just the
    mantissa bits in front of those that are dropped that the format stores."""
    dropped: tl.constexpr = _dropped(FORMAT)
    smallest: tl.constexpr = _smallest(FORMAT)
    magnitude = tl.minimum(as_bits(x) & 0x7FFFFFFF, _bits(_max_of(FORMAT)))
    shift = tl.where(magnitude < _bits(smallest), smallest, 0.0)
    if STOCHASTIC:
        used: tl.constexpr = BITS if BITS < dropped else dropped
        addend = ((random >> (LOW + BITS - used)) & (2**used - 1)) << (dropped - used)
        if used < dropped:
            addend += 2 ** (dropped - used - 1)
        bits = as_bits(from_bits(magnitude) + shift) + addend
    else:
        step: tl.constexpr = smallest * 2.0**dropped
        normal = magnitude + ((magnitude >> dropped) & 1) + (2 ** (dropped - 1) - 1)
        bits = tl.where(shift > 0, as_bits(((from_bits(magnitude) + step) - step) + smallest), normal)
    magnitude = as_bits(from_bits(bits & -(2**dropped)) - shift)
    return from_bits(magnitude | (as_bits(x) & -0x80000000))


@triton.jit
def encoded(x, FORMAT: tl.constexpr, HAS_FP8_CASTS: tl.constexpr):
    """Numbers that the format has, as it stores them; uint8 for those of eight bits."""
    if FORMAT == "fp16":
        return x.to(tl.float16)
    elif FORMAT == "bf16":
        return (as_bits(x) >> 16).to(tl.int16).to(tl.bfloat16, bitcast=True)
    elif HAS_FP8_CASTS and FORMAT == "e4m3":
        return x.to(tl.float8e4nv).to(tl.uint8, bitcast=True)
    else:
        bits = as_bits(x * (2.0**-126 / _smallest(FORMAT)))  # FP32 has the code there as its upper bits
        return ((bits & 0x7FFFFFFF) >> _dropped(FORMAT) | ((bits >> 24) & 0x80)).to(tl.uint8)


@triton.jit
def scale_of(amax, FORMAT: tl.constexpr):
    if FORMAT == "fp32" or FORMAT == "bf16":
        return tl.zeros_like(amax) + 1.0
    else:
        return power_of_two_scale(amax, _max_of(FORMAT), 126)


@triton.jit
def mixed(x):
    """32 mixed bits of a uint32."""
    x ^= x >> 16
    x *= 0x7FEB352D
    x ^= x >> 15
    x *= 0x846CA68B
    return x ^ (x >> 16)
