// Layer norm and RMS norm, alone or of the sum of two tensors, forward and backward: a row is read once and processed
// in fp32. The weight's gradients are sums over rows. They are computed per piece of rows and added in the order of
// the pieces, so that the result is the same for any number of threads.
#ifndef LANES_LEVEL
#include "../compiled/native.h"

#include <cmath>

NATIVE_TEXT(native_text_of_norm)

struct Arguments {
    const void *x, *residual;    // (rows, width); `residual` is added to `x` unless it is null
    const void *above, *of_sum;  // gradients of the norm, and of the sum (or null)
    const float *weight, *bias;  // (width); bias may be null
    void *out, *added;           // (rows, width): the norm, or the gradient of x; and the sum, rounded, if there is one
    float* facts;                // (rows, 2): mean and 1 / deviation; of an RMS norm (rows, 1): 1 / root of the mean square
    float* sums;                 // (pieces, 2, width): for the gradients of the weight and the bias; null: they have none
    int64_t rows, width, piece;  // `piece`: rows per piece
    float eps;
    int threads, level;
};

enum class Pass { FORWARD, BACKWARD, BACKWARD_OF_INPUT };

#define LANES_FILE "../cpu/norm.cpp"
#include "../compiled/levels.h"

namespace {

template <typename T, bool RMS>
void norm(const Arguments& a) {
    const auto one = !a.above ? BEST_OF(a.level, piece<T, RMS, Pass::FORWARD>)
                     : a.sums ? BEST_OF(a.level, piece<T, RMS, Pass::BACKWARD>)
                              : BEST_OF(a.level, piece<T, RMS, Pass::BACKWARD_OF_INPUT>);
    const int64_t pieces = (a.rows + a.piece - 1) / a.piece;
#pragma omp parallel for schedule(static) num_threads(a.threads) if (a.rows * a.width > 16384)
    for (int64_t number = 0; number < pieces; ++number) one(a, number);
}

}  // namespace

// Compute the norm if `above` is null, else the gradients.
NATIVE_EXPORT void native_layer_norm_f32(const Arguments* a) { norm<float, false>(*a); }
NATIVE_EXPORT void native_layer_norm_bf16(const Arguments* a) { norm<uint16_t, false>(*a); }
NATIVE_EXPORT void native_rms_norm_f32(const Arguments* a) { norm<float, true>(*a); }
NATIVE_EXPORT void native_rms_norm_bf16(const Arguments* a) { norm<uint16_t, true>(*a); }

NATIVE_EXPORT const char* native_source_norm() { return native_text_of_norm; }

#else  // for each instruction set

// Return normalised numbers. For bf16 that is one instruction: `shift` is -mean * inverse, and what this loses is less than
// the precision of the numbers.
template <typename T, bool RMS>
LANES_INLINE Lanes normal_of(Lanes x, float mean, float inverse, float shift) {
    if (RMS) return x * inverse;
    return sizeof(T) == 4 ? (x - mean) * inverse : x * inverse + shift;
}

// The numbers of a row in fp32.
template <typename T>
struct Numbers {
    const T* x;
    LANES_MEMBER Lanes operator()(int64_t i, int64_t count) const { return load(x + i, count); }
};

// The squares of the differences from the mean.
template <typename T>
struct Squares {
    const T* x;
    float mean;
    LANES_MEMBER Lanes operator()(int64_t i, int64_t count) const {
        Lanes v = load(x + i, count) - mean;
        if (count < WIDTH) {
            float part[WIDTH];
            save(part, v);
            v = load(part, count);
        }
        return v * v;
    }
};

// The sum of two rows. It is rounded and written, and the norm is that of the rounded numbers.
template <typename T, bool RMS>
struct Sums {
    const T *x, *residual;
    T* added;
    LANES_MEMBER Lanes operator()(int64_t i, int64_t count) const {
        save(added + i, load(x + i, count) + load(residual + i, count), count);
        const Lanes v = load(added + i, count);
        return RMS ? v * v : v;
    }
};

