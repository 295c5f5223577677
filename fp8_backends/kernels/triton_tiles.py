"""Process a tile of a parameter in the programs of `triton_adam`: [rows, width], with rows of
blocks if there are any.

KIND is `triton_adam._Constants`; `row` points to the parameter's row in the table; `place` is from
`place_of`. A FULL tile has all its elements and no masks: an unaligned mask would narrow every
access.

Formats are decoded, rounded and encoded as in `rounding.py`, to the bit. FORMAT is "fp32", "bf16"
or "fp16"; or "e4m3", "e5m2", "e4m11" or "root8" with uint8 codes in memory, like the residuals of
"e4m11".
"""

from __future__ import annotations

import triton
import triton.language as tl

from .adam_table import GRADIENT_LIMIT, HALF_OF_ONE, INF_BITS, RATIO_BITS
from .triton_common import (
    as_bits,
    bits_of,
    decoded,
    dropped_bits,
    format_max,
    from_bits,
    from_magnitude_codes,
    hardware_codes,
    magnitude_codes,
    power_of_two_scale,
    scale_inv_of,
    smallest_bits,
    smallest_normal,
    stored_dtype,
)

# Columns of a parameter's row, as in table.py
COPY, INVERSE, HYPER, FINITE_FLAG = (tl.constexpr(column) for column in (4, 5, 10, 11))
NUMEL, FIRST, SEED, FIRST_CHUNK, RECORD_COLUMN, ROW_WIDTH = (
    tl.constexpr(column) for column in (12, 13, 14, 15, 16, 17)
)
_GRADIENT_LIMIT = tl.constexpr(GRADIENT_LIMIT)
_ONE, _MOST_CODED = tl.constexpr(127 << 23), tl.constexpr(INF_BITS - RATIO_BITS)
_HALF_OF_ONE = tl.constexpr(HALF_OF_ONE)


@triton.jit
def pointer_at(row, COLUMN: tl.constexpr, DTYPE: tl.constexpr):
    """Load a pointer from a column of the table."""
    return tl.load(row + COLUMN).to(tl.pointer_type(DTYPE))


@triton.jit
def data_at(row, COLUMN: tl.constexpr, FORMAT: tl.constexpr, ALIGNED: tl.constexpr):
    """Load a pointer to numbers of a format."""
    pointer = tl.load(row + COLUMN).to(tl.pointer_type(stored_dtype(FORMAT)))
    if ALIGNED:  # for vector accesses; a result of `pointer_at` would lose this when inlined
        pointer = tl.multiple_of(pointer, 16)
    return pointer


@triton.jit
def decoded_pair(codes, residuals):
    """Decode E4M3 codes and residuals, E4M11, to FP32."""
    bits = codes.to(tl.int32)
    values = from_magnitude_codes(
        ((bits & 0x7F) << 8) + residuals.to(tl.int8, bitcast=True).to(tl.int32), "e4m11"
    )
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
    """Round |x| to the format, in FP32. A shift by the smallest normal number, for smaller |x|,
    puts exactly the format's mantissa bits in front of the dropped ones. WITHIN: no |x| exceeds the
    format's maximum."""
    dropped: tl.constexpr = dropped_bits(FORMAT)
    smallest: tl.constexpr = smallest_normal(FORMAT)
    magnitude = tl.abs(x)
    if not WITHIN:
        # a NaN, too
        magnitude = from_bits(tl.minimum(as_bits(magnitude), bits_of(format_max(FORMAT))))
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
            normal = (
                as_bits(magnitude)
                + ((as_bits(magnitude) >> dropped) & 1)
                + (2 ** (dropped - 1) - 1)
            )
            bits = tl.where(shift > 0, as_bits(((magnitude + step) - step) + smallest), normal)
        return from_bits(bits & -(2**dropped)) - shift


@triton.jit
def with_sign_of(magnitude, x):
    return from_bits(as_bits(magnitude) | (as_bits(x) & -0x80000000))


@triton.jit
def encoded(x, FORMAT: tl.constexpr, HAS_FP8_CASTS: tl.constexpr):
    """Encode numbers on the format's grid; uint8 for eight bits."""
    if FORMAT == "fp16":
        return x.to(tl.float16)
    elif FORMAT == "bf16":
        return (as_bits(x) >> 16).to(tl.int16).to(tl.bfloat16, bitcast=True)
    elif HAS_FP8_CASTS and FORMAT == "e4m3":
        return hardware_codes(x, FORMAT)
    elif FORMAT == "root8":
        return magnitude_codes(x, FORMAT).to(tl.uint8)
    else:
        return (magnitude_codes(tl.abs(x), FORMAT) | ((as_bits(x) >> 24) & 0x80)).to(tl.uint8)


