// GELU by tanh, forward and backward: x s(z) with the logistic function s and z = 2 sqrt(2 / pi) (x + 0.044715 x^3),
// which equals x (1 + tanh(z / 2)) / 2.
#include "../compiled/native.h"

NATIVE_TEXT(native_text_of_gelu)

namespace {

constexpr int64_t PIECE = 4096;  // numbers that a thread takes at a time
constexpr float SLOPE = 1.5957691216f;  // 2 sqrt(2 / pi)
constexpr float CUBE = 0.044715f;

template <typename T>
NATIVE_INLINE void forward(const T* x, const T*, T* out, int64_t n) {
#pragma omp simd
    for (int64_t i = 0; i < n; ++i) {
        const float a = to_float(x[i]);
        float s, rest;
        logistic(SLOPE * a * (1.0f + CUBE * a * a), &s, &rest);
        store(&out[i], a * s);
    }
}

template <typename T>
NATIVE_INLINE void backward(const T* x, const T* above, T* out, int64_t n) {
#pragma omp simd
    for (int64_t i = 0; i < n; ++i) {
        const float a = to_float(x[i]);
        float s, rest;
        logistic(SLOPE * a * (1.0f + CUBE * a * a), &s, &rest);
        store(&out[i], to_float(above[i]) * (s + a * s * rest * SLOPE * (1.0f + 3.0f * CUBE * a * a)));
    }
}

template <typename T, bool BACK>
struct Piece {
    NATIVE_INLINE void run(const T* x, const T* above, T* out, int64_t n) {
        if (BACK) backward(x, above, out, n);
        else forward(x, above, out, n);
    }
};

template <typename T>
void gelu(const T* x, const T* above, T* out, int64_t n, int threads, int level) {
    const auto one = above ? for_level<Piece<T, true>, const T*, const T*, T*, int64_t>(level)
                           : for_level<Piece<T, false>, const T*, const T*, T*, int64_t>(level);
#pragma omp parallel for schedule(static) num_threads(threads) if (n > 4 * PIECE)
    for (int64_t i = 0; i < n; i += PIECE) {
        one(x + i, above ? above + i : nullptr, out + i, n - i < PIECE ? n - i : PIECE);
    }
}

}  // namespace

// Compute the value if `above` is null, else the gradient; `out` may be `above`.
NATIVE_EXPORT void native_gelu_f32(const float* x, const float* above, float* out, int64_t n, int threads, int level) {
    gelu(x, above, out, n, threads, level);
}
NATIVE_EXPORT void native_gelu_bf16(const uint16_t* x, const uint16_t* above, uint16_t* out, int64_t n, int threads,
                                    int level) {
    gelu(x, above, out, n, threads, level);
}

NATIVE_EXPORT const char* native_source_gelu() { return native_text_of_gelu; }
