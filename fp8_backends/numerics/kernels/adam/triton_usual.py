"""`triton_tiles.write_tile` of a full tile in three quarters of the instructions, for a parameter of which numbers that
are known before the step say that nothing unusual can happen: its bounds, scales and hyperparameters. What the general
one does for each element, lest a number overflow, is asked once a program, by `has_usual_numbers`.

* Scales that are powers of two are factors of other numbers: all these products are exact.
* A magnitude times its scale and 2**-126 over the format's smallest normal number has the format's own exponent, and
  is subnormal where the format's number is. Random bits are added to it, and its upper bits are the code.
* Root and quotient are those of the correctly rounded instructions without their branches for other numbers: an
  approximation, and fused steps that correct it. exp_avg_sq is shifted by a power of four to where the root is exact;
  2**-100 is added then, which changes no number whose root counts beside eps.
* A root that is stored counts whatever its size. The shift is 4**24 there: no positive FP32 number is below 2**-101
  then. 2**-126 is added for the approximation alone, so that 0 has one, and the root 0 times it; it is below half the
  last place of any other number. With exp_avg_sq up to 2**16 a block's scale is 1 at least, and times 2**-24 and
  2**-120 an FP32 number. So is exp_avg's times 2**-120.
* Code and residual of a split weight are the bytes of one number, to which half a code is added first, so that the
  residual counts from 128. Its scale_inv times 2**120 and the decay is an FP32 number where that is 1 at most.
* What the hash does first to a thread's indices it does to the first of them, whose lowest bits are 0; the bits in
  which the others differ reach no further there.

The result is the general one's to the bit. Only where |step size * exp_avg| or the update is below 2**-101, which is no
part of a weight of usual size, may the update differ by its last place, or by the sign of a zero: the remainder of the
quotient is no FP32 number there.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ..reference import GRADIENT_LIMIT
from ..triton_common import (
    as_bits,
    dropped_bits,
    format_max,
    from_bits,
    from_magnitude_codes,
    is_finite,
    smallest_normal,
)
from .bounds import HALF_OF_ONE
from .triton_rounding import decoded, encoded, mixed_on, rounded, scale_of, with_sign_of
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
    coded,
    half_of_inverse,
)

_GRADIENT_LIMIT = tl.constexpr(GRADIENT_LIMIT)
_LEAST, _MOST, _LEAST_FACTOR = tl.constexpr(2.0**-100), tl.constexpr(2.0**100), tl.constexpr(2.0**-20)
_MOST_OF_ROOT = tl.constexpr(2.0**64)
_LEAST_NORMAL, _MOST_OF_ROOTS, _MOST_OF_BLOCKS = tl.constexpr(2.0**-126), tl.constexpr(2.0**16), tl.constexpr(2.0**36)
_FOURS = tl.constexpr(24)  # 4**24, times which a stored root's square is 2**-101 at least, or 0
_HALF_BESIDE_ROOTS = tl.constexpr(HALF_OF_ONE - (8 << 23))  # times 2**-8
_ROOT_BESIDE_EPS = tl.constexpr(2.0**12)  # roots from 2**-37 on: below them, a product with it is 2**-25 of eps at most


_PAIRS = tl.constexpr("""{
.reg .b32 r, a, b, c, d;
xor.b32 r, $5, 0x80808080;
prmt.b32 a, $4, r, 0x8044;
prmt.b32 b, $4, r, 0x9155;
prmt.b32 c, $4, r, 0xA266;
prmt.b32 d, $4, r, 0xB377;
mad.lo.s32 a, a, 16, -0x80000;
mad.lo.s32 b, b, 16, -0x80000;
mad.lo.s32 c, c, 16, -0x80000;
mad.lo.s32 d, d, 16, -0x80000;
and.b32 $0, a, 0x87FFF000;
and.b32 $1, b, 0x87FFF000;
and.b32 $2, c, 0x87FFF000;
and.b32 $3, d, 0x87FFF000;
}""")
_ROOTS = tl.constexpr("""{
.reg .b32 a, b;
.reg .b16 c, d, e, f;
prmt.b32 a, $4, 0, 0x1404;
prmt.b32 b, $4, 0, 0x3424;
shr.u32 a, a, 2;
shr.u32 b, b, 2;
mov.b32 {c, d}, a;
mov.b32 {e, f}, b;
cvt.f32.f16 $0, c;
cvt.f32.f16 $1, d;
cvt.f32.f16 $2, e;
cvt.f32.f16 $3, f;
}""")
_UPPER_BYTES = tl.constexpr("""{
.reg .b32 a, b;
prmt.b32 a, $1, $2, 0x0073;
prmt.b32 b, $3, $4, 0x0073;
prmt.b32 $0, a, b, 0x5410;
}""")
_RESIDUALS = tl.constexpr("""{
.reg .b32 a, b;
prmt.b32 a, $1, $2, 0x0062;
prmt.b32 b, $3, $4, 0x0062;
prmt.b32 a, a, b, 0x5410;
xor.b32 $0, a, 0x80808080;
}""")
"""PTX for four elements of a thread: what has a byte for each of them is one register."""
_OF_ROOTS = tl.constexpr(2.0**-8)


@triton.constexpr_function
def _to_exponent_of(fmt):
    """What gives a number of the format its own exponent's bits."""
    return 2.0**-126 / smallest_normal(fmt)


