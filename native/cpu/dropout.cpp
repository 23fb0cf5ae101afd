// Bias, dropout and residual in one pass, forward and backward. The mask is computed from a counter and never stored:
// number i of the tensor is kept if word i % 4 of Philox 4x32-10 is at least the threshold, where the counter is
// offset + i / 4 in its two low words (0 in the others) and the key is the seed. So it is the same for any number of
// threads, instruction set and device.
#include "../compiled/native.h"

#ifdef NATIVE_X86
#include <immintrin.h>
#endif

NATIVE_TEXT(native_text_of_dropout)

struct Arguments {
    const void *x, *residual;  // (rows, width); backward: `x` is the gradient of the result
    const float* bias;         // (width), or null
    void* out;                 // (rows, width): the result, or the gradient of x
    float* sums;               // (pieces, width), zero, or null: for the gradient of the bias
    int64_t rows, width, piece;  // `piece`: rows per piece
    uint64_t seed, offset;
    uint32_t threshold;
    float scale;
    int threads, level;
};

namespace {

constexpr int64_t BLOCK = 1024;  // words at a time, a multiple of 4

// Write four words for each of `count` counters.
NATIVE_INLINE void words(uint64_t seed, uint64_t counter, int64_t count, uint32_t* out) {
#pragma omp simd
    for (int64_t i = 0; i < count; ++i) {
        const uint64_t own = counter + static_cast<uint64_t>(i);
        uint32_t a = static_cast<uint32_t>(own), b = static_cast<uint32_t>(own >> 32), c = 0, d = 0;
        uint32_t key = static_cast<uint32_t>(seed), other = static_cast<uint32_t>(seed >> 32);
#pragma GCC unroll 10
        for (int round = 0; round < 10; ++round) {
            const uint64_t left = static_cast<uint64_t>(a) * 0xD2511F53u;
            const uint64_t right = static_cast<uint64_t>(c) * 0xCD9E8D57u;
            a = static_cast<uint32_t>(right >> 32) ^ b ^ key;
            b = static_cast<uint32_t>(right);
            c = static_cast<uint32_t>(left >> 32) ^ d ^ other;
            d = static_cast<uint32_t>(left);
            key += 0x9E3779B9u;
            other += 0xBB67AE85u;
        }
        out[4 * i] = a;
        out[4 * i + 1] = b;
        out[4 * i + 2] = c;
        out[4 * i + 3] = d;
    }
}

#ifdef NATIVE_X86
// The same for a multiple of 8 counters. A word has 64 bits of a vector, of which the upper 32 may hold anything: that is
// what the multiplication reads and writes, so that no halves are moved between the rounds.
NATIVE_AVX2 void words_avx2(uint64_t seed, uint64_t counter, int64_t count, uint32_t* out) {
    const __m256i left_factor = _mm256_set1_epi64x(0xD2511F53), right_factor = _mm256_set1_epi64x(0xCD9E8D57);
    for (int64_t i = 0; i < count; i += 8) {
        __m256i a[2], b[2], c[2], d[2];
        for (int g = 0; g < 2; ++g) {
            const __m256i own = _mm256_add_epi64(_mm256_set1_epi64x(static_cast<int64_t>(counter) + i + 4 * g),
                                                 _mm256_setr_epi64x(0, 1, 2, 3));
            a[g] = own;
            b[g] = _mm256_srli_epi64(own, 32);
            c[g] = d[g] = _mm256_setzero_si256();
        }
        uint32_t key = static_cast<uint32_t>(seed), other = static_cast<uint32_t>(seed >> 32);
#pragma GCC unroll 10
        for (int round = 0; round < 10; ++round) {
            const __m256i first = _mm256_set1_epi64x(key), second = _mm256_set1_epi64x(other);
            for (int g = 0; g < 2; ++g) {
                const __m256i left = _mm256_mul_epu32(a[g], left_factor), right = _mm256_mul_epu32(c[g], right_factor);
                a[g] = _mm256_xor_si256(_mm256_srli_epi64(right, 32), _mm256_xor_si256(b[g], first));
                c[g] = _mm256_xor_si256(_mm256_srli_epi64(left, 32), _mm256_xor_si256(d[g], second));
                b[g] = right;
                d[g] = left;
            }
            key += 0x9E3779B9u;
            other += 0xBB67AE85u;
        }
        for (int g = 0; g < 2; ++g) {
            const __m256i front = _mm256_blend_epi32(a[g], _mm256_slli_epi64(b[g], 32), 0xAA);
            const __m256i back = _mm256_blend_epi32(c[g], _mm256_slli_epi64(d[g], 32), 0xAA);
            const __m256i even = _mm256_unpacklo_epi64(front, back), odd = _mm256_unpackhi_epi64(front, back);
            auto to = reinterpret_cast<__m256i*>(out + 4 * (i + 4 * g));
            _mm256_storeu_si256(to, _mm256_permute2x128_si256(even, odd, 0x20));
            _mm256_storeu_si256(to + 1, _mm256_permute2x128_si256(even, odd, 0x31));
        }
    }
}
#endif

// Return `x` if its word keeps it, else 0; without a branch, which compilers would make masks of.
NATIVE_INLINE float kept(float x, uint32_t word, uint32_t threshold) {
    return float_of(bits_of(x) & (word >= threshold ? 0xffffffffu : 0u));
}

template <typename T, bool BACK>
struct Piece {
    NATIVE_INLINE void run(const Arguments& a, int64_t piece) {
        const int64_t end = (piece + 1) * a.piece < a.rows ? (piece + 1) * a.piece : a.rows;
        for (int64_t r = piece * a.piece; r < end; ++r) row(a, r, a.sums ? a.sums + piece * a.width : nullptr);
    }

