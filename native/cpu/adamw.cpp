// AdamW over all tensors of a step in one pass: gradients in fp32 or bf16, masters in fp32, and optionally the
// model's bf16 weights, rounded from the masters; or masters stored as these weights and a 16-bit remainder
// (native/masters.py explains how). The speed of memory limits all of it.
#include "../compiled/native.h"

#include <cmath>

NATIVE_TEXT(native_text_of_adamw)

struct Tensor {
    const void* gradient;
    float *held, *average, *square;
    uint16_t* lowered;   // null if the model computes with the masters
    int16_t* remainder;  // null if `held` has the masters; else `lowered` and this are the masters, and `held` is null
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

// Return a master from its weight and remainder; remove the mark from the square.
NATIVE_INLINE float master_of(uint16_t low, int16_t remainder, float* square) {
    const uint32_t marked = bits_of(*square);
    *square = float_of(marked & 0x7fffffffu);
    return float_of((static_cast<uint32_t>(low) << 16) + static_cast<uint32_t>(static_cast<int32_t>(remainder)) +
                    (marked >> 31 << 16));
}

// Store the weight and the remainder of a master; return the square with its mark.
NATIVE_INLINE float divide(float master, float square, uint16_t* low, int16_t* remainder) {
    const uint32_t bits = bits_of(master);
    const uint32_t rounded = (bits + 0x7fffu + ((bits >> 16) & 1u)) & 0xffff0000u;
    const uint32_t distance = master == master ? bits - rounded : 0u;
    store(low, master);
    *remainder = static_cast<int16_t>(static_cast<uint16_t>(distance));
    return float_of((bits_of(square) & 0x7fffffffu) | (distance == 0x8000u ? 0x80000000u : 0u));
}

enum class Form { MASTER, LOWERED, REMAINDER };

template <typename G, Form FORM>
NATIVE_INLINE void update(const Arguments& a, const Tensor& t, int64_t start, int64_t end) {
    const G* gradient = static_cast<const G*>(t.gradient);
    const float kept = 1.0f - a.rate * t.decay, step = a.rate / a.correction1;
    const float unroot = 1.0f / std::sqrt(a.correction2), rest1 = 1.0f - a.beta1, rest2 = 1.0f - a.beta2;
    const float factor = a.factor, beta2 = a.beta2, eps = a.eps;  // copies avoid a read from the struct per number
    float *held = t.held, *average = t.average, *square = t.square;
    uint16_t* lowered = t.lowered;
    int16_t* remainder = t.remainder;
#pragma omp simd
    for (int64_t i = start; i < end; ++i) {
        const float g = to_float(gradient[i]) * factor;
        const float m = average[i] + rest1 * (g - average[i]);
        float w, v = square[i];
        if constexpr (FORM == Form::REMAINDER) w = master_of(lowered[i], remainder[i], &v);
        else w = held[i];
        v = beta2 * v + rest2 * g * g;
        w = w * kept - step * m / (std::sqrt(v) * unroot + eps);
        average[i] = m;
        if constexpr (FORM == Form::REMAINDER) v = divide(w, v, &lowered[i], &remainder[i]);
        else held[i] = w;
        if constexpr (FORM == Form::LOWERED) store(&lowered[i], w);
        square[i] = v;
    }
}

template <typename G>
NATIVE_INLINE void any_form(const Arguments& a, const Tensor& t, int64_t start, int64_t end) {
    if (t.remainder) update<G, Form::REMAINDER>(a, t, start, end);
    else if (t.lowered) update<G, Form::LOWERED>(a, t, start, end);
    else update<G, Form::MASTER>(a, t, start, end);
}

struct Piece {
    NATIVE_INLINE void run(const Arguments* a, const Tensor* t, int64_t start, int64_t end) {
        if (t->gradient_is_bf16) any_form<uint16_t>(*a, *t, start, end);
        else any_form<float>(*a, *t, start, end);
    }
};

}  // namespace

NATIVE_EXPORT void native_adamw(const Arguments* arguments) {
    const Arguments& a = *arguments;
    const auto piece = for_level<Piece, const Arguments*, const Tensor*, int64_t, int64_t>(a.level);
#pragma omp parallel num_threads(a.threads)
    {
        for (int64_t i = 0; i < a.count; ++i) {
            const Tensor& t = a.tensors[i];
#pragma omp for schedule(static) nowait
            for (int64_t start = 0; start < t.size; start += PIECE) {
                piece(&a, &t, start, start + PIECE < t.size ? start + PIECE : t.size);
            }
        }
    }
}

NATIVE_EXPORT const char* native_source_adamw() { return native_text_of_adamw; }