@triton.constexpr_function
def _spare_bits(fmt):
    """Bits above those of a magnitude that has the format's own exponent, but for the sign."""
    return {"fp16": 3, "bf16": 0, "e4m3": 4, "e5m2": 3, "e4m11": 4, "root8": 5}[fmt]


@triton.constexpr_function
def _width(fmt):
    return 8 if fmt in ("e4m3", "e5m2", "root8") else 16


@triton.jit
def _is_usual_inverse(inverse):
    return (inverse >= _LEAST) & (inverse <= _MOST) & ((as_bits(inverse) & 0x7FFFFF) == 0)


@triton.jit
def _are_usual_scales(old_inverse, new, KIND: tl.constexpr, SLOT: tl.constexpr):
    """new: the scale and its inverse."""
    usual = _is_usual_inverse(old_inverse) & _is_usual_inverse(new[1])
    return usual & (new[0] >= smallest_normal(KIND.formats[SLOT]))


@triton.jit
def _root_factors(v_bound, hyper, KIND: tl.constexpr):
    """4**k, times which no exp_avg_sq overflows, and what the root of the product is multiplied by."""
    if KIND.has_roots:
        k = tl.full((), _FOURS, tl.int32)
    else:
        k = (251 - (as_bits(v_bound) >> 23)) >> 1
        k = tl.minimum(tl.maximum(k, 0), 62)
    return from_bits((127 + 2 * k) << 23), hyper[INV_SQRT_BIAS2] * from_bits((127 - k) << 23)