@triton.jit
def encoded_pair(x):
    """Encode numbers of "e4m11" as E4M3 codes and residuals."""
    magnitude = magnitude_codes(tl.abs(x), "e4m11")
    code = (magnitude + 0x80) >> 8
    return (code | ((as_bits(x) >> 24) & 0x80)).to(tl.uint8), magnitude.to(tl.uint8)


@triton.jit
def scale_of(amax, FORMAT: tl.constexpr):
    """Compute `scaling.power_of_two_scale`; 1 for formats without a scale."""
    if FORMAT == "fp32" or FORMAT == "bf16":
        return tl.zeros_like(amax) + 1.0
    else:
        return power_of_two_scale(amax, format_max(FORMAT), 126)


@triton.jit
def mixed(x):
    """Run `rounding.mixed` on a uint32."""
    x ^= x >> 16
    x *= 0x7FEB352D
    x ^= x >> 15
    x *= 0x846CA68B
    return x ^ (x >> 16)


@triton.jit
def row_of(table, parameters, KIND: tl.constexpr):
    """Return row and index of the program's parameter, and the first element of its chunk."""
    index = tl.load(parameters + tl.program_id(0)).to(tl.int64)
    row = table + index * ROW_WIDTH
    return row, index, (tl.program_id(0) - tl.load(row + FIRST_CHUNK)) * KIND.chunk


@triton.jit
def pointers_of(row, KIND: tl.constexpr, ALIGNED: tl.constexpr):
    """Return pointers to weight, grad, exp_avg, exp_avg_sq, and the weight's residual if it is
    split."""
    weight = data_at(row, 0, KIND.formats[0], ALIGNED)
    residual = weight
    if KIND.split:
        residual = data_at(row, COPY, KIND.formats[0], ALIGNED)
    return (
        weight,
        data_at(row, 1, KIND.formats[1], ALIGNED),
        data_at(row, 2, KIND.formats[2], ALIGNED),
        data_at(row, 3, KIND.formats[3], ALIGNED),
        residual,
    )


@triton.jit
def hyper_of(row):
    """Load the hyperparameters, as `adam_numbers` orders them."""
    at = pointer_at(row, HYPER, tl.float32)
    return [tl.load(at + place) for place in (0, 1, 2, 3, 4, 5, 6, 7, 8)]


@triton.jit
def inverse_of(row, KIND: tl.constexpr, SLOT: tl.constexpr):
    """Load scale_inv of a slot with one scale; else 1."""
    if KIND.scaled[SLOT] and not KIND.blocked[SLOT]:
        return tl.load(pointer_at(row, INVERSE + SLOT, tl.float32))
    else:
        return tl.full((), 1.0, tl.float32)


@triton.jit
def if_finite(row, x, other, KIND: tl.constexpr):
    """Return x, or `other` for a gradient flagged as not finite."""
    if KIND.finite_is_told:
        finite = tl.load(pointer_at(row, FINITE_FLAG, tl.uint8))
        x = tl.where(finite != 0, x, other)
    return x


@triton.jit
def load(pointer, inside, other):
    """Read a tile. inside: None, or its mask."""
    if inside is None:
        return tl.load(pointer)
    else:
        return tl.load(pointer, mask=inside, other=other)


@triton.jit
def _values_of(pointers, row, inverses, place, KIND: tl.constexpr, SLOT: tl.constexpr):
    """Decode a tile of a slot to FP32; roots of exp_avg_sq if stored."""
    at, inside, block, rows_inside = place
    inverse = inverses[SLOT]
    if KIND.blocked[SLOT]:
        of_blocks = pointer_at(row, INVERSE + SLOT, tl.float32)
        inverse = load(of_blocks + block, rows_inside, 1.0) * inverse
    data = load(pointers[SLOT] + at, inside, 0.0)
    return decoded(data, KIND.formats[SLOT], KIND.has_fp8_casts) * inverse


@triton.jit
def _adam_step(pointers, row, inverses, hyper, place, KIND: tl.constexpr):
    """Compute torch.optim's Adam in FP32: new weight, exp_avg and exp_avg_sq, or its root if
    stored."""
    step_size, decay, weight_decay, n, beta2, new_in_exp_avg_sq, c, eps, _ = hyper
    if KIND.split:
        code = load(pointers[0] + place[0], place[1], 0)
        residual = load(pointers[4] + place[0], place[1], 0)
        w = decoded_pair(code, residual) * inverses[0]
    else:
        w = _values_of(pointers, row, inverses, place, KIND, 0)
    g = _values_of(pointers, row, inverses, place, KIND, 1)
    m = _values_of(pointers, row, inverses, place, KIND, 2)
    v = _values_of(pointers, row, inverses, place, KIND, 3)
    if KIND.has_roots:
        v = v * v
    g = tl.where(tl.abs(g) < _GRADIENT_LIMIT, g, 0.0)
    if KIND.maximize:
        g = -g
    if KIND.decoupled:
        w = w * decay
    else:
        g = g + weight_decay * w
    m = m + n * (g - m)
    v = v * beta2 + new_in_exp_avg_sq * g * g
    root = tl.sqrt_rn(v)
    w = w - tl.div_rn(step_size * m, root * c + eps)
    if KIND.has_roots:
        return w, m, root
    else:
        return w, m, v


