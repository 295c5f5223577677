"""Arithmetic shared by the Triton kernels: `scaling` and `formats` on a GPU, to the bit.

Importing this module loads Triton, so check `triton_gate.usable` first. Launch every kernel with
`**OPTIONS` inside `devices.on_device_of(tensor)`, by `launch` where a layer waits for the host.

FP8 codes are uint8 in kernels and pointers, as older GPUs and Triton's interpreter use integer
operations.
"""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl
from triton import knobs
from triton.runtime import JITFunction, driver

from ..formats.formats import E4M11, FORMATS

OPTIONS = {"enable_fp_fusion": False}
"""Options of every launch: a fused product and sum would be rounded once, not twice."""

TYPES = {
    torch.float32: tl.float32,
    torch.bfloat16: tl.bfloat16,
    torch.float16: tl.float16,
    torch.uint8: tl.uint8,
}
"""Types that kernels read, by dtype."""

_RUNS_COMPILED = triton.__version__.startswith(("3.6.", "3.7.", "3.8.", "3.9."))
"""True for versions of Triton whose compiled kernels take the arguments that `launch` passes."""

_FORMATS = tl.constexpr(
    {
        f.name: (f.max, f.mantissa_bits, f.min_exponent, TYPES.get(f.dtype, tl.uint8))
        for f in (*FORMATS.values(), E4M11)
    }
)

# Constants of a kernel. Triton's disk cache key covers only globals that are `tl.constexpr`.
# Formats are named as in `formats`: "e4m3", "e5m2", "fp16", "bf16", "fp32", "e4m11", "root8"


