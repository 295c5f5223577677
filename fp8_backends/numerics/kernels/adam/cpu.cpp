// The Adam step of passes.py over all parameters of one kind, on a CPU and to the bit the same. `amaxes` computes the
// new values and keeps their largest; `write` computes them again, rounds them and stores them in place. In between,
// numbers are in vector registers only. Where a step is BOUNDED, `bounds` takes the place of `amaxes`, and `write` keeps
// the record of what it stores (bounds.py).
//
// Compiled once a kind. WEIGHT, GRAD, EXP_AVG, EXP_AVG_SQ and COPY name dtypes (below); BLOCKED has a bit for each of
// the first four whose scales are of blocks; BOUNDED, COPIED, DECOUPLED, MAXIMIZE and STOCHASTIC are 0 or 1.

#include <cmath>
#include <cstdint>
#include <cstring>
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

enum Dtype { FP32, BF16, FP16, E4M3, E5M2 };

// A format's numbers are multiples of 2**(exponent - mantissa bits), the exponent at least `min_exponent`.
struct Grid {
    int bytes, dropped, min_exponent;  // `dropped`: mantissa bits that FP32 has and the format has not
    int32_t max_bits;                  // the largest number as FP32 bits
    bool scales;                       // whether values are stored times a scale
};
constexpr Grid GRIDS[] = {
    {4, 0, -126, 0x7F7FFFFF, false}, {2, 16, -126, 0x7F7F0000, false}, {2, 13, -14, 0x477FE000, true},
    {1, 20, -6, 0x43E00000, true},   {1, 21, -14, 0x47600000, true},
};
constexpr int32_t bits_of_power(int exponent) { return (exponent + 127) << 23; }

// Columns of a parameter's row, as in table.py
constexpr int DATA = 0, COPY_DATA = 4, INVERSE = 5, COPY_INVERSE = 9, HYPER = 10, FINITE = 11, NUMEL = 12, FIRST = 13,
              SEED = 14, FIRST_CHUNK = 15, AMAX = 16, RECORD = 19, COLUMNS = 20;
// Places in the hyperparameters, as in table.py
constexpr int STEP_SIZE = 0, DECAY = 1, WEIGHT_DECAY = 2, NEW_IN_EXP_AVG = 3, BETA2 = 4, NEW_IN_EXP_AVG_SQ = 5,
              INV_SQRT_BIAS2 = 6, EPS = 7, STEP = 8;

// As in bounds.py
constexpr int32_t RATIO_BITS = 534121127, INF_BITS = 0x7F800000;
constexpr float SLACK = 0x1p-20f, UPDATE_SLACK = 1 + 0x1p-10f, LEAST_ROOT = 0x1p-63f;

constexpr int DTYPES[] = {WEIGHT, GRAD, EXP_AVG, EXP_AVG_SQ};
constexpr int WRITTEN[] = {0, 2, 3};                         // weight, exp_avg and exp_avg_sq among these
constexpr int LOW_BIT[] = {16, 4, 3}, BITS[] = {16, 20, 13};  // their fields of an element's random bits
constexpr bool blocked(int slot) { return BLOCKED >> slot & 1; }

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

// Loads, stores and decoding

template <class Vector> inline Vector load_lanes(const void* from, int64_t count) {
    Vector x{};
    if (count >= LANES) std::memcpy(&x, from, sizeof x);
    else std::memcpy(&x, from, count * (sizeof x / LANES));
    return x;
}

template <class Vector> inline void store_lanes(void* to, Vector x, int64_t count) {
    if (count >= LANES) std::memcpy(to, &x, sizeof x);
    else std::memcpy(to, &x, count * (sizeof x / LANES));
}

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