@triton.jit
def has_usual_numbers(bounds, inverses, hyper, scales, KIND: tl.constexpr):
    """Whether `write_usual_tile` may write the tiles of a parameter. False for what is no number. bounds: of weight,
    exp_avg and exp_avg_sq."""
    w_bound, m_bound, v_bound = bounds
    _, root_factor = _root_factors(v_bound, hyper, KIND)
    denominator = root_factor * _MOST_OF_ROOT + hyper[EPS]
    usual = (w_bound <= _MOST) & is_finite(v_bound) & (denominator <= _MOST) & (w_bound * denominator <= _MOST)
    usual = usual & (hyper[EPS] >= _LEAST)
    usual = usual & (hyper[BETA2] >= _LEAST_FACTOR) & (tl.abs(hyper[DECAY]) >= _LEAST_FACTOR)
    if KIND.scaled[1] and (KIND.formats[1] == "e4m3" or KIND.formats[1] == "e5m2"):
        usual = usual & (inverses[1] * format_max(KIND.formats[1]) < _GRADIENT_LIMIT)
    usual = usual & _are_usual_scales(inverses[0], scales[0], KIND, 0)
    if KIND.split:
        usual = usual & (inverses[0] * tl.maximum(tl.abs(hyper[DECAY]), 1.0) <= 1.0)
    if KIND.has_roots:
        usual = usual & (v_bound <= _MOST_OF_ROOTS) & (hyper[INV_SQRT_BIAS2] >= 1.0)
    else:
        usual = usual & (root_factor <= hyper[EPS] * _ROOT_BESIDE_EPS)
        usual = usual & _are_usual_scales(inverses[3], scales[2], KIND, 3)
    if KIND.blocked[2]:
        usual = usual & (m_bound <= _MOST_OF_BLOCKS)
    else:
        usual = usual & is_finite(m_bound) & _are_usual_scales(inverses[2], scales[1], KIND, 2)
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
def root_of_square(x, IN_HARDWARE: tl.constexpr):
    """`root_of`, and 0 for 0."""
    if IN_HARDWARE:
        inverse = _approximate_root(x + _LEAST_NORMAL)
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
def _random_bits(first, at, key, KIND: tl.constexpr):
    """32 bits for the elements at places behind the index `first`. The indices of a thread's elements mostly differ in
    their lowest bits alone: what the hash does first with the others is done once for all of them."""
    lowest: tl.constexpr = KIND.usual_lanes - 1
    if first & lowest == 0:
        x = (first + (at & (-1 - lowest))).to(tl.uint32, bitcast=True) ^ key
        x = (x ^ (x >> 16)) ^ (at & lowest).to(tl.uint32, bitcast=True)
    else:
        x = (first + at).to(tl.uint32, bitcast=True) ^ key
        x = x ^ (x >> 16)
    return mixed_on(x)


@triton.jit
def _stored(pointer, KIND: tl.constexpr, SLOT: tl.constexpr):
    """FP32 values without their scale."""
    return decoded(tl.load(pointer), KIND.formats[SLOT], KIND.has_fp8_casts)


@triton.jit
def pairs_of(codes, residuals, IN_HARDWARE: tl.constexpr):
    """FP32 bits of a split weight, without its scale and times 2**-120: with the format's own exponent. A residual
    counts from 128 at first; code and residual stand side by side then, with the code's sign above them."""
    if IN_HARDWARE:
        return tl.inline_asm_elementwise(_PAIRS, "=r,=r,=r,=r,r,r", [codes, residuals], tl.int32, is_pure=True, pack=4)
    else:
        code = codes.to(tl.int8, bitcast=True).to(tl.int32) << 20
        return (code + (residuals.to(tl.int8, bitcast=True).to(tl.int32) << 12)) & -0x78001000


@triton.jit
def roots_of(codes, IN_HARDWARE: tl.constexpr):
    """FP32 values of codes of "root8", times 2**-8: those of FP16, which has the mantissa at another place."""
    if IN_HARDWARE:
        return tl.inline_asm_elementwise(_ROOTS, "=f,=f,=f,=f,r", [codes], tl.float32, is_pure=True, pack=4)
    else:
        return from_magnitude_codes(codes.to(tl.int32), "root8") * _OF_ROOTS


@triton.jit
def upper_bytes(x, IN_HARDWARE: tl.constexpr):
    """The upper eight bits of a uint32."""
    if IN_HARDWARE:
        return tl.inline_asm_elementwise(_UPPER_BYTES, "=r,r,r,r,r", [x], tl.uint8, is_pure=True, pack=4)
    else:
        return (x >> 24).to(tl.uint8)


@triton.jit
def residuals_of(x, IN_HARDWARE: tl.constexpr):
    """The next eight bits, less 128."""
    if IN_HARDWARE:
        return tl.inline_asm_elementwise(_RESIDUALS, "=r,r,r,r,r", [x], tl.uint8, is_pure=True, pack=4)
    else:
        return ((x >> 16) ^ 0x80).to(tl.uint8)


