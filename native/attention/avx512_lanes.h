// Code that the attention kernels for AVX-512 and AMX share. The file that includes it is compiled for AVX512-BF16.
#pragma once

#include "../compiled/native.h"
#include "../compiled/transpose_avx512.h"

NATIVE_TEXT(native_text_of_attention_avx512_lanes)

#ifdef LANES_OF_REGISTER

#define HAS_OWN_TURN 1
#define HAS_OWN_LARGEST 1
#define HAS_OWN_EXP 1

namespace {

typedef float Lanes __attribute__((vector_size(64)));

NATIVE_INLINE Lanes largest(Lanes a, Lanes b) { return _mm512_max_ps(a, b); }

// exp(x) for x <= 0, as in native.h; exactly 0 below -87, so that hidden keys have no weight.
NATIVE_INLINE Lanes exp_lanes(Lanes x) {
    const __m512 clamped = _mm512_max_ps(_mm512_set1_ps(-88.0f), x);  // a NaN stays NaN
    const __mmask16 high = _mm512_cmp_ps_mask(x, _mm512_set1_ps(-87.0f), _CMP_NLT_UQ);
    const __m512 n = _mm512_roundscale_ps(_mm512_mul_ps(clamped, _mm512_set1_ps(1.44269504f)), 0);
    __m512 r = _mm512_fnmadd_ps(n, _mm512_set1_ps(0.693359375f), clamped);
    r = _mm512_fmadd_ps(n, _mm512_set1_ps(2.12194440e-4f), r);
    __m512 p = _mm512_set1_ps(1.9875691500e-4f);
    p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(1.3981999507e-3f));
    p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(8.3334519073e-3f));
    p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(4.1665795894e-2f));
    p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(1.6666665459e-1f));
    p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(5.0000001201e-1f));
    p = _mm512_fmadd_ps(_mm512_mul_ps(p, r), r, _mm512_add_ps(r, _mm512_set1_ps(1.0f)));
    return _mm512_maskz_scalef_ps(high, p, n);
}

constexpr int64_t TURNED = 16;

// Transpose 16 x 16 words.
NATIVE_INLINE void turn(const uint32_t* from, int64_t from_row, uint32_t* to, int64_t to_row) {
    __m512i a[16];
#pragma GCC unroll 16
    for (int i = 0; i < 16; ++i) a[i] = _mm512_loadu_si512(from + i * from_row);
    transpose_words(a);
#pragma GCC unroll 16
    for (int i = 0; i < 16; ++i) _mm512_storeu_si512(to + i * to_row, a[i]);
}

struct BF16 {
    struct Session {};
    using Number = uint16_t;
    static constexpr int64_t EACH = 2;
    static constexpr bool TILES = false;
    static inline __attribute__((always_inline)) Lanes kept(Lanes x) { return x; }
    static inline __attribute__((always_inline)) Lanes dot(Lanes sum, Lanes a, Lanes b) {
        return _mm512_dpbf16_ps(sum, (__m512bh)a, (__m512bh)b);
    }
};

// Interleave the numbers of each two neighbouring rows, which makes one row of pairs.
NATIVE_INLINE void pair_rows(const uint16_t* from, int64_t rows, int64_t width, uint32_t* to) {
    for (int64_t r = 0; r < rows; r += 2)
        for (int64_t c = 0; c < width; c += 16, to += 16) {
            const auto* low = reinterpret_cast<const __m256i*>(from + r * width + c);
            const auto* high = reinterpret_cast<const __m256i*>(from + (r + 1) * width + c);
            const __m512i a = _mm512_cvtepu16_epi32(_mm256_loadu_si256(low));
            const __m512i b = _mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_loadu_si256(high)), 16);
            _mm512_storeu_si512(to, _mm512_or_si512(a, b));
        }
}

// The functions of the same names in kernel.h are for fp32.
NATIVE_INLINE void put_rows(uint16_t* rows, Lanes one, Lanes two) {
    const __m512i both = (__m512i)_mm512_cvtne2ps_pbh(two, one);
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(rows), _mm512_castsi512_si256(both));
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(rows + 64), _mm512_extracti64x4_epi64(both, 1));
}
NATIVE_INLINE void put_units(uint16_t* units, Lanes one, Lanes two) {
    const __m512i a = _mm512_cvtepu16_epi32((__m256i)_mm512_cvtneps_pbh(one));
    const __m512i b = _mm512_slli_epi32(_mm512_cvtepu16_epi32((__m256i)_mm512_cvtneps_pbh(two)), 16);
    _mm512_storeu_si512(units, _mm512_or_si512(a, b));
}

}  // namespace

#endif