// FP32 values of stored data. A NaN of an eight-bit format is not seen, its scale tells of it.
template <int DTYPE> inline Floats decoded(const void* data, int64_t at, int64_t count) {
    const char* from = static_cast<const char*>(data) + at * GRIDS[DTYPE].bytes;
    if constexpr (DTYPE == FP32) return load_lanes<Floats>(from, count);
    else if constexpr (DTYPE == BF16) {
        return floats_of(__builtin_convertvector(load_lanes<Halves>(from, count), Ints) << 16);
    } else if constexpr (DTYPE == FP16) return from_halves(load_lanes<Halves>(from, count));
    else if constexpr (DTYPE == E4M3) {  // FP16 has the same bits behind an exponent that is greater by 8
        Shorts wide = __builtin_convertvector(load_lanes<SignedBytes>(from, count), Shorts) << 7;
        return from_halves(cast<Halves>(wide) & 0xBFFF) * 256.0f;
    } else {
        Ints code = __builtin_convertvector(load_lanes<Bytes>(from, count), Ints), magnitude = code & 0x7F;
        Ints subnormal = bits_of(__builtin_convertvector(magnitude, Floats) * 0x1p-16f);
        Ints normal = (magnitude << 21) + (112 << 23);
        return floats_of((magnitude < 4 ? subnormal : normal) | (code >> 7 << 31));
    }
}

// Rounding and encoding

struct Rounded {
    Ints bits;   // of |x| + shift, on the format's grid
    Ints below;  // all ones where |x| is subnormal: shifted by the smallest normal number, which puts the mantissa bits
                 // that the format stores in front of those that are dropped
};

template <int DTYPE> inline Rounded on_grid(Floats x, bool stochastic, Ints random, int low, int bits) {
    constexpr Grid grid = GRIDS[DTYPE];
    constexpr int32_t smallest_bits = bits_of_power(grid.min_exponent);
    Ints magnitude = magnitude_of(x);
    magnitude = magnitude < grid.max_bits ? magnitude : grid.max_bits - Ints{};
    Ints below = magnitude < smallest_bits;
    if (stochastic) {
        const int used = bits < grid.dropped ? bits : grid.dropped;
        Ints addend = ((random >> (low + bits - used)) & ((1 << used) - 1)) << (grid.dropped - used);
        if (used < grid.dropped) addend += 1 << (grid.dropped - used - 1);
        Ints shifted = bits_of(floats_of(magnitude) + floats_of(below & smallest_bits));
        return {(shifted + addend) & -(1 << grid.dropped), below};
    }
    Ints normal = magnitude + ((magnitude >> grid.dropped) & 1) + ((1 << (grid.dropped - 1)) - 1);
    const float step = cast<float>(bits_of_power(grid.min_exponent + grid.dropped));
    Floats subnormal = ((floats_of(magnitude) + step) - step) + cast<float>(smallest_bits);
    return {(below ? bits_of(subnormal) : normal) & -(1 << grid.dropped), below};
}

// Writes x as it was rounded. above_zero: positive values were rounded, and none of them may become 0.
template <int DTYPE> inline void store(void* data, int64_t at, int64_t count, Floats x, Rounded r, bool above_zero) {
    constexpr Grid grid = GRIDS[DTYPE];
    constexpr int width = 8 * grid.bytes - 1;
    char* to = static_cast<char*>(data) + at * grid.bytes;
    Ints code = (r.bits - bits_of_power(grid.min_exponent - 1) + (r.below << 23)) >> grid.dropped;
    if (above_zero) code = larger(code, (x > 0.0f) & 1);
    else code |= (bits_of(x) >> (31 - width)) & (1 << width);
    if constexpr (grid.bytes == 1) store_lanes(to, __builtin_convertvector(code, Bytes), count);
    else store_lanes(to, __builtin_convertvector(code, Halves), count);
}

template <int DTYPE> inline Ints stored_magnitude(Rounded r) {
    return bits_of(floats_of(r.bits) - floats_of(r.below & bits_of_power(GRIDS[DTYPE].min_exponent)));
}

// Scales

inline bool is_finite(float amax) { return (cast<int32_t>(amax) & INT32_MAX) < 0x7F800000; }

