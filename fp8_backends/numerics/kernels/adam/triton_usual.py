"""`triton_tiles.write_tile` of a full tile in three quarters of the instructions, for a parameter of which numbers that
are known before the step say that nothing unusual can happen: its bounds, scales and hyperparameters. What the general
one does for each element, lest a number overflow, is asked once a program, by `has_usual_numbers`.

* Scales that are powers of two are factors of other numbers: all these products are exact.
* A magnitude times its scale and 2**-126 over the format's smallest normal number has the format's own exponent, and
  is subnormal where the format's number is. Random bits are added to it, and its upper bits are the code.
* Root and quotient are those of the correctly rounded instructions without their branches for other numbers: an
  approximation, and fused steps that correct it. exp_avg_sq is shifted by a power of four to where the root is exact;
  2**-100 is added then, which changes no number whose root counts beside eps.

The result is the general one's to the bit. Only where |step size * exp_avg| or the update is below 2**-101, which is no
part of a weight of usual size, may the update differ by its last place, or by the sign of a zero: the remainder of the
quotient is no FP32 number there.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ..reference import GRADIENT_LIMIT
from ..triton_common import as_bits, dropped_bits, format_max, from_bits, is_finite, smallest_normal
from .triton_rounding import decoded, encoded, mixed, rounded, scale_of, with_sign_of
from .triton_tiles import (
    BETA2,
    DECAY,
    EPS,
    FIRST,
    INV_SQRT_BIAS2,
    INVERSE,
    NEW_IN_EXP_AVG,
    NEW_IN_EXP_AVG_SQ,
    STEP_SIZE,
    WEIGHT_DECAY,
    amax_of,
    coded,
    half_of_inverse,
    of_lanes,
)

_GRADIENT_LIMIT = tl.constexpr(GRADIENT_LIMIT)
_LEAST, _MOST, _LEAST_FACTOR = tl.constexpr(2.0**-100), tl.constexpr(2.0**100), tl.constexpr(2.0**-20)
_MOST_OF_ROOT = tl.constexpr(2.0**64)
_ROOT_BESIDE_EPS = tl.constexpr(2.0**12)  # roots from 2**-37 on: below them, a product with it is 2**-25 of eps at most


@triton.constexpr_function
def _to_exponent_of(fmt):
    """What gives a number of the format its own exponent's bits."""
    return 2.0**-126 / smallest_normal(fmt)


@triton.constexpr_function
def _spare_bits(fmt):
    """Bits above those of a magnitude that has the format's own exponent, but for the sign."""
    return {"fp16": 3, "bf16": 0, "e4m3": 4, "e5m2": 3}[fmt]


@triton.constexpr_function
def _width(fmt):
    return 8 if fmt in ("e4m3", "e5m2") else 16


@triton.jit
def _is_usual_inverse(inverse):
    return (inverse >= _LEAST) & (inverse <= _MOST) & ((as_bits(inverse) & 0x7FFFFF) == 0)


@triton.jit
def _are_usual_scales(old_inverse, new, KIND: tl.constexpr, SLOT: tl.constexpr):
    """new: the scale and its inverse."""
    usual = _is_usual_inverse(old_inverse) & _is_usual_inverse(new[1])
    return usual & (new[0] >= smallest_normal(KIND.formats[SLOT]))


@triton.jit
def _root_factors(v_bound, hyper):
    """4**k, times which no exp_avg_sq overflows, and what the root of the product is multiplied by."""
    k = (251 - (as_bits(v_bound) >> 23)) >> 1
    k = tl.minimum(tl.maximum(k, 0), 62)
    return from_bits((127 + 2 * k) << 23), hyper[INV_SQRT_BIAS2] * from_bits((127 - k) << 23)


