// GELU, exact or by tanh, of a tensor or of its sum with a bias, forward and backward. By tanh it is x s(z) with the
// logistic function s and z = 2 sqrt(2 / pi) (x + 0.044715 x^3), which equals x (1 + tanh(z / 2)) / 2. The bias's
// gradient is computed per piece of rows and added in the order of the pieces, so that it is the same for any number of
// threads.
#ifndef LANES_LEVEL
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

#define LANES_FILE "../cpu/gelu.cpp"
#include "../compiled/levels.h"

namespace {

template <typename T, bool TANH, bool BIAS>
void gelu(const Arguments& a) {
    const auto one = a.above ? BEST_OF(a.level, piece<T, TANH, BIAS, true>) : BEST_OF(a.level, piece<T, TANH, BIAS, false>);
    const int64_t pieces = (a.rows + a.piece - 1) / a.piece;
#pragma omp parallel for schedule(static) num_threads(a.threads) if (a.rows * a.width > 16384)
    for (int64_t number = 0; number < pieces; ++number) one(a, number);
}

template <typename T>
void gelu(const Arguments& a) {
    if (a.bias) a.tanh ? gelu<T, true, true>(a) : gelu<T, false, true>(a);
    else a.tanh ? gelu<T, true, false>(a) : gelu<T, false, false>(a);
}

}  // namespace

NATIVE_EXPORT void native_gelu_f32(const Arguments* a) { gelu<float>(*a); }
NATIVE_EXPORT void native_gelu_bf16(const Arguments* a) { gelu<uint16_t>(*a); }

NATIVE_EXPORT const char* native_source_gelu() { return native_text_of_gelu; }

#else  // for each instruction set

constexpr float SLOPE = 1.5957691216f;  // 2 sqrt(2 / pi)
constexpr float CUBE = 0.044715f;

// The normal distribution's density at x and its integral up to x. The integral's smaller side is exp(-x^2 / 2) times a
// polynomial in t = 1 / (1 + 0.35 |x| / sqrt(2)), fitted by least squares to a relative error of 1e-8.
template <typename T>
LANES_INLINE void normal(Lanes x, Lanes* density, Lanes* integral) {
    const Words bits = (Words)x;
    const Lanes size = smallest(all(13.0f), (Lanes)(bits & 0x7fffffffu));  // 13, beyond which exp is 0
    const Lanes e = exp_lanes<T>(-0.5f * size * size);
    const Lanes t = quotient<T>(all(1.0f), 0.2474873734f * size + 1.0f);
    Lanes p = t * 4.13102401e-2f - 1.750059050e-1f;
    p = p * t + 2.199866485e-1f;
    p = p * t - 8.01377177e-2f;
    p = p * t + 1.315923752e-1f;
    p = p * t + 1.215472613e-1f;
    p = p * t + 1.598697586e-1f;
    p = p * t + 1.859911419e-1f;
    p = p * t + 1.973749662e-1f;
    p = p * t + 1.974712401e-1f;
    const Lanes from_half = 0.5f - 0.5f * e * p * t;
    *density = 0.3989422804f * e;
    *integral = 0.5f + (Lanes)((Words)from_half | (bits & 0x80000000u));
}

// Replace z by the logistic function of it, where z belongs to x.
template <typename T, int N>
LANES_INLINE void logistic_for(const Lanes (&x)[N], Lanes (&part)[N]) {
    constexpr float ONE = SLOPE * LOGISTIC_UNIT, THREE = CUBE * ONE;
    EACH_REGISTER part[k] = x[k] * x[k];
    EACH_REGISTER part[k] = part[k] * THREE + ONE;
    EACH_REGISTER part[k] *= x[k];
    logistic_of<T>(part);
}

// Replace x by its GELU.
template <typename T, bool TANH, int N>
LANES_INLINE void value(Lanes (&x)[N]) {
    Lanes part[N], density[N];
    if (TANH) logistic_for<T>(x, part);
    else EACH_REGISTER normal<T>(x[k], &density[k], &part[k]);
    EACH_REGISTER x[k] *= part[k];
}

// Replace x by the slope of GELU there.
template <typename T, bool TANH, int N>
LANES_INLINE void slope(Lanes (&x)[N]) {
    Lanes part[N], density[N];
    if (TANH) {
        logistic_for<T>(x, part);
        EACH_REGISTER {
            const Lanes of_z = x[k] * x[k] * (3.0f * SLOPE * CUBE) + SLOPE;
            x[k] = part[k] + x[k] * part[k] * (1.0f - part[k]) * of_z;
        }
    } else {
        EACH_REGISTER normal<T>(x[k], &density[k], &part[k]);
        EACH_REGISTER x[k] = part[k] + x[k] * density[k];
    }
}

template <typename T, bool TANH, bool BIAS>
struct Forward {
    const T* x;
    const float* bias;
    T* out;
    bool past;
    template <int N>
    LANES_MEMBER void run(int64_t i, int64_t count) const {
        Lanes v[N];
        EACH_REGISTER v[k] = load(x + i + k * WIDTH, count);
        if (BIAS) EACH_REGISTER v[k] += load(bias + i + k * WIDTH, count);
        value<T, TANH>(v);
        EACH_REGISTER save(out + i + k * WIDTH, v[k], count, past);
    }
};

template <typename T, bool TANH, bool BIAS>
struct Backward {
    const T *x, *above;
    const float* bias;
    T* out;
    float* sums;
    bool past;
    template <int N>
    LANES_MEMBER void run(int64_t i, int64_t count) const {
        Lanes v[N];
        EACH_REGISTER v[k] = load(x + i + k * WIDTH, count);
        if (BIAS) EACH_REGISTER v[k] += load(bias + i + k * WIDTH, count);
        slope<T, TANH>(v);
        EACH_REGISTER v[k] *= load(above + i + k * WIDTH, count);
        if (BIAS) EACH_REGISTER save(sums + i + k * WIDTH, load(sums + i + k * WIDTH, count) + v[k], count);
        EACH_REGISTER save(out + i + k * WIDTH, v[k], count, past);
    }
};

template <typename T, bool TANH, bool BIAS, bool BACK>
LANES_TARGET void piece(const Arguments& a, int64_t number) {
    const int64_t n = a.width, end = (number + 1) * a.piece < a.rows ? (number + 1) * a.piece : a.rows;
    const bool past = write_past(a.out, a.rows, static_cast<int64_t>(sizeof(T)) * n);
    for (int64_t r = number * a.piece; r < end; ++r) {
        const T* x = static_cast<const T*>(a.x) + r * n;
        T* out = static_cast<T*>(a.out) + r * n;
        if (BACK) {
            const T* above = static_cast<const T*>(a.above) + r * n;
            for_row_together(Backward<T, TANH, BIAS>{x, above, a.bias, out, BIAS ? a.sums + number * n : nullptr, past}, n);
        } else {
            for_row_together(Forward<T, TANH, BIAS>{x, a.bias, out, past}, n);
        }
    }
    finish();
}

#endif