// 2**floor(log2(max / amax)), at most 2**126; 1 for an amax of 0, inf or NaN
template <int DTYPE> inline float scale_of(float amax) {
    constexpr int32_t max_bits = GRIDS[DTYPE].max_bits;
    if (!GRIDS[DTYPE].scales || !(amax > 0.0f) || !is_finite(amax)) return 1.0f;
    const int32_t bits = cast<int32_t>(amax);
    const int32_t quotient = (max_bits >> 23) - (bits >> 23) - ((bits & 0x7FFFFF) > (max_bits & 0x7FFFFF));
    return cast<float>(bits_of_power(quotient < 126 ? quotient : 126));
}

inline float inverse_of(float scale, float amax) { return is_finite(amax) ? 1.0f / scale : NAN; }

// Random bits: the finaliser "lowbias32" of Chris Wellons' hash-prospector

template <class T> inline T hashed(T x) {
    x ^= x >> 16;
    x *= 0x7FEB352Du;
    x ^= x >> 15;
    x *= 0x846CA68Bu;
    return x ^ (x >> 16);
}

// Parameters

struct Table {  // as in cpu.py
    const int64_t* rows;
    float *amaxes, *grad_amaxes, *stored;
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
    int64_t amax_place(int i, int64_t block) const { return row[AMAX + i] + (blocked(WRITTEN[i]) ? block : 0); }

    // No less than max |x| of the gradient; 0 if it counts as zero. measured: where no scale tells.
    float largest_gradient(float measured) const {
        if (row[FINITE] && !*at<bool>(FINITE)) return 0;
        const float amax = scaled(1) && !blocked(1) ? inverse(1, 0) * cast<float>(GRIDS[GRAD].max_bits) : measured;
        if (scaled(1) && !blocked(1) && !is_finite(inverse(1, 0))) return 0;
        return amax < 0x1p63f ? amax : 0x1p63f;
    }

    // new_bounds of bounds.py
    void find_bounds(float measured, float bounds[3]) const {
        const float* record = at<float>(RECORD);
        const float n = hyper[NEW_IN_EXP_AVG], s = std::fabs(hyper[STEP_SIZE]), c = hyper[INV_SQRT_BIAS2];
        const float ratio = cast<float>(cast<int32_t>(record[3]) + RATIO_BITS), kept = 1 - n + SLACK, more = n + SLACK;
        float g = largest_gradient(measured), w = record[0];
        if (!DECOUPLED) g = g + std::fabs(hyper[WEIGHT_DECAY]) * w;
        const float m = kept * record[1] + more * g;
        const float v = record[2] * hyper[BETA2] + hyper[NEW_IN_EXP_AVG_SQ] * g * g;
        const float quotient =
            kept / std::sqrt(hyper[BETA2]) * ratio + more / std::sqrt(hyper[NEW_IN_EXP_AVG_SQ]);
        const float least_root = LEAST_ROOT * std::sqrt(blocked(3) ? INFINITY : std::fmax(inverse(3, 0), 1.0f));
        const float above_eps = std::fmax(c * least_root / hyper[EPS], 1.0f);
        const float of_quotient = s * quotient / c * above_eps, of_eps = s * m / hyper[EPS];
        if (DECOUPLED) w = w * std::fabs(hyper[DECAY]);
        bounds[0] = (w + (of_quotient < of_eps ? of_quotient : of_eps) * UPDATE_SLACK) * (1 + SLACK);
        bounds[1] = m;
        bounds[2] = v;
    }
};

inline int32_t largest_of(Ints x) {
    int32_t largest = 0;
    for (int i = 0; i < LANES; i++) largest = x[i] > largest ? x[i] : largest;
    return largest;
}

// The largest of what is stored, as `measured` of bounds.py has it
struct Record {
    int32_t largest[4] = {};