@triton.jit
def place_of(numel, start, KIND: tl.constexpr):
    """Locate a tile by its first element: places of elements, their mask, indices of rows' blocks,
    mask of rows with any element."""
    rows = tl.arange(0, KIND.rows)[:, None]
    at = rows * KIND.width + tl.arange(0, KIND.width)[None, :]
    count = tl.minimum(numel - start, KIND.rows * KIND.width).to(tl.int32)
    inside = at < count
    rows_inside = tl.max(inside.to(tl.int32), axis=1)[:, None] > 0
    return at, inside, start // KIND.width + rows, rows_inside


@triton.jit
def _store(pointers, row, scale, x, random, place, KIND: tl.constexpr, SLOT: tl.constexpr):
    """Write x as stored by the slot, and scales of blocks. scale: the slot's only one, with its
    inverse. Returns stored magnitudes, FP32, and the inverse of their scale."""
    FORMAT: tl.constexpr = KIND.formats[SLOT]
    at, inside, block, rows_inside = place
    pointer, inverse = pointers[SLOT], scale[1]
    if KIND.blocked[SLOT]:
        amax = from_bits(tl.max(as_bits(x) & 0x7FFFFFFF, axis=1)[:, None])
        scale_of_block = scale_of(amax, FORMAT)
        inverse = scale_inv_of(scale_of_block, amax)
        of_blocks = pointer_at(row, INVERSE + SLOT, tl.float32)
        tl.store(of_blocks + block, inverse, mask=rows_inside)
        stored = x * scale_of_block
    else:
        stored = x * scale[0]
    if FORMAT == "fp32":
        tl.store(pointer + at, x, mask=inside)
        return tl.abs(x), inverse
    else:
        # a non-finite weight has no bound
        within: tl.constexpr = KIND.bounded and KIND.scaled[SLOT] and SLOT > 0
        casts: tl.constexpr = KIND.has_fp8_casts
        low: tl.constexpr = KIND.low_bit[SLOT]
        magnitude = rounded(
            stored, random, FORMAT, casts, KIND.stochastic, low, KIND.bits[SLOT], within
        )
        if SLOT == 3:  # positive values may not become 0
            least = tl.where(x > 0, smallest_bits(FORMAT), 0)
            magnitude = from_bits(tl.maximum(as_bits(magnitude), least))
            tl.store(pointer + at, encoded(magnitude, FORMAT, casts), mask=inside)
        elif FORMAT == "e4m11":
            code, residual = encoded_pair(with_sign_of(magnitude, x))
            tl.store(pointer + at, code, mask=inside)
            tl.store(pointers[4] + at, residual, mask=inside)
        else:
            codes = encoded(with_sign_of(magnitude, x), FORMAT, casts)
            tl.store(pointer + at, codes, mask=inside)
        return magnitude, inverse


@triton.jit
def _half_of_inverse(v_inverse, KIND: tl.constexpr):
    """Return half the bits of exp_avg_sq's scale_inv over 1; all bits for a root's."""
    half = as_bits(v_inverse) - _ONE
    if not KIND.has_roots:
        half = half >> 1
    return half


@triton.jit
def _coded(ratio, m_inverse, half_of_inverse):
    """Code differences bits(exp_avg) - bits(exp_avg_sq) / 2 of unscaled magnitudes; 0 if exp_avg is
    0."""
    shift = as_bits(m_inverse) - _ONE - half_of_inverse
    most = _MOST_CODED - tl.maximum(shift, 0)
    return tl.where(ratio > 0, tl.maximum(tl.minimum(ratio, most) + shift, 0), 0)


@triton.jit
def keep_record(row, stored, scales, KIND: tl.constexpr):
    """Raise the record to the largest stored values of a program, from `write_tile`."""
    record = pointer_at(row, RECORD_COLUMN, tl.int32)
    for place in tl.static_range(3):
        largest = from_bits(tl.max(tl.max(stored[place], axis=1), axis=0)) * scales[place][1]
        if place == 2 and KIND.has_roots:
            largest = largest * largest
        tl.atomic_max(record + place, as_bits(largest) & 0x7FFFFFFF, sem="relaxed")
    ratio = tl.max(tl.max(stored[3], axis=1), axis=0)
    if not (KIND.blocked[2] or KIND.blocked[3]):
        ratio = _coded(ratio, scales[1][1], _half_of_inverse(scales[2][1], KIND))
    tl.atomic_max(record + 3, ratio, sem="relaxed")


