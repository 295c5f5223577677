// The one-pass Adam step of adam.py over all parameters of one kind, on a CPU, to the bit. `bounds` bounds amaxes, for
// scales; `write` computes, rounds and stores new values in place, and updates the record (adam_table.py). Values stay
// in vector registers, or, until the amax of their block is known, in first-level cache.
//
// Compiled once a kind. WEIGHT, GRAD, EXP_AVG, EXP_AVG_SQ and COPY name formats (below); BLOCKED has a bit for each of
// the first four with scales of blocks; BOUNDED (0: nothing written has a scale), COPIED, DECOUPLED, MAXIMIZE and
// STOCHASTIC are 0 or 1.

#include <cmath>
#include <cstdint>
#include <cstring>
#include <memory>
#include <type_traits>
#if defined(__F16C__)
#include <immintrin.h>
#endif

namespace {

#if defined(__AVX512F__)
constexpr int LANES = 16;
#elif defined(__AVX2__) && defined(__F16C__)
constexpr int LANES = 8;
#else
constexpr int LANES = 4;
#endif

typedef float Floats __attribute__((vector_size(4 * LANES)));
typedef int32_t Ints __attribute__((vector_size(4 * LANES)));
typedef uint32_t Unsigneds __attribute__((vector_size(4 * LANES)));
typedef uint16_t Halves __attribute__((vector_size(2 * LANES)));
typedef int16_t Shorts __attribute__((vector_size(2 * LANES)));
typedef uint8_t Bytes __attribute__((vector_size(LANES)));
typedef int8_t SignedBytes __attribute__((vector_size(LANES)));

enum Format { FP32, BF16, FP16, E4M3, E5M2, ROOT8, E4M11 };  // of E4M11, two planes: codes and residuals

// A format's numbers are multiples of 2**(exponent - mantissa bits), the exponent at least `min_exponent`.
struct Grid {
    int bytes, dropped, min_exponent;  // of the data; `dropped`: mantissa bits that FP32 has and the format has not
    int32_t max_bits;                  // the largest number as FP32 bits
    bool scales;                       // whether values are stored times a scale
};
constexpr Grid GRIDS[] = {
    {4, 0, -126, 0x7F7FFFFF, false}, {2, 16, -126, 0x7F7F0000, false}, {2, 13, -14, 0x477FE000, true},
    {1, 20, -6, 0x43E00000, true},   {1, 21, -14, 0x47600000, true},   {1, 19, -6, 0x43F80000, true},
    {1, 12, -6, 0x43E00000, true},
};
constexpr int32_t bits_of_power(int exponent) { return (exponent + 127) << 23; }
constexpr int32_t bits_of_smallest(Grid grid) {
    const int exponent = grid.min_exponent + grid.dropped - 23;
    return exponent < -126 ? 1 << (exponent + 149) : bits_of_power(exponent);
}

// Columns of a parameter's row, as in adam_table.py
constexpr int DATA = 0, COPY_DATA = 4, RESIDUAL = 4, INVERSE = 5, COPY_INVERSE = 9, HYPER = 10, FINITE = 11, NUMEL = 12,
              FIRST = 13, SEED = 14, FIRST_CHUNK = 15, RECORD = 16, COLUMNS = 17;
// Places in the hyperparameters, as in adam_table.py
constexpr int STEP_SIZE = 0, DECAY = 1, WEIGHT_DECAY = 2, NEW_IN_EXP_AVG = 3, BETA2 = 4, NEW_IN_EXP_AVG_SQ = 5,
              INV_SQRT_BIAS2 = 6, EPS = 7, STEP = 8;

// As in adam_table.py
constexpr int32_t RATIO_BITS = 534121127, INF_BITS = 0x7F800000, ONE = 127 << 23, HALF_OF_ONE = ONE >> 1;
constexpr float SLACK = 0x1p-20f, UPDATE_SLACK = 1 + 0x1p-10f, LEAST_ROOT = 0x1p-63f;

constexpr int FORMATS[] = {WEIGHT, GRAD, EXP_AVG, EXP_AVG_SQ};
constexpr int WRITTEN[] = {0, 2, 3};                          // weight, exp_avg and exp_avg_sq among these
constexpr int LOW_BIT[] = {16, 4, 3}, BITS[] = {16, 20, 13};  // their fields of an element's random bits
constexpr bool blocked(int slot) { return BLOCKED >> slot & 1; }
constexpr bool OF_ROOTS = EXP_AVG_SQ == ROOT8;
constexpr bool WAITS = BOUNDED && (blocked(0) || blocked(2) || blocked(3));  // for amaxes of blocks

template <class To, class From> inline To cast(From x) {
    static_assert(sizeof(To) == sizeof(From), "a cast of bits");
    To y;
    std::memcpy(&y, &x, sizeof y);
    return y;
}
inline Ints bits_of(Floats x) { return cast<Ints>(x); }
inline Floats floats_of(Ints x) { return cast<Floats>(x); }
inline Ints magnitude_of(Floats x) { return bits_of(x) & INT32_MAX; }
inline Ints larger(Ints a, Ints b) { return a > b ? a : b; }
inline Ints smaller(Ints a, Ints b) {
#if defined(__AVX512F__)
    return cast<Ints>(_mm512_min_epi32(cast<__m512i>(a), cast<__m512i>(b)));  // GCC compares and blends some of these
#else
    return a < b ? a : b;
#endif
}

inline Floats square_root(Floats x) {
#if defined(__AVX512F__)
    return cast<Floats>(_mm512_sqrt_ps(cast<__m512>(x)));
#elif defined(__AVX2__) && defined(__F16C__)
    return cast<Floats>(_mm256_sqrt_ps(cast<__m256>(x)));
#else
    for (int i = 0; i < LANES; i++) x[i] = std::sqrt(x[i]);
    return x;
#endif
}

// A count of elements is a constant for a whole vector, to fold comparisons.
constexpr std::integral_constant<int64_t, LANES> ALL{};

template <class Vector, class Count> inline Vector load_lanes(const void* from, Count count) {
    Vector x{};
    if (count >= LANES) std::memcpy(&x, from, sizeof x);
    else std::memcpy(&x, from, count * (sizeof x / LANES));
    return x;
}

template <class Vector, class Count> inline void store_lanes(void* to, Vector x, Count count) {
    if (count >= LANES) std::memcpy(to, &x, sizeof x);
    else std::memcpy(to, &x, count * (sizeof x / LANES));
}

// Widen integers, take the lowest bits, and encode numbers on FP16's grid. GCC's vector conversions are slow.
#if defined(__AVX512F__)
inline Shorts shorts_of(SignedBytes x) { return cast<Shorts>(_mm256_cvtepi8_epi16(cast<__m128i>(x))); }
inline Ints ints_of(SignedBytes x) { return cast<Ints>(_mm512_cvtepi8_epi32(cast<__m128i>(x))); }
inline Bytes bytes_of(Ints x) { return cast<Bytes>(_mm512_cvtepi32_epi8(cast<__m512i>(x))); }
inline Halves halves_of(Ints x) { return cast<Halves>(_mm512_cvtepi32_epi16(cast<__m512i>(x))); }
inline Halves fp16_of(Floats x) { return cast<Halves>(_mm512_cvtps_ph(cast<__m512>(x), _MM_FROUND_TO_ZERO)); }
#elif defined(__AVX2__) && defined(__F16C__)
inline Shorts shorts_of(SignedBytes x) {
    return cast<Shorts>(_mm_cvtepi8_epi16(_mm_cvtsi64_si128(cast<int64_t>(x))));
}
inline Ints ints_of(SignedBytes x) { return cast<Ints>(_mm256_cvtepi8_epi32(_mm_cvtsi64_si128(cast<int64_t>(x)))); }
inline Halves halves_of(Ints x) {
    const __m256i low = cast<__m256i>(x & 0xFFFF);
    return cast<Halves>(_mm_packus_epi32(_mm256_castsi256_si128(low), _mm256_extracti128_si256(low, 1)));
}
inline Halves fp16_of(Floats x) { return cast<Halves>(_mm256_cvtps_ph(cast<__m256>(x), _MM_FROUND_TO_ZERO)); }
inline Bytes bytes_of(Ints x) {
    const __m128i low = cast<__m128i>(halves_of(x & 0xFF));
    return cast<Bytes>(_mm_cvtsi128_si64(_mm_packus_epi16(low, low)));
}
#else
inline Shorts shorts_of(SignedBytes x) { return __builtin_convertvector(x, Shorts); }
inline Ints ints_of(SignedBytes x) { return __builtin_convertvector(x, Ints); }
inline Bytes bytes_of(Ints x) { return __builtin_convertvector(x, Bytes); }
inline Halves halves_of(Ints x) { return __builtin_convertvector(x, Halves); }
#endif

inline Floats from_halves(Halves x) {
#if defined(__AVX512F__)
    return cast<Floats>(_mm512_cvtph_ps(cast<__m256i>(x)));
#elif defined(__AVX2__) && defined(__F16C__)
    return cast<Floats>(_mm256_cvtph_ps(cast<__m128i>(x)));
#else
    Ints code = __builtin_convertvector(x, Ints), magnitude = code & 0x7FFF;
    Ints normal = (magnitude << 13) + (112 << 23);
    normal = magnitude >= 0x7C00 ? normal + (112 << 23) : normal;  // inf and NaN
    Ints subnormal = bits_of(__builtin_convertvector(magnitude, Floats) * 0x1p-24f);
    return floats_of((magnitude < 0x400 ? subnormal : normal) | (code >> 15 << 31));
#endif
}

// Decode stored data to FP32. A NaN of an eight-bit format becomes a number: its scale is NaN.
template <int FORMAT, class Count> inline Floats decoded(const void* data, int64_t at, Count count) {
    const char* from = static_cast<const char*>(data) + at * GRIDS[FORMAT].bytes;
    if constexpr (FORMAT == FP32) return load_lanes<Floats>(from, count);
    else if constexpr (FORMAT == BF16) {
        return floats_of(__builtin_convertvector(load_lanes<Halves>(from, count), Ints) << 16);
    } else if constexpr (FORMAT == FP16) return from_halves(load_lanes<Halves>(from, count));
    else if constexpr (FORMAT == E4M3) {  // FP16 has the same bits behind an exponent that is greater by 8
        Shorts wide = shorts_of(load_lanes<SignedBytes>(from, count)) << 7;
        return from_halves(cast<Halves>(wide) & 0xBFFF) * 256.0f;
    } else if constexpr (FORMAT == ROOT8) {
        Shorts wide = shorts_of(load_lanes<SignedBytes>(from, count)) << 6;
        return from_halves(cast<Halves>(wide) & 0x3FC0) * 256.0f;
    } else {
        static_assert(FORMAT == E5M2, "a format of one plane");
        Ints code = ints_of(load_lanes<SignedBytes>(from, count)), magnitude = code & 0x7F;
        Ints subnormal = bits_of(__builtin_convertvector(magnitude, Floats) * 0x1p-16f);
        Ints normal = (magnitude << 21) + (112 << 23);
        return floats_of((magnitude < 4 ? subnormal : normal) | (code & INT32_MIN));
    }
}

// Decode E4M11 to FP32.
template <class Count>
inline Floats decoded_pair(const void* codes, const void* residuals, int64_t at, Count count) {
    const auto plane = [&](const void* data) {
        return ints_of(load_lanes<SignedBytes>(static_cast<const char*>(data) + at, count));
    };
    const Ints code = plane(codes), magnitude = ((code & 0x7F) << 8) + plane(residuals);
    Ints subnormal = bits_of(__builtin_convertvector(magnitude, Floats) * 0x1p-17f);
    Ints normal = (magnitude << 12) + bits_of_power(-7);
    return floats_of((magnitude < 0x800 ? subnormal : normal) ^ (code & INT32_MIN));
}

struct Rounded {
    Ints bits;   // of |x| + shift, on the format's grid but for the dropped bits
    Ints shift;  // bits of 0, or for subnormal |x| of the smallest normal number: puts the format's mantissa bits in
                 // front of the dropped ones
};

// above_zero: x is not negative, and positive x does not become 0.
template <int FORMAT>
inline Rounded on_grid(Floats x, bool stochastic, Unsigneds random, int low, int bits, bool above_zero) {
    constexpr Grid grid = GRIDS[FORMAT];
    constexpr int32_t smallest_normal = bits_of_power(grid.min_exponent);
    Ints magnitude = smaller(magnitude_of(x), grid.max_bits - Ints{});
    if (above_zero) magnitude = x > 0.0f ? larger(magnitude, bits_of_smallest(grid) - Ints{}) : magnitude;
    const Ints shift = (magnitude < smallest_normal) & smallest_normal;
    if (stochastic) {
        const int used = bits < grid.dropped ? bits : grid.dropped, left = grid.dropped - low - bits;
        Ints addend = cast<Ints>(left < 0 ? random >> -left : random << left);
        if (low + bits < 32 || used < grid.dropped) addend &= ((1 << used) - 1) << (grid.dropped - used);
        if (used < grid.dropped) addend |= 1 << (grid.dropped - used - 1);
        return {bits_of(floats_of(magnitude) + floats_of(shift)) + addend, shift};
    }
    Ints normal = magnitude + ((magnitude >> grid.dropped) & 1) + ((1 << (grid.dropped - 1)) - 1);
    const float step = cast<float>(bits_of_power(grid.min_exponent + grid.dropped));
    Floats subnormal = ((floats_of(magnitude) + step) - step) + cast<float>(smallest_normal);
    return {shift > 0 ? bits_of(subnormal) : normal, shift};
}

// Rounded |x|: FP32 bits, and exponent and mantissa as stored
template <int FORMAT> inline Ints magnitude_bits(Rounded r) {
    return bits_of(floats_of(r.bits & -(1 << GRIDS[FORMAT].dropped)) - floats_of(r.shift));
}
template <int FORMAT> inline Ints magnitude_code(Rounded r) {
    constexpr Grid grid = GRIDS[FORMAT];
    return (r.bits - larger(r.shift, bits_of_power(grid.min_exponent - 1) - Ints{})) >> grid.dropped;
}

inline Ints sign_of(Floats x, int bit) { return (bits_of(x) >> (31 - bit)) & (1 << bit); }

// Write rounded x. with_sign: false if x is not negative.
template <int FORMAT, class Count>
inline void store(void* data, int64_t at, Count count, Floats x, Rounded r, bool with_sign) {
    constexpr Grid grid = GRIDS[FORMAT];
    constexpr int width = 8 * grid.bytes - 1;
    char* to = static_cast<char*>(data) + at * grid.bytes;
    const Ints sign = with_sign ? sign_of(x, width) : Ints{};
    if constexpr (grid.bytes == 1) {
        store_lanes(to, bytes_of(magnitude_code<FORMAT>(r) | sign), count);
    } else {
#if defined(__AVX2__) && defined(__F16C__)
        if constexpr (FORMAT == FP16) {
            const Ints value = magnitude_bits<FORMAT>(r) | (with_sign ? bits_of(x) & INT32_MIN : Ints{});
            return store_lanes(to, fp16_of(floats_of(value)), count);
        }
#endif
        store_lanes(to, halves_of(magnitude_code<FORMAT>(r) | sign), count);
    }
}

template <class Count>
inline void store_pair(void* codes, void* residuals, int64_t at, Count count, Floats x, Rounded r) {
    const Ints both = magnitude_code<E4M11>(r) | sign_of(x, 15);
    const Ints code = (both + 0x80) >> 8;  // the nearest one
    store_lanes(static_cast<char*>(codes) + at, bytes_of(code), count);
    store_lanes(static_cast<char*>(residuals) + at, bytes_of(both), count);
}

inline bool is_finite(float amax) { return (cast<int32_t>(amax) & INT32_MAX) < INF_BITS; }

// 2**floor(log2(max / amax)), at most 2**126; 1 for an amax of 0, inf or NaN
template <int FORMAT> inline float scale_of(float amax) {
    constexpr int32_t max_bits = GRIDS[FORMAT].max_bits;
    if (!GRIDS[FORMAT].scales || !(amax > 0.0f) || !is_finite(amax)) return 1.0f;
    const int32_t bits = cast<int32_t>(amax);
    const int32_t quotient = (max_bits >> 23) - (bits >> 23) - ((bits & 0x7FFFFF) > (max_bits & 0x7FFFFF));
    return cast<float>(bits_of_power(quotient < 126 ? quotient : 126));
}

// 1 / scale, which is a power of two
inline float inverse_of(float scale, float amax) {
    return is_finite(amax) ? cast<float>(2 * ONE - cast<int32_t>(scale)) : NAN;
}

// Mix bits: the finalizer "lowbias32" of Chris Wellons' hash-prospector

template <class T> inline T hashed(T x) {
    x ^= x >> 16;
    x *= 0x7FEB352Du;
    x ^= x >> 15;
    x *= 0x846CA68Bu;
    return x ^ (x >> 16);
}

struct Table {  // as in adam_cpu.py
    const int64_t* rows;
    float *bounds, *grad_amaxes;
    int64_t parameters, chunks, chunk_size, block_size, threads;
};

struct Parameter {
    const int64_t* row;
    const float* hyper;
    uint32_t key;

