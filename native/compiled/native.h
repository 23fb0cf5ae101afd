// Code that every CPU op needs: bf16, an exp that compilers can vectorise, several instruction sets in one library,
// and the source text embedded in the library, so that a stale library is detected without version numbers.
#pragma once

#include <cstdint>
#include <cstring>

#ifdef _OPENMP
#include <omp.h>
#endif

#define NATIVE_INLINE static inline __attribute__((always_inline))
#define NATIVE_EXPORT extern "C" __attribute__((visibility("default")))

// The library may be pushed to a node with an older processor, so nothing is built for the build machine's
// processor: each kernel is compiled three times and chosen at run time. Plain attributes are used instead of
// target_clones, which needs an ifunc (only in glibc) and knows x86-64-v4 only since GCC 12. Other processors need
// one version (aarch64 always has NEON).
#if defined(__x86_64__) && defined(__GNUC__)
#define NATIVE_X86 1
#define NATIVE_AVX2 __attribute__((target("avx2,fma")))
#ifdef __clang__
#define NATIVE_AVX512 __attribute__((target("avx512f,avx512bw,avx512dq,avx512vl,avx2,fma")))
#else
#define NATIVE_AVX512 \
    __attribute__((target("avx512f,avx512bw,avx512dq,avx512vl,avx2,fma,prefer-vector-width=512")))
#endif
#endif

// Return the instruction set of this processor: 0 the compiler's default, 1 AVX2 with FMA, 2 AVX-512.
static inline int best_level() {
#ifdef NATIVE_X86
    __builtin_cpu_init();
    const bool avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
    const bool avx512 = __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                        __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
    return avx2 ? (avx512 ? 2 : 1) : 0;
#else
    return 0;
#endif
}

// `.incbin` puts the text of the compiled file into the read-only data, with a zero byte after it.
#ifdef __ELF__
#define NATIVE_TEXT(label)                                                                        \
    __asm__(".pushsection .rodata\n" #label ":\n.incbin \"" __FILE__ "\"\n.byte 0\n.popsection"); \
    extern "C" __attribute__((visibility("hidden"))) const char label[];
#else
#define NATIVE_TEXT(label) static const char label[] = "";
#endif

NATIVE_TEXT(native_text_of_header)

// Return whether rows of `bytes` bytes should be written past the caches: together they do not stay in a core's caches
// until they are read again, and each begins at a whole line.
NATIVE_INLINE bool write_past(const void* rows, int64_t count, int64_t bytes) {
    constexpr int64_t LARGE = 8 << 20;
    return count * bytes >= LARGE && (reinterpret_cast<uintptr_t>(rows) | static_cast<uintptr_t>(bytes)) % 64 == 0;
}

NATIVE_INLINE uint32_t bits_of(float x) {
    uint32_t bits;
    std::memcpy(&bits, &x, sizeof bits);
    return bits;
}

NATIVE_INLINE float float_of(uint32_t bits) {
    float x;
    std::memcpy(&x, &bits, sizeof x);
    return x;
}

NATIVE_INLINE float to_float(float x) { return x; }

NATIVE_INLINE float to_float(uint16_t bf16) {
    return float_of(static_cast<uint32_t>(bf16) << 16);
}

NATIVE_INLINE void store(float* at, float x) { *at = x; }

// Round to nearest, ties to even, as torch does; a NaN stays NaN.
NATIVE_INLINE void store(uint16_t* at, float x) {
    const uint32_t bits = bits_of(x), rounded = bits + 0x7fffu + ((bits >> 16) & 1u);
    *at = static_cast<uint16_t>((x == x ? rounded : 0x7fc00000u) >> 16);
}

// Return exp(x) for x <= 0, within 1.5 units in the last place; 0 below -87.7, where n is -127 and 2^n is too small
// for a normal float. x = n ln 2 + r with |r| <= ln 2 / 2; adding 1.5 * 2^23 rounds to an integer without a call,
// which would prevent vectorisation.
NATIVE_INLINE float exp_nonpositive(float x) {
    const float magic = 12582912.0f;
    const float clamped = x < -88.0f ? -88.0f : x;  // a NaN stays NaN
    const float shifted = clamped * 1.44269504f + magic;
    const float n = shifted - magic;
    const float r = (clamped - n * 0.693359375f) + n * 2.12194440e-4f;  // ln 2 split in two parts
    float p = 1.9875691500e-4f;
    p = p * r + 1.3981999507e-3f;
    p = p * r + 8.3334519073e-3f;
    p = p * r + 4.1665795894e-2f;
    p = p * r + 1.6666665459e-1f;
    p = p * r + 5.0000001201e-1f;
    p = p * r * r + r + 1.0f;
    uint32_t bits;  // unsigned, because the bits of a NaN overflow, which is undefined for signed integers
    std::memcpy(&bits, &shifted, sizeof bits);
    bits = (bits - 0x4b400000u + 127u) << 23;  // 2^n
    float scale;
    std::memcpy(&scale, &bits, sizeof scale);
    return p * scale;
}

// Sums and maxima over 16 lanes for any register width: every processor adds in the same order, and the compiler can
// use vectors without permission to reorder. An `omp simd reduction` does not achieve this: GCC 12 fixes its width
// before inlining, by the compiler's default, and used four lanes for AVX2.
constexpr int LANES = 16;

NATIVE_INLINE float sum_of(const float* x, int64_t n) {
    float lane[LANES] = {};
    int64_t i = 0;
    for (; i + LANES <= n; i += LANES)
        for (int j = 0; j < LANES; ++j) lane[j] += x[i + j];
    for (int j = 0; i + j < n; ++j) lane[j] += x[i + j];
    for (int half = LANES / 2; half > 0; half /= 2)
        for (int j = 0; j < half; ++j) lane[j] += lane[j + half];
    return lane[0];
}

// Return the maximum, or -infinity if n is 0; NaNs are ignored.
NATIVE_INLINE float max_of(const float* x, int64_t n) {
    float lane[LANES];
    for (int j = 0; j < LANES; ++j) lane[j] = -__builtin_inff();
    int64_t i = 0;
    for (; i + LANES <= n; i += LANES)
        for (int j = 0; j < LANES; ++j) lane[j] = x[i + j] > lane[j] ? x[i + j] : lane[j];
    for (int j = 0; i + j < n; ++j) lane[j] = x[i + j] > lane[j] ? x[i + j] : lane[j];
    for (int half = LANES / 2; half > 0; half /= 2)
        for (int j = 0; j < half; ++j) lane[j] = lane[j + half] > lane[j] ? lane[j + half] : lane[j];
    return lane[0];
}

// The function `Work::run`, compiled for each instruction set; `run` must be NATIVE_INLINE.
template <typename Work, typename... A>
void run_plain(A... a) { Work::run(a...); }
#ifdef NATIVE_X86
template <typename Work, typename... A>
NATIVE_AVX2 void run_avx2(A... a) { Work::run(a...); }
template <typename Work, typename... A>
NATIVE_AVX512 void run_avx512(A... a) { Work::run(a...); }
#endif

// Return the version of `Work::run` for a level.
template <typename Work, typename... A>
static auto for_level(int level) -> void (*)(A...) {
#ifdef NATIVE_X86
    if (level == 2) return run_avx512<Work, A...>;
    if (level == 1) return run_avx2<Work, A...>;
#endif
    (void)level;
    return run_plain<Work, A...>;
}