def ceil_div(number: int, size: int) -> int:
    """Divide on the host, rounding up. `triton.cdiv` takes microseconds there."""
    return -(-number // size)


def launch(kernel: JITFunction, programs: int, arguments: tuple, constants: dict) -> None:
    """Run `kernel[(programs,)](*arguments, **constants)` in half of the host's time.

    Triton's own binder describes the arguments in every launch (types, alignment, numbers equal to
    1 or divisible by 16), so the kernel is the one that Triton would choose. Only Triton's search
    for it is shorter: it builds strings from the description. Hooks of profilers, sanitizers and
    other versions of Triton take Triton's way.
    """
    if _takes_tritons_way(kernel):
        kernel[(programs,)](*arguments, **constants)
        return
    active = driver.active
    device = active.get_current_device()
    cache, *_, bind = kernel.device_caches[device]
    values, specialization, options = bind(*arguments, **constants)
    key = (*specialization, *options.items())  # Triton's own keys are strings
    compiled = cache.get(key)
    if compiled is None:
        cache[key] = kernel[(programs,)](*arguments, **constants)
        return
    run = compiled.run
    loaded = compiled.function, compiled.packed_metadata
    no_hooks = None, None, None
    stream = active.get_current_stream(device)
    run(programs, 1, 1, stream, *loaded, *no_hooks, *values.values())


def _takes_tritons_way(kernel: JITFunction) -> bool:
    runtime = knobs.runtime
    entered = runtime.launch_enter_hook
    left = runtime.launch_exit_hook
    return bool(
        not _RUNS_COMPILED
        or type(kernel) is not JITFunction  # the interpreter's
        or getattr(entered, "calls", entered)  # a chain of hooks, one hook, or None
        or getattr(left, "calls", left)
        or kernel.pre_run_hooks
        or runtime.debug
        or runtime.add_stages_inspection_hook
        or knobs.compilation.instrumentation_mode
    )


@triton.constexpr_function
def format_max(fmt):
    """Return the largest finite magnitude."""
    return _FORMATS.value[fmt][0]


@triton.constexpr_function
def dropped_bits(fmt):
    """Count the mantissa bits lost from FP32."""
    return 23 - _FORMATS.value[fmt][1]


@triton.constexpr_function
def smallest_normal(fmt):
    return 2.0 ** _FORMATS.value[fmt][2]


@triton.constexpr_function
def smallest_bits(fmt):
    """Return the smallest positive number as FP32 bits, subnormal for bf16."""
    exponent = _FORMATS.value[fmt][2] - _FORMATS.value[fmt][1]
    return exponent + 127 << 23 if exponent >= -126 else 1 << exponent + 149


@triton.constexpr_function
def bits_of(number):
    """Return FP32 bits of a positive normal FP32 number."""
    fraction, exponent = math.frexp(number)  # the fraction is from 0.5 to 1
    return (exponent + 126 << 23) + int((2 * fraction - 1) * 2**23)


@triton.constexpr_function
def stored_dtype(fmt):
    """Return the dtype in memory: uint8 for eight bits."""
    return _FORMATS.value[fmt][3]


@triton.constexpr_function
def _power(exponent):
    return 2.0**exponent


@triton.jit
def as_fp32(x):
    """Convert bf16, fp16 or FP32 to FP32. bf16 on its bits: Triton's interpreter misreads subnormal
    numbers."""
    if x.dtype == tl.bfloat16:
        return from_bits(x.to(tl.int16, bitcast=True).to(tl.int32) << 16)
    else:
        return x.to(tl.float32)


@triton.jit
def to_nearest(x, DTYPE: tl.constexpr):
    """Round FP32 to another dtype, to nearest even. bf16 on its bits: Triton's interpreter rounds
    differently."""
    if DTYPE == tl.bfloat16:
        bits = as_bits(x)
        upper = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
        return tl.where(x == x, upper, 0x7FC0).to(tl.int16).to(tl.bfloat16, bitcast=True)
    else:
        return x.to(DTYPE)


@triton.jit
def magnitude(x):
    """Return |x| in FP32, zero for NaN."""
    return tl.where(x == x, tl.abs(x), 0.0)


@triton.jit
def amax_along(x, AXIS: tl.constexpr):
    """Return the maximum of |x| along an axis, in FP32, without NaN; zero for nothing else."""
    amax = tl.max(tl.abs(x), axis=AXIS)  # NaN only if all are: `max.f32` drops others
    return tl.where(amax == amax, amax, 0.0)


@triton.jit
def larger(largest, x):
    """Return the larger of `largest` and |x|, matrices, and `largest` for NaN. Reduces pairs:
    unlike `tl.max`, `tl.maximum` keeps NaN in Triton's interpreter."""
    return tl.max(tl.join(largest, tl.abs(x)), axis=2)


@triton.jit
def as_bits(x):
    """Reinterpret FP32 as int32. For magnitudes the order is kept, with NaN above inf."""
    return x.to(tl.int32, bitcast=True)


@triton.jit
def from_bits(bits):
    """Reinterpret int32 as FP32."""
    return bits.to(tl.float32, bitcast=True)


@triton.jit
def is_finite(amax):
    """Return True for a finite amax; NaN is not."""
    return amax < float("inf")


@triton.jit
def scale_from_amax(amax, FORMAT_MAX: tl.constexpr):
    """Compute `scaling.scale_from_amax`: FORMAT_MAX / amax, at most FP32's maximum; 1 for an amax
    of 0, inf or NaN."""
    scale = tl.minimum(tl.div_rn(tl.zeros_like(amax) + FORMAT_MAX, amax), format_max("fp32"))
    return tl.where((amax > 0) & is_finite(amax), scale, 1.0)


@triton.jit
def power_of_two_scale(amax, FORMAT_MAX: tl.constexpr, LARGEST: tl.constexpr):
    """Compute `2**floor(log2(FORMAT_MAX / amax))`, at most 2**LARGEST; 1 for an amax of 0, inf or
    NaN. LARGEST is 126 in `scaling.power_of_two_scale`, 127 in `scaling.block_scale`."""
    bits = as_bits(amax)
    above = ((bits & 0x7FFFFF) > (bits_of(FORMAT_MAX) & 0x7FFFFF)).to(tl.int32)
    quotient = (bits_of(FORMAT_MAX) >> 23) - (bits >> 23) - above
    scale = from_bits((tl.minimum(quotient, LARGEST) + 127) << 23)
    return tl.where((amax > 0) & is_finite(amax), scale, 1.0)


@triton.jit
def scale_inv_of(scale, amax):
    """Compute `scaling.scale_inv_of`: 1 / scale, NaN for a non-finite amax."""
    return tl.where(is_finite(amax), tl.div_rn(tl.zeros_like(scale) + 1.0, scale), float("nan"))


@triton.jit
def scale_and_inverse(amax, FORMAT: tl.constexpr):
    """Return `scale_from_amax` of a format, and `scale_inv_of`."""
    scale = scale_from_amax(amax, format_max(FORMAT))
    return scale, scale_inv_of(scale, amax)


@triton.jit
def _on_grid(x, FORMAT: tl.constexpr):
    """Round FP32 to a format's numbers, to nearest even, without saturation. Adds a power of two
    with the format's unit as its last place, which rounds, and subtracts it, which is exact."""
    bits = as_bits(x)
    power = from_bits(bits & 0x7F800000)
    unit = tl.maximum(power, smallest_normal(FORMAT)) * _power(dropped_bits(FORMAT))
    rounded = (tl.abs(x) + unit) - unit
    return from_bits(as_bits(rounded) | (bits & -0x80000000))


@triton.jit
def to_codes(x, FORMAT: tl.constexpr, HAS_FP8_CASTS: tl.constexpr):
    """Compute `formats.saturating_cast` of scaled FP32 values: to nearest even, saturating, NaN
    stays NaN.

    FORMAT: "e4m3" or "e5m2" (uint8 codes), or "fp16" (float16). HAS_FP8_CASTS:
    `devices.has_fp8_casts`, one instruction for two values.
    """
    if FORMAT == "fp16":
        largest: tl.constexpr = format_max(FORMAT)
        return tl.clamp(x, -largest, largest, propagate_nan=tl.PropagateNan.ALL).to(tl.float16)
    elif HAS_FP8_CASTS:
        return hardware_codes(x, FORMAT)
    else:
        rounded = _on_grid(tl.minimum(tl.abs(x), format_max(FORMAT)), FORMAT)
        code = tl.where(x == x, magnitude_codes(rounded, FORMAT), 0x7F)
        return (code | ((as_bits(x) >> 24) & 0x80)).to(tl.uint8)


@triton.constexpr_function
def _four_casts(fmt):
    """Write the PTX of four casts into the bytes of one register."""
    cast = f"cvt.rn.satfinite.{fmt}x2.f32"
    return f"{{ .reg .b16 low, high; {cast} low, $2, $1; {cast} high, $4, $3; mov.b32 $0, {{low, high}}; }}"


@triton.jit
def hardware_codes(x, FORMAT: tl.constexpr):
    """Cast FP32 to uint8 codes of "e4m3" or "e5m2" by the GPU's instruction, four values at a time.

    Assembly, since ptxas of CUDA 12.8 and 12.9 miscompiles `x.to(tl.float8e4nv)`: of codes used
    both as a word and one by one, it reads some bytes before the cast has written them.
    """
    return tl.inline_asm_elementwise(
        _four_casts(FORMAT), "=r,f,f,f,f", [x], dtype=tl.uint8, is_pure=True, pack=4
    )


@triton.jit
def magnitude_codes(x, FORMAT: tl.constexpr):
    """Encode magnitudes on the grid of "e4m3", "e5m2", "e4m11" or "root8" as int32 codes.
    Multiplied by FP32's smallest normal number over the format's, a number has its code in its
    upper bits, subnormal codes included."""
    return as_bits(x * (_power(-126) / smallest_normal(FORMAT))) >> dropped_bits(FORMAT)


@triton.jit
def from_codes(codes, FORMAT: tl.constexpr):
    """Decode uint8 codes of "e4m3" or "e5m2" to FP32. inf and NaN become numbers: their scale is
    NaN."""
    bits = codes.to(tl.int32)
    values = from_magnitude_codes(bits & 0x7F, FORMAT)
    return from_bits(as_bits(values) | ((bits & 0x80) << 24))


@triton.jit
def decoded(data, FORMAT: tl.constexpr, HAS_FP8_CASTS: tl.constexpr):
    """Decode stored data to FP32. A NaN of an eight-bit format becomes any number: its scale is
    NaN."""
    if HAS_FP8_CASTS and FORMAT == "e4m3":
        return data.to(tl.float8e4nv, bitcast=True).to(tl.float32)
    elif FORMAT == "e4m3" or FORMAT == "e5m2":
        return from_codes(data, FORMAT)
    elif FORMAT == "root8":
        return from_magnitude_codes(data.to(tl.int32), FORMAT)
    else:
        return data.to(tl.float32)


@triton.jit
def from_magnitude_codes(codes, FORMAT: tl.constexpr):
    """Invert `magnitude_codes`."""
    return from_bits(codes << dropped_bits(FORMAT)) * (smallest_normal(FORMAT) / _power(-126))