    explicit Parameter(const int64_t* table, int64_t index) : row(table + index * COLUMNS), hyper(at<float>(HYPER)) {
        const uint32_t step = static_cast<uint32_t>(static_cast<int32_t>(hyper[STEP]));
        key = hashed<uint32_t>(hashed<uint32_t>(step) + static_cast<uint32_t>(row[SEED]));
    }
    template <class T> T* at(int column) const { return reinterpret_cast<T*>(row[column]); }
    int64_t numel() const { return row[NUMEL]; }
    bool scaled(int slot) const { return row[INVERSE + slot]; }
    float inverse(int slot, int64_t block) const {
        if (slot == 1 && row[FINITE] && !*at<bool>(FINITE)) return NAN;
        return scaled(slot) ? at<float>(INVERSE + slot)[blocked(slot) ? block : 0] : 1.0f;
    }

    // Bound max |x| of the gradient; 0 if it counts as zero. measured: for gradients without one scale.
    float largest_gradient(float measured) const {
        if (row[FINITE] && !*at<bool>(FINITE)) return 0;
        const float amax = scaled(1) && !blocked(1) ? inverse(1, 0) * cast<float>(GRIDS[GRAD].max_bits) : measured;
        if (scaled(1) && !blocked(1) && !is_finite(inverse(1, 0))) return 0;
        return amax < 0x1p63f ? amax : 0x1p63f;
    }

