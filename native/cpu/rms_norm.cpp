// RMS norm, forward and backward: a row is read once and processed in fp32. The weight's gradient is a sum over rows.
// It is computed per piece of rows and added in the order of the pieces, so that the result is the same for any number
// of threads.
#include "../compiled/native.h"

#include <cmath>

NATIVE_TEXT(native_text_of_rms_norm)

struct Arguments {
    const void *x, *above;       // (rows, width)
    const float* weight;         // (width)
    void* out;                   // (rows, width): the value, or the gradient of x
    float* inverse;              // (rows): 1 / root of the mean square
    float* sums;                 // (pieces, width): for the gradient of the weight
    float* scratch;              // (threads, 2, width)
    int64_t rows, width, piece;  // `piece`: rows per piece
    float eps;
    int threads, level;
};

namespace {

// Block size of sums over 16 lanes: a lane adds few enough fp32 numbers to keep its last bits.
constexpr int64_t BLOCK = 512;

template <typename T>
NATIVE_INLINE void forward_row(const Arguments& a, int64_t r, float* wide) {
    const int64_t n = a.width;
    const T* x = static_cast<const T*>(a.x) + r * n;
    T* out = static_cast<T*>(a.out) + r * n;
    const float* weight = a.weight;  // a copy avoids a read from the struct per number
    double sum = 0.0;
    for (int64_t start = 0; start < n; start += BLOCK) {
        const int64_t end = n - start < BLOCK ? n : start + BLOCK;
        float square[BLOCK];
#pragma omp simd
        for (int64_t i = start; i < end; ++i) {
            wide[i] = to_float(x[i]);
            square[i - start] = wide[i] * wide[i];
        }
        sum += sum_of(square, end - start);
    }
    const float inverse = 1.0f / std::sqrt(static_cast<float>(sum / static_cast<double>(n)) + a.eps);
#pragma omp simd
    for (int64_t i = 0; i < n; ++i) store(&out[i], wide[i] * inverse * weight[i]);
    a.inverse[r] = inverse;
}

// dx = inverse (g - y mean(g y)), where y is the normalised row and g the gradient times the weight.
template <typename T>
NATIVE_INLINE void backward_row(const Arguments& a, int64_t r, float* normal, float* slope, float* sums) {
    const int64_t n = a.width;
    const T* x = static_cast<const T*>(a.x) + r * n;
    const T* above = static_cast<const T*>(a.above) + r * n;
    T* out = static_cast<T*>(a.out) + r * n;
    const float inverse = a.inverse[r];
    const float* weight = a.weight;
    double along = 0.0;
    for (int64_t start = 0; start < n; start += BLOCK) {
        const int64_t end = n - start < BLOCK ? n : start + BLOCK;
        float product[BLOCK];
#pragma omp simd
        for (int64_t i = start; i < end; ++i) {
            const float up = to_float(above[i]);
            normal[i] = to_float(x[i]) * inverse;
            slope[i] = up * weight[i];
            product[i - start] = slope[i] * normal[i];
            sums[i] += up * normal[i];
        }
        along += sum_of(product, end - start);
    }
    const float mean = static_cast<float>(along / static_cast<double>(n));
#pragma omp simd
    for (int64_t i = 0; i < n; ++i) store(&out[i], inverse * (slope[i] - normal[i] * mean));
}

template <typename T, bool BACK>
struct Piece {
    NATIVE_INLINE void run(const Arguments& a, int64_t piece, float* scratch) {
        const int64_t end = (piece + 1) * a.piece < a.rows ? (piece + 1) * a.piece : a.rows;
        for (int64_t r = piece * a.piece; r < end; ++r) {
            if (BACK) backward_row<T>(a, r, scratch, scratch + a.width, a.sums + piece * a.width);
            else forward_row<T>(a, r, scratch);
        }
    }
};

template <typename T>
void rms_norm(const Arguments& a, bool back) {
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

NATIVE_EXPORT void native_rms_norm_f32(const Arguments* a, int back) { rms_norm<float>(*a, back != 0); }
NATIVE_EXPORT void native_rms_norm_bf16(const Arguments* a, int back) { rms_norm<uint16_t>(*a, back != 0); }

NATIVE_EXPORT const char* native_source_rms_norm() { return native_text_of_rms_norm; }