@triton.jit
def has_usual_numbers(amax_ptr, row, inverses, hyper, scales, KIND: tl.constexpr):
    """Whether `write_usual_tile` may write the tiles of a parameter. False for what is no number."""
    w_bound, v_bound = amax_of(amax_ptr, row, 0), amax_of(amax_ptr, row, 2)
    _, root_factor = _root_factors(v_bound, hyper)
    denominator = root_factor * _MOST_OF_ROOT + hyper[EPS]
    usual = (w_bound <= _MOST) & is_finite(v_bound) & (denominator <= _MOST) & (w_bound * denominator <= _MOST)
    usual = usual & (hyper[EPS] >= _LEAST) & (root_factor <= hyper[EPS] * _ROOT_BESIDE_EPS)
    usual = usual & (hyper[BETA2] >= _LEAST_FACTOR) & (tl.abs(hyper[DECAY]) >= _LEAST_FACTOR)
    if KIND.scaled[1] and (KIND.formats[1] == "e4m3" or KIND.formats[1] == "e5m2"):
        usual = usual & (inverses[1] * format_max(KIND.formats[1]) < _GRADIENT_LIMIT)
    usual = usual & _are_usual_scales(inverses[0], scales[0], KIND, 0)
    usual = usual & _are_usual_scales(inverses[3], scales[2], KIND, 3)
    if not KIND.blocked[2]:
        usual = usual & is_finite(amax_of(amax_ptr, row, 1)) & _are_usual_scales(inverses[2], scales[1], KIND, 2)
    return usual


@triton.jit
def _approximate_root(x):
    return tl.inline_asm_elementwise("rsqrt.approx.ftz.f32 $0, $1;", "=f,f", [x], tl.float32, is_pure=True, pack=1)


@triton.jit
def _approximate_inverse(x):
    return tl.inline_asm_elementwise("rcp.approx.ftz.f32 $0, $1;", "=f,f", [x], tl.float32, is_pure=True, pack=1)


@triton.jit
def root_of(x, IN_HARDWARE: tl.constexpr):
    """The correctly rounded root of numbers from 2**-101 on."""
    if IN_HARDWARE:
        inverse = _approximate_root(x)
        root = x * inverse
        return tl.fma(tl.fma(root * -1.0, root, x), 0.5 * inverse, root)
    else:
        return tl.sqrt_rn(x)


@triton.jit
def quotient_of(x, y, IN_HARDWARE: tl.constexpr):
    """The correctly rounded quotient of numbers from 2**-101 on, y up to 2**100, x / y up to 2**100."""
    if IN_HARDWARE:
        inverse = _approximate_inverse(y)
        inverse = tl.fma(inverse, tl.fma(y * -1.0, inverse, 1.0), inverse)
        quotient = x * inverse
        return tl.fma(inverse, tl.fma(y * -1.0, quotient, x), quotient)
    else:
        return tl.div_rn(x, y)


@triton.jit
def _stored(pointer, KIND: tl.constexpr, SLOT: tl.constexpr):
    """FP32 values without their scale."""
    return decoded(tl.load(pointer), KIND.formats[SLOT], KIND.has_fp8_casts)


@triton.jit
def _step(bases, inverses, of_blocks, hyper, at, root_numbers, KIND: tl.constexpr):
    """`triton_tiles.adam_step`."""
    w, g = _stored(bases[0] + at, KIND, 0), _stored(bases[1] + at, KIND, 1) * inverses[1]
    m, v = _stored(bases[2] + at, KIND, 2), _stored(bases[3] + at, KIND, 3)
    if not (KIND.scaled[1] and (KIND.formats[1] == "e4m3" or KIND.formats[1] == "e5m2")):
        g = tl.where(tl.abs(g) < _GRADIENT_LIMIT, g, 0.0)
    if KIND.maximize:
        g = -g
    if KIND.decoupled:
        w = w * (inverses[0] * hyper[DECAY])
    else:
        w = w * inverses[0]
        g = g + hyper[WEIGHT_DECAY] * w
    if KIND.blocked[2]:
        m = m * tl.load(of_blocks)
        m = m + hyper[NEW_IN_EXP_AVG] * (g - m)
    else:
        m = tl.fma(m, inverses[2], hyper[NEW_IN_EXP_AVG] * tl.fma(m * -1.0, inverses[2], g))
    v = v * (inverses[3] * hyper[BETA2]) + hyper[NEW_IN_EXP_AVG_SQ] * g * g
    root = root_of(tl.fma(v, root_numbers[0], _LEAST), KIND.has_fp8_casts)
    denominator = root * root_numbers[1] + hyper[EPS]
    return w - quotient_of(hyper[STEP_SIZE] * m, denominator, KIND.has_fp8_casts), m, v


