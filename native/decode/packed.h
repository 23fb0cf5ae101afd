// Declarations for products with packed weights, for the kernels of all instruction sets and for their callers.
#pragma once

#include "../compiled/native.h"

#include <cmath>

NATIVE_TEXT(native_text_of_packed_header)

constexpr int64_t WIDTH = 16;  // outputs of a panel

enum Kind { FP32, BF16, INT8 };
constexpr int64_t BLOCK_8 = 64;  // numbers of a row of x that share a scale where x is read in 8 bits
enum Activation { NONE, GELU_TANH, GELU };

// The layout of `_Product` in packed.py. n is a multiple of 16, and rows of results have room for n numbers.
struct Product {
    const void* weight;
    const float* scales;  // of each output, or null
    const float* bias;    // or null
    int64_t n, k;
    int kind, threads;
    int level;  // 0 baseline, 1 AVX2, 2 AVX-512, 3 AVX-512 with products of bf16 pairs and four products of 8 bits
};

// What is done with the results of a product, and where they are written.
struct After {
    int activation;
    float* sum;  // rows to which the results are added, or null
    int64_t sum_stride;
    uint16_t* rounded;  // rows that get the results in bf16, or null
    int64_t rounded_stride;
};

// x is bf16 if `reads_bf16`; if `reads_int8`, a row has its numbers, padded to whole blocks, then the scale of each
// block in fp32, then -128 times the sum of each block in int32; otherwise x is fp32.
struct Rows {
    const void* x;
    int64_t stride;  // in numbers, or in bytes if `reads_int8`
    float* out;
    int64_t out_stride;
};

static inline bool reads_bf16(const Product& of) { return of.kind == BF16 && of.level >= 3; }
static inline bool reads_int8(const Product& of) { return of.kind == INT8 && of.level >= 1; }

// Return the inputs of a panel: k, rounded up to whole pairs in bf16 and to whole blocks in 8 bits.
NATIVE_INLINE int64_t padded_inputs(int kind, int64_t k) {
    return kind == FP32 ? k : kind == BF16 ? (k + 1) / 2 * 2 : (k + BLOCK_8 - 1) / BLOCK_8 * BLOCK_8;
}

// Write a row of x in 8 bits, as `Rows` says.
NATIVE_INLINE void quantize_row(const float* x, int64_t k, int8_t* out) {
    const int64_t padded = padded_inputs(INT8, k);
    float* scales = reinterpret_cast<float*>(out + padded);
    int32_t* offsets = reinterpret_cast<int32_t*>(scales + padded / BLOCK_8);
    for (int64_t b = 0; b * BLOCK_8 < k; ++b) {
        float part[BLOCK_8] = {};
        const int64_t size = k - b * BLOCK_8 < BLOCK_8 ? k - b * BLOCK_8 : BLOCK_8;
        std::memcpy(part, x + b * BLOCK_8, static_cast<size_t>(size) * sizeof(float));
        float size_of[BLOCK_8];
        for (int j = 0; j < BLOCK_8; ++j) size_of[j] = part[j] < 0.0f ? -part[j] : part[j];
        const float most = max_of(size_of, BLOCK_8), inverse = most > 0.0f ? 127.0f / most : 0.0f;
        int32_t sum = 0;
        for (int j = 0; j < BLOCK_8; ++j) {
            // Adding 1.5 * 2^23 rounds to the nearest integer, ties to even.
            const float shifted = part[j] * inverse + 12582912.0f;
            int32_t bits;
            std::memcpy(&bits, &shifted, sizeof bits);
            const int32_t number = bits - 0x4b400000;
            out[b * BLOCK_8 + j] = static_cast<int8_t>(number);
            sum += number;
        }
        scales[b] = most / 127.0f;
        offsets[b] = -128 * sum;
    }
}

// Compute panels [from, to) of rows [first, last).
using Panels = void (*)(const Product&, const Rows&, const After&, int64_t first, int64_t last, int64_t from,
                        int64_t to);

__attribute__((visibility("hidden"))) Panels panels_of(const Product& of);
__attribute__((visibility("hidden"))) Panels panels_of_avx512(const Product& of);
__attribute__((visibility("hidden"))) int packed_level();

// Rows and panels of a piece of work: many small ones, so that a thread that is disturbed does less of them.
struct Pieces {
    int64_t row_size, panel_size, row_pieces, count;
    Pieces(int64_t rows, int64_t panels, int64_t threads) {
        // Blocks of equal size, a multiple of 12 rows: up to 200 KB of x with 768 numbers in bf16 stay in the cache.
        row_pieces = rows < 24 ? 1 : (rows + 131) / 132;
        row_size = row_pieces == 1 ? rows : ((rows + row_pieces - 1) / row_pieces + 11) / 12 * 12;
        const int64_t fair = panels * row_pieces / threads / 2 / 4 * 4, most = rows < 24 ? 8 : 16;
        panel_size = fair < 4 ? 4 : fair > most ? most : fair;
        count = row_pieces * ((panels + panel_size - 1) / panel_size);
    }
};

// Compute piece `i`. Pieces with the same panels follow one another, so that the panels are still in the cache.
static inline void run_piece(Panels run, const Product& of, const Rows& rows, const After& after, int64_t count,
                             const Pieces& pieces, int64_t i) {
    const int64_t first = i % pieces.row_pieces * pieces.row_size, from = i / pieces.row_pieces * pieces.panel_size;
    const int64_t last = first + pieces.row_size, to = from + pieces.panel_size, panels = of.n / WIDTH;
    if (first < count) run(of, rows, after, first, last < count ? last : count, from, to < panels ? to : panels);
}

NATIVE_INLINE float logistic(float z) {
    const float e = exp_nonpositive(z < 0.0f ? z : -z);
    return (z < 0.0f ? e : 1.0f) / (1.0f + e);
}

// Apply scales, bias and activation, and write the results to their places.
NATIVE_INLINE void finish(const Product& of, const Rows& rows, const After& after, int64_t first, int64_t last,
                          int64_t from, int64_t to) {
    const int64_t begin = from * WIDTH, end = to * WIDTH;
    const float *scales = of.scales, *bias = of.bias;
    for (int64_t row = first; row < last; ++row) {
        float* out = rows.out + row * rows.out_stride;
        if (scales) {
#pragma omp simd
            for (int64_t i = begin; i < end; ++i) out[i] *= scales[i];
        }
        if (bias) {
#pragma omp simd
            for (int64_t i = begin; i < end; ++i) out[i] += bias[i];
        }
        if (after.activation == GELU_TANH) {
#pragma omp simd
            for (int64_t i = begin; i < end; ++i) {
                const float a = out[i];
                out[i] = a * logistic(1.5957691216f * a * (1.0f + 0.044715f * a * a));
            }
        } else if (after.activation == GELU) {
            for (int64_t i = begin; i < end; ++i) out[i] *= 0.5f * (1.0f + std::erf(out[i] * 0.70710678f));
        }
        if (after.sum) {
            float* sum = after.sum + row * after.sum_stride;
#pragma omp simd
            for (int64_t i = begin; i < end; ++i) sum[i] += out[i];
        }
        if (after.rounded) {
            uint16_t* rounded = after.rounded + row * after.rounded_stride;
#pragma omp simd
            for (int64_t i = begin; i < end; ++i) store(&rounded[i], out[i]);
        }
    }
}
