// Bias, dropout and residual in one pass, forward and backward. The mask is computed from a counter and never stored:
// number i of the tensor is kept if half i % 8 of the four words of Philox 4x32-10, the lower half of each first, is at least
// the threshold, where the counter is offset + i / 8 in its two low words (0 in the others) and the key is the seed. So it
// is the same for any number of threads, instruction set and device.
#ifndef LANES_LEVEL
#include "../compiled/native.h"

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

#define LANES_FILE "../cpu/dropout.cpp"
#include "../compiled/levels.h"

namespace {

template <typename T>
void dropout(const Arguments& a, bool back) {
    const auto one = back ? BEST_OF(a.level, piece<T, true>) : BEST_OF(a.level, piece<T, false>);
    const int64_t pieces = (a.rows + a.piece - 1) / a.piece;
#pragma omp parallel for schedule(static) num_threads(a.threads) if (a.rows * a.width > 16384)
    for (int64_t number = 0; number < pieces; ++number) one(a, number);
}

}  // namespace

// Compute the gradients if `residual` is null, else the value.
NATIVE_EXPORT void native_dropout_f32(const Arguments* a) { dropout<float>(*a, !a->residual); }
NATIVE_EXPORT void native_dropout_bf16(const Arguments* a) { dropout<uint16_t>(*a, !a->residual); }

NATIVE_EXPORT const char* native_source_dropout() { return native_text_of_dropout; }

#else  // for each instruction set

constexpr int GROUPS = 4;
constexpr int64_t BLOCK = 256;             // numbers at a time: few, so that memory is read while words are computed
constexpr int64_t AHEAD = 4 * BLOCK;       // how far the next numbers are fetched before their words are computed
constexpr int64_t COUNTERS = 8 * GROUPS;   // as many more may be computed than are needed