    // found: bits of data without their scales, and of the quotient
    void add(const Ints found[4], const float inverses[3]) {
        for (int i = 0; i < 3; i++) {
            raise(i, cast<int32_t>(cast<float>(largest_of(found[i])) * inverses[i]) & INT32_MAX);
        }
        const int32_t ratio = largest_of(found[3]), one = 127 << 23;
        const int32_t shift = cast<int32_t>(inverses[1]) - one - ((cast<int32_t>(inverses[2]) - one) >> 1);
        const int32_t most = INF_BITS - RATIO_BITS - (shift > 0 ? shift : 0);
        if (ratio > 0) raise(3, (ratio < most ? ratio : most) + shift);
    }
    void raise(int place, int32_t bits) { largest[place] = bits > largest[place] ? bits : largest[place]; }
};

// Elements that share all scales: a chunk of a parameter, or a block of its elements
struct Run {
    const Parameter p;
    const int64_t block, start, stop;
    float inverse[4], scale[3], copy_inverse, copy_scale;

    Run(const Parameter& p, int64_t block, int64_t start, int64_t stop) : p(p), block(block), start(start), stop(stop) {
        for (int slot = 0; slot < 4; slot++) inverse[slot] = p.inverse(slot, block);
    }

    // body(first element, elements), full vectors first: their loop has a constant there
    template <class Body> inline void for_vectors(Body body) const {
        int64_t at = start;
        for (; at + LANES <= stop; at += LANES) body(at, LANES);
        if (at < stop) body(at, stop - at);
    }

    // adam_step of reference.py with FP32 operations
    inline void adam_step(int64_t at, int64_t count, Floats& w, Floats& m, Floats& v) const {
        const float* hyper = p.hyper;
        w = decoded<WEIGHT>(p.at<void>(DATA), at, count) * inverse[0];
        Floats g = decoded<GRAD>(p.at<void>(DATA + 1), at, count) * inverse[1];
        m = decoded<EXP_AVG>(p.at<void>(DATA + 2), at, count) * inverse[2];
        v = decoded<EXP_AVG_SQ>(p.at<void>(DATA + 3), at, count) * inverse[3];
        g = floats_of(bits_of(g) & (magnitude_of(g) < bits_of_power(63)));
        if (MAXIMIZE) g = -g;
        if (DECOUPLED) w = w * hyper[DECAY];
        else g = g + hyper[WEIGHT_DECAY] * w;
        m = m + hyper[NEW_IN_EXP_AVG] * (g - m);
        v = v * hyper[BETA2] + hyper[NEW_IN_EXP_AVG_SQ] * g * g;
        w = w - hyper[STEP_SIZE] * m / (square_root(v) * hyper[INV_SQRT_BIAS2] + hyper[EPS]);
    }

    void measure(Ints amax[3]) const {
        for_vectors([&](int64_t at, int64_t count) {
            Floats values[3];
            adam_step(at, count, values[0], values[1], values[2]);
            for (int i = 0; i < 3; i++) amax[i] = larger(amax[i], magnitude_of(values[i]));
        });
    }

    // The amaxes of this block, where scales are of blocks.
    void measure_block(float* amaxes) const {
        Ints amax[3] = {};
        measure(amax);
        for (int i = 0; i < 3; i++) {
            if (blocked(WRITTEN[i])) amaxes[p.amax_place(i, block)] = cast<float>(largest_of(amax[i]));
        }
    }

    // From the amaxes of this step, or bounds of them. The copy's scale follows from the weight as it is stored: here, as if rounding did
    // not carry its amax to where the scale is another. `recast` corrects that.
    void choose_scales(const float* amaxes) {
        const float weight_amax = amaxes[p.amax_place(0, block)];
        scale[0] = p.scaled(0) ? scale_of<WEIGHT>(weight_amax) : 1.0f;
        scale[1] = p.scaled(2) ? scale_of<EXP_AVG>(amaxes[p.amax_place(1, block)]) : 1.0f;
        scale[2] = p.scaled(3) ? scale_of<EXP_AVG_SQ>(amaxes[p.amax_place(2, block)]) : 1.0f;
        copy_inverse = p.scaled(0) ? inverse_of(scale[0], weight_amax) : 1.0f;
        copy_scale = scale_of<COPY>(weight_amax);
    }

