"""`bounds.new_bounds` for kernels, to the bit the same."""

from __future__ import annotations

import triton
import triton.language as tl

from ..reference import GRADIENT_LIMIT
from ..triton_common import format_max, from_bits, is_finite
from .bounds import LEAST_ROOT, RATIO_BITS, SLACK, UPDATE_SLACK
from .triton_tiles import (
    BETA2,
    DECAY,
    EPS,
    FINITE,
    INV_SQRT_BIAS2,
    NEW_IN_EXP_AVG,
    NEW_IN_EXP_AVG_SQ,
    STEP_SIZE,
    WEIGHT_DECAY,
    inverse_of,
)

_RATIO_BITS, _LIMIT = tl.constexpr(RATIO_BITS), tl.constexpr(GRADIENT_LIMIT)
_SLACK, _UPDATE_SLACK, _LEAST_ROOT = tl.constexpr(SLACK), tl.constexpr(UPDATE_SLACK), tl.constexpr(LEAST_ROOT)


@triton.jit
def grad_amax(row, measured, KIND: tl.constexpr):
    """`table.largest_gradient`. measured: where no scale tells."""
    if KIND.scaled[1] and not KIND.blocked[1]:
        inverse = inverse_of(row, KIND, 1)
        amax = tl.where(is_finite(inverse), inverse * format_max(KIND.formats[1]), 0.0)
    else:
        amax = measured
    if KIND.finite_is_told:
        finite = tl.load(tl.load(row + FINITE).to(tl.pointer_type(tl.uint8)))
        amax = tl.where(finite != 0, amax, 0.0)
    return amax


@triton.jit
def new_bounds(record, grad_amax, hyper, v_inverse, KIND: tl.constexpr):
    """record: int32. v_inverse: scale_inv of exp_avg_sq, 1 for roots."""
    w, m, v = from_bits(record[0]), from_bits(record[1]), from_bits(record[2])
    ratio = from_bits(record[3] + _RATIO_BITS)
    n, step_size, c, eps = hyper[NEW_IN_EXP_AVG], tl.abs(hyper[STEP_SIZE]), hyper[INV_SQRT_BIAS2], hyper[EPS]
    g = tl.where(grad_amax < _LIMIT, grad_amax, _LIMIT)
    if not KIND.decoupled:
        g = g + tl.abs(hyper[WEIGHT_DECAY]) * w
    kept, new = 1 - n + _SLACK, n + _SLACK
    m = kept * m + new * g
    v = v * hyper[BETA2] + hyper[NEW_IN_EXP_AVG_SQ] * g * g
    of_exp_avg = tl.div_rn(kept, tl.sqrt_rn(hyper[BETA2])) * ratio
    of_gradient = tl.div_rn(new, tl.sqrt_rn(hyper[NEW_IN_EXP_AVG_SQ]))
    of_eps = tl.div_rn(step_size * m, eps)
    if KIND.blocked[3] and not KIND.has_roots:
        update = of_eps
    else:
        least_root = _LEAST_ROOT * tl.sqrt_rn(tl.maximum(v_inverse, 1.0))
        above_eps = tl.maximum(tl.div_rn(c * least_root, eps), 1.0)
        of_quotient = tl.div_rn(step_size * (of_exp_avg + of_gradient), c) * above_eps
        update = tl.where(of_quotient < of_eps, of_quotient, of_eps)
    if KIND.decoupled:
        w = w * tl.abs(hyper[DECAY])
    return (w + update * _UPDATE_SLACK) * (1 + _SLACK), m, v
