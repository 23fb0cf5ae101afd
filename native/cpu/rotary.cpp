// Rotary positions of queries and keys in one pass: each pair of the first numbers of a head turns by an angle of its
// position, and the other numbers are copied. Backward turns the gradients the other way.
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

namespace {

template <typename T>
NATIVE_INLINE void turn(const T* x, T* out, const float* c, const float* s, float sign, int64_t half) {
#pragma omp simd
    for (int64_t i = 0; i < half; ++i) {
        const float first = to_float(x[i]), second = to_float(x[i + half]), sine = sign * s[i];
        store(&out[i], first * c[i] - second * sine);
        store(&out[i + half], second * c[i] + first * sine);
    }
}

template <typename T>
NATIVE_INLINE void turn_neighbours(const T* x, T* out, const float* c, const float* s, float sign, int64_t half) {
#pragma omp simd
    for (int64_t i = 0; i < half; ++i) {
        const float first = to_float(x[2 * i]), second = to_float(x[2 * i + 1]), sine = sign * s[i];
        store(&out[2 * i], first * c[i] - second * sine);
        store(&out[2 * i + 1], second * c[i] + first * sine);
    }
}

template <typename T>
struct Row {
    NATIVE_INLINE void run(const Arguments& a, int64_t b, int64_t r) {
        const float* c = a.cosines + b * a.angles_batch + r * a.half;
        const float* s = a.sines + b * a.angles_batch + r * a.half;
        heads(a, a.q, a.q_out, a.heads, b, r, c, s);
        heads(a, a.k, a.k_out, a.groups, b, r, c, s);
    }

    NATIVE_INLINE void heads(const Arguments& a, const Span& from, const Span& to, int64_t count, int64_t b, int64_t r,
                             const float* c, const float* s) {
        const float sign = a.back ? -1.0f : 1.0f;
        for (int64_t h = 0; h < count; ++h) {
            const T* x = static_cast<const T*>(from.at) + b * from.batch + h * from.head + r * from.row;
            T* out = static_cast<T*>(to.at) + b * to.batch + h * to.head + r * to.row;
            if (a.interleaved) turn_neighbours(x, out, c, s, sign, a.half);
            else turn(x, out, c, s, sign, a.half);
            for (int64_t i = 2 * a.half; i < a.dim; ++i) out[i] = x[i];
        }
    }
};

template <typename T>
void rotary(const Arguments& a) {
    const auto one = for_level<Row<T>, const Arguments&, int64_t, int64_t>(a.level);
    const int64_t rows = a.batch * a.rows;
#pragma omp parallel for schedule(static) num_threads(a.threads) if (rows * (a.heads + a.groups) * a.dim > 16384)
    for (int64_t i = 0; i < rows; ++i) one(a, i / a.rows, i % a.rows);
}

}  // namespace

NATIVE_EXPORT void native_rotary_f32(const Arguments* a) { rotary<float>(*a); }
NATIVE_EXPORT void native_rotary_bf16(const Arguments* a) { rotary<uint16_t>(*a); }

NATIVE_EXPORT const char* native_source_rotary() { return native_text_of_rotary; }