// Add the sum of a row's numbers less `shift`, and the sum of their squares, in one pass. `number(i, count)` returns `count`
// numbers from place i on.
template <typename Number>
LANES_INLINE void add_moments(const Number& number, int64_t n, float shift, double* sum, double* squares) {
    constexpr int64_t BLOCK = 64 * WIDTH;
    for (int64_t start = 0; start < n; start += BLOCK) {
        const int64_t end = n - start < BLOCK ? n : start + BLOCK;
        Lanes sums[2] = {}, products[2] = {};
        int64_t i = start;
        for (; i + 2 * WIDTH <= end; i += 2 * WIDTH) {
            const Lanes a = number(i, WIDTH) - shift, b = number(i + WIDTH, WIDTH) - shift;
            sums[0] += a;
            sums[1] += b;
            products[0] += a * a;
            products[1] += b * b;
        }
        for (; i < end; i += WIDTH) {
            Lanes v = number(i, end - i) - shift;
            if (end - i < WIDTH) {
                float part[WIDTH];
                save(part, v);
                v = load(part, end - i);
            }
            sums[0] += v;
            products[0] += v * v;
        }
        *sum += sum_of(sums[0] + sums[1]);
        *squares += sum_of(products[0] + products[1]);
    }
}

template <typename T, bool RMS>
struct Normal {
    const T* x;
    const float *weight, *bias;
    T* out;
    float mean, inverse;
    bool past;
    LANES_MEMBER void operator()(int64_t i, int64_t count) const {
        const Lanes v = normal_of<T, RMS>(load(x + i, count), mean, inverse, -mean * inverse) * load(weight + i, count);
        save(out + i, bias ? v + load(bias + i, count) : v, count, past);
    }
};

template <typename T, bool RMS>
LANES_INLINE void forward_row(const Arguments& a, int64_t r, bool past) {
    const int64_t n = a.width;
    const T* x = static_cast<const T*>(a.x) + r * n;
    const T* residual = a.residual ? static_cast<const T*>(a.residual) + r * n : nullptr;
    T* added = residual ? static_cast<T*>(a.added) + r * n : nullptr;
    const float count = static_cast<float>(n);
    double sum = 0.0, squares = 0.0;
    float mean = 0.0f;
    if (sizeof(T) == 2 && !RMS && n >= WIDTH) {
        // One pass is exact enough if the numbers are near 0, so subtract the mean of the first ones.
        const float shift = sum_of(residual ? load(x) + load(residual) : load(x)) / WIDTH;
        if (residual) add_moments(Sums<T, false>{x, residual, added}, n, shift, &sum, &squares);
        else add_moments(Numbers<T>{x}, n, shift, &sum, &squares);
        squares -= sum * sum / count;
        squares = squares < 0.0 ? 0.0 : squares;
        mean = shift + static_cast<float>(sum) / count;
        x = residual ? added : x;
    } else {
        if (residual) {
            (RMS ? squares : sum) = row_sum(Sums<T, RMS>{x, residual, added}, n);
            x = added;
        } else if (!RMS) {
            sum = row_sum(Numbers<T>{x}, n);
        }
        mean = RMS ? 0.0f : static_cast<float>(sum) / count;
        if (!RMS || !residual) squares = row_sum(Squares<T>{x, mean}, n);
    }
    const float inverse = 1.0f / std::sqrt(static_cast<float>(squares) / count + a.eps);
    for_row(Normal<T, RMS>{x, a.weight, a.bias, static_cast<T*>(a.out) + r * n, mean, inverse, past}, n);
    if (RMS) {
        a.facts[r] = inverse;
    } else {
        a.facts[2 * r] = mean;
        a.facts[2 * r + 1] = inverse;
    }
}

// Rows of a backward pass. dx = inverse (g - mean(g) - y mean(g y)), where y is the normalised row and g the gradient
// times the weight; an RMS norm has no mean(g). The gradient of the sum is added.
template <typename T, bool RMS, int ROWS, bool LEARNED>
struct Rows {
    const T *x, *above, *of_sum;
    const float* weight;
    T* out;
    float *weight_sums, *bias_sums;
    int64_t n;
    float mean[ROWS], inverse[ROWS];
    bool past;

    // Add to the gradients of the weight and the bias, and to the sums of g and g y.
    LANES_MEMBER void add(int64_t i, int64_t count, Lanes* slopes, Lanes* products) const {
        const Lanes w = load(weight + i, count);
        Lanes of_weight{}, of_bias{};
        if (LEARNED) of_weight = load(weight_sums + i, count);
        if (LEARNED && !RMS) of_bias = load(bias_sums + i, count);
#pragma GCC unroll 4
        for (int r = 0; r < ROWS; ++r) {
            const Lanes up = load(above + r * n + i, count);
            const Lanes own = load(x + r * n + i, count), slope = up * w;
            const Lanes normal = normal_of<T, RMS>(own, mean[r], inverse[r], -mean[r] * inverse[r]);
            if (!RMS) slopes[r] += slope;
            products[r] += slope * normal;
            if (LEARNED) of_weight += up * normal;
            if (LEARNED && !RMS) of_bias += up;
        }
        if (LEARNED) save(weight_sums + i, of_weight, count);
        if (LEARNED && !RMS) save(bias_sums + i, of_bias, count);
    }

