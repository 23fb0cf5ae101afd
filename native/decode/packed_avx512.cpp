// The products of packed.cpp on AVX-512, in the same order of additions; in bf16 with instructions that multiply pairs,
// and in 8 bits with those that add up four products.
#include "packed.h"

#include <algorithm>

NATIVE_TEXT(native_text_of_packed_avx512)

#if defined(NATIVE_X86) && (defined(__clang__) || __GNUC__ >= 10)
#include <immintrin.h>

int packed_level() {
    const int level = best_level();
    const bool sums = __builtin_cpu_supports("avx512bf16") && __builtin_cpu_supports("avx512vnni");
    return level == 2 && sums ? 3 : level;
}

// Valid to the end of the file, so that it also applies to templates that are instantiated later.
#ifdef __clang__
#pragma clang attribute push( \
    __attribute__((target("avx512f,avx512bw,avx512dq,avx512vl,avx512bf16,avx512vnni,avx2,fma"))), apply_to = function)
#else
#pragma GCC target("avx512f,avx512bw,avx512dq,avx512vl,avx512bf16,avx512vnni,avx2,fma,prefer-vector-width=512")
#endif

namespace {

// A unit of the inner dimension has 32 bits of x: one number, or two in bf16.
constexpr int64_t DEPTH = 128;   // units of a block: 16 KB of two panels in bf16, half of a first-level cache

struct Single {
    using Weight = float;
    static constexpr int64_t EACH = 1;
    static inline __attribute__((always_inline)) __m512i load(const float* at) {
        return _mm512_castps_si512(_mm512_loadu_ps(at));
    }
    static inline __attribute__((always_inline)) __m512 dot(__m512 sum, __m512i x, __m512i weight) {
        return _mm512_fmadd_ps(_mm512_castsi512_ps(x), _mm512_castsi512_ps(weight), sum);
    }
};

struct Pairs {
    using Weight = uint16_t;
    static constexpr int64_t EACH = 2;
    static inline __attribute__((always_inline)) __m512i load(const uint16_t* at) { return _mm512_loadu_si512(at); }
    static inline __attribute__((always_inline)) __m512 dot(__m512 sum, __m512i x, __m512i weight) {
        return _mm512_dpbf16_ps(sum, (__m512bh)x, (__m512bh)weight);
    }
};

struct Units {
    const uint32_t* x;
    int64_t stride;  // in units
    float* out;
    int64_t out_stride;
};

// Add to the sums of ROWS x PANELS tiles; a block that begins at 0 starts with empty sums.
template <typename N, int ROWS, int PANELS>
NATIVE_INLINE void tile(const typename N::Weight* panel, int64_t panel_size, const Units& rows, int64_t row,
                        int64_t column, int64_t begin, int64_t end) {
    __m512 sums[ROWS][PANELS];
    float* out = rows.out + row * rows.out_stride + column;
#pragma GCC unroll 12
    for (int r = 0; r < ROWS; ++r)
#pragma GCC unroll 4
        for (int p = 0; p < PANELS; ++p)
            sums[r][p] = begin ? _mm512_loadu_ps(out + r * rows.out_stride + p * WIDTH) : _mm512_setzero_ps();
    const uint32_t* x = rows.x + row * rows.stride;
    for (int64_t u = begin; u < end; ++u) {
        __m512i weights[PANELS];
#pragma GCC unroll 4
        for (int p = 0; p < PANELS; ++p)
            weights[p] = N::load(panel + p * panel_size + (u - begin) * WIDTH * N::EACH);
#pragma GCC unroll 12
        for (int r = 0; r < ROWS; ++r) {
            const __m512i own = _mm512_set1_epi32(static_cast<int>(x[r * rows.stride + u]));
#pragma GCC unroll 4
            for (int p = 0; p < PANELS; ++p) sums[r][p] = N::dot(sums[r][p], own, weights[p]);
        }
    }
#pragma GCC unroll 12
    for (int r = 0; r < ROWS; ++r)
#pragma GCC unroll 4
        for (int p = 0; p < PANELS; ++p) _mm512_storeu_ps(out + r * rows.out_stride + p * WIDTH, sums[r][p]);
}

// All rows [first, last) against PANELS panels.
template <typename N, int PANELS>
NATIVE_INLINE void rows_of(const typename N::Weight* panel, int64_t size, const Units& rows, int64_t first,
                           int64_t last, int64_t column, int64_t begin, int64_t end) {
    int64_t row = first;
    for (; row + 12 <= last; row += 12) tile<N, 12, PANELS>(panel, size, rows, row, column, begin, end);
    for (; row + 8 <= last; row += 8) tile<N, 8, PANELS>(panel, size, rows, row, column, begin, end);
    switch (last - row) {
        case 7: return tile<N, 7, PANELS>(panel, size, rows, row, column, begin, end);
        case 6: return tile<N, 6, PANELS>(panel, size, rows, row, column, begin, end);
        case 5: return tile<N, 5, PANELS>(panel, size, rows, row, column, begin, end);
        case 4: return tile<N, 4, PANELS>(panel, size, rows, row, column, begin, end);
        case 3: return tile<N, 3, PANELS>(panel, size, rows, row, column, begin, end);
        case 2: return tile<N, 2, PANELS>(panel, size, rows, row, column, begin, end);
        case 1: return tile<N, 1, PANELS>(panel, size, rows, row, column, begin, end);
    }
}

template <typename N>
NATIVE_INLINE void few(const typename N::Weight* weight, int64_t units, const Units& rows, int64_t first,
                       int64_t last, int64_t from, int64_t to) {
    const int64_t size = units * N::EACH * WIDTH;
    int64_t p = from;
    if (last - first == 1)
        for (; p + 4 <= to; p += 4) tile<N, 1, 4>(weight + p * size, size, rows, first, p * WIDTH, 0, units);
    for (; p + 2 <= to; p += 2) rows_of<N, 2>(weight + p * size, size, rows, first, last, p * WIDTH, 0, units);
    for (; p < to; ++p) rows_of<N, 1>(weight + p * size, size, rows, first, last, p * WIDTH, 0, units);
}

template <typename N>
NATIVE_INLINE void many(const typename N::Weight* weight, int64_t units, const Units& rows, int64_t first,
                        int64_t last, int64_t from, int64_t to) {
    const int64_t size = units * N::EACH * WIDTH;
    for (int64_t begin = 0; begin < units; begin += DEPTH) {
        const int64_t end = std::min(units, begin + DEPTH);
        int64_t p = from;
        for (; p + 2 <= to; p += 2)
            rows_of<N, 2>(weight + p * size + begin * N::EACH * WIDTH, size, rows, first, last, p * WIDTH, begin, end);
        for (; p < to; ++p)
            rows_of<N, 1>(weight + p * size + begin * N::EACH * WIDTH, size, rows, first, last, p * WIDTH, begin, end);
    }
}

// ROWS x PANELS tiles of 8 bits: each block is summed in integers, exactly, then scaled.
template <int ROWS, int PANELS>
NATIVE_INLINE void tile_8(const int8_t* panel, int64_t panel_size, const Rows& rows, int64_t row, int64_t column,
                          int64_t padded) {
    const __m512i flip = _mm512_set1_epi8(-128);  // makes w + 128 of w, as the instruction needs it
    const int8_t* x = static_cast<const int8_t*>(rows.x) + row * rows.stride;
    __m512 sums[ROWS][PANELS] = {};
    for (int64_t b = 0; b * BLOCK_8 < padded; ++b) {
        __m512i parts[ROWS][PANELS];
#pragma GCC unroll 6
        for (int r = 0; r < ROWS; ++r) {
            int32_t offset;
            std::memcpy(&offset, x + r * rows.stride + padded + (padded / BLOCK_8 + b) * 4, sizeof offset);
#pragma GCC unroll 4
            for (int p = 0; p < PANELS; ++p) parts[r][p] = _mm512_set1_epi32(offset);
        }
        for (int64_t k = b * BLOCK_8; k < (b + 1) * BLOCK_8; k += 4) {
            __m512i weights[PANELS];
#pragma GCC unroll 4
            for (int p = 0; p < PANELS; ++p)
                weights[p] = _mm512_xor_si512(_mm512_loadu_si512(panel + p * panel_size + k * WIDTH), flip);
#pragma GCC unroll 6
            for (int r = 0; r < ROWS; ++r) {
                int32_t four;
                std::memcpy(&four, x + r * rows.stride + k, sizeof four);
                const __m512i own = _mm512_set1_epi32(four);
#pragma GCC unroll 4
                for (int p = 0; p < PANELS; ++p) parts[r][p] = _mm512_dpbusd_epi32(parts[r][p], weights[p], own);
            }
        }
#pragma GCC unroll 6
        for (int r = 0; r < ROWS; ++r) {
            float scale;
            std::memcpy(&scale, x + r * rows.stride + padded + b * 4, sizeof scale);
#pragma GCC unroll 4
            for (int p = 0; p < PANELS; ++p)
                sums[r][p] = _mm512_fmadd_ps(_mm512_cvtepi32_ps(parts[r][p]), _mm512_set1_ps(scale), sums[r][p]);
        }
    }
#pragma GCC unroll 6
    for (int r = 0; r < ROWS; ++r)
#pragma GCC unroll 4
        for (int p = 0; p < PANELS; ++p)
            _mm512_storeu_ps(rows.out + (row + r) * rows.out_stride + column + p * WIDTH, sums[r][p]);
}

template <int PANELS>
NATIVE_INLINE void rows_8(const int8_t* panel, int64_t size, const Rows& rows, int64_t first, int64_t last,
                          int64_t column, int64_t padded) {
    int64_t row = first;
    for (; row + 6 <= last; row += 6) tile_8<6, PANELS>(panel, size, rows, row, column, padded);
    for (; row + 3 <= last; row += 3) tile_8<3, PANELS>(panel, size, rows, row, column, padded);
    for (; row < last; ++row) tile_8<1, PANELS>(panel, size, rows, row, column, padded);
}

void work_8(const Product& of, const Rows& rows, const After& after, int64_t first, int64_t last, int64_t from,
            int64_t to) {
    const int64_t padded = padded_inputs(INT8, of.k), size = padded * WIDTH;
    const int8_t* weight = static_cast<const int8_t*>(of.weight);
    int64_t p = from;
    if (last - first == 1)
        for (; p + 4 <= to; p += 4) tile_8<1, 4>(weight + p * size, size, rows, first, p * WIDTH, padded);
    for (; p + 2 <= to; p += 2) rows_8<2>(weight + p * size, size, rows, first, last, p * WIDTH, padded);
    for (; p < to; ++p) rows_8<1>(weight + p * size, size, rows, first, last, p * WIDTH, padded);
    finish(of, rows, after, first, last, from, to);
}

template <typename N>
void work(const Product& of, const Rows& rows, const After& after, int64_t first, int64_t last, int64_t from,
          int64_t to) {
    const auto* weight = static_cast<const typename N::Weight*>(of.weight);
    const Units own{static_cast<const uint32_t*>(rows.x), rows.stride / N::EACH, rows.out, rows.out_stride};
    const int64_t units = (of.k + N::EACH - 1) / N::EACH;
    if (last - first < 12) few<N>(weight, units, own, first, last, from, to);
    else many<N>(weight, units, own, first, last, from, to);
    finish(of, rows, after, first, last, from, to);
}

}  // namespace

Panels panels_of_avx512(const Product& of) {
    if (of.level < 2) return nullptr;
    if (of.kind == FP32) return work<Single>;
    if (of.level < 3) return nullptr;
    return of.kind == BF16 ? work<Pairs> : work_8;
}

#ifdef __clang__
#pragma clang attribute pop
#endif
#else

int packed_level() { return best_level(); }
Panels panels_of_avx512(const Product&) { return nullptr; }

#endif