    NATIVE_INLINE void row(const Arguments& a, int64_t r, float* sums) {
        uint32_t word[BLOCK + 32];
        for (int64_t start = 0; start < a.width; start += BLOCK) {
            const int64_t n = a.width - start < BLOCK ? a.width - start : BLOCK;
            // The first number of these need not be the first of its counter.
            const int64_t at = r * a.width + start, first = at % 4, count = (first + n + 3) / 4;
            const uint64_t counter = a.offset + static_cast<uint64_t>(at / 4);
#ifdef NATIVE_X86
            if (a.level == 1) words_avx2(a.seed, counter, (count + 7) / 8 * 8, word);
            else
#endif
                words(a.seed, counter, count, word);
            part(a, at, start, n, word + first, sums);
        }
    }

    NATIVE_INLINE void part(const Arguments& a, int64_t at, int64_t start, int64_t n, const uint32_t* word, float* sums) {
        const T* x = static_cast<const T*>(a.x) + at;
        T* out = static_cast<T*>(a.out) + at;
        const uint32_t threshold = a.threshold;
        const float scale = a.scale;
        if (BACK) {
            if (sums) {
#pragma omp simd
                for (int64_t i = 0; i < n; ++i) {
                    const float own = kept(to_float(x[i]) * scale, word[i], threshold);
                    sums[start + i] += own;
                    store(&out[i], own);
                }
                return;
            }
#pragma omp simd
            for (int64_t i = 0; i < n; ++i) store(&out[i], kept(to_float(x[i]) * scale, word[i], threshold));
            return;
        }
        const T* residual = static_cast<const T*>(a.residual) + at;
        if (a.bias) {
            const float* bias = a.bias + start;
#pragma omp simd
            for (int64_t i = 0; i < n; ++i) {
                const float own = kept((to_float(x[i]) + bias[i]) * scale, word[i], threshold);
                store(&out[i], to_float(residual[i]) + own);
            }
            return;
        }
#pragma omp simd
        for (int64_t i = 0; i < n; ++i) {
            store(&out[i], to_float(residual[i]) + kept(to_float(x[i]) * scale, word[i], threshold));
        }
    }
};

template <typename T>
void dropout(const Arguments& a, bool back) {
    const auto one = back ? for_level<Piece<T, true>, const Arguments&, int64_t>(a.level)
                          : for_level<Piece<T, false>, const Arguments&, int64_t>(a.level);
    const int64_t pieces = (a.rows + a.piece - 1) / a.piece;
#pragma omp parallel for schedule(static) num_threads(a.threads) if (a.rows * a.width > 16384)
    for (int64_t piece = 0; piece < pieces; ++piece) one(a, piece);
}

}  // namespace

// Compute the gradients if `residual` is null, else the value.
NATIVE_EXPORT void native_dropout_f32(const Arguments* a) { dropout<float>(*a, !a->residual); }
NATIVE_EXPORT void native_dropout_bf16(const Arguments* a) { dropout<uint16_t>(*a, !a->residual); }

NATIVE_EXPORT const char* native_source_dropout() { return native_text_of_dropout; }
