// A register of fp32 numbers for one instruction set, and what kernels do with it. Included by levels.h alone.
#ifndef NATIVE_LANES
#define NATIVE_LANES
NATIVE_TEXT(native_text_of_lanes)
#endif

#define LANES_MEMBER inline __attribute__((always_inline)) LANES_TARGET
#define LANES_INLINE static LANES_MEMBER

namespace {
namespace LANES_SET {

typedef float Lanes __attribute__((vector_size(LANES_BYTES)));
typedef uint32_t Words __attribute__((vector_size(LANES_BYTES)));
typedef int32_t Signed __attribute__((vector_size(LANES_BYTES)));
// A register of numbers in bf16.
#if LANES_LEVEL >= 2
typedef __m256i Halves;
#elif LANES_LEVEL == 1
typedef __m128i Halves;
#else
typedef uint16_t Halves __attribute__((vector_size(LANES_BYTES / 2)));
#endif
constexpr int64_t WIDTH = LANES_BYTES / 4;

LANES_INLINE Lanes all(float x) { return x - Lanes{}; }
LANES_INLINE Words all_words(uint32_t x) { return x - Words{}; }

LANES_INLINE Lanes load(const float* x) {
    Lanes v;
    std::memcpy(&v, x, sizeof v);
    return v;
}

LANES_INLINE Words load_words(const uint32_t* x) {
    Words v;
    std::memcpy(&v, x, sizeof v);
    return v;
}

// Return 16-bit numbers, each in a word.
LANES_INLINE Words load_halves(const uint16_t* x) {
    Halves v;
    std::memcpy(&v, x, sizeof v);
#if LANES_LEVEL >= 2
    return (Words)_mm512_cvtepu16_epi32(v);
#elif LANES_LEVEL == 1
    return (Words)_mm256_cvtepu16_epi32(v);
#else
    return __builtin_convertvector(v, Words);
#endif
}

LANES_INLINE Lanes load(const uint16_t* x) { return (Lanes)(load_halves(x) << 16); }

LANES_INLINE void save(float* at, Lanes v) { std::memcpy(at, &v, sizeof v); }

// Round to nearest, ties to even; a NaN stays NaN. AVX512-BF16 makes zeros of numbers below 1.2e-38.
LANES_INLINE Halves rounded(Lanes v) {
#if LANES_LEVEL == 3
    return (__m256i)_mm512_cvtneps_pbh((__m512)v);
#else
    const Words bits = (Words)v;
    Words whole = bits + (0x7fffu + ((bits >> 16) & 1u));
#if LANES_LEVEL == 2
    whole = (Words)_mm512_mask_mov_epi32((__m512i)whole, _mm512_cmp_ps_mask((__m512)v, (__m512)v, _CMP_UNORD_Q),
                                         _mm512_set1_epi32(0x7fc00000));
    return _mm512_cvtepi32_epi16((__m512i)(whole >> 16));
#else
    whole = v == v ? whole : all_words(0x7fc00000u);
#if LANES_LEVEL == 1
    const __m256i high = (__m256i)(whole >> 16);
    return _mm_packus_epi32(_mm256_castsi256_si128(high), _mm256_extracti128_si256(high, 1));
#else
    return __builtin_convertvector(whole >> 16, Halves);
#endif
#endif
#endif
}

LANES_INLINE void save(uint16_t* at, Lanes v) {
    const Halves halves = rounded(v);
    std::memcpy(at, &halves, sizeof halves);
}

// Write a register past the caches, which would otherwise read each line before it is overwritten. `at` is a multiple of the
// bytes that are written. Call `finish` afterwards.
template <typename T>
LANES_INLINE void save_past(T* at, Lanes v) {
#if LANES_LEVEL >= 2
    if constexpr (sizeof(T) == 4) _mm512_stream_ps(reinterpret_cast<float*>(at), v);
    else _mm256_stream_si256(reinterpret_cast<__m256i*>(at), rounded(v));
#elif LANES_LEVEL == 1
    if constexpr (sizeof(T) == 4) _mm256_stream_ps(reinterpret_cast<float*>(at), v);
    else _mm_stream_si128(reinterpret_cast<__m128i*>(at), rounded(v));
#else
    save(at, v);
#endif
}

LANES_INLINE void finish() {
#if LANES_LEVEL >= 1
    _mm_sfence();
#endif
}

// Ask for memory that will be read soon; `x` may be behind the end of a tensor.
LANES_INLINE void fetch(const void* x) { __builtin_prefetch(x); }

// Load the first `count` numbers; the other lanes are zeros.
template <typename T>
LANES_INLINE Lanes load(const T* x, int64_t count) {
    if (count >= WIDTH) return load(x);
    T part[WIDTH] = {};
    for (int64_t i = 0; i < count; ++i) part[i] = x[i];
    return load(part);
}

template <typename T>
LANES_INLINE void save(T* at, Lanes v, int64_t count, bool past = false) {
    if (past) return save_past(at, v);
    if (count >= WIDTH) return save(at, v);
    T part[WIDTH];
    save(part, v);
    for (int64_t i = 0; i < count; ++i) at[i] = part[i];
}

// Where `b` is a NaN, the results are NaNs.
LANES_INLINE Lanes largest(Lanes a, Lanes b) {
#if LANES_LEVEL >= 2
    return _mm512_max_ps(a, b);
#elif LANES_LEVEL == 1
    return _mm256_max_ps(a, b);
#else
    return a > b ? a : b;
#endif
}
LANES_INLINE Lanes smallest(Lanes a, Lanes b) {
#if LANES_LEVEL >= 2
    return _mm512_min_ps(a, b);
#elif LANES_LEVEL == 1
    return _mm256_min_ps(a, b);
#else
    return a < b ? a : b;
#endif
}

// Return a / b for a finite b of 1 or more; for bf16 AVX2 takes a faster way, at most 1e-6 off.
template <typename T>
LANES_INLINE Lanes quotient(Lanes a, Lanes b) {
#if LANES_LEVEL == 1
    if (sizeof(T) == 2) {
        const Lanes first = _mm256_rcp_ps(b);
        return a * (first * (2.0f - b * first));
    }
#endif
    return a / b;
}

// Return the lanes of `x` whose random number is at least the threshold, and 0 in the others.
LANES_INLINE Lanes kept(Lanes x, Words words, uint32_t threshold) {
#if LANES_LEVEL >= 2
    return _mm512_maskz_mov_ps(_mm512_cmpge_epu32_mask((__m512i)words, _mm512_set1_epi32(static_cast<int>(threshold))), x);
#elif LANES_LEVEL == 1
    const __m256i least = _mm256_set1_epi32(static_cast<int>(threshold));
    return (Lanes)_mm256_and_si256((__m256i)x, _mm256_cmpeq_epi32(_mm256_max_epu32((__m256i)words, least), (__m256i)words));
#else
    return (Lanes)((Words)x & (Words)(words >= all_words(threshold)));
#endif
}

// Return the place of the first number that is `x`, or -1.
LANES_INLINE int first_equal(Lanes v, float x) {
#if LANES_LEVEL >= 2
    const unsigned found = _mm512_cmp_ps_mask(v, all(x), _CMP_EQ_OQ);
#elif LANES_LEVEL == 1
    const unsigned found = static_cast<unsigned>(_mm256_movemask_ps(_mm256_cmp_ps(v, all(x), _CMP_EQ_OQ)));
#else
    float part[WIDTH];
    save(part, v);
    unsigned found = 0;
    for (int i = 0; i < WIDTH; ++i) found |= static_cast<unsigned>(part[i] == x) << i;
#endif
    return found ? __builtin_ctz(found) : -1;
}

LANES_INLINE float sum_of(Lanes v) {
#if LANES_LEVEL >= 2
    return _mm512_reduce_add_ps(v);
#else
    float x[WIDTH];
    save(x, v);
    for (int64_t half = WIDTH / 2; half > 0; half /= 2)
        for (int64_t i = 0; i < half; ++i) x[i] += x[i + half];
    return x[0];
#endif
}

// Return the largest number; NaNs are ignored.
LANES_INLINE float largest_of(Lanes v) {
#if LANES_LEVEL >= 2
    // If one operand is a NaN, the instruction returns the second one, so the second one is never a NaN here.
    Lanes most = _mm512_max_ps(v, all(-__builtin_inff()));
    most = _mm512_max_ps(most, _mm512_shuffle_f32x4(most, most, 0x4e));
    most = _mm512_max_ps(most, _mm512_shuffle_f32x4(most, most, 0xb1));
    most = _mm512_max_ps(most, _mm512_permute_ps(most, 0x4e));
    most = _mm512_max_ps(most, _mm512_permute_ps(most, 0xb1));
    return most[0];
#else
    float x[WIDTH], most = -__builtin_inff();
    save(x, v);
    for (int64_t i = 0; i < WIDTH; ++i) most = x[i] > most ? x[i] : most;
    return most;
#endif
}

// How many registers a loop works on in parallel. An instruction has its result only after several cycles; those of other
// registers run meanwhile. Below AVX-512 there are too few registers for it.
constexpr int REGISTERS = LANES_LEVEL >= 2 ? 4 : 1;
#define EACH_REGISTER _Pragma("GCC unroll 4") for (int k = 0; k < N; ++k)

#if LANES_LEVEL >= 2
// Write 2^x, with a relative error of at most 2e-7, or 3e-6 for a result in bf16; 0 where the mask has no bit. The part
// behind the point, which is in [0, 1), goes into a polynomial; the instruction that scales by a power of two rounds its
// exponent down itself.
template <typename T, int N>
LANES_INLINE void powers(const Lanes (&x)[N], const __mmask16 (&mask)[N], Lanes (&out)[N]) {
    constexpr bool SHORT = sizeof(T) == 2;
    Lanes r[N];
    EACH_REGISTER r[k] = _mm512_reduce_ps(x[k], _MM_FROUND_TO_NEG_INF | _MM_FROUND_NO_EXC);
    EACH_REGISTER out[k] = SHORT ? r[k] * 1.342668477e-2f + 5.224247277e-2f : r[k] * 1.867130050e-3f + 9.017030708e-3f;
    if (!SHORT) EACH_REGISTER out[k] = out[k] * r[k] + 5.579991266e-2f;
    EACH_REGISTER out[k] = out[k] * r[k] + (SHORT ? 2.412801981e-1f : 2.401644439e-1f);
    EACH_REGISTER out[k] = out[k] * r[k] + (SHORT ? 6.930448413e-1f : 6.931512952e-1f);
    EACH_REGISTER out[k] = out[k] * r[k] + 1.0f;
    EACH_REGISTER out[k] = _mm512_maskz_scalef_ps(mask[k], out[k], x[k]);
}
#endif

// Replace x <= 0 by exp(x), as exp_nonpositive of native.h does; T is the type of the result that it is for.
template <typename T, int N>
LANES_INLINE void exp_of(Lanes (&x)[N]) {
#if LANES_LEVEL >= 2
    // 0 below -87.3: results that are not normal floats take long. A NaN stays one.
    __mmask16 mask[N];
    Lanes scaled[N];
    EACH_REGISTER mask[k] = _mm512_cmp_ps_mask(x[k], all(-87.3f), _CMP_NLT_UQ);
    EACH_REGISTER scaled[k] = x[k] * 1.44269504f;
    powers<T>(scaled, mask, x);
#else
    EACH_REGISTER {
        const Lanes clamped = largest(all(-88.0f), x[k]);
        const Lanes shifted = clamped * 1.44269504f + 12582912.0f, n = shifted - 12582912.0f;
        const Lanes r = (clamped - n * 0.693359375f) + n * 2.12194440e-4f;
        Lanes p = r * 1.9875691500e-4f + 1.3981999507e-3f;
        p = p * r + 8.3334519073e-3f;
        p = p * r + 4.1665795894e-2f;
        p = p * r + 1.6666665459e-1f;
        p = p * r + 5.0000001201e-1f;
        p = p * r * r + (r + 1.0f);
        x[k] = p * (Lanes)(((Words)shifted - (0x4b400000u - 127u)) << 23);
    }
#endif
}

template <typename T>
LANES_INLINE Lanes exp_lanes(Lanes x) {
    Lanes one[1] = {x};
    exp_of<T>(one);
    return one[0];
}

// Replace z times LOGISTIC_UNIT by the logistic function of z, at most 2e-7 off, or 3e-6 of itself for a result in bf16;
// exactly 0 or 1 where it is nearer than fp32 can tell. Without AVX-512 it is 1 / 2 plus z P(z^2) / Q(z^2), fitted on 16.6
// on both sides to 4e-9.
constexpr float LOGISTIC_UNIT = LANES_LEVEL >= 2 ? -1.44269504f : 1.0f;

template <typename T, int N>
LANES_INLINE void logistic_of(Lanes (&z)[N]) {
#if LANES_LEVEL >= 2
    // 1 / (1 + 2^x), and 0 beyond 60: smaller numbers would make denormal products, which take long.
    __mmask16 every[N], mask[N];
    Lanes below[N], first[N];
    EACH_REGISTER every[k] = 0xffff;
    powers<T>(z, every, below);
    EACH_REGISTER mask[k] = _mm512_cmp_ps_mask(z[k], all(60.0f), _CMP_NGT_UQ);
    EACH_REGISTER below[k] += 1.0f;
    // One step of Newton's method; a division takes longer.
    EACH_REGISTER first[k] = _mm512_rcp14_ps(below[k]);
    EACH_REGISTER below[k] = 2.0f - below[k] * first[k];
    EACH_REGISTER z[k] = _mm512_maskz_mul_ps(mask[k], first[k], below[k]);
#else
    EACH_REGISTER {
        const Lanes c = smallest(all(18.0f), largest(all(-18.0f), z[k])), w = c * c;
        Lanes p = w * 1.413938010e-11f + 8.352430904e-8f, q = w * 3.212757080e-9f + 5.251880372e-6f;
        p = p * w + 5.533238109e-5f;
        q = q * w + 1.628102180e-3f;
        p = p * w + 8.386956156e-3f;
        q = q * w + 1.168811138e-1f;
        p = p * w + 2.499999892e-1f;
        q = q * w + 1.0f;
        z[k] = smallest(all(0.5f), largest(all(-0.5f), quotient<T>(c * p, q))) + 0.5f;
    }
#endif
}

// Return the sum of a row's terms. `term(i, count)` returns those of `count` numbers from place i on, and zeros in the
// other lanes. At most 64 registers are added in fp32, in four independent sums: one alone would wait for each addition.
template <typename Term>
LANES_INLINE double row_sum(const Term& term, int64_t n) {
    constexpr int64_t BLOCK = 64 * WIDTH;
    double sum = 0.0;
    for (int64_t start = 0; start < n; start += BLOCK) {
        const int64_t end = n - start < BLOCK ? n : start + BLOCK;
        Lanes chain[4] = {};
        int64_t i = start;
        for (; i + 4 * WIDTH <= end; i += 4 * WIDTH) {
            chain[0] += term(i, WIDTH);
            chain[1] += term(i + WIDTH, WIDTH);
            chain[2] += term(i + 2 * WIDTH, WIDTH);
            chain[3] += term(i + 3 * WIDTH, WIDTH);
        }
        for (; i + WIDTH <= end; i += WIDTH) chain[0] += term(i, WIDTH);
        if (i < end) chain[1] += term(i, end - i);
        sum += sum_of((chain[0] + chain[1]) + (chain[2] + chain[3]));
    }
    return sum;
}

// Call `each(i, count)` for all numbers of a row.
template <typename Each>
LANES_INLINE void for_row(const Each& each, int64_t n) {
    int64_t i = 0;
    for (; i + WIDTH <= n; i += WIDTH) each(i, WIDTH);
    if (i < n) each(i, n - i);
}

// Call `each.run<N>(i, count)` for all numbers of a row: N registers from place i on have `count` numbers each.
template <typename Each>
LANES_INLINE void for_row_together(const Each& each, int64_t n) {
    int64_t i = 0;
    for (; i + REGISTERS * WIDTH <= n; i += REGISTERS * WIDTH) each.template run<REGISTERS>(i, WIDTH);
    for (; i + WIDTH <= n; i += WIDTH) each.template run<1>(i, WIDTH);
    if (i < n) each.template run<1>(i, n - i);
}

#include LANES_FILE

}  // namespace LANES_SET
}  // namespace

#undef EACH_REGISTER
#undef LANES_LEVEL
#undef LANES_SET
#undef LANES_BYTES
#undef LANES_TARGET
#undef LANES_MEMBER
#undef LANES_INLINE
