// The sum of the squares of several tensors, for the norm of a gradient: each is read once, in fp32 or bf16. Pieces
// are summed separately and then added in their order, so that the result is the same for any number of threads.
#include "../compiled/native.h"

NATIVE_TEXT(native_text_of_square_sum)

struct Tensor {
    const void* at;
    int64_t size;
    double* sums;  // one per piece
    int is_bf16;
};

namespace {

constexpr int64_t PIECE = 1 << 15;
constexpr int64_t BLOCK = 512;  // squares summed in fp32, 32 per lane

template <typename T>
NATIVE_INLINE double piece_sum(const T* x, int64_t n) {
    float square[BLOCK];
    double total = 0.0;
    for (int64_t start = 0; start < n; start += BLOCK) {
        const int64_t size = n - start < BLOCK ? n - start : BLOCK;
#pragma omp simd
        for (int64_t i = 0; i < size; ++i) square[i] = to_float(x[start + i]) * to_float(x[start + i]);
        total += sum_of(square, size);
    }
    return total;
}

NATIVE_INLINE double any_sum(const Tensor& t, int64_t start) {
    const int64_t n = t.size - start < PIECE ? t.size - start : PIECE;
    if (t.is_bf16) return piece_sum(static_cast<const uint16_t*>(t.at) + start, n);
    return piece_sum(static_cast<const float*>(t.at) + start, n);
}

using Sum = double (*)(const Tensor&, int64_t);

double sum_plain(const Tensor& t, int64_t start) { return any_sum(t, start); }
#ifdef NATIVE_X86
NATIVE_AVX2 double sum_avx2(const Tensor& t, int64_t start) { return any_sum(t, start); }
NATIVE_AVX512 double sum_avx512(const Tensor& t, int64_t start) { return any_sum(t, start); }
#endif

Sum sum_for(int level) {
#ifdef NATIVE_X86
    if (level == 2) return sum_avx512;
    if (level == 1) return sum_avx2;
#endif
    (void)level;
    return sum_plain;
}

}  // namespace

NATIVE_EXPORT int64_t native_square_sum_piece() { return PIECE; }

NATIVE_EXPORT void native_square_sum(const Tensor* tensors, int64_t count, int threads, int level) {
    const Sum one = sum_for(level);
#pragma omp parallel num_threads(threads)
    for (int64_t i = 0; i < count; ++i) {
        const Tensor& t = tensors[i];
#pragma omp for schedule(static) nowait
        for (int64_t start = 0; start < t.size; start += PIECE) t.sums[start / PIECE] = one(t, start);
    }
}

NATIVE_EXPORT const char* native_source_square_sum() { return native_text_of_square_sum; }