    LANES_MEMBER void run() const {
        double slope[ROWS] = {}, product[ROWS] = {};
        constexpr int64_t BLOCK = 64 * WIDTH;
        for (int64_t start = 0; start < n; start += BLOCK) {
            const int64_t end = n - start < BLOCK ? n : start + BLOCK;
            Lanes slopes[ROWS] = {}, products[ROWS] = {};
            int64_t i = start;
            for (; i + WIDTH <= end; i += WIDTH) add(i, WIDTH, slopes, products);
            if (i < end) add(i, end - i, slopes, products);
#pragma GCC unroll 4
            for (int r = 0; r < ROWS; ++r) {
                if (!RMS) slope[r] += sum_of(slopes[r]);
                product[r] += sum_of(products[r]);
            }
        }
        const float count = static_cast<float>(n);
        for (int r = 0; r < ROWS; ++r) {
            const int64_t at = r * n;
            const float one = static_cast<float>(slope[r]) / count, two = static_cast<float>(product[r]) / count;
            const T* added = of_sum ? of_sum + at : nullptr;
            for_row(Slope{x + at, above + at, added, weight, out + at, n, mean[r], inverse[r], one, two, past}, n);
        }
    }

    struct Slope {
        const T *x, *above, *of_sum;
        const float* weight;
        T* out;
        int64_t n;
        float mean, inverse, one, two;
        bool past;
        LANES_MEMBER void operator()(int64_t i, int64_t count) const {
            if (i % (64 / sizeof(T)) == 0) {
                // The next rows, while these are written. A processor's own prefetcher stops at the end of a page.
                __builtin_prefetch(x + ROWS * n + i, 0, 2);
                __builtin_prefetch(above + ROWS * n + i, 0, 2);
            }
            const Lanes own = load(x + i, count), slope = load(above + i, count) * load(weight + i, count);
            Lanes v;
            if (sizeof(T) == 4) {
                v = slope - normal_of<T, RMS>(own, mean, inverse, 0.0f) * two;
                v = inverse * (RMS ? v : v - one);
            } else {
                // The same with two instructions less.
                const float factor = inverse * inverse * two, rest = RMS ? 0.0f : factor * mean - inverse * one;
                v = slope * inverse + (rest - own * factor);
            }
            save(out + i, of_sum ? v + load(of_sum + i, count) : v, count, past);
        }
    };
};

template <typename T, bool RMS, int ROWS, bool LEARNED>
LANES_INLINE void backward_rows(const Arguments& a, int64_t r, float* sums, bool past) {
    const int64_t n = a.width, at = r * n;
    Rows<T, RMS, ROWS, LEARNED> rows{};
    rows.x = static_cast<const T*>(a.x) + at;
    rows.above = static_cast<const T*>(a.above) + at;
    rows.of_sum = a.of_sum ? static_cast<const T*>(a.of_sum) + at : nullptr;
    rows.weight = a.weight;
    rows.out = static_cast<T*>(a.out) + at;
    rows.weight_sums = sums;
    rows.bias_sums = LEARNED ? sums + n : nullptr;
    rows.n = n;
    rows.past = past;
    for (int i = 0; i < ROWS; ++i) {
        rows.mean[i] = RMS ? 0.0f : a.facts[2 * (r + i)];
        rows.inverse[i] = RMS ? a.facts[r + i] : a.facts[2 * (r + i) + 1];
    }
    rows.run();
}

// TOGETHER rows are processed at a time, for which the sums are read and written once. Registers have room for no more.
template <typename T, bool RMS, Pass PASS>
LANES_TARGET void piece(const Arguments& a, int64_t number) {
    constexpr int TOGETHER = LANES_LEVEL >= 2 ? 4 : 2;
    const int64_t end = (number + 1) * a.piece < a.rows ? (number + 1) * a.piece : a.rows;
    const bool past = write_past(a.out, a.rows, static_cast<int64_t>(sizeof(T)) * a.width);
    int64_t r = number * a.piece;
    if (PASS == Pass::FORWARD) {
        for (; r < end; ++r) forward_row<T, RMS>(a, r, past);
        return finish();
    }
    constexpr bool LEARNED = PASS == Pass::BACKWARD;
    float* sums = LEARNED ? a.sums + number * 2 * a.width : nullptr;
    for (; r + TOGETHER <= end; r += TOGETHER) backward_rows<T, RMS, TOGETHER, LEARNED>(a, r, sums, past);
    for (; r < end; ++r) backward_rows<T, RMS, 1, LEARNED>(a, r, sums, past);
    finish();
}

#endif