    // new_bounds of adam_table.py
    void find_bounds(float measured, float bounds[3]) const {
        const float* record = at<float>(RECORD);
        const float n = hyper[NEW_IN_EXP_AVG], s = std::fabs(hyper[STEP_SIZE]), c = hyper[INV_SQRT_BIAS2];
        const float ratio = cast<float>(cast<int32_t>(record[3]) + RATIO_BITS), kept = 1 - n + SLACK, more = n + SLACK;
        float g = largest_gradient(measured), w = record[0];
        if (!DECOUPLED) g = g + std::fabs(hyper[WEIGHT_DECAY]) * w;
        const float m = kept * record[1] + more * g;
        const float v = record[2] * hyper[BETA2] + hyper[NEW_IN_EXP_AVG_SQ] * g * g;
        const float of_exp_avg = kept / std::sqrt(hyper[BETA2]) * ratio;
        const float of_gradient = more / std::sqrt(hyper[NEW_IN_EXP_AVG_SQ]);
        const float v_inverse = OF_ROOTS ? 1.0f : blocked(3) ? INFINITY : inverse(3, 0);
        const float least_root = LEAST_ROOT * std::sqrt(std::fmax(v_inverse, 1.0f));
        const float above_eps = std::fmax(c * least_root / hyper[EPS], 1.0f);
        const float of_quotient = s * (of_exp_avg + of_gradient) / c * above_eps;
        const float of_eps = s * m / hyper[EPS];
        if (DECOUPLED) w = w * std::fabs(hyper[DECAY]);
        bounds[0] = (w + (of_quotient < of_eps ? of_quotient : of_eps) * UPDATE_SLACK) * (1 + SLACK);
        bounds[1] = m;
        bounds[2] = v;
    }
};

inline int32_t largest_of(Ints x) {
#if defined(__AVX512F__)
    return _mm512_reduce_max_epi32(cast<__m512i>(x));
#else
    int32_t largest = 0;
    for (int i = 0; i < LANES; i++) largest = x[i] > largest ? x[i] : largest;
    return largest;
#endif
}

// Largest stored bits of a run in each lane, without scales
struct Stored {
    Ints w{}, m{}, v{}, quotient = OF_ROOTS ? -HALF_OF_ONE - Ints{} : Ints{};

