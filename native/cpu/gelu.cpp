// GELU, exact or by tanh, of a tensor or of its sum with a bias, forward and backward. By tanh it is x s(z) with the
// logistic function s and z = 2 sqrt(2 / pi) (x + 0.044715 x^3), which equals x (1 + tanh(z / 2)) / 2. The bias's
// gradient is computed per piece of rows and added in the order of the pieces, so that it is the same for any number of
// threads.
#include "../compiled/native.h"

NATIVE_TEXT(native_text_of_gelu)

struct Arguments {
    const void *x, *above;  // (rows, width); `above`: the gradient of the result, or null
    const float* bias;      // (width), or null
    void* out;              // (rows, width): the value, or the gradient of x
    float* sums;            // (pieces, width), zero: for the gradient of the bias
    int64_t rows, width, piece;  // `piece`: rows per piece
    int tanh, threads, level;
};

namespace {

constexpr float SLOPE = 1.5957691216f;  // 2 sqrt(2 / pi)
constexpr float CUBE = 0.044715f;

// The normal distribution's density at x and its integral up to x. The integral's smaller side is exp(-x^2 / 2) times a
// polynomial in t = 1 / (1 + 0.35 |x| / sqrt(2)), fitted by least squares to a relative error of 1e-8.
NATIVE_INLINE void normal(float x, float* density, float* integral) {
    const uint32_t bits = bits_of(x), magnitude = bits & 0x7fffffffu;
    const float size = float_of(magnitude < 0x41500000u ? magnitude : 0x41500000u);  // 13, beyond which exp is 0
    const float e = exp_nonpositive(-0.5f * size * size);
    const float t = 1.0f / (1.0f + 0.2474873734f * size);
    float p = 4.13102401e-2f;
    p = p * t - 1.750059050e-1f;
    p = p * t + 2.199866485e-1f;
    p = p * t - 8.01377177e-2f;
    p = p * t + 1.315923752e-1f;
    p = p * t + 1.215472613e-1f;
    p = p * t + 1.598697586e-1f;
    p = p * t + 1.859911419e-1f;
    p = p * t + 1.973749662e-1f;
    p = p * t + 1.974712401e-1f;
    const float from_half = 0.5f - 0.5f * e * p * t;
    *density = 0.3989422804f * e;
    *integral = 0.5f + float_of(bits_of(from_half) | (bits & 0x80000000u));
}

template <bool TANH>
NATIVE_INLINE float value(float x) {
    if (TANH) return x * fitted_logistic(x * (SLOPE + SLOPE * CUBE * (x * x)));
    float part, rest;
    normal(x, &rest, &part);
    return x * part;
}

template <bool TANH>
NATIVE_INLINE float slope(float x) {
    if (TANH) {
        const float part = fitted_logistic(x * (SLOPE + SLOPE * CUBE * (x * x)));
        return part + x * part * (1.0f - part) * (SLOPE + 3.0f * SLOPE * CUBE * (x * x));
    }
    float part, rest;
    normal(x, &rest, &part);
    return part + x * rest;
}

template <typename T, bool TANH>
NATIVE_INLINE void forward(const T* x, const float* bias, T* out, int64_t n) {
    if (bias) {
#pragma omp simd
        for (int64_t i = 0; i < n; ++i) store(&out[i], value<TANH>(to_float(x[i]) + bias[i]));
    } else {
#pragma omp simd
        for (int64_t i = 0; i < n; ++i) store(&out[i], value<TANH>(to_float(x[i])));
    }
}

template <typename T, bool TANH>
NATIVE_INLINE void backward(const T* x, const float* bias, const T* above, T* out, float* sums, int64_t n) {
    if (bias) {
#pragma omp simd
        for (int64_t i = 0; i < n; ++i) {
            const float own = to_float(above[i]) * slope<TANH>(to_float(x[i]) + bias[i]);
            sums[i] += own;
            store(&out[i], own);
        }
    } else {
#pragma omp simd
        for (int64_t i = 0; i < n; ++i) store(&out[i], to_float(above[i]) * slope<TANH>(to_float(x[i])));
    }
}

template <typename T, bool TANH, bool BACK>
struct Piece {
    NATIVE_INLINE void run(const Arguments& a, int64_t piece) {
        const int64_t n = a.width, end = (piece + 1) * a.piece < a.rows ? (piece + 1) * a.piece : a.rows;
        for (int64_t r = piece * a.piece; r < end; ++r) {
            const T* x = static_cast<const T*>(a.x) + r * n;
            T* out = static_cast<T*>(a.out) + r * n;
            if (BACK) {
                const T* above = static_cast<const T*>(a.above) + r * n;
                backward<T, TANH>(x, a.bias, above, out, a.bias ? a.sums + piece * n : nullptr, n);
            } else {
                forward<T, TANH>(x, a.bias, out, n);
            }
        }
    }
};

template <typename T, bool TANH>
void gelu(const Arguments& a) {
    const auto one = a.above ? for_level<Piece<T, TANH, true>, const Arguments&, int64_t>(a.level)
                             : for_level<Piece<T, TANH, false>, const Arguments&, int64_t>(a.level);
    const int64_t pieces = (a.rows + a.piece - 1) / a.piece;
#pragma omp parallel for schedule(static) num_threads(a.threads) if (a.rows * a.width > 16384)
    for (int64_t piece = 0; piece < pieces; ++piece) one(a, piece);
}

}  // namespace

NATIVE_EXPORT void native_gelu_f32(const Arguments* a) {
    if (a->tanh) gelu<float, true>(*a);
    else gelu<float, false>(*a);
}
NATIVE_EXPORT void native_gelu_bf16(const Arguments* a) {
    if (a->tanh) gelu<uint16_t, true>(*a);
    else gelu<uint16_t, false>(*a);
}

NATIVE_EXPORT const char* native_source_gelu() { return native_text_of_gelu; }
