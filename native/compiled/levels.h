// Includes the file LANES_FILE once for each instruction set, after lanes.h and in a namespace for that set. A source
// file sets LANES_FILE to itself; its kernels are in the part that is compiled only if LANES_LEVEL is defined.
// `BEST_OF(level, name)` is the kernel `name` for a level.
//
// This is for kernels whose loops compilers vectorise badly, such as those that round to bf16 or add many numbers. The
// others take `for_level` of native.h.
#include "native.h"

#ifndef NATIVE_LEVELS
#define NATIVE_LEVELS
NATIVE_TEXT(native_text_of_levels)

#ifdef NATIVE_X86
#include <immintrin.h>

// As NATIVE_AVX512, with instructions that round to bf16.
#ifdef __clang__
#define NATIVE_AVX512_BF16 __attribute__((target("avx512f,avx512bw,avx512dq,avx512vl,avx512bf16,avx2,fma")))
#else
#define NATIVE_AVX512_BF16 \
    __attribute__((target("avx512f,avx512bw,avx512dq,avx512vl,avx512bf16,avx2,fma,prefer-vector-width=512")))
#endif

// Level 4 is AVX-512 without them, so that both can be tested on one processor.
static inline bool rounds_to_bf16(int level) {
    static const bool has = __builtin_cpu_supports("avx512bf16");
    return level != 4 && has;
}

#define BEST_OF(level, ...)                                                         \
    ((level) >= 2   ? (rounds_to_bf16(level) ? avx512_bf16::__VA_ARGS__ : avx512::__VA_ARGS__) \
     : (level) == 1 ? avx2::__VA_ARGS__                                             \
                    : plain::__VA_ARGS__)
#else
#define BEST_OF(level, ...) ((level) ? plain::__VA_ARGS__ : plain::__VA_ARGS__)  // the form that names a template
#endif
#endif

#define LANES_LEVEL 0
#define LANES_SET plain
#define LANES_BYTES 16
#define LANES_TARGET
#include "lanes.h"

#ifdef NATIVE_X86
#define LANES_LEVEL 1
#define LANES_SET avx2
#define LANES_BYTES 32
#define LANES_TARGET NATIVE_AVX2
#include "lanes.h"

#define LANES_LEVEL 2
#define LANES_SET avx512
#define LANES_BYTES 64
#define LANES_TARGET NATIVE_AVX512
#include "lanes.h"

#define LANES_LEVEL 3
#define LANES_SET avx512_bf16
#define LANES_BYTES 64
#define LANES_TARGET NATIVE_AVX512_BF16
#include "lanes.h"
#endif