// Write four words for each of `count` counters. With AVX2 and AVX-512 a word has 64 bits of a vector, of which the upper
// 32 may hold anything: that is what the multiplication reads and writes, so that no halves are moved between the rounds.
LANES_INLINE void write_words(const uint64_t* keys, uint64_t counter, int64_t count, uint32_t* out) {
#if LANES_LEVEL >= 2
    const __m512i left_factor = _mm512_set1_epi64(0xD2511F53), right_factor = _mm512_set1_epi64(0xCD9E8D57);
    const __m512i first_half = _mm512_setr_epi64(0, 8, 1, 9, 2, 10, 3, 11);
    const __m512i last_half = _mm512_setr_epi64(4, 12, 5, 13, 6, 14, 7, 15);
    // Four groups of eight counters: a multiplication takes longer than the processor needs to start one in each group.
    for (int64_t i = 0; i < count; i += 8 * GROUPS) {
        __m512i a[GROUPS], b[GROUPS], c[GROUPS], d[GROUPS];
#pragma GCC unroll 4
        for (int g = 0; g < GROUPS; ++g) {
            const __m512i own = _mm512_add_epi64(_mm512_set1_epi64(static_cast<int64_t>(counter) + i + 8 * g),
                                                 _mm512_setr_epi64(0, 1, 2, 3, 4, 5, 6, 7));
            a[g] = own;
            b[g] = _mm512_srli_epi64(own, 32);
            c[g] = d[g] = _mm512_setzero_si512();
        }
#pragma GCC unroll 10
        for (int round = 0; round < 10; ++round) {
            const __m512i first = _mm512_set1_epi64(keys[round]), second = _mm512_set1_epi64(keys[10 + round]);
            __m512i left[GROUPS], right[GROUPS];
#pragma GCC unroll 4
            for (int g = 0; g < GROUPS; ++g) left[g] = _mm512_mul_epu32(a[g], left_factor);
#pragma GCC unroll 4
            for (int g = 0; g < GROUPS; ++g) right[g] = _mm512_mul_epu32(c[g], right_factor);
            // 0x96: the exclusive or of all three.
#pragma GCC unroll 4
            for (int g = 0; g < GROUPS; ++g)
                a[g] = _mm512_ternarylogic_epi64(_mm512_srli_epi64(right[g], 32), b[g], first, 0x96);
#pragma GCC unroll 4
            for (int g = 0; g < GROUPS; ++g)
                c[g] = _mm512_ternarylogic_epi64(_mm512_srli_epi64(left[g], 32), d[g], second, 0x96);
#pragma GCC unroll 4
            for (int g = 0; g < GROUPS; ++g) {
                b[g] = right[g];
                d[g] = left[g];
            }
        }
#pragma GCC unroll 4
        for (int g = 0; g < GROUPS; ++g) {
            const __m512i front = _mm512_mask_shuffle_epi32(a[g], 0xAAAA, b[g], _MM_PERM_CCAA);
            const __m512i back = _mm512_mask_shuffle_epi32(c[g], 0xAAAA, d[g], _MM_PERM_CCAA);
            uint32_t* to = out + 4 * (i + 8 * g);
            _mm512_storeu_si512(to, _mm512_permutex2var_epi64(front, first_half, back));
            _mm512_storeu_si512(to + 16, _mm512_permutex2var_epi64(front, last_half, back));
        }
    }
#elif LANES_LEVEL == 1
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
#pragma GCC unroll 10
        for (int round = 0; round < 10; ++round) {
            const __m256i first = _mm256_set1_epi64x(static_cast<int64_t>(keys[round]));
            const __m256i second = _mm256_set1_epi64x(static_cast<int64_t>(keys[10 + round]));
            for (int g = 0; g < 2; ++g) {
                const __m256i left = _mm256_mul_epu32(a[g], left_factor), right = _mm256_mul_epu32(c[g], right_factor);
                a[g] = _mm256_xor_si256(_mm256_srli_epi64(right, 32), _mm256_xor_si256(b[g], first));
                c[g] = _mm256_xor_si256(_mm256_srli_epi64(left, 32), _mm256_xor_si256(d[g], second));
                b[g] = right;
                d[g] = left;
            }
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
#else
#pragma omp simd
    for (int64_t i = 0; i < count; ++i) {
        const uint64_t own = counter + static_cast<uint64_t>(i);
        uint32_t a = static_cast<uint32_t>(own), b = static_cast<uint32_t>(own >> 32), c = 0, d = 0;
#pragma GCC unroll 10
        for (int round = 0; round < 10; ++round) {
            const uint64_t left = static_cast<uint64_t>(a) * 0xD2511F53u;
            const uint64_t right = static_cast<uint64_t>(c) * 0xCD9E8D57u;
            a = static_cast<uint32_t>(right >> 32) ^ b ^ static_cast<uint32_t>(keys[round]);
            b = static_cast<uint32_t>(right);
            c = static_cast<uint32_t>(left >> 32) ^ d ^ static_cast<uint32_t>(keys[10 + round]);
            d = static_cast<uint32_t>(left);
        }
        out[4 * i] = a;
        out[4 * i + 1] = b;
        out[4 * i + 2] = c;
        out[4 * i + 3] = d;
    }
#endif
}

// The numbers of a row from `start` on.
template <typename T>
struct Part {
    const T *x, *residual;
    const float* bias;
    T* out;
    float* sums;
    const uint16_t* half;
    uint32_t threshold;
    float scale;
    bool past;
    LANES_MEMBER Lanes dropped(int64_t i, int64_t count) const {
        const Lanes v = load(x + i, count);
        return kept((bias ? v + load(bias + i, count) : v) * scale, load_halves(half + i), threshold);
    }
};

template <typename T>
struct Forward : Part<T> {
    LANES_MEMBER void operator()(int64_t i, int64_t count) const {
        save(this->out + i, load(this->residual + i, count) + this->dropped(i, count), count, this->past);
    }
};

template <typename T>
struct Backward : Part<T> {
    LANES_MEMBER void operator()(int64_t i, int64_t count) const {
        const Lanes own = this->dropped(i, count);
        if (this->sums) save(this->sums + i, load(this->sums + i, count) + own, count);
        save(this->out + i, own, count, this->past);
    }
};

template <typename T, bool BACK>
LANES_INLINE void row(const Arguments& a, const uint64_t* keys, int64_t r, float* sums, bool past) {
    // Lanes read a register of halves for the last numbers too.
    uint32_t word[BLOCK / 2 + 4 * COUNTERS + 16] = {};
    for (int64_t start = 0; start < a.width; start += BLOCK) {
        const int64_t n = a.width - start < BLOCK ? a.width - start : BLOCK;
        // The first number of these need not be the first of its counter.
        const int64_t at = r * a.width + start, first = at % 8, count = (first + n + 7) / 8;
        // Read ahead while the words are computed: a processor reads ahead by itself only between two reads.
        for (int64_t i = 0; i < n; i += 64 / static_cast<int64_t>(sizeof(T))) {
            fetch(static_cast<const T*>(a.x) + at + AHEAD + i);
            if (!BACK) fetch(static_cast<const T*>(a.residual) + at + AHEAD + i);
        }
        write_words(keys, a.offset + static_cast<uint64_t>(at / 8), count, word);
        const Part<T> part{static_cast<const T*>(a.x) + at,
                           BACK ? nullptr : static_cast<const T*>(a.residual) + at,
                           BACK || !a.bias ? nullptr : a.bias + start,
                           static_cast<T*>(a.out) + at,
                           sums ? sums + start : nullptr,
                           reinterpret_cast<const uint16_t*>(word) + first,
                           a.threshold,
                           a.scale,
                           past};
        if (BACK) for_row(Backward<T>{part}, n);
        else for_row(Forward<T>{part}, n);
    }
}

template <typename T, bool BACK>
LANES_TARGET void piece(const Arguments& a, int64_t number) {
    const int64_t end = (number + 1) * a.piece < a.rows ? (number + 1) * a.piece : a.rows;
    // The words of the key grow in each of the ten rounds: those of the low word, then those of the high one.
    uint64_t keys[20];
    for (uint32_t round = 0; round < 10; ++round) {
        keys[round] = static_cast<uint32_t>(a.seed) + round * 0x9E3779B9u;
        keys[10 + round] = static_cast<uint32_t>(a.seed >> 32) + round * 0xBB67AE85u;
    }
    const bool past = write_past(a.out, a.rows, static_cast<int64_t>(sizeof(T)) * a.width);
    float* sums = a.sums ? a.sums + number * a.width : nullptr;
    for (int64_t r = number * a.piece; r < end; ++r) row<T, BACK>(a, keys, r, sums, past);
    finish();
}

#endif