@triton.jit
def write_tile(step, start, known, KIND: tl.constexpr, FULL: tl.constexpr):
    """Write one tile.

    Args:
        step: of a parameter: pointers, row, inverses, hyperparameters; scales, (scale, inverse) of
            weight, exp_avg and exp_avg_sq; pointer to a copy and its scale; key of random bits;
            number of elements.
        known: largest of earlier tiles. Returned raised to this tile's: bits of these three as
            stored, roots included, times the inverse only for blocks; and of their quotient, coded.
    """
    pointers, row, inverses, hyper, scales, copy, key, numel = step
    place = place_of(numel, start, KIND)
    at, _, block, _ = place
    if FULL:
        place = (at, None, block, None)
    w, g, m, v, residual = pointers
    pointers = (w + start, g + start, m + start, v + start, residual + start)
    w, m, v = _adam_step(pointers, row, inverses, hyper, place, KIND)
    first = (tl.load(row + FIRST) + start).to(tl.int32)
    random = mixed((first + at).to(tl.uint32, bitcast=True) ^ key).to(tl.int32, bitcast=True)
    if KIND.blocked[0] or KIND.blocked[2] or KIND.blocked[3]:
        tl.debug_barrier()  # after all reads of the blocks' old scales
    stored_w, w_inv = _store(pointers, row, scales[0], w, random, place, KIND, 0)
    m, m_inv = _store(pointers, row, scales[1], m, random, place, KIND, 2)
    v, v_inv = _store(pointers, row, scales[2], v, random, place, KIND, 3)
    if KIND.copied:
        x = with_sign_of(stored_w, w) * w_inv * copy[1]
        x = with_sign_of(rounded(x, 0, KIND.formats[4], KIND.has_fp8_casts, False, 0, 0, False), x)
        codes = encoded(x, KIND.formats[4], KIND.has_fp8_casts)
        tl.store(copy[0] + start + at, codes, mask=place[1])
    half = _half_of_inverse(v_inv, KIND)
    if KIND.has_roots:  # a root of 0 and its scale add up to 0
        half_of_v = tl.where(v > 0, as_bits(v) - _HALF_OF_ONE, -half)
        ratio = tl.where(m > 0, as_bits(m) - half_of_v, 0)
    else:
        ratio = as_bits(m) - (as_bits(v) >> 1)
    if KIND.blocked[2] or KIND.blocked[3]:
        ratio = _coded(ratio, m_inv, half)
    if KIND.blocked[0]:
        stored_w = stored_w * w_inv
    if KIND.blocked[2]:
        m = m * m_inv
    if KIND.blocked[3]:
        v = v * v_inv
    if KIND.bounded:
        return (
            tl.maximum(known[0], _of_lanes(as_bits(stored_w), KIND)),
            tl.maximum(known[1], _of_lanes(as_bits(m), KIND)),
            tl.maximum(known[2], _of_lanes(as_bits(v), KIND)),
            tl.maximum(known[3], _of_lanes(ratio, KIND)),
        )
    else:
        return known


@triton.jit
def nothing_stored(KIND: tl.constexpr):
    """Return the largest before the first tile: zeros, one for each thread's elements in a row."""
    nothing = tl.zeros((KIND.rows, KIND.width // KIND.lanes), tl.int32)
    return nothing, nothing, nothing, nothing


@triton.jit
def _of_lanes(x, KIND: tl.constexpr):
    """Reduce each thread's elements to their maximum."""
    return tl.max(tl.reshape(x, (KIND.rows, KIND.width // KIND.lanes, KIND.lanes)), axis=2)


@triton.jit
def scale_within(bound, row, start, KIND: tl.constexpr, SLOT: tl.constexpr):
    """Return scale and inverse of a slot or, 4, of the copy, stored by the parameter's first
    program."""
    amax = tl.load(bound)
    scale = scale_of(amax, KIND.formats[SLOT])
    inverse = scale_inv_of(scale, amax)
    if start == 0:
        tl.store(pointer_at(row, INVERSE + SLOT, tl.float32), inverse)
    return scale, inverse


@triton.jit
def new_scale(bounds, row, start, KIND: tl.constexpr, SLOT: tl.constexpr):
    """Return `scale_within` of a slot with one scale; else 1."""
    if KIND.scaled[SLOT] and not KIND.blocked[SLOT]:
        bound = bounds + (SLOT if SLOT == 0 else SLOT - 1)
        return scale_within(bound, row, start, KIND, SLOT)
    else:
        one = tl.full((), 1.0, tl.float32)
        return one, one
