// Attention that never stores all scores: the choice of a kernel for a processor, and the kernel for any processor.
#define LANES_OF_REGISTER 4
#include "kernel.h"

NATIVE_TEXT(native_text_of_attention)

AttentionKernel attention_plain(bool bf16) { return bf16 ? attention_of<F32, uint16_t> : attention_of<F32, float>; }

static AttentionKernel kernel_for(bool bf16, int level) {
    AttentionKernel kernel = level == 2 ? attention_avx512(bf16) : nullptr;
    if (!kernel && level >= 1) kernel = attention_avx2(bf16);
    return kernel ? kernel : attention_plain(bf16);
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