    inline void keep_weight(Ints bits) { w = larger(w, bits & INT32_MAX); }
    inline void keep_moments(Ints m_bits, Ints v_bits, float v_inverse) {
        m = larger(m, m_bits);
        v = larger(v, v_bits);
        if (OF_ROOTS) {  // less by half of one, which `Record` adds
            const Ints half_of_v = v_bits > 0 ? v_bits : HALF_OF_ONE + ONE - cast<int32_t>(v_inverse) - Ints{};
            quotient = larger(quotient, m_bits > 0 ? m_bits - half_of_v : -HALF_OF_ONE - Ints{});
        } else {
            quotient = larger(quotient, m_bits - (v_bits >> 1));
        }
    }
};

// Largest stored bits of several runs in each lane, coded as by `measured` of adam_table.py
struct Record {
    Ints largest[4] = {};

    inline void add(const Stored& found, const float inverses[3]) {
        const Floats v_amax = floats_of(found.v) * inverses[2];
        largest[0] = larger(largest[0], magnitude_of(floats_of(found.w) * inverses[0]));
        largest[1] = larger(largest[1], magnitude_of(floats_of(found.m) * inverses[1]));
        largest[2] = larger(largest[2], magnitude_of(OF_ROOTS ? v_amax * v_amax : v_amax));
        const int32_t of_v = cast<int32_t>(inverses[2]) - ONE;
        const int32_t shift = cast<int32_t>(inverses[1]) - ONE - (OF_ROOTS ? of_v : of_v >> 1);
        const int32_t most = INF_BITS - RATIO_BITS - (shift > 0 ? shift : 0);
        Ints quotient = OF_ROOTS ? found.quotient + HALF_OF_ONE : found.quotient;
        quotient = quotient > 0 ? smaller(quotient, most - Ints{}) + shift : Ints{};
        largest[3] = larger(largest[3], quotient);
    }
};

struct New {
    Floats w, m, v;  // v: or its root, if that is stored
};

// New values until the amaxes of their block are known
struct Waiting {
    Floats w, m, v;
    Unsigneds random;
};

// Elements with common scales: a chunk of a parameter, or a block of its elements
struct Run {
    const Parameter p;
    int64_t block = 0, start = 0, stop = 0;
    float inverse[4], scale[3] = {1, 1, 1}, new_inverse[3] = {1, 1, 1}, copy_scale = 1;

