// Rotary positions of queries and keys in one pass: each pair of the first numbers of a head turns by an angle of its
// position, and the other numbers are copied. Backward turns the gradients the other way.
#ifndef LANES_LEVEL
#include "../compiled/native.h"

NATIVE_TEXT(native_text_of_rotary)

// A tensor (batch, heads, rows, dim) whose last dimension is dense; strides in numbers.
struct Span {
    void* at;
    int64_t batch, head, row;
};

struct Arguments {
    Span q, k, q_out, k_out;
    const float *cosines, *sines;   // (batch or 1, rows, half)
    int64_t batch, heads, groups, rows, dim, half;  // `half`: pairs that turn; `groups`: heads of the keys
    int64_t angles_batch;           // numbers from one sample's angles to the next's: 0 if all have the same
    int interleaved, back;          // pairs are neighbours, or (i, i + half); `back`: turn the other way
    int threads, level;
};

// Rows that are processed together: a head's rows, or a row's heads, are next to each other in memory.
constexpr int64_t BLOCK = 16;

#define LANES_FILE "../cpu/rotary.cpp"
#include "../compiled/levels.h"

namespace {

template <typename T>
void rotary(const Arguments& a) {
    const auto one = BEST_OF(a.level, block<T>);
    const int64_t blocks = (a.rows + BLOCK - 1) / BLOCK;
#pragma omp parallel for schedule(static) num_threads(a.threads) if (a.batch * a.rows * (a.heads + a.groups) * a.dim > 16384)
    for (int64_t i = 0; i < a.batch * blocks; ++i) one(a, i / blocks, i % blocks * BLOCK);
}

}  // namespace

NATIVE_EXPORT void native_rotary_f32(const Arguments* a) { rotary<float>(*a); }
NATIVE_EXPORT void native_rotary_bf16(const Arguments* a) { rotary<uint16_t>(*a); }

NATIVE_EXPORT const char* native_source_rotary() { return native_text_of_rotary; }

#else  // for each instruction set

template <typename T>
struct Turn {
    const T* x;
    T* out;
    const float *c, *s;
    float sign;
    int64_t half;
    LANES_MEMBER void operator()(int64_t i, int64_t count) const {
        const Lanes first = load(x + i, count), second = load(x + i + half, count);
        const Lanes cosine = load(c + i, count), sine = load(s + i, count) * sign;
        save(out + i, first * cosine - second * sine, count);
        save(out + i + half, second * cosine + first * sine, count);
    }
};

template <typename T>
LANES_INLINE void turn_neighbours(const T* x, T* out, const float* c, const float* s, float sign, int64_t half) {
#pragma omp simd
    for (int64_t i = 0; i < half; ++i) {
        const float first = to_float(x[2 * i]), second = to_float(x[2 * i + 1]), sine = sign * s[i];
        store(&out[2 * i], first * c[i] - second * sine);
        store(&out[2 * i + 1], second * c[i] + first * sine);
    }
}

template <typename T>
LANES_INLINE void turn_head(const Arguments& a, const T* x, T* out, int64_t b, int64_t r) {
    const float sign = a.back ? -1.0f : 1.0f;
    const float *c = a.cosines + b * a.angles_batch + r * a.half, *s = a.sines + b * a.angles_batch + r * a.half;
    if (a.interleaved) turn_neighbours(x, out, c, s, sign, a.half);
    else for_row(Turn<T>{x, out, c, s, sign, a.half}, a.half);
    for (int64_t i = 2 * a.half; i < a.dim; ++i) out[i] = x[i];
}

template <typename T>
LANES_INLINE void heads(const Arguments& a, const Span& from, const Span& to, int64_t count, int64_t b, int64_t first) {
    const int64_t end = first + BLOCK < a.rows ? first + BLOCK : a.rows;
    const T* x = static_cast<const T*>(from.at) + b * from.batch;
    T* out = static_cast<T*>(to.at) + b * to.batch;
    if (from.head < from.row) {
        for (int64_t r = first; r < end; ++r)
            for (int64_t h = 0; h < count; ++h)
                turn_head(a, x + h * from.head + r * from.row, out + h * to.head + r * to.row, b, r);
        return;
    }
    for (int64_t h = 0; h < count; ++h)
        for (int64_t r = first; r < end; ++r)
            turn_head(a, x + h * from.head + r * from.row, out + h * to.head + r * to.row, b, r);
}

template <typename T>
LANES_TARGET void block(const Arguments& a, int64_t b, int64_t first) {
    heads<T>(a, a.q, a.q_out, a.heads, b, first);
    heads<T>(a, a.k, a.k_out, a.groups, b, first);
}

#endif
