// SwiGLU, forward and backward: silu(gate) x up of rows whose halves are gate and up, where silu(z) is z times the
// logistic function of z.
#ifndef LANES_LEVEL
#include "../compiled/native.h"

NATIVE_TEXT(native_text_of_swiglu)

#define LANES_FILE "../cpu/swiglu.cpp"
#include "../compiled/levels.h"

namespace {

template <typename T>
void swiglu(const T* x, const T* above, T* out, int64_t rows, int64_t n, int threads, int level) {
    const auto one = above ? BEST_OF(level, row<T, true>) : BEST_OF(level, row<T, false>);
#pragma omp parallel for schedule(static) num_threads(threads) if (rows * n > 16384)
    for (int64_t r = 0; r < rows; ++r) {
        one(x + 2 * r * n, above ? above + r * n : nullptr, out + (above ? 2 : 1) * r * n, n);
    }
}

}  // namespace

// x: (rows, 2 n). Compute the value (rows, n) if `above` is null, else the gradient (rows, 2 n).
NATIVE_EXPORT void native_swiglu_f32(const float* x, const float* above, float* out, int64_t rows, int64_t n,
                                     int threads, int level) {
    swiglu(x, above, out, rows, n, threads, level);
}
NATIVE_EXPORT void native_swiglu_bf16(const uint16_t* x, const uint16_t* above, uint16_t* out, int64_t rows,
                                      int64_t n, int threads, int level) {
    swiglu(x, above, out, rows, n, threads, level);
}

NATIVE_EXPORT const char* native_source_swiglu() { return native_text_of_swiglu; }

#else  // for each instruction set

template <typename T>
struct Forward {
    const T *x, *up;
    T* out;
    template <int N>
    LANES_MEMBER void run(int64_t i, int64_t count) const {
        Lanes a[N], s[N];
        EACH_REGISTER a[k] = load(x + i + k * WIDTH, count);
        EACH_REGISTER s[k] = a[k] * LOGISTIC_UNIT;
        logistic_of<T>(s);
        EACH_REGISTER save(out + i + k * WIDTH, a[k] * s[k] * load(up + i + k * WIDTH, count), count);
    }
};

template <typename T>
struct Backward {
    const T *x, *up, *above;
    T *out, *of_up;
    template <int N>
    LANES_MEMBER void run(int64_t i, int64_t count) const {
        Lanes a[N], s[N], g[N];
        EACH_REGISTER a[k] = load(x + i + k * WIDTH, count);
        EACH_REGISTER s[k] = a[k] * LOGISTIC_UNIT;
        logistic_of<T>(s);
        EACH_REGISTER g[k] = load(above + i + k * WIDTH, count);
        EACH_REGISTER a[k] *= s[k];
        EACH_REGISTER save(of_up + i + k * WIDTH, g[k] * a[k], count);
        EACH_REGISTER {
            const Lanes slope = s[k] + a[k] * (1.0f - s[k]);
            save(out + i + k * WIDTH, g[k] * load(up + i + k * WIDTH, count) * slope, count);
        }
    }
};

template <typename T, bool BACK>
LANES_TARGET void row(const T* x, const T* above, T* out, int64_t n) {
    if (BACK) for_row_together(Backward<T>{x, x + n, above, out, out + n}, n);
    else for_row_together(Forward<T>{x, x + n, out}, n);
}

#endif
