// Layer norm, forward and backward: a row is read once and processed in fp32. The weight's gradients are sums over
// rows. They are computed per piece of rows and added in the order of the pieces, so that the result is the same for
// any number of threads.
#include "../compiled/native.h"

#include <cmath>

NATIVE_TEXT(native_text_of_layer_norm)

struct Arguments {
    const void *x, *above;       // (rows, width)
    const float *weight, *bias;  // (width); bias may be null
    void* out;                   // (rows, width): the value, or the gradient of x
    float* facts;                // (rows, 2): mean and 1 / deviation
    float* sums;                 // (pieces, 2, width): for the gradients of the weight and the bias
    float* scratch;              // (threads, 2, width)
    int64_t rows, width, piece;  // `piece`: rows per piece
    float eps;
    int threads, level;
};

namespace {

// Block size of sums over 16 lanes: a lane adds few enough fp32 numbers to keep its last bits.
constexpr int64_t BLOCK = 512;

NATIVE_INLINE float total(const float* x, int64_t n) {
    double sum = 0.0;
    for (int64_t i = 0; i < n; i += BLOCK) sum += sum_of(x + i, n - i < BLOCK ? n - i : BLOCK);
    return static_cast<float>(sum);
}

template <typename T>
NATIVE_INLINE void forward_row(const Arguments& a, int64_t r, float* wide, float* square) {
    const int64_t n = a.width;
    const T* x = static_cast<const T*>(a.x) + r * n;
    T* out = static_cast<T*>(a.out) + r * n;
    const float *weight = a.weight, *bias = a.bias;  // copies avoid a read from the struct per number
#pragma omp simd
    for (int64_t i = 0; i < n; ++i) wide[i] = to_float(x[i]);
    const float mean = total(wide, n) / static_cast<float>(n);
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
    a.facts[2 * r] = mean;
    a.facts[2 * r + 1] = inverse;
}

// dx = inverse (g - mean(g) - y mean(g y)), where y is the normalised row and g the gradient times the weight.
template <typename T>
NATIVE_INLINE void backward_row(const Arguments& a, int64_t r, float* normal, float* slope, float* sums) {
    const int64_t n = a.width;
    const T* x = static_cast<const T*>(a.x) + r * n;
    const T* above = static_cast<const T*>(a.above) + r * n;
    T* out = static_cast<T*>(a.out) + r * n;
    const float mean = a.facts[2 * r], inverse = a.facts[2 * r + 1];
    const float* weight = a.weight;
    float* bias_sums = sums + n;
    double along = 0.0, level = 0.0;
    for (int64_t start = 0; start < n; start += BLOCK) {
        const int64_t end = n - start < BLOCK ? n : start + BLOCK;
        float product[BLOCK];
#pragma omp simd
        for (int64_t i = start; i < end; ++i) {
            const float up = to_float(above[i]);
            normal[i] = (to_float(x[i]) - mean) * inverse;
            slope[i] = up * weight[i];
            product[i - start] = slope[i] * normal[i];
            sums[i] += up * normal[i];
            bias_sums[i] += up;
        }
        along += sum_of(product, end - start);
        level += sum_of(slope + start, end - start);
    }
    const float one = static_cast<float>(level / static_cast<double>(n));
    const float two = static_cast<float>(along / static_cast<double>(n));
#pragma omp simd
    for (int64_t i = 0; i < n; ++i) store(&out[i], inverse * (slope[i] - one - normal[i] * two));
}

template <typename T, bool BACK>
struct Piece {
    NATIVE_INLINE void run(const Arguments& a, int64_t piece, float* scratch) {
        const int64_t end = (piece + 1) * a.piece < a.rows ? (piece + 1) * a.piece : a.rows;
        float* sums = BACK ? a.sums + piece * 2 * a.width : nullptr;
        for (int64_t r = piece * a.piece; r < end; ++r) {
            if (BACK) backward_row<T>(a, r, scratch, scratch + a.width, sums);
            else forward_row<T>(a, r, scratch, scratch + a.width);
        }
    }
};

template <typename T>
void layer_norm(const Arguments& a, bool back) {
    const auto one = back ? for_level<Piece<T, true>, const Arguments&, int64_t, float*>(a.level)
                          : for_level<Piece<T, false>, const Arguments&, int64_t, float*>(a.level);
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

NATIVE_EXPORT void native_layer_norm_bf16(const Arguments* a, int back) { layer_norm<uint16_t>(*a, back != 0); }

NATIVE_EXPORT const char* native_source_layer_norm() { return native_text_of_layer_norm; }
