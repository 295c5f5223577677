"""What the Triton kernels share: the arithmetic of `scaling` and `formats` on a GPU, to the bit.

Import this module only where `triton_gate.usable` has said yes: it loads Triton. Launch every kernel with `**OPTIONS`,
inside `triton_gate.on_device_of(tensor)`.

FP8 codes are uint8 here, in kernels and pointers: the numbers of older GPUs and of Triton's interpreter come from
integer operations, and one type serves all.
"""

from __future__ import annotations

import math

import triton
import triton.language as tl

OPTIONS = {"enable_fp_fusion": False}
"""For every launch: a product and a sum that become one instruction are rounded once, not twice."""

_FP32_MAX = tl.constexpr(3.4028234663852886e38)


@triton.constexpr_function
def format_max(fmt):
    """Largest finite magnitude of "e4m3", "e5m2" or "fp16" (`Format.name`). As all below, for constants of a kernel."""
    return {"e4m3": 448.0, "e5m2": 57344.0, "fp16": 65504.0}[fmt]


@triton.constexpr_function
def mantissa_bits(fmt):
    return {"e4m3": 3, "e5m2": 2, "fp16": 10}[fmt]


@triton.constexpr_function
def smallest_normal(fmt):
    return {"e4m3": 2.0**-6, "e5m2": 2.0**-14, "fp16": 2.0**-14}[fmt]


@triton.constexpr_function
def _mantissa(number):
    """The 23 mantissa bits of a positive FP32 number."""
    return int((2 * math.frexp(number)[0] - 1) * 2**23)


@triton.constexpr_function
def _exponent(number):
    """floor(log2(number))."""
    return math.frexp(number)[1] - 1


@triton.constexpr_function
def _power(exponent):
    return 2.0**exponent


@triton.jit
def as_fp32(x):
    """bf16, fp16 or FP32 as FP32. bf16 by its bits, the upper half: Triton's interpreter misreads subnormal numbers."""
    if x.dtype == tl.bfloat16:
        return from_bits(x.to(tl.int16, bitcast=True).to(tl.int32) << 16)
    else:
        return x.to(tl.float32)


@triton.jit
def magnitude(x):
    """|x|, zero for NaN. FP32."""
    return tl.where(x == x, tl.abs(x), 0.0)


@triton.jit
def as_bits(x):
    """FP32 as int32. The bits of numbers that are not negative have the order of the numbers, with NaN above inf."""
    return x.to(tl.int32, bitcast=True)


@triton.jit
def from_bits(bits):
    """int32 as FP32."""
    return bits.to(tl.float32, bitcast=True)


@triton.jit
def is_finite(amax):
    """Of an amax, which is not negative. False for NaN."""
    return amax < float("inf")


@triton.jit
def scale_from_amax(amax, FORMAT_MAX: tl.constexpr):
    """`scaling.scale_from_amax`: FORMAT_MAX / amax, at most the largest FP32; 1 for an amax of 0, inf or NaN."""
    scale = tl.minimum(tl.div_rn(tl.zeros_like(amax) + FORMAT_MAX, amax), _FP32_MAX)
    return tl.where((amax > 0) & is_finite(amax), scale, 1.0)


@triton.jit
def power_of_two_scale(amax, FORMAT_MAX: tl.constexpr, LARGEST: tl.constexpr):
    """`2**floor(log2(FORMAT_MAX / amax))`, at most 2**LARGEST; 1 for an amax of 0, inf or NaN.

    LARGEST 126 is `scaling.power_of_two_scale`, 127 `scaling.block_scale`.
    """
    bits = as_bits(amax)
    above = ((bits & 0x7FFFFF) > _mantissa(FORMAT_MAX)).to(tl.int32)
    quotient = _exponent(FORMAT_MAX) + 127 - (bits >> 23) - above
    scale = from_bits((tl.minimum(quotient, LARGEST) + 127) << 23)
    return tl.where((amax > 0) & is_finite(amax), scale, 1.0)


@triton.jit
def scale_inv_of(scale, amax):
    """`scaling.scale_inv_of`: 1 / scale, NaN where the amax was not finite."""
    return tl.where(is_finite(amax), tl.div_rn(tl.zeros_like(scale) + 1.0, scale), float("nan"))


@triton.jit
def on_grid(x, MANTISSA_BITS: tl.constexpr, SMALLEST_NORMAL: tl.constexpr):
    """FP32 values rounded to nearest even to a format's numbers, and still FP32; of any size, nothing saturates.

    Adding a power of two whose last place is the format's unit there rounds, and taking it away is exact.
    """
    bits = as_bits(x)
    power = from_bits(bits & 0x7F800000)
    unit = tl.maximum(power, SMALLEST_NORMAL) * _power(23 - MANTISSA_BITS)
    rounded = (tl.abs(x) + unit) - unit
    return from_bits(as_bits(rounded) | (bits & -0x80000000))


@triton.jit
def to_codes(x, FORMAT: tl.constexpr, HAS_FP8_CASTS: tl.constexpr):
    """`formats.saturating_cast` of FP32 values, already scaled: to nearest even, saturated, NaN stays NaN.

    FORMAT: "e4m3" or "e5m2", whose codes are uint8; "fp16", which returns float16. HAS_FP8_CASTS: as
    `triton_gate.has_fp8_casts` says. One instruction then does all of it for two values.
    """
    if FORMAT == "fp16":
        largest: tl.constexpr = format_max(FORMAT)
        return tl.clamp(x, -largest, largest, propagate_nan=tl.PropagateNan.ALL).to(tl.float16)
    elif HAS_FP8_CASTS:
        if FORMAT == "e4m3":
            return x.to(tl.float8e4nv).to(tl.uint8, bitcast=True)
        else:
            return x.to(tl.float8e5).to(tl.uint8, bitcast=True)
    else:
        return _codes_by_bits(x, format_max(FORMAT), mantissa_bits(FORMAT), smallest_normal(FORMAT))


@triton.jit
def _codes_by_bits(x, FORMAT_MAX: tl.constexpr, MANTISSA_BITS: tl.constexpr, SMALLEST_NORMAL: tl.constexpr):
    """The same by integer operations, uint8. Rounded to the format's numbers, a value times the power of two between
    FP32's smallest normal number and the format's has the code as the upper bits, subnormal codes included."""
    rounded = on_grid(tl.minimum(tl.abs(x), FORMAT_MAX), MANTISSA_BITS, SMALLEST_NORMAL)
    bits = as_bits(rounded * (_power(-126) / SMALLEST_NORMAL))
    code = tl.where(x == x, bits >> (23 - MANTISSA_BITS), 0x7F)
    return (code | ((as_bits(x) >> 24) & 0x80)).to(tl.uint8)


@triton.jit
def from_codes(codes, FORMAT: tl.constexpr):
    """FP32 values of uint8 codes ("e4m3", "e5m2"), NaN included; of "fp16" itself, a plain cast.

    The inverse of `_codes_by_bits`: shifted to where FP32 has its exponent, and multiplied by a power of two.
    """
    if FORMAT == "fp16":
        return codes.to(tl.float32)
    bits = codes.to(tl.int32)
    values = from_bits((bits & 0x7F) << (23 - mantissa_bits(FORMAT))) * (smallest_normal(FORMAT) / _power(-126))
    if FORMAT == "e4m3":
        values = tl.where((bits & 0x7F) == 0x7F, float("nan"), values)
    else:
        values = tl.where((bits & 0x7F) == 0x7C, float("inf"), values)
        values = tl.where((bits & 0x7F) > 0x7C, float("nan"), values)
    return from_bits(as_bits(values) | ((bits & 0x80) << 24))
