// Attention that never stores all scores: the choice of a kernel for a processor, and the kernel for any processor.
#define LANES_OF_REGISTER 4
#include "kernel.h"

NATIVE_TEXT(native_text_of_attention)

AttentionKernel attention_plain(bool bf16) { return bf16 ? attention_of<Rounded, uint16_t> : attention_of<F32, float>; }

// Further values of `level`, so that tests and benchmarks can choose each kernel that a processor has.
enum { AVX512 = 2, AVX512_PRODUCTS = 3, AVX512_WIDENED = 4 };

static bool has_bf16_products() {
#ifdef NATIVE_X86
    __builtin_cpu_init();
    return best_level() == AVX512 && __builtin_cpu_supports("avx512bf16");
#else
    return false;
#endif
}

// On Intel's processors AVX-512's products of bf16 take longer than products in fp32; for bf16 they have AMX.
static bool products_are_fast() {
#ifdef NATIVE_X86
    return has_bf16_products() && !__builtin_cpu_is("intel");
#else
    return false;
#endif
}

static AttentionKernel kernel_for(bool bf16, int level) {
    AttentionKernel kernel = bf16 && level == AVX512 ? attention_amx() : nullptr;
    if (!kernel && level >= AVX512)
        kernel = attention_avx512(bf16, level == AVX512_PRODUCTS ? has_bf16_products()
                                                                 : level == AVX512 && products_are_fast());
    if (!kernel && level >= 1) kernel = attention_avx2(bf16);
    return kernel ? kernel : attention_plain(bf16);
}

// Return which products this processor has: 0 none of AVX-512, 1 in fp32, 2 in fp32 and bf16, 3 in bf16 by AMX.
NATIVE_EXPORT int native_attention_level() {
    if (best_level() < AVX512 || !attention_avx512(false, false)) return 0;
    return attention_amx() ? 3 : products_are_fast() ? 2 : 1;
}

NATIVE_EXPORT void native_attention(const AttentionArguments* a, int backward, int bf16, int level) {
    kernel_for(bf16 != 0, level)(*a, backward != 0);
}

// Return the bytes of scratch memory per thread, a multiple of 64; at least what the kernels take.
NATIVE_EXPORT int64_t native_attention_scratch(int64_t queries, int64_t keys, int64_t dim, int backward) {
    const int64_t width = up(dim, 32), q = up(queries, B), k = up(keys, B);
    const int64_t forward = 2 * k * width + 5 * B * width + 2 * B * B;
    const int64_t words = backward ? q * (5 * width + 2) + 2 * k * width + 4 * B * width + 5 * B * B : forward;
    return up((words + k + B) * 4 + 20 * 64, 64);
}
