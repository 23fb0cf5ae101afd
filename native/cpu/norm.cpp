// Layer norm and RMS norm, alone or of the sum of two tensors, forward and backward: a row is read once and processed
// in fp32. The weight's gradients are sums over rows. They are computed per piece of rows and added in the order of
// the pieces, so that the result is the same for any number of threads.
#include "../compiled/native.h"

#include <cmath>

NATIVE_TEXT(native_text_of_norm)

struct Arguments {
    const void *x, *residual;    // (rows, width); `residual` is added to `x` unless it is null
    const void *above, *of_sum;  // gradients of the norm, and of the sum (or null)
    const float *weight, *bias;  // (width); bias may be null
    void *out, *added;           // (rows, width): the norm, or the gradient of x; and the sum, rounded, if there is one
    float* facts;                // (rows, 2): mean and 1 / deviation; of an RMS norm (rows, 1): 1 / root of the mean square
    float* sums;                 // (pieces, 2, width): for the gradients of the weight and the bias
    float* scratch;              // (threads, 2, width)
    int64_t rows, width, piece;  // `piece`: rows per piece
    float eps;
    int threads, level;
};

namespace {

// Block size of sums over 64 lanes: a lane adds few enough fp32 numbers to keep its last bits.
constexpr int64_t BLOCK = 1024;

// Return the sum in four chains, because one waits for each addition.
NATIVE_INLINE float block_sum(const float* x, int64_t n) {
    float a[LANES] = {}, b[LANES] = {}, c[LANES] = {}, d[LANES] = {};
    int64_t i = 0;
    for (; i + 4 * LANES <= n; i += 4 * LANES) {
        for (int j = 0; j < LANES; ++j) a[j] += x[i + j];
        for (int j = 0; j < LANES; ++j) b[j] += x[i + LANES + j];
        for (int j = 0; j < LANES; ++j) c[j] += x[i + 2 * LANES + j];
        for (int j = 0; j < LANES; ++j) d[j] += x[i + 3 * LANES + j];
    }
    for (int j = 0; j < LANES; ++j) a[j] = (a[j] + b[j]) + (c[j] + d[j]);
    for (int half = LANES / 2; half > 0; half /= 2)
        for (int j = 0; j < half; ++j) a[j] += a[j + half];
    return a[0] + (i < n ? sum_of(x + i, n - i) : 0.0f);
}

NATIVE_INLINE float total(const float* x, int64_t n) {
    double sum = 0.0;
    for (int64_t i = 0; i < n; i += BLOCK) sum += block_sum(x + i, n - i < BLOCK ? n - i : BLOCK);
    return static_cast<float>(sum);
}

// Write the row in fp32 to `wide`; with a residual also the sum, and its rounded values are those that count.
template <typename T>
NATIVE_INLINE void read_row(const Arguments& a, int64_t r, float* wide) {
    const int64_t n = a.width;
    const T* x = static_cast<const T*>(a.x) + r * n;
    if (!a.residual) {
#pragma omp simd
        for (int64_t i = 0; i < n; ++i) wide[i] = to_float(x[i]);
        return;
    }
    const T* residual = static_cast<const T*>(a.residual) + r * n;
    T* added = static_cast<T*>(a.added) + r * n;
#pragma omp simd
    for (int64_t i = 0; i < n; ++i) {
        T rounded;
        store(&rounded, to_float(x[i]) + to_float(residual[i]));
        added[i] = rounded;
        wide[i] = to_float(rounded);
    }
}

template <typename T, bool RMS>
NATIVE_INLINE void forward_row(const Arguments& a, int64_t r, float* wide, float* square) {
    const int64_t n = a.width;
    T* out = static_cast<T*>(a.out) + r * n;
    const float *weight = a.weight, *bias = a.bias;  // copies avoid a read from the struct per number
    read_row<T>(a, r, wide);
    const float mean = RMS ? 0.0f : total(wide, n) / static_cast<float>(n);
#pragma omp simd
    for (int64_t i = 0; i < n; ++i) {
        wide[i] -= mean;
        square[i] = wide[i] * wide[i];
    }
    const float inverse = 1.0f / std::sqrt(total(square, n) / static_cast<float>(n) + a.eps);
    if (bias) {
#pragma omp simd
        for (int64_t i = 0; i < n; ++i) store(&out[i], wide[i] * inverse * weight[i] + bias[i]);
    } else {
#pragma omp simd
        for (int64_t i = 0; i < n; ++i) store(&out[i], wide[i] * inverse * weight[i]);
    }
    if (RMS) {
        a.facts[r] = inverse;
    } else {
        a.facts[2 * r] = mean;
        a.facts[2 * r + 1] = inverse;
    }
}

// dx = inverse (g - mean(g) - y mean(g y)), where y is the normalised row and g the gradient times the weight; an RMS
// norm has no mean(g). The gradient of the sum is added.
template <typename T, bool RMS>
NATIVE_INLINE void backward_row(const Arguments& a, int64_t r, float* slope, float* product, float* sums) {
    const int64_t n = a.width;
    const T* x = static_cast<const T*>(a.x) + r * n;
    const T* above = static_cast<const T*>(a.above) + r * n;
    T* out = static_cast<T*>(a.out) + r * n;
    const float mean = RMS ? 0.0f : a.facts[2 * r], inverse = RMS ? a.facts[r] : a.facts[2 * r + 1];
    const float* weight = a.weight;
    float* bias_sums = sums + n;
#pragma omp simd
    for (int64_t i = 0; i < n; ++i) {
        const float up = to_float(above[i]);
        const float normal = (to_float(x[i]) - mean) * inverse;
        slope[i] = up * weight[i];
        product[i] = slope[i] * normal;
        sums[i] += up * normal;
        if (!RMS) bias_sums[i] += up;
    }
    const float one = RMS ? 0.0f : total(slope, n) / static_cast<float>(n);
    const float two = total(product, n) / static_cast<float>(n);
    if (a.of_sum) {
        const T* of_sum = static_cast<const T*>(a.of_sum) + r * n;
#pragma omp simd
        for (int64_t i = 0; i < n; ++i) {
            const float normal = (to_float(x[i]) - mean) * inverse;
            store(&out[i], inverse * (slope[i] - one - normal * two) + to_float(of_sum[i]));
        }
    } else {
#pragma omp simd
        for (int64_t i = 0; i < n; ++i) {
            const float normal = (to_float(x[i]) - mean) * inverse;
            store(&out[i], inverse * (slope[i] - one - normal * two));
        }
    }
}

template <typename T, bool RMS, bool BACK>
struct Piece {
    NATIVE_INLINE void run(const Arguments& a, int64_t piece, float* scratch) {
        const int64_t end = (piece + 1) * a.piece < a.rows ? (piece + 1) * a.piece : a.rows;
        float* sums = BACK ? a.sums + piece * 2 * a.width : nullptr;
        for (int64_t r = piece * a.piece; r < end; ++r) {
            if (BACK) backward_row<T, RMS>(a, r, scratch, scratch + a.width, sums);
            else forward_row<T, RMS>(a, r, scratch, scratch + a.width);
        }
    }
};

template <typename T, bool RMS>
void norm(const Arguments& a) {
    const auto one = a.above ? for_level<Piece<T, RMS, true>, const Arguments&, int64_t, float*>(a.level)
                             : for_level<Piece<T, RMS, false>, const Arguments&, int64_t, float*>(a.level);
    const int64_t pieces = (a.rows + a.piece - 1) / a.piece;
#pragma omp parallel for schedule(static) num_threads(a.threads) if (a.rows * a.width > 16384)
    for (int64_t piece = 0; piece < pieces; ++piece) {
#ifdef _OPENMP
        float* scratch = a.scratch + omp_get_thread_num() * 2 * a.width;
#else
        float* scratch = a.scratch;
#endif
        one(a, piece, scratch);
    }
}

}  // namespace

// Compute the norm if `above` is null, else the gradients.
NATIVE_EXPORT void native_layer_norm_f32(const Arguments* a) { norm<float, false>(*a); }
NATIVE_EXPORT void native_layer_norm_bf16(const Arguments* a) { norm<uint16_t, false>(*a); }
NATIVE_EXPORT void native_rms_norm_f32(const Arguments* a) { norm<float, true>(*a); }
NATIVE_EXPORT void native_rms_norm_bf16(const Arguments* a) { norm<uint16_t, true>(*a); }

NATIVE_EXPORT const char* native_source_norm() { return native_text_of_norm; }