@triton.jit
def _rounded(x, factor, random, FORMAT: tl.constexpr, LOW: tl.constexpr, BITS: tl.constexpr):
    """The code of |x| times a scale as the upper bits of a uint32. factor: the scale times `_to_exponent_of`."""
    dropped: tl.constexpr = dropped_bits(FORMAT)
    spare: tl.constexpr = _spare_bits(FORMAT)
    used: tl.constexpr = BITS if BITS < dropped else dropped
    if LOW + BITS == 32 and used == dropped:  # what is below the field carries nothing
        addend = random >> (32 - dropped - spare)
    else:
        addend = ((random >> (LOW + BITS - used)) & (2**used - 1)) << (dropped - used + spare)
    if used < dropped:
        addend |= 2 ** (dropped - used - 1 + spare)
    return (as_bits(tl.abs(x) * factor).to(tl.uint32, bitcast=True) << spare) + addend


@triton.jit
def _code(upper, FORMAT: tl.constexpr):
    """The code as the format is stored."""
    width: tl.constexpr = _width(FORMAT)
    if width == 8:
        return (upper >> 24).to(tl.uint8)
    elif FORMAT == "fp16":
        return (upper >> 16).to(tl.uint16).to(tl.float16, bitcast=True)
    else:
        return (upper >> 16).to(tl.uint16).to(tl.bfloat16, bitcast=True)


@triton.jit
def _with_sign_of(upper, x):
    return upper | (as_bits(x).to(tl.uint32, bitcast=True) & 0x80000000)


@triton.jit
def _magnitude(code, KIND: tl.constexpr, SLOT: tl.constexpr):
    return tl.abs(decoded(code, KIND.formats[SLOT], KIND.has_fp8_casts))


@triton.jit
def _upper(x, scale, random, KIND: tl.constexpr, SLOT: tl.constexpr):
    FORMAT: tl.constexpr = KIND.formats[SLOT]
    factor = scale * _to_exponent_of(FORMAT)
    return _rounded(x, factor, random, FORMAT, KIND.low_bit[SLOT], KIND.bits[SLOT])


@triton.jit
def _write_weight(pointer, copy, w, scale, copy_scale, random, KIND: tl.constexpr):
    """Returns the bits of what is stored, the largest of a thread's."""
    if KIND.formats[0] == "fp32":
        tl.store(pointer, w)
        stored, largest = w, of_lanes(as_bits(w) & 0x7FFFFFFF, KIND)
    else:
        upper = _upper(w, scale[0], random, KIND, 0)
        code = _code(_with_sign_of(upper, w), KIND.formats[0])
        tl.store(pointer, code)
        stored = decoded(code, KIND.formats[0], KIND.has_fp8_casts)
        most = of_lanes(upper.to(tl.int32, bitcast=True), KIND).to(tl.uint32, bitcast=True)
        largest = as_bits(decoded(_code(most, KIND.formats[0]), KIND.formats[0], KIND.has_fp8_casts))
    if KIND.copied:
        x = stored * (scale[1] * copy_scale)
        if KIND.has_fp8_casts and KIND.formats[4] == "e4m3":
            tl.store(copy, x.to(tl.float8e4nv).to(tl.uint8, bitcast=True))
        else:
            magnitude = rounded(x, 0, KIND.formats[4], KIND.has_fp8_casts, False, 0, 0, False)
            tl.store(copy, encoded(with_sign_of(magnitude, x), KIND.formats[4], KIND.has_fp8_casts))
    return largest


