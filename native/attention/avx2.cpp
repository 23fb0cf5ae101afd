// Attention for AVX2 with FMA. AVX2 has no products of bf16, so tensors in bf16 are converted to fp32.
#include "../compiled/native.h"

NATIVE_TEXT(native_text_of_attention_avx2)

#ifdef NATIVE_X86
#include <immintrin.h>
// Included before the target changes, because its functions must run on every processor.
#include <cmath>

// Valid to the end of the file, so that it also applies to templates that are instantiated later.
#ifdef __clang__
#pragma clang attribute push(__attribute__((target("avx2,fma"))), apply_to = function)
#else
#pragma GCC target("avx2,fma")
#endif

#define LANES_OF_REGISTER 8
#define HAS_OWN_TURN 1
#define HAS_OWN_LARGEST 1

namespace {

typedef float Lanes __attribute__((vector_size(32)));

NATIVE_INLINE Lanes largest(Lanes a, Lanes b) { return _mm256_max_ps(a, b); }

constexpr int64_t TURNED = 8;

// Transpose 8 x 8 words.
NATIVE_INLINE void turn(const uint32_t* from, int64_t from_row, uint32_t* to, int64_t to_row) {
    __m256 a[8], b[8];
#pragma GCC unroll 8
    for (int i = 0; i < 8; ++i) a[i] = _mm256_loadu_ps(reinterpret_cast<const float*>(from + i * from_row));
#pragma GCC unroll 4
    for (int i = 0; i < 8; i += 2) {
        b[i] = _mm256_unpacklo_ps(a[i], a[i + 1]);
        b[i + 1] = _mm256_unpackhi_ps(a[i], a[i + 1]);
    }
#pragma GCC unroll 2
    for (int i = 0; i < 8; i += 4) {
        a[i] = _mm256_shuffle_ps(b[i], b[i + 2], 0x44);
        a[i + 1] = _mm256_shuffle_ps(b[i], b[i + 2], 0xee);
        a[i + 2] = _mm256_shuffle_ps(b[i + 1], b[i + 3], 0x44);
        a[i + 3] = _mm256_shuffle_ps(b[i + 1], b[i + 3], 0xee);
    }
#pragma GCC unroll 4
    for (int i = 0; i < 4; ++i) {
        _mm256_storeu_ps(reinterpret_cast<float*>(to + i * to_row), _mm256_permute2f128_ps(a[i], a[i + 4], 0x20));
        _mm256_storeu_ps(reinterpret_cast<float*>(to + (i + 4) * to_row), _mm256_permute2f128_ps(a[i], a[i + 4], 0x31));
    }
}

}  // namespace

#include "kernel.h"

AttentionKernel attention_avx2(bool bf16) { return bf16 ? attention_of<Rounded, uint16_t> : attention_of<F32, float>; }

#ifdef __clang__
#pragma clang attribute pop
#endif

#else

#include "kernel.h"

AttentionKernel attention_avx2(bool) { return nullptr; }

#endif