    // Returns bits of |x| as it is stored, without its scale.
    template <int I> inline Ints put(int64_t at, int64_t count, Floats x, Ints random) const {
        constexpr int dtype = DTYPES[WRITTEN[I]];
        void* data = p.at<void>(DATA + WRITTEN[I]);
        Ints magnitude;
        if constexpr (dtype == FP32) {
            store_lanes(static_cast<float*>(data) + at, x, count);
            magnitude = magnitude_of(x);
        } else {
            x = x * scale[I];
            const Rounded r = on_grid<dtype>(x, STOCHASTIC, random, LOW_BIT[I], BITS[I]);
            store<dtype>(data, at, count, x, r, I == 2);
            magnitude = stored_magnitude<dtype>(r);
        }
        if (I == 0 && COPIED) put_copy(at, count, floats_of(magnitude | (bits_of(x) & INT32_MIN)));
        return magnitude;
    }

    // stored: the weight without its scale
    inline void put_copy(int64_t at, int64_t count, Floats stored) const {
        const Floats x = stored * copy_inverse * copy_scale;
        store<COPY>(p.at<void>(COPY_DATA), at, count, x, on_grid<COPY>(x, false, Ints{}, 0, 0), false);
    }

    // stored: the largest bits of weight, exp_avg, exp_avg_sq and of their quotient
    void write(Ints stored[4]) const {
        Unsigneds lanes;
        for (int i = 0; i < LANES; i++) lanes[i] = i;
        for_vectors([&](int64_t at, int64_t count) {
            Floats w, m, v;
            adam_step(at, count, w, m, v);
            Ints random{};
            if (STOCHASTIC) random = cast<Ints>(hashed((lanes + static_cast<uint32_t>(p.row[FIRST] + at)) ^ p.key));
            const Ints w_bits = put<0>(at, count, w, random);
            const Ints m_bits = put<1>(at, count, m, random);
            const Ints v_bits = put<2>(at, count, v, random);
            if (BOUNDED || COPIED) stored[0] = larger(stored[0], w_bits);
            if (!BOUNDED) return;
            stored[1] = larger(stored[1], m_bits);
            stored[2] = larger(stored[2], v_bits);
            stored[3] = larger(stored[3], m_bits - (v_bits >> 1));
        });
    }

    // scale_inv of what is written
    void new_inverses(const float* amaxes, float inverses[3]) const {
        for (int i = 0; i < 3; i++) {
            inverses[i] = p.scaled(WRITTEN[i]) ? inverse_of(scale[i], amaxes[p.amax_place(i, block)]) : 1.0f;
        }
    }