    explicit Run(const Parameter& p) : p(p) {
        for (int slot = 0; slot < 4; slot++) inverse[slot] = blocked(slot) ? 1 : p.inverse(slot, 0);
    }

    void enter(int64_t new_block, int64_t new_start, int64_t new_stop) {
        block = new_block, start = new_start, stop = new_stop;
        for (int slot = 0; slot < 4; slot++) {
            if (blocked(slot)) inverse[slot] = p.inverse(slot, block);
        }
    }

    // body(first element, elements), full vectors first
    template <class Body> inline void for_vectors(Body body) const {
        int64_t at = start;
        for (; at + LANES <= stop; at += LANES) body(at, ALL);
        if (at < stop) body(at, stop - at);
    }

    template <class Count> inline Floats weight(int64_t at, Count count) const {
        if constexpr (WEIGHT == E4M11) return decoded_pair(p.at<void>(DATA), p.at<void>(RESIDUAL), at, count);
        else return decoded<WEIGHT>(p.at<void>(DATA), at, count);
    }

    // torch.optim Adam with FP32 operations
    template <class Count> inline New adam_step(int64_t at, Count count) const {
        const float* hyper = p.hyper;
        Floats w = weight(at, count) * inverse[0];
        Floats g = decoded<GRAD>(p.at<void>(DATA + 1), at, count) * inverse[1];
        Floats m = decoded<EXP_AVG>(p.at<void>(DATA + 2), at, count) * inverse[2];
        Floats v = decoded<EXP_AVG_SQ>(p.at<void>(DATA + 3), at, count) * inverse[3];
        if (OF_ROOTS) v = v * v;
        g = floats_of(bits_of(g) & (magnitude_of(g) < bits_of_power(63)));
        if (MAXIMIZE) g = -g;
        if (DECOUPLED) w = w * hyper[DECAY];
        else g = g + hyper[WEIGHT_DECAY] * w;
        m = m + hyper[NEW_IN_EXP_AVG] * (g - m);
        v = v * hyper[BETA2] + hyper[NEW_IN_EXP_AVG_SQ] * g * g;
        const Floats root = square_root(v), denominator = root * hyper[INV_SQRT_BIAS2] + hyper[EPS];
        w = w - hyper[STEP_SIZE] * m / denominator;
        return {w, m, OF_ROOTS ? root : v};
    }

