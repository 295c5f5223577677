"""How the kernels of activations round what they store, and keep its amax."""

from __future__ import annotations

import triton
import triton.language as tl

from ..triton_common import as_bits, as_fp32, magnitude, to_nearest


@triton.jit
def stored(x, DTYPE: tl.constexpr, ON_GPU: tl.constexpr):
    """FP32 values in another dtype, to nearest even: one instruction of a GPU for two of them."""
    return x.to(DTYPE) if ON_GPU else to_nearest(x, DTYPE)


@triton.jit
def larger(largest, x, KEEP_NAN: tl.constexpr):
    """The larger of two magnitudes, FP32."""
    x = as_fp32(x)
    if KEEP_NAN:
        return tl.maximum(largest, tl.abs(x), propagate_nan=tl.PropagateNan.ALL)
    else:
        return tl.maximum(largest, magnitude(x))


@triton.jit
def store_largest(ptr, largest):
    """Of one program, as bits, by whose order NaN is the largest."""
    tl.store(ptr + tl.program_id(0), tl.max(as_bits(largest) & 0x7FFFFFFF))
