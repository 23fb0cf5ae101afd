// x W^T + bias, with W packed in panels of 16 outputs: panel p holds W[16 p + j][k] at [k][j], in bf16 at
// [k / 2][j][k % 2], and in 8 bits at [k / 4][j][k % 4].
//
// Each result is one chain of multiply-adds over k, from 0 upwards, whatever the number of rows of x, the number of
// threads or the size of a block. So a row's result does not depend on the other rows, bit by bit. Where x is read in
// 8 bits, the links of the chain are the exact sums of blocks of 64.
#include "packed.h"

#include <algorithm>

#ifdef NATIVE_X86
#include <immintrin.h>
#endif

NATIVE_TEXT(native_text_of_packed)

namespace {

constexpr int64_t DEPTH = 256;  // k of a block: 16 KB of a panel in fp32, half of a small first-level cache
constexpr int64_t EXPAND = 12;  // rows from which a panel is converted to fp32 once, before use

typedef float V __attribute__((vector_size(32)));
typedef uint32_t U __attribute__((vector_size(32)));
typedef int32_t I __attribute__((vector_size(32)));

// The 16 weights of one k.
struct Weights {
    V low, high;
};

// Weights of consecutive k that are loaded together.
template <typename T>
constexpr int EACH = 4 / sizeof(T);

// GCC 12 needs 4 to 9 instructions more for its own conversions from 8 and 16 bits.
NATIVE_INLINE void load(const float* at, Weights* to) {
    std::memcpy(&to->low, at, sizeof to->low);
    std::memcpy(&to->high, at + 8, sizeof to->high);
}

NATIVE_INLINE void load(const uint16_t* at, Weights* to) {
    U low, high;
    std::memcpy(&low, at, sizeof low);
    std::memcpy(&high, at + 16, sizeof high);
    to[0] = {reinterpret_cast<V>(low << 16), reinterpret_cast<V>(high << 16)};
    to[1] = {reinterpret_cast<V>(low & 0xffff0000u), reinterpret_cast<V>(high & 0xffff0000u)};
}

NATIVE_INLINE void load(const int8_t* at, Weights* to) {
    I low, high;
    std::memcpy(&low, at, sizeof low);
    std::memcpy(&high, at + 32, sizeof high);
    for (int e = 0; e < 4; ++e)
        to[e] = {__builtin_convertvector((low << (24 - 8 * e)) >> 24, V),
                 __builtin_convertvector((high << (24 - 8 * e)) >> 24, V)};
}

// Add to the sums of ROWS x PANELS tiles; a block that begins at 0 starts with empty sums.
template <typename T, int ROWS, int PANELS>
NATIVE_INLINE void tile(const T* panel, int64_t panel_size, const Rows& rows, int64_t row, int64_t column,
                        int64_t begin, int64_t end) {
    V sums[ROWS][PANELS][2];
    for (int r = 0; r < ROWS; ++r)
        for (int p = 0; p < PANELS; ++p)
            for (int h = 0; h < 2; ++h) {
                if (!begin) sums[r][p][h] = V{};
                else
                    std::memcpy(&sums[r][p][h], rows.out + (row + r) * rows.out_stride + column + p * WIDTH + h * 8,
                                sizeof(V));
            }
    const float* x[ROWS];
    for (int r = 0; r < ROWS; ++r) x[r] = static_cast<const float*>(rows.x) + (row + r) * rows.stride;
    int64_t k = begin;
    for (; k + EACH<T> <= end; k += EACH<T>) {
        for (int p = 0; p < PANELS; ++p) {
            Weights weights[EACH<T>];
            load(panel + p * panel_size + (k - begin) * WIDTH, weights);
            for (int e = 0; e < EACH<T>; ++e)
                for (int r = 0; r < ROWS; ++r) {
                    sums[r][p][0] += weights[e].low * x[r][k + e];
                    sums[r][p][1] += weights[e].high * x[r][k + e];
                }
        }
    }
    // The last k, which do not fill a whole load.
    if (k < end)
        for (int p = 0; p < PANELS; ++p) {
            Weights weights[EACH<T>];
            load(panel + p * panel_size + (k - begin) * WIDTH, weights);
            for (int e = 0; k + e < end; ++e)
                for (int r = 0; r < ROWS; ++r) {
                    sums[r][p][0] += weights[e].low * x[r][k + e];
                    sums[r][p][1] += weights[e].high * x[r][k + e];
                }
        }
    for (int r = 0; r < ROWS; ++r)
        for (int p = 0; p < PANELS; ++p)
            for (int h = 0; h < 2; ++h)
                std::memcpy(rows.out + (row + r) * rows.out_stride + column + p * WIDTH + h * 8, &sums[r][p][h],
                            sizeof(V));
}

// All rows [first, last) against one panel.
template <typename T>
NATIVE_INLINE void rows_of(const T* panel, const Rows& rows, int64_t first, int64_t last, int64_t column,
                           int64_t begin, int64_t end) {
    int64_t row = first;
    for (; row + 6 <= last; row += 6) tile<T, 6, 1>(panel, 0, rows, row, column, begin, end);
    for (; row + 4 <= last; row += 4) tile<T, 4, 1>(panel, 0, rows, row, column, begin, end);
    for (; row + 2 <= last; row += 2) tile<T, 2, 1>(panel, 0, rows, row, column, begin, end);
    for (; row < last; ++row) tile<T, 1, 1>(panel, 0, rows, row, column, begin, end);
}

template <typename T>
NATIVE_INLINE int64_t panel_numbers(int64_t k) {
    return padded_inputs(sizeof(T) == 4 ? FP32 : sizeof(T) == 2 ? BF16 : INT8, k) * WIDTH;
}

template <typename T>
NATIVE_INLINE void few(const T* weight, int64_t k, const Rows& rows, int64_t first, int64_t last, int64_t from,
                       int64_t to) {
    const int64_t size = panel_numbers<T>(k);
    int64_t p = from;
    if (last - first == 1) {
        for (; p + 4 <= to; p += 4) tile<T, 1, 4>(weight + p * size, size, rows, first, p * WIDTH, 0, k);
    } else if (last - first == 2) {
        for (; p + 2 <= to; p += 2) tile<T, 2, 2>(weight + p * size, size, rows, first, p * WIDTH, 0, k);
    }
    for (; p < to; ++p) rows_of<T>(weight + p * size, rows, first, last, p * WIDTH, 0, k);
}

NATIVE_INLINE const float* expanded(const float* panel, float*, int64_t) { return panel; }

template <typename T>
NATIVE_INLINE const float* expanded(const T* panel, float* scratch, int64_t depth) {
    for (int64_t k = 0; k < depth; k += EACH<T>) {
        Weights weights[EACH<T>];
        load(panel + k * WIDTH, weights);
        std::memcpy(scratch + k * WIDTH, weights, sizeof weights);
    }
    return scratch;
}

template <typename T>
NATIVE_INLINE void many(const T* weight, int64_t k, const Rows& rows, int64_t first, int64_t last, int64_t from,
                        int64_t to) {
    // Weights are loaded in groups: behind the last k of a block there may be the rest of its group.
    float scratch[DEPTH * WIDTH] __attribute__((aligned(64)));
    for (int64_t begin = 0; begin < k; begin += DEPTH) {
        const int64_t end = std::min(k, begin + DEPTH);
        for (int64_t p = from; p < to; ++p) {
            const float* panel =
                expanded(weight + p * panel_numbers<T>(k) + begin * WIDTH, scratch, end - begin);
            rows_of<float>(panel, rows, first, last, p * WIDTH, begin, end);
        }
    }
}

template <typename T>
NATIVE_INLINE void work(const Product& of, const Rows& rows, const After& after, int64_t first, int64_t last,
                        int64_t from, int64_t to) {
    const T* weight = static_cast<const T*>(of.weight);
    if (last - first < EXPAND) few<T>(weight, of.k, rows, first, last, from, to);
    else many<T>(weight, of.k, rows, first, last, from, to);
    finish(of, rows, after, first, last, from, to);
}

template <typename T>
void work_plain(const Product& of, const Rows& rows, const After& after, int64_t first, int64_t last, int64_t from,
                int64_t to) {
    work<T>(of, rows, after, first, last, from, to);
}
#ifdef NATIVE_X86
template <typename T>
NATIVE_AVX2 void work_avx2(const Product& of, const Rows& rows, const After& after, int64_t first, int64_t last,
                           int64_t from, int64_t to) {
    work<T>(of, rows, after, first, last, from, to);
}

// ROWS x PANELS tiles of 8 bits, with the sums of tile_8 of packed_avx512.cpp: each block is summed in integers, exactly.
// The sum of two products of numbers from -127 to 127 fits into 16 bits, so that the instruction never saturates.
template <int ROWS, int PANELS>
NATIVE_AVX2 NATIVE_INLINE void tile_8(const int8_t* panel, int64_t panel_size, const Rows& rows, int64_t row,
                                      int64_t column, int64_t padded) {
    constexpr int HALVES = 2 * PANELS;
    const __m256i ones = _mm256_set1_epi16(1);
    const int8_t* x = static_cast<const int8_t*>(rows.x) + row * rows.stride;
    __m256 sums[ROWS][HALVES] = {};
    for (int64_t b = 0; b * BLOCK_8 < padded; ++b) {
        __m256i parts[ROWS][HALVES] = {};
        for (int64_t k = b * BLOCK_8; k < (b + 1) * BLOCK_8; k += 4) {
            __m256i own[ROWS], sizes[ROWS];
#pragma GCC unroll 4
            for (int r = 0; r < ROWS; ++r) {
                int32_t four;
                std::memcpy(&four, x + r * rows.stride + k, sizeof four);
                own[r] = _mm256_set1_epi32(four);
                sizes[r] = _mm256_abs_epi8(own[r]);
            }
#pragma GCC unroll 8
            for (int h = 0; h < HALVES; ++h) {
                const int8_t* at = panel + h / 2 * panel_size + k * WIDTH + h % 2 * 32;
                const __m256i weights = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(at));
#pragma GCC unroll 4
                for (int r = 0; r < ROWS; ++r) {
                    const __m256i pairs = _mm256_maddubs_epi16(sizes[r], _mm256_sign_epi8(weights, own[r]));
                    parts[r][h] = _mm256_add_epi32(parts[r][h], _mm256_madd_epi16(pairs, ones));
                }
            }
        }
#pragma GCC unroll 4
        for (int r = 0; r < ROWS; ++r) {
            float scale;
            std::memcpy(&scale, x + r * rows.stride + padded + b * 4, sizeof scale);
#pragma GCC unroll 8
            for (int h = 0; h < HALVES; ++h)
                sums[r][h] = _mm256_fmadd_ps(_mm256_cvtepi32_ps(parts[r][h]), _mm256_set1_ps(scale), sums[r][h]);
        }
    }
    float* out = rows.out + row * rows.out_stride + column;
#pragma GCC unroll 4
    for (int r = 0; r < ROWS; ++r)
#pragma GCC unroll 8
        for (int h = 0; h < HALVES; ++h) _mm256_storeu_ps(out + r * rows.out_stride + h * 8, sums[r][h]);
}