    // From a bound of this step's amax, or the amax of a block. The copy's scale follows from the weight's.
    template <int I> void choose_scale(float amax) {
        if (I == 0) copy_scale = scale_of<COPY>(amax);
        if (!p.scaled(WRITTEN[I])) return;
        scale[I] = scale_of<FORMATS[WRITTEN[I]]>(amax);
        new_inverse[I] = inverse_of(scale[I], amax);
    }
    // For slots with one scale. bounds: the parameter's three.
    void choose_scales(const float* bounds) {
        if (!blocked(0)) choose_scale<0>(bounds[0]);
        if (!blocked(2)) choose_scale<1>(bounds[1]);
        if (!blocked(3)) choose_scale<2>(bounds[2]);
    }
    void store_inverses(bool of_blocks) const {
        for (int i = 0; i < 3; i++) {
            if (blocked(WRITTEN[i]) != of_blocks || !p.scaled(WRITTEN[i])) continue;
            p.at<float>(INVERSE + WRITTEN[i])[of_blocks ? block : 0] = new_inverse[i];
        }
    }

    inline Unsigneds random(int64_t at) const {
        if (!STOCHASTIC) return Unsigneds{};
        Unsigneds lanes;
        for (int i = 0; i < LANES; i++) lanes[i] = i;
        return hashed((lanes + static_cast<uint32_t>(p.row[FIRST] + at)) ^ p.key);
    }

