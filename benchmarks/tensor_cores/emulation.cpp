// The products of emulation.py on a CPU, to the bit: FP8 codes summed as tensor cores do.
//
// A product of two FP8 values has 8 significant bits and lies between 2**-32 and 2**32, and its alignment is a scaling by
// a power of two: FP32 holds both exactly. Truncation is the conversion to int32. Sums of half a group stay below 2**31.

#include <cstdint>
#include <cstring>

namespace {

constexpr int COLUMNS = 64;  // of the result, summed at the same time
constexpr int ROWS = 64;     // of the result, that share one decoding of b
constexpr int PART = 128;    // elements of the contraction, whole groups
constexpr float LEAST = 0x1p-60f;  // an exponent below all products' that divides

struct Table {  // as in emulation.py
    const uint8_t *a, *b;             // codes [m, k] and [n, k]
    const float *a_values, *b_values;  // of 256 codes: values, then their powers of two (0 for a zero)
    float* out;                       // [m, n]
    int64_t m, n, k, group, bits, result_bits, promotes, adds_in_fp32, threads;
};

template <class To, class From> inline To bits_as(From from) {
    To to;
    std::memcpy(&to, &from, sizeof(to));
    return to;
}

// Add the products of a group to sums of COLUMNS results.
inline void add_group(const Table& t, const float* a, const float* a_powers, const float (*b)[COLUMNS],
                      const float (*b_powers)[COLUMNS], int64_t group, float* sums) {
    alignas(64) float largest[COLUMNS], scale[COLUMNS];
    alignas(64) int32_t totals[2][COLUMNS];
    for (int j = 0; j < COLUMNS; j++) {
        const float exponent = bits_as<float>(bits_as<int32_t>(sums[j]) & 0x7F800000);
        largest[j] = !t.adds_in_fp32 && exponent > LEAST ? exponent : LEAST;
    }
    for (int64_t i = 0; i < group; i++) {
        const float power = a_powers[i];
        for (int j = 0; j < COLUMNS; j++) {
            const float exponent = power * b_powers[i][j];
            largest[j] = exponent > largest[j] ? exponent : largest[j];
        }
    }
    for (int j = 0; j < COLUMNS; j++) {
        scale[j] = bits_as<float>(int32_t((254 + t.bits) << 23) - bits_as<int32_t>(largest[j]));
        totals[0][j] = t.adds_in_fp32 ? 0 : int32_t(sums[j] * scale[j]);
        totals[1][j] = 0;
    }
    for (int half = 0; half < 2; half++)
        for (int64_t i = half * group / 2; i < (half + 1) * group / 2; i++) {
            const float value = a[i];
            for (int j = 0; j < COLUMNS; j++) totals[half][j] += int32_t(value * b[i][j] * scale[j]);
        }
    const int64_t kept = -(int64_t(1) << (52 - t.result_bits));
    for (int j = 0; j < COLUMNS; j++) {
        const double total = (double(totals[0][j]) + double(totals[1][j])) / scale[j];
        const float result = float(bits_as<double>(bits_as<int64_t>(total) & kept));
        sums[j] = t.adds_in_fp32 ? sums[j] + result : result;
    }
}

void add_tile(const Table& t, int64_t row, int64_t column) {
    alignas(64) float b[PART][COLUMNS], b_powers[PART][COLUMNS], a[PART], a_powers[PART], sums[ROWS][COLUMNS] = {};
    const int64_t rows = t.m - row < ROWS ? t.m - row : ROWS, columns = t.n - column < COLUMNS ? t.n - column : COLUMNS;
    for (int64_t start = 0; start < t.k; start += PART) {
        const int64_t size = t.k - start < PART ? t.k - start : PART;
        for (int64_t j = 0; j < COLUMNS; j++)
            for (int64_t i = 0; i < size; i++) {
                const uint8_t code = j < columns ? t.b[(column + j) * t.k + start + i] : 0;
                b[i][j] = t.b_values[code], b_powers[i][j] = t.b_values[256 + code];
            }
        for (int64_t r = 0; r < rows; r++) {
            for (int64_t i = 0; i < size; i++) {
                const uint8_t code = t.a[(row + r) * t.k + start + i];
                a[i] = t.a_values[code], a_powers[i] = t.a_values[256 + code];
            }
            alignas(64) float part[COLUMNS] = {};
            float* total = t.promotes ? part : sums[r];
            for (int64_t i = 0; i < size; i += t.group)
                add_group(t, a + i, a_powers + i, b + i, b_powers + i, size - i < t.group ? size - i : t.group, total);
            for (int j = 0; j < COLUMNS; j++) sums[r][j] += part[j];
        }
    }
    for (int64_t r = 0; r < rows; r++) std::memcpy(t.out + (row + r) * t.n + column, sums[r], 4 * columns);
}

}  // namespace

extern "C" void add_products(const Table& t) {
    const int64_t across = (t.n + COLUMNS - 1) / COLUMNS, tiles = (t.m + ROWS - 1) / ROWS * across;
#pragma omp parallel for schedule(dynamic, 1) num_threads(t.threads)
    for (int64_t tile = 0; tile < tiles; tile++) add_tile(t, tile / across * ROWS, tile % across * COLUMNS);
}