@triton.jit
def _step(bases, inverses, of_blocks, hyper, at, root_numbers, KIND: tl.constexpr):
    """`triton_tiles.adam_step`; the root is larger than exp_avg_sq's, as `root_numbers` say."""
    w_inv = inverses[0]
    if KIND.split:
        w = from_bits(pairs_of(tl.load(bases[0] + at), tl.load(bases[4] + at), KIND.has_fp8_casts))
        w_inv = w_inv * (1 / _to_exponent_of("e4m11"))
    else:
        w = _stored(bases[0] + at, KIND, 0)
    g = _stored(bases[1] + at, KIND, 1) * inverses[1]
    m = _stored(bases[2] + at, KIND, 2)
    if not (KIND.scaled[1] and (KIND.formats[1] == "e4m3" or KIND.formats[1] == "e5m2")):
        g = tl.where(tl.abs(g) < _GRADIENT_LIMIT, g, 0.0)
    if KIND.maximize:
        g = -g
    if KIND.decoupled:
        w = w * (w_inv * hyper[DECAY])
    else:
        w = w * w_inv
        g = g + hyper[WEIGHT_DECAY] * w
    if KIND.blocked[2]:
        m = m * tl.load(of_blocks[0])
        m = m + hyper[NEW_IN_EXP_AVG] * (g - m)
    else:
        m = tl.fma(m, inverses[2], hyper[NEW_IN_EXP_AVG] * tl.fma(m * -1.0, inverses[2], g))
    if KIND.has_roots:
        v = roots_of(tl.load(bases[3] + at), KIND.has_fp8_casts) * (tl.load(of_blocks[1]) * (1 / _OF_ROOTS))
        v = v * v * hyper[BETA2] + hyper[NEW_IN_EXP_AVG_SQ] * g * g
        root = root_of_square(v * root_numbers[0], KIND.has_fp8_casts)
    else:
        v = _stored(bases[3] + at, KIND, 3)
        v = v * (inverses[3] * hyper[BETA2]) + hyper[NEW_IN_EXP_AVG_SQ] * g * g
        root = root_of(tl.fma(v, root_numbers[0], _LEAST), KIND.has_fp8_casts)
    denominator = root * root_numbers[1] + hyper[EPS]
    return w - quotient_of(hyper[STEP_SIZE] * m, denominator, KIND.has_fp8_casts), m, v, root


@triton.jit
def _rounded(x, factor, random, FORMAT: tl.constexpr, LOW: tl.constexpr, BITS: tl.constexpr, MORE: tl.constexpr = 0):
    """The code of |x| times a scale as the upper bits of a uint32. factor: the scale times `_to_exponent_of`. MORE: a
    bit of the code that is added."""
    dropped: tl.constexpr = dropped_bits(FORMAT)
    spare: tl.constexpr = _spare_bits(FORMAT)
    used: tl.constexpr = BITS if BITS < dropped else dropped
    if LOW + BITS == 32 and used == dropped:  # what is below the field carries nothing
        addend = random >> (32 - dropped - spare)
    else:
        addend = ((random >> (LOW + BITS - used)) & (2**used - 1)) << (dropped - used + spare)
    if used < dropped:
        addend |= 2 ** (dropped - used - 1 + spare)
    if MORE:
        addend |= MORE
    return (as_bits(tl.abs(x) * factor).to(tl.uint32, bitcast=True) << spare) + addend


