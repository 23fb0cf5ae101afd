// AdamW over all tensors of a step in one pass: gradients in fp32 or bf16, masters in fp32, and optionally the
// model's bf16 weights, rounded from the masters. The speed of memory limits all of it.
#include "../compiled/native.h"

#include <cmath>

NATIVE_TEXT(native_text_of_adamw)

struct Tensor {
    const void* gradient;
    float *held, *average, *square;
    uint16_t* lowered;  // null if the model computes with the masters
    int64_t size;
    float decay;
    int gradient_is_bf16;
};

struct Arguments {
    const Tensor* tensors;
    int64_t count;
    float rate, beta1, beta2, eps, correction1, correction2, factor;
    int threads, level;
};

namespace {

constexpr int64_t PIECE = 1 << 15;  // numbers that a thread takes at a time

template <typename G, bool LOWER>
NATIVE_INLINE void update(const Arguments& a, const Tensor& t, int64_t start, int64_t end) {
    const G* gradient = static_cast<const G*>(t.gradient);
    const float kept = 1.0f - a.rate * t.decay, step = a.rate / a.correction1;
    const float root = std::sqrt(a.correction2), rest1 = 1.0f - a.beta1, rest2 = 1.0f - a.beta2;
    const float factor = a.factor, beta2 = a.beta2, eps = a.eps;  // copies avoid a read from the struct per number
    float *held = t.held, *average = t.average, *square = t.square;
    uint16_t* lowered = t.lowered;
#pragma omp simd
    for (int64_t i = start; i < end; ++i) {
        const float g = to_float(gradient[i]) * factor;
        const float m = average[i] + rest1 * (g - average[i]);
        const float v = beta2 * square[i] + rest2 * g * g;
        const float w = held[i] * kept - step * m / (std::sqrt(v) / root + eps);
        average[i] = m;
        square[i] = v;
        held[i] = w;
        if (LOWER) store(&lowered[i], w);
    }
}

NATIVE_INLINE void any_update(const Arguments& a, const Tensor& t, int64_t start, int64_t end) {
    if (t.gradient_is_bf16) {
        if (t.lowered) update<uint16_t, true>(a, t, start, end);
        else update<uint16_t, false>(a, t, start, end);
    } else {
        if (t.lowered) update<float, true>(a, t, start, end);
        else update<float, false>(a, t, start, end);
    }
}

using Piece = void (*)(const Arguments&, const Tensor&, int64_t, int64_t);

void piece_plain(const Arguments& a, const Tensor& t, int64_t start, int64_t end) { any_update(a, t, start, end); }
#ifdef NATIVE_X86
NATIVE_AVX2 void piece_avx2(const Arguments& a, const Tensor& t, int64_t start, int64_t end) {
    any_update(a, t, start, end);
}
NATIVE_AVX512 void piece_avx512(const Arguments& a, const Tensor& t, int64_t start, int64_t end) {
    any_update(a, t, start, end);
}
#endif

Piece piece_for(int level) {
#ifdef NATIVE_X86
    if (level == 2) return piece_avx512;
    if (level == 1) return piece_avx2;
#endif
    (void)level;
    return piece_plain;
}

}  // namespace

NATIVE_EXPORT void native_adamw(const Arguments* arguments) {
    const Arguments& a = *arguments;
    const Piece one = piece_for(a.level);
#pragma omp parallel num_threads(a.threads)
    {
        for (int64_t i = 0; i < a.count; ++i) {
            const Tensor& t = a.tensors[i];
#pragma omp for schedule(static) nowait
            for (int64_t start = 0; start < t.size; start += PIECE) {
                one(a, t, start, start + PIECE < t.size ? start + PIECE : t.size);
            }
        }
    }
}

NATIVE_EXPORT const char* native_source_adamw() { return native_text_of_adamw; }