NATIVE_AVX2 void work_8(const Product& of, const Rows& rows, const After& after, int64_t first, int64_t last,
                        int64_t from, int64_t to) {
    const int64_t padded = padded_inputs(INT8, of.k), size = padded * WIDTH;
    const int8_t* weight = static_cast<const int8_t*>(of.weight);
    int64_t p = from;
    if (last - first == 1)
        for (; p + 2 <= to; p += 2) tile_8<1, 2>(weight + p * size, size, rows, first, p * WIDTH, padded);
    for (; p < to; ++p) {
        int64_t row = first;
        for (; row + 4 <= last; row += 4) tile_8<4, 1>(weight + p * size, size, rows, row, p * WIDTH, padded);
        for (; row + 2 <= last; row += 2) tile_8<2, 1>(weight + p * size, size, rows, row, p * WIDTH, padded);
        for (; row < last; ++row) tile_8<1, 1>(weight + p * size, size, rows, row, p * WIDTH, padded);
    }
    finish(of, rows, after, first, last, from, to);
}
#endif

template <typename T>
Panels panels_of_type(int level) {
#ifdef NATIVE_X86
    if (level >= 1) return work_avx2<T>;
#endif
    (void)level;
    return work_plain<T>;
}

}  // namespace

Panels panels_of(const Product& of) {
    if (Panels found = panels_of_avx512(of)) return found;
#ifdef NATIVE_X86
    if (reads_int8(of)) return work_8;
#endif
    if (of.kind == FP32) return panels_of_type<float>(of.level);
    return of.kind == BF16 ? panels_of_type<uint16_t>(of.level) : panels_of_type<int8_t>(of.level);
}

NATIVE_EXPORT int native_packed_level() { return packed_level(); }

// Write rows of x in 8 bits, `stride` bytes apart.
NATIVE_EXPORT void native_packed_quantize(const float* x, int64_t count, int64_t k, int8_t* out, int64_t stride) {
    for (int64_t row = 0; row < count; ++row) quantize_row(x + row * k, k, out + row * stride);
}

NATIVE_EXPORT void native_packed_product(const Product* of, const void* x, int64_t count, int64_t stride, float* out,
                                         int64_t out_stride) {
    const Rows rows{x, stride, out, out_stride};
    const After after{};
    const Pieces pieces(count, of->n / WIDTH, of->threads);
    const Panels run = panels_of(*of);
    const bool alone = of->threads == 1 || of->n * of->k < 32768;
#pragma omp parallel for schedule(dynamic) num_threads(of->threads) if (!alone)
    for (int64_t i = 0; i < pieces.count; ++i) run_piece(run, *of, rows, after, count, pieces, i);
}

NATIVE_EXPORT const char* native_source_packed() { return native_text_of_packed; }