@triton.jit
def _code(upper, FORMAT: tl.constexpr, IN_HARDWARE: tl.constexpr):
    """The code as the format is stored."""
    width: tl.constexpr = _width(FORMAT)
    if width == 8:
        return upper_bytes(upper, IN_HARDWARE)
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
def of_lanes(x, KIND: tl.constexpr):
    """The largest of each thread's elements."""
    lanes: tl.constexpr = KIND.usual_lanes
    return tl.max(tl.reshape(x, (KIND.usual_rows, KIND.width // lanes, lanes)), axis=2)


@triton.jit
def _write_weight(pointer, copy, w, scale, copy_scale, random, KIND: tl.constexpr):
    """copy: a pointer to the residual of a weight that is split. Returns the bits of what is stored, without its scale:
    the largest of a thread's."""
    if KIND.formats[0] == "fp32":
        tl.store(pointer, w)
        return of_lanes(as_bits(w) & 0x7FFFFFFF, KIND)
    elif KIND.split:
        # half a code more, so that the upper bits are the nearest code
        factor = scale[0] * _to_exponent_of("e4m11")
        upper = _rounded(w, factor, random, "e4m11", KIND.low_bit[0], KIND.bits[0], 1 << 23)
        tl.store(pointer, upper_bytes(_with_sign_of(upper, w), KIND.has_fp8_casts))
        tl.store(copy, residuals_of(upper, KIND.has_fp8_casts))
        most = (of_lanes(upper.to(tl.int32, bitcast=True), KIND) - (1 << 23)) >> 16
        return as_bits(from_magnitude_codes(most, "e4m11"))
    else:
        upper = _upper(w, scale[0], random, KIND, 0)
        code = _code(_with_sign_of(upper, w), KIND.formats[0], KIND.has_fp8_casts)
        tl.store(pointer, code)
        if KIND.copied:
            x = decoded(code, KIND.formats[0], KIND.has_fp8_casts) * (scale[1] * copy_scale)
            if KIND.has_fp8_casts and KIND.formats[4] == "e4m3":
                tl.store(copy, x.to(tl.float8e4nv).to(tl.uint8, bitcast=True))
            else:
                magnitude = rounded(x, 0, KIND.formats[4], KIND.has_fp8_casts, False, 0, 0, False)
                tl.store(copy, encoded(with_sign_of(magnitude, x), KIND.formats[4], KIND.has_fp8_casts))
        most = of_lanes(upper.to(tl.int32, bitcast=True), KIND).to(tl.uint32, bitcast=True)
        return as_bits(decoded(_code(most, KIND.formats[0], False), KIND.formats[0], KIND.has_fp8_casts))


@triton.jit
def _scale_of_block(amax, FORMAT: tl.constexpr):
    """The scale for a finite amax, and its inverse."""
    scale = scale_of(amax, FORMAT)
    return scale, from_bits((254 << 23) - as_bits(scale))  # of a power of two


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
            block_scale, inverse = _scale_of_block(tl.max(tl.abs(m), axis=1)[:, None], FORMAT)
            tl.store(inverses, inverse)
            upper = _upper(m, block_scale, random, KIND, 2)
        else:
            upper = _upper(m, scale[0], random, KIND, 2)
        code = _code(_with_sign_of(upper, m), FORMAT, KIND.has_fp8_casts)
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
        code = _code(tl.maximum(upper, tl.minimum(any_bits, least)), FORMAT, KIND.has_fp8_casts)
        tl.store(pointer, code)
        return decoded(code, FORMAT, KIND.has_fp8_casts)


@triton.jit
def _write_root(pointer, inverses, root, root_numbers, random, KIND: tl.constexpr):
    """root: times 2**_FOURS. Returns roots as they are stored, without their scale and times 2**-8; its inverse."""
    shift: tl.constexpr = 2.0**-_FOURS
    scale, inverse = _scale_of_block(tl.max(root, axis=1)[:, None] * shift, "root8")
    tl.store(inverses, inverse)
    factor = scale * (shift * _to_exponent_of("root8"))
    upper = _rounded(root, factor, random, "root8", KIND.low_bit[3], KIND.bits[3])
    least: tl.constexpr = 1 << 24
    upper = tl.maximum(upper, tl.minimum(as_bits(root).to(tl.uint32, bitcast=True), least))  # bits: 0, or more than it
    code = upper_bytes(upper, KIND.has_fp8_casts)
    tl.store(pointer, code)
    return roots_of(code, KIND.has_fp8_casts), inverse


@triton.jit
def bases_of(pointers, copy, row, start, KIND: tl.constexpr):
    """What a program's tiles count from: pointers to its first element (weight, grad, exp_avg, exp_avg_sq, copy or
    residual) and to the scale_inv of its first block of exp_avg and exp_avg_sq; the index of its first element for
    random bits."""
    m_blocks = tl.load(row + INVERSE + 2).to(tl.pointer_type(tl.float32)) + start // KIND.width
    v_blocks = tl.load(row + INVERSE + 3).to(tl.pointer_type(tl.float32)) + start // KIND.width
    index = (tl.load(row + FIRST) + start).to(tl.int32)
    w, g, m, v, residual = pointers
    if KIND.split:
        copy = residual
    return w + start, g + start, m + start, v + start, copy + start, m_blocks, v_blocks, index


@triton.jit
def write_usual_tile(bases, inverses, hyper, scales, copy_scale, v_bound, key, first, known, KIND: tl.constexpr):
    """What `write_tile` does. bases: from `bases_of`; first: the tile's place behind them; v_bound: of exp_avg_sq."""
    rows = tl.arange(0, KIND.usual_rows)[:, None]
    at = first + rows * KIND.width + tl.arange(0, KIND.width)[None, :]
    block = first // KIND.width + rows
    of_blocks = (bases[5] + block, bases[6] + block)
    root_numbers = _root_factors(v_bound, hyper, KIND)
    w, m, v, root = _step(bases, inverses, of_blocks, hyper, at, root_numbers, KIND)
    random = _random_bits(bases[7], at, key, KIND)
    if KIND.blocked[2]:
        tl.debug_barrier()  # all threads have read the blocks' old scales
    largest_w = _write_weight(bases[0] + at, bases[4] + at, w, scales[0], copy_scale, random, KIND)
    m, m_inv = _write_exp_avg(bases[2] + at, of_blocks[0], m, scales[1], random, KIND)
    v_inv = scales[2][1]
    if KIND.has_roots:
        v, v_inv = _write_root(bases[3] + at, of_blocks[1], root, root_numbers, random, KIND)
    else:
        v = _write_exp_avg_sq(bases[3] + at, v, scales[2], random, KIND)
    half = half_of_inverse(v_inv, KIND)
    if KIND.has_roots:  # scale_inv is 1 at most, so that exp_avg of 0 has no ratio above 0
        half_of_v = tl.where(v > 0, as_bits(v), _HALF_BESIDE_ROOTS - half)
        ratio = of_lanes(as_bits(m) - half_of_v, KIND) + _HALF_BESIDE_ROOTS
    else:
        ratio = of_lanes(as_bits(m) - (as_bits(v) >> 1), KIND)
    largest_m, largest_v = of_lanes(as_bits(m), KIND), of_lanes(as_bits(v), KIND)
    if KIND.blocked[2]:
        m_inv, v_inv = _of_each_thread(m_inv, KIND), _of_each_thread(v_inv, KIND)
        ratio = coded(ratio, m_inv, half_of_inverse(v_inv, KIND))
        largest_m = as_bits(from_bits(largest_m) * m_inv)
    if KIND.blocked[3]:
        largest_v = as_bits(from_bits(largest_v) * (v_inv * (1 / _OF_ROOTS)))
    return (
        _larger(known[0], largest_w, KIND),
        _larger(known[1], largest_m, KIND),
        _larger(known[2], largest_v, KIND),
        _larger(known[3], ratio, KIND),
    )


@triton.jit
def _of_each_thread(inverse, KIND: tl.constexpr):
    """The scale_inv of rows, or of all, beside what `of_lanes` returns: a thread has it already."""
    return from_bits(of_lanes(as_bits(tl.broadcast_to(inverse, (KIND.usual_rows, KIND.width))), KIND))


@triton.jit
def _larger(known, found, KIND: tl.constexpr):
    """known: a number for each thread's elements of a general tile; found: of a usual one, in any order."""
    return tl.maximum(known, tl.reshape(found, known.shape, can_reorder=True))
