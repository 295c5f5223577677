"""What the Triton kernels share: the arithmetic of `scaling` and `formats` on a GPU, to the bit.

Import this module only where `triton_gate.usable` returned True: it loads Triton. Launch every kernel with `**OPTIONS`,
inside `triton_gate.on_device_of(tensor)`.

FP8 codes are uint8 here, in kernels and pointers: the numbers of older GPUs and of Triton's interpreter come from
integer operations, and one type serves all.
"""

from __future__ import annotations

import contextlib
import math

import torch
import triton
import triton.language as tl

from ..formats import E4M3, E4M11, E5M2, FORMATS, saturating_cast

OPTIONS = {"enable_fp_fusion": False}
"""For every launch: a product and a sum that become one instruction are rounded once, not twice."""

_FORMATS = tl.constexpr({f.name: (f.max, f.mantissa_bits, f.min_exponent) for f in (*FORMATS.values(), E4M11)})

# constants of a kernel. Of global values the key of Triton's disk cache has those that are `tl.constexpr`. A format is
# named as in `formats`: "e4m3", "e5m2", "fp16", "bf16", "fp32", "e4m11", "root8"


def ceil_div(number: int, size: int) -> int:
    """Their quotient, rounded up, on the host, where `triton.cdiv` takes microseconds."""
    return -(-number // size)


@triton.constexpr_function
def format_max(fmt):
    """Largest finite magnitude."""
    return _FORMATS.value[fmt][0]


@triton.constexpr_function
def dropped_bits(fmt):
    """The mantissa bits that FP32 has and the format has not."""
    return 23 - _FORMATS.value[fmt][1]


@triton.constexpr_function
def smallest_normal(fmt):
    return 2.0 ** _FORMATS.value[fmt][2]


@triton.constexpr_function
def smallest_bits(fmt):
    """The smallest positive number as FP32 bits. In bf16 it is no normal FP32 number."""
    exponent = _FORMATS.value[fmt][2] - _FORMATS.value[fmt][1]
    return exponent + 127 << 23 if exponent >= -126 else 1 << exponent + 149


@triton.constexpr_function
def bits_of(number):
    """FP32 bits of a positive normal number that FP32 has."""
    fraction, exponent = math.frexp(number)  # the fraction is from 0.5 to 1
    return (exponent + 126 << 23) + int((2 * fraction - 1) * 2**23)


@triton.constexpr_function
def _power(exponent):
    return 2.0**exponent


# the arithmetic


@triton.jit
def as_fp32(x):
    """bf16, fp16 or FP32 as FP32. bf16 by its bits, the upper half: Triton's interpreter misreads subnormal numbers."""
    if x.dtype == tl.bfloat16:
        return from_bits(x.to(tl.int16, bitcast=True).to(tl.int32) << 16)
    else:
        return x.to(tl.float32)


@triton.jit
def to_nearest(x, DTYPE: tl.constexpr):
    """FP32 in another dtype, to nearest even. bf16 on the bits: Triton's interpreter rounds it another way."""
    if DTYPE == tl.bfloat16:
        bits = as_bits(x)
        upper = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
        return tl.where(x == x, upper, 0x7FC0).to(tl.int16).to(tl.bfloat16, bitcast=True)
    else:
        return x.to(DTYPE)


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
    """Whether an amax, which is not negative, is finite. False for NaN."""
    return amax < float("inf")


@triton.jit
def scale_from_amax(amax, FORMAT_MAX: tl.constexpr):
    """`scaling.scale_from_amax`: FORMAT_MAX / amax, at most the largest FP32; 1 for an amax of 0, inf or NaN."""
    scale = tl.minimum(tl.div_rn(tl.zeros_like(amax) + FORMAT_MAX, amax), format_max("fp32"))
    return tl.where((amax > 0) & is_finite(amax), scale, 1.0)


@triton.jit
def power_of_two_scale(amax, FORMAT_MAX: tl.constexpr, LARGEST: tl.constexpr):
    """`2**floor(log2(FORMAT_MAX / amax))`, at most 2**LARGEST; 1 for an amax of 0, inf or NaN.

    LARGEST 126 is `scaling.power_of_two_scale`, 127 `scaling.block_scale`.
    """
    bits = as_bits(amax)
    above = ((bits & 0x7FFFFF) > (bits_of(FORMAT_MAX) & 0x7FFFFF)).to(tl.int32)
    quotient = (bits_of(FORMAT_MAX) >> 23) - (bits >> 23) - above
    scale = from_bits((tl.minimum(quotient, LARGEST) + 127) << 23)
    return tl.where((amax > 0) & is_finite(amax), scale, 1.0)


@triton.jit
def scale_inv_of(scale, amax):
    """`scaling.scale_inv_of`: 1 / scale, NaN where the amax was not finite."""
    return tl.where(is_finite(amax), tl.div_rn(tl.zeros_like(scale) + 1.0, scale), float("nan"))


@triton.jit
def _on_grid(x, FORMAT: tl.constexpr):
    """FP32 values rounded to nearest even to a format's numbers, and still FP32; of any size, nothing saturates.

    Adding a power of two whose last place is the format's unit there rounds, and taking it away is exact.
    """
    bits = as_bits(x)
    power = from_bits(bits & 0x7F800000)
    unit = tl.maximum(power, smallest_normal(FORMAT)) * _power(dropped_bits(FORMAT))
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
        rounded = _on_grid(tl.minimum(tl.abs(x), format_max(FORMAT)), FORMAT)
        code = tl.where(x == x, magnitude_codes(rounded, FORMAT), 0x7F)
        return (code | ((as_bits(x) >> 24) & 0x80)).to(tl.uint8)


@triton.jit
def magnitude_codes(x, FORMAT: tl.constexpr):
    """The codes, int32, of numbers that "e4m3", "e5m2", "e4m11" or "root8" has, none of them negative. Times the power
    of two between FP32's smallest normal number and the format's, a number has its code as the upper bits, subnormal
    codes included.
    """
    return as_bits(x * (_power(-126) / smallest_normal(FORMAT))) >> dropped_bits(FORMAT)


@triton.jit
def from_codes(codes, FORMAT: tl.constexpr):
    """FP32 values of uint8 codes of "e4m3" or "e5m2". inf and NaN come out as numbers: wherever codes are read, a scale
    of NaN tells of them."""
    bits = codes.to(tl.int32)
    values = from_magnitude_codes(bits & 0x7F, FORMAT)
    return from_bits(as_bits(values) | ((bits & 0x80) << 24))


@triton.jit
def from_magnitude_codes(codes, FORMAT: tl.constexpr):
    """FP32 numbers of what `magnitude_codes` makes of them."""
    return from_bits(codes << dropped_bits(FORMAT)) * (smallest_normal(FORMAT) / _power(-126))


# One small run on a device, before training depends on it: the launcher wants a C compiler, the code generator may not
# know a new GPU, and casts to FP8 are the hardware's

_TRIAL_BLOCK = 2048


@torch.no_grad()
def obstacle(device: torch.device, has_fp8_casts: bool) -> str | None:
    """Why kernels must not be used on this device, or None: both formats' codes of all bf16 numbers are compared with
    PyTorch's. Waits for the device. Raises what Triton raises.

    has_fp8_casts: whether the device converts FP32 to FP8 in hardware.
    """
    x = torch.arange(2**16, dtype=torch.int32).to(torch.uint16).view(torch.bfloat16).float().to(device)
    for fmt in (E4M3, E5M2):
        codes = torch.empty(x.shape, dtype=torch.uint8, device=device)
        with torch.cuda.device(device) if device.type == "cuda" else contextlib.nullcontext():
            _cast_kernel[(x.numel() // _TRIAL_BLOCK,)](x, codes, fmt.name, has_fp8_casts, _TRIAL_BLOCK, **OPTIONS)
        right = codes == saturating_cast(x, fmt).view(torch.uint8)
        right |= x.isnan() & codes.view(fmt.dtype).float().isnan()  # of a NaN the sign does not matter
        if wrong := int((~right).sum()):
            return f"{wrong} of {x.numel()} casts to {fmt.name} differ from PyTorch's"
    return None


@triton.jit
def _cast_kernel(x_ptr, codes_ptr, FORMAT: tl.constexpr, HAS_FP8_CASTS: tl.constexpr, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(codes_ptr + at, to_codes(tl.load(x_ptr + at), FORMAT, HAS_FP8_CASTS))
