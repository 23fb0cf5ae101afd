// Attention for AVX-512. Numbers in bf16 are multiplied by the instructions of AVX512-BF16, or converted to fp32.
#include "../compiled/native.h"

NATIVE_TEXT(native_text_of_attention_avx512)

#if defined(NATIVE_X86) && (defined(__clang__) || __GNUC__ >= 10)
#include <immintrin.h>
// Included before the target changes, because its functions must run on every processor.
#include <cmath>

// Valid to the end of the file, so that it also applies to templates that are instantiated later.
#ifdef __clang__
#pragma clang attribute push( \
    __attribute__((target("avx512f,avx512bw,avx512dq,avx512vl,avx512bf16,avx2,fma"))), apply_to = function)
#else
#pragma GCC target("avx512f,avx512bw,avx512dq,avx512vl,avx512bf16,avx2,fma,prefer-vector-width=512")
#endif

#define LANES_OF_REGISTER 16
#include "avx512_lanes.h"
#include "kernel.h"

AttentionKernel attention_avx512(bool bf16, bool products) {
    if (!bf16) return attention_of<F32, float>;
    return products ? attention_of<BF16, uint16_t> : attention_of<Rounded, uint16_t>;
}

#ifdef __clang__
#pragma clang attribute pop
#endif

#else

// Never called: it keeps the embedded source text in the library.
#include "avx512_lanes.h"
#include "kernel.h"

AttentionKernel attention_avx512(bool, bool) { return nullptr; }

#endif