@triton.jit
def _write_exp_avg(pointer, inverses, m, scale, random, KIND: tl.constexpr):
    """inverses: pointers to those of blocks. Returns |exp_avg| as it is stored, without its scale; the inverse."""
    FORMAT: tl.constexpr = KIND.formats[2]
    inverse = scale[1]
    if FORMAT == "fp32":
        tl.store(pointer, m)
        return tl.abs(m), inverse
    else:
        if KIND.blocked[2]:
            amax = from_bits(tl.max(as_bits(m) & 0x7FFFFFFF, axis=1)[:, None])
            scale_of_block = scale_of(amax, FORMAT)
            inverse = from_bits((254 << 23) - as_bits(scale_of_block))  # of a power of two
            inverse = tl.where(is_finite(amax), inverse, float("nan"))
            tl.store(inverses, inverse)
            upper = _upper(m * scale_of_block, 1.0, random, KIND, 2)
        else:
            upper = _upper(m, scale[0], random, KIND, 2)
        code = _code(_with_sign_of(upper, m), FORMAT)
        tl.store(pointer, code)
        return _magnitude(code, KIND, 2), inverse


@triton.jit
def _write_exp_avg_sq(pointer, v, scale, random, KIND: tl.constexpr):
    """Returns exp_avg_sq as it is stored, without its scale."""
    FORMAT: tl.constexpr = KIND.formats[3]
    if FORMAT == "fp32":
        tl.store(pointer, v)
        return v
    else:
        least: tl.constexpr = 1 << (32 - _width(FORMAT))
        upper = _upper(v, scale[0], random, KIND, 3)
        any_bits = as_bits(v * 2.0**127).to(tl.uint32, bitcast=True)  # 0, or more than `least`
        code = _code(tl.maximum(upper, tl.minimum(any_bits, least)), FORMAT)
        tl.store(pointer, code)
        return decoded(code, FORMAT, KIND.has_fp8_casts)


@triton.jit
def bases_of(pointers, copy, row, start, KIND: tl.constexpr):
    """What a program's tiles count from: pointers to its first element (weight, grad, exp_avg, exp_avg_sq, copy) and to
    the scale_inv of its first block of exp_avg; the index of its first element for random bits."""
    of_blocks = tl.load(row + INVERSE + 2).to(tl.pointer_type(tl.float32)) + start // KIND.width
    index = (tl.load(row + FIRST) + start).to(tl.int32)
    w, g, m, v, _ = pointers
    return w + start, g + start, m + start, v + start, copy + start, of_blocks, index


@triton.jit
def write_usual_tile(bases, inverses, hyper, scales, copy_scale, v_bound, key, first, known, KIND: tl.constexpr):
    """What `write_tile` does. bases: from `bases_of`; first: the tile's place behind them; v_bound: of exp_avg_sq."""
    rows = tl.arange(0, KIND.rows)[:, None]
    at = first + rows * KIND.width + tl.arange(0, KIND.width)[None, :]
    of_blocks = bases[5] + (first // KIND.width + rows)
    w, m, v = _step(bases, inverses, of_blocks, hyper, at, _root_factors(v_bound, hyper), KIND)
    random = mixed((bases[6] + at).to(tl.uint32, bitcast=True) ^ key)
    if KIND.blocked[2]:
        tl.debug_barrier()  # all threads have read the blocks' old scales
    largest_w = _write_weight(bases[0] + at, bases[4] + at, w, scales[0], copy_scale, random, KIND)
    m, m_inv = _write_exp_avg(bases[2] + at, of_blocks, m, scales[1], random, KIND)
    v = _write_exp_avg_sq(bases[3] + at, v, scales[2], random, KIND)
    ratio, largest_m = of_lanes(as_bits(m) - (as_bits(v) >> 1), KIND), of_lanes(as_bits(m), KIND)
    if KIND.blocked[2]:
        ratio = coded(ratio, m_inv, half_of_inverse(scales[2][1], KIND))
        largest_m = as_bits(from_bits(largest_m) * m_inv)
    return (
        tl.maximum(known[0], largest_w),
        tl.maximum(known[1], largest_m),
        tl.maximum(known[2], of_lanes(as_bits(v), KIND)),
        tl.maximum(known[3], ratio),
    )