    // The new scales of this block, or of the whole parameter.
    void store_inverses(const float* amaxes, bool of_blocks) const {
        float inverses[3];
        new_inverses(amaxes, inverses);
        for (int i = 0; i < 3; i++) {
            if (blocked(WRITTEN[i]) != of_blocks || !p.scaled(WRITTEN[i])) continue;
            p.at<float>(INVERSE + WRITTEN[i])[of_blocks ? block : 0] = inverses[i];
        }
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

// each(run) for the runs of a chunk: blocks, or all of it
template <class Each>
inline void for_runs(const Parameter& p, int64_t start, int64_t stop, int64_t block_size, Each each) {
    if (!BLOCKED) block_size = stop - start;
    for (int64_t at = start; at < stop; at += block_size) {
        Run run(p, BLOCKED ? at / block_size : 0, at, at + block_size < stop ? at + block_size : stop);
        each(run);
    }
}

}  // namespace

// What cpu.py calls. t.amaxes: zero before `amaxes`. t.stored: zero before `write`, which leaves there the amaxes
// of the weights as they are stored, if they are copied.

extern "C" void measure_gradients(const Table& t) {
    for_chunks(t, [&](const Parameter& p, int64_t index, int64_t start, int64_t stop) {
        Ints amax{};
        Run(p, 0, start, stop).for_vectors([&](int64_t at, int64_t count) {
            amax = larger(amax, magnitude_of(decoded<GRAD>(p.at<void>(DATA + 1), at, count)));
        });
        keep_largest(t.grad_amaxes + index, largest_of(amax));
        if (largest_of(amax) >= INF_BITS) __atomic_store_n(p.at<bool>(FINITE), false, __ATOMIC_RELAXED);
    });
}

extern "C" void bounds(const Table& t) {
    for (int64_t index = 0; index < t.parameters; index++) {
        const Parameter p(t.rows, index);
        float found[3];
        p.find_bounds(t.grad_amaxes[index], found);
        for (int i = 0; i < 3; i++) {
            if (!blocked(WRITTEN[i])) t.amaxes[p.amax_place(i, 0)] = found[i];
        }
        std::memset(p.at<float>(RECORD), 0, 4 * sizeof(float));  // `write` keeps the largest there
    }
}

extern "C" void amaxes(const Table& t) {
    for_chunks(t, [&](const Parameter& p, int64_t, int64_t start, int64_t stop) {
        Ints amax[3] = {};
        const auto keep = [&](bool of_blocks, int64_t block) {
            for (int i = 0; i < 3; i++) {
                if (blocked(WRITTEN[i]) != of_blocks) continue;
                keep_largest(t.amaxes + p.amax_place(i, block), largest_of(amax[i]));
                amax[i] = Ints{};
            }
        };
        for_runs(p, start, stop, t.block_size, [&](const Run& run) {
            run.measure(amax);
            if (BLOCKED) keep(true, run.block);
        });
        keep(false, 0);
    });
}

extern "C" void write(const Table& t) {
    for_chunks(t, [&](const Parameter& p, int64_t index, int64_t start, int64_t stop) {
        Ints stored[4] = {};
        Record record;
        for_runs(p, start, stop, t.block_size, [&](Run& run) {
            if (BOUNDED && BLOCKED) run.measure_block(t.amaxes);
            run.choose_scales(t.amaxes);
            run.write(stored);
            run.store_inverses(t.amaxes, true);
            if (!BOUNDED) return;
            float inverses[3];
            run.new_inverses(t.amaxes, inverses);
            record.add(stored, inverses);
            std::memset(stored, 0, sizeof stored);
        });
        for (int i = 0; BOUNDED && i < 4; i++) keep_largest(p.at<float>(RECORD) + i, record.largest[i]);
        if (COPIED && !BOUNDED) keep_largest(t.stored + index, largest_of(stored[0]));
    });
    for (int64_t index = 0; index < t.parameters; index++) {  // after all chunks have read the old scales
        Run run(Parameter(t.rows, index), 0, 0, 0);
        run.choose_scales(t.amaxes);
        run.store_inverses(t.amaxes, false);
        if (!COPIED) continue;
        if (BOUNDED) *run.p.at<float>(COPY_INVERSE) = inverse_of(run.copy_scale, t.amaxes[run.p.amax_place(0, 0)]);
        else t.stored[index] *= run.copy_inverse;
    }
}

// Cast again the copies whose scale is not the one that `write` took, and store the scales of all.
extern "C" void recast(const Table& t) {
    for_chunks(t, [&](const Parameter& p, int64_t index, int64_t start, int64_t stop) {
        Run run(p, 0, start, stop);
        run.choose_scales(t.amaxes);
        const float scale = scale_of<COPY>(t.stored[index]);
        if (start == 0) *p.at<float>(COPY_INVERSE) = inverse_of(scale, t.stored[index]);
        if (scale == run.copy_scale) return;
        run.copy_scale = scale;
        run.for_vectors([&](int64_t at, int64_t count) {
            run.put_copy(at, count, decoded<WEIGHT>(p.at<void>(DATA), at, count));
        });
    });
}