    // Write new values. Return stored bits of |x|, without the scale.
    template <int I, class Count> inline Ints put(int64_t at, Count count, Floats x, Unsigneds random) const {
        constexpr int format = FORMATS[WRITTEN[I]];
        void* data = p.at<void>(DATA + WRITTEN[I]);
        if constexpr (format == FP32) {
            store_lanes(static_cast<float*>(data) + at, x, count);
            return magnitude_of(x);
        } else {
            x = x * scale[I];
            const Rounded r = on_grid<format>(x, STOCHASTIC, random, LOW_BIT[I], BITS[I], I == 2);
            if constexpr (format == E4M11) store_pair(data, p.at<void>(RESIDUAL), at, count, x, r);
            else store<format>(data, at, count, x, r, I != 2);
            return magnitude_bits<format>(r);
        }
    }

    // Write the new weight and its copy. Return stored bits, with the sign but without the scale.
    template <class Count> inline Ints put_weight(int64_t at, Count count, Floats x, Unsigneds random) const {
        const Ints stored = put<0>(at, count, x, random) | (bits_of(x) & INT32_MIN);
        if (COPIED) put_copy(at, count, floats_of(stored));
        return stored;
    }

    // stored: the weight without its scale
    template <class Count> inline void put_copy(int64_t at, Count count, Floats stored) const {
        const Floats x = stored * new_inverse[0] * copy_scale;
        store<COPY>(p.at<void>(COPY_DATA), at, count, x, on_grid<COPY>(x, false, Unsigneds{}, 0, 0, false), true);
    }

    // Return the largest stored bits.
    Stored write() const {
        Stored largest;
        for_vectors([&](int64_t at, auto count) {
            const New made = adam_step(at, count);
            const Unsigneds bits = random(at);
            largest.keep_weight(put_weight(at, count, made.w, bits));
            const Ints m = put<1>(at, count, made.m, bits), v = put<2>(at, count, made.v, bits);
            if (BOUNDED) largest.keep_moments(m, v, new_inverse[2]);
        });
        return largest;
    }

