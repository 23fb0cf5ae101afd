// The sum of the squares of several tensors, for the norm of a gradient: each is read once, in fp32 or bf16. Pieces
// are summed separately and then added in their order, so that the result is the same for any number of threads.
#ifndef LANES_LEVEL
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
}

#define LANES_FILE "../cpu/square_sum.cpp"
#include "../compiled/levels.h"

NATIVE_EXPORT int64_t native_square_sum_piece() { return PIECE; }

NATIVE_EXPORT void native_square_sum(const Tensor* tensors, int64_t count, int threads, int level) {
    const auto of_f32 = BEST_OF(level, piece_sum<float>), of_bf16 = BEST_OF(level, piece_sum<uint16_t>);
#pragma omp parallel num_threads(threads)
    for (int64_t i = 0; i < count; ++i) {
        const Tensor& t = tensors[i];
#pragma omp for schedule(static) nowait
        for (int64_t start = 0; start < t.size; start += PIECE)
            t.sums[start / PIECE] = (t.is_bf16 ? of_bf16 : of_f32)(t, start);
    }
}

NATIVE_EXPORT const char* native_source_square_sum() { return native_text_of_square_sum; }

#else  // for each instruction set

constexpr int64_t AHEAD = 4096;  // bytes

template <typename T>
struct Squares {
    const T* x;
    LANES_MEMBER Lanes operator()(int64_t i, int64_t count) const {
        fetch(reinterpret_cast<const char*>(x + i) + AHEAD);
        const Lanes v = load(x + i, count);
        return v * v;
    }
};

template <typename T>
LANES_TARGET double piece_sum(const Tensor& t, int64_t start) {
    return row_sum(Squares<T>{static_cast<const T*>(t.at) + start}, t.size - start < PIECE ? t.size - start : PIECE);
}

#endif
