// SwiGLU, forward and backward: silu(gate) x up of rows whose halves are gate and up, where silu(z) is z times the
// logistic function of z.
#include "../compiled/native.h"

NATIVE_TEXT(native_text_of_swiglu)

namespace {

template <typename T>
NATIVE_INLINE void forward(const T* x, T* out, int64_t n) {
    const T* up = x + n;
#pragma omp simd
    for (int64_t i = 0; i < n; ++i) {
        const float a = to_float(x[i]);
        store(&out[i], a * fitted_logistic(a) * to_float(up[i]));
    }
}

template <typename T>
NATIVE_INLINE void backward(const T* x, const T* above, T* out, int64_t n) {
    const T* up = x + n;
    T* of_up = out + n;
#pragma omp simd
    for (int64_t i = 0; i < n; ++i) {
        const float a = to_float(x[i]), g = to_float(above[i]);
        const float s = fitted_logistic(a);
        store(&out[i], g * to_float(up[i]) * (s + a * s * (1.0f - s)));
        store(&of_up[i], g * a * s);
    }
}

template <typename T, bool BACK>
struct Row {
    NATIVE_INLINE void run(const T* x, const T* above, T* out, int64_t n) {
        if (BACK) backward(x, above, out, n);
        else forward(x, out, n);
    }
};

template <typename T>
void swiglu(const T* x, const T* above, T* out, int64_t rows, int64_t n, int threads, int level) {
    const auto one = above ? for_level<Row<T, true>, const T*, const T*, T*, int64_t>(level)
                           : for_level<Row<T, false>, const T*, const T*, T*, int64_t>(level);
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