    // `write` of a block with scales from its own values
    Stored write_block(Waiting* waiting) {
        Stored largest;
        Ints w_amax{}, m_amax{}, v_amax{};
        for_vectors([&](int64_t at, auto count) {
            const New made = adam_step(at, count);
            const Unsigneds bits = random(at);
            Waiting& kept = waiting[(at - start) / LANES];
            if (blocked(0)) {
                kept.w = made.w;
                w_amax = larger(w_amax, magnitude_of(made.w));
            } else {
                largest.keep_weight(put_weight(at, count, made.w, bits));
            }
            if (blocked(2)) m_amax = larger(m_amax, magnitude_of(made.m));
            if (blocked(3)) v_amax = larger(v_amax, magnitude_of(made.v));
            kept.m = made.m, kept.v = made.v, kept.random = bits;
        });
        if (blocked(0)) choose_scale<0>(cast<float>(largest_of(w_amax)));
        if (blocked(2)) choose_scale<1>(cast<float>(largest_of(m_amax)));
        if (blocked(3)) choose_scale<2>(cast<float>(largest_of(v_amax)));
        for_vectors([&](int64_t at, auto count) {
            const Waiting& kept = waiting[(at - start) / LANES];
            if (blocked(0)) largest.keep_weight(put_weight(at, count, kept.w, kept.random));
            const Ints m = put<1>(at, count, kept.m, kept.random), v = put<2>(at, count, kept.v, kept.random);
            largest.keep_moments(m, v, new_inverse[2]);
        });
        return largest;
    }
};

void keep_largest(float* amax_of_bits, int32_t largest) {
    int32_t* amax = reinterpret_cast<int32_t*>(amax_of_bits);
    int32_t kept = __atomic_load_n(amax, __ATOMIC_RELAXED);
    while (kept < largest &&
           !__atomic_compare_exchange_n(amax, &kept, largest, true, __ATOMIC_RELAXED, __ATOMIC_RELAXED)) {
    }
}

// body(parameter, its index, first and last + 1 element) for all chunks of all parameters, on several threads
template <class Body> void for_chunks(const Table& t, Body body) {
    const auto first_chunk = [&](int64_t i) { return t.rows[i * COLUMNS + FIRST_CHUNK]; };
#pragma omp parallel for schedule(dynamic, 1) num_threads(t.threads)
    for (int64_t chunk = 0; chunk < t.chunks; chunk++) {
        int64_t low = 0, high = t.parameters;  // the last parameter that begins at this chunk or before
        while (high - low > 1) {
            const int64_t middle = (low + high) / 2;
            (first_chunk(middle) <= chunk ? low : high) = middle;
        }
        const Parameter p(t.rows, low);
        const int64_t start = (chunk - first_chunk(low)) * t.chunk_size;
        body(p, low, start, start + t.chunk_size < p.numel() ? start + t.chunk_size : p.numel());
    }
}

// each() for the runs of a chunk: blocks, or all of it
template <class Each> inline void for_runs(Run& run, int64_t start, int64_t stop, int64_t block_size, Each each) {
    if (!BLOCKED) block_size = stop - start;
    for (int64_t at = start; at < stop; at += block_size) {
        run.enter(BLOCKED ? at / block_size : 0, at, at + block_size < stop ? at + block_size : stop);
        each();
    }
}

}  // namespace

// Called by adam_cpu.py.

extern "C" void measure_gradients(const Table& t) {
    for_chunks(t, [&](const Parameter& p, int64_t index, int64_t start, int64_t stop) {
        Ints amax{};
        Run run(p);
        run.enter(0, start, stop);
        run.for_vectors([&](int64_t at, auto count) {
            amax = larger(amax, magnitude_of(decoded<GRAD>(p.at<void>(DATA + 1), at, count)));
        });
        keep_largest(t.grad_amaxes + index, largest_of(amax));
        if (largest_of(amax) >= INF_BITS) __atomic_store_n(p.at<bool>(FINITE), false, __ATOMIC_RELAXED);
    });
}

extern "C" void bounds(const Table& t) {
    for (int64_t index = 0; index < t.parameters; index++) {
        const Parameter p(t.rows, index);
        p.find_bounds(t.grad_amaxes[index], t.bounds + 3 * index);
        std::memset(p.at<float>(RECORD), 0, 4 * sizeof(float));  // `write` keeps the largest there
    }
}

extern "C" void write(const Table& t) {
    for_chunks(t, [&](const Parameter& p, int64_t index, int64_t start, int64_t stop) {
        Record record;
        Run run(p);
        run.choose_scales(t.bounds + 3 * index);
        const std::unique_ptr<Waiting[]> waiting(new Waiting[WAITS ? (t.block_size + LANES - 1) / LANES : 0]);
        for_runs(run, start, stop, t.block_size, [&] {
            const Stored largest = WAITS ? run.write_block(waiting.get()) : run.write();
            if (BLOCKED) run.store_inverses(true);
            if (BOUNDED) record.add(largest, run.new_inverse);
        });
        for (int i = 0; BOUNDED && i < 4; i++) keep_largest(p.at<float>(RECORD) + i, largest_of(record.largest[i]));
    });
    for (int64_t index = 0; index < t.parameters; index++) {  // after all chunks have read the old scales
        const float* bounds = t.bounds + 3 * index;
        Run run(Parameter(t.rows, index));
        run.choose_scales(bounds);
        run.store_inverses(false);
        if (COPIED) *run.p.at<float>(COPY_INVERSE) = inverse_of(run.copy_scale, bounds[0]);
    }
}
