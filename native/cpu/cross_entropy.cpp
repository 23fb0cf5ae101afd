// Cross-entropy over a vocabulary, forward and backward. A row of logits is read once for its sum of exp, a block at a
// time with the largest logit so far, and again for the gradient, which overwrites it. Sums are fp32 within a block and
// fp64 over a row.
#ifndef LANES_LEVEL
#include "../compiled/native.h"

#include <cmath>

NATIVE_TEXT(native_text_of_cross_entropy)

namespace {

struct Row {
    int64_t vocabulary;
    int64_t target;
    float scale;  // of the gradient: 1 / number of targets that are not ignored
    bool gradient;
};

// The largest number of a row, and the sum of exp(number - largest).
struct Sum {
    float largest;
    double sum;
};

// A rank's columns of the logits, for a vocabulary that ranks divide.
struct Columns {
    void* logits;
    const int64_t* targets;  // the column of each token's target; -1: another rank's; -2: the token is not counted
    float* numbers;          // (3, tokens): the largest logit, the sum of exp(logit - largest), the weighted sum of logits
    const float* factors;    // (3, tokens), or null: what the gradient is computed from
    int64_t tokens, vocabulary, columns, row;  // columns from `vocabulary` on are padding; `row`: from one to the next
    float of_target, of_all;  // weights of the target's logit and of every logit
    int threads, level, bf16;

    void* logits_of(int64_t t) const {
        return static_cast<char*>(logits) + t * row * (bf16 ? 2 : 4);
    }
};

// Return the loss. Subtract first: added to a logit of 1e38 the logarithm would be lost.
NATIVE_INLINE float loss_of(const Sum& all, float at_target) {
    return static_cast<float>(std::log(all.sum) + (static_cast<double>(all.largest) - at_target));
}

}  // namespace

#define LANES_FILE "../cpu/cross_entropy.cpp"
#include "../compiled/levels.h"

namespace {

struct Arguments {
    const int64_t* targets;  // each is within the vocabulary, or ignored
    float* losses;           // (tokens): 0 where the target is ignored
    int64_t tokens, vocabulary, columns, counted, ignore_index;  // columns from `vocabulary` on are padding
    int gradient, threads, level;
};

template <typename T>
void cross_entropy(T* logits, const Arguments& a) {
    const auto row_loss = BEST_OF(a.level, row_loss<T>);
    const float scale = a.counted ? 1.0f / static_cast<float>(a.counted) : 0.0f;
    // Below 64 Ki elements, waking the other threads takes longer than they save.
#pragma omp parallel for schedule(static) num_threads(a.threads) if (a.tokens * a.vocabulary > 65536)
    for (int64_t i = 0; i < a.tokens; ++i) {
        T* row = logits + i * a.columns;
        const int64_t real = a.targets[i] == a.ignore_index ? 0 : a.vocabulary;
        a.losses[i] = real ? row_loss(row, Row{a.vocabulary, a.targets[i], scale, a.gradient != 0}) : 0.0f;
        if (a.gradient) std::memset(row + real, 0, sizeof(T) * static_cast<size_t>(a.columns - real));
    }
}

template <typename T>
void columns(const Columns& a) {
    const auto row = a.factors ? BEST_OF(a.level, column_slopes<T>) : BEST_OF(a.level, column_sums<T>);
#pragma omp parallel for schedule(static) num_threads(a.threads) if (a.tokens * a.vocabulary > 65536)
    for (int64_t t = 0; t < a.tokens; ++t) row(a, t);
}

}  // namespace

NATIVE_EXPORT void native_cross_entropy_f32(float* logits, const Arguments* a) { cross_entropy(logits, *a); }
NATIVE_EXPORT void native_cross_entropy_bf16(uint16_t* logits, const Arguments* a) { cross_entropy(logits, *a); }
// Fill the numbers, or with factors write the gradient over the logits.
NATIVE_EXPORT void native_columns_f32(const Columns* a) { columns<float>(*a); }
NATIVE_EXPORT void native_columns_bf16(const Columns* a) { columns<uint16_t>(*a); }

// Never called: the reference keeps the linker from dropping the embedded source texts.
NATIVE_EXPORT const char* native_source_cross_entropy(int part) {
    return part == 0 ? native_text_of_header : native_text_of_cross_entropy;
}

NATIVE_EXPORT int native_level() { return best_level(); }

NATIVE_EXPORT int native_openmp() {
#ifdef _OPENMP
    return 1;
#else
    return 0;
#endif
}

#else  // for each instruction set

// Lanes add 16 numbers of a block. A lane that holds the largest term, 1, loses terms below 6e-8: with 256 the measured
// error of a sum was 5e-6.
constexpr int64_t BLOCK = 64 * WIDTH;

template <typename T>
LANES_INLINE float largest_in(const T* x, int64_t n) {
    Lanes most[4];
    for (Lanes& each : most) each = all(-__builtin_inff());
    int64_t i = 0;
    for (; i + 4 * WIDTH <= n; i += 4 * WIDTH) {
        most[0] = largest(load(x + i), most[0]);
        most[1] = largest(load(x + i + WIDTH), most[1]);
        most[2] = largest(load(x + i + 2 * WIDTH), most[2]);
        most[3] = largest(load(x + i + 3 * WIDTH), most[3]);
    }
    float found = largest_of(largest(largest(most[0], most[1]), largest(most[2], most[3])));
    for (; i < n; ++i) found = to_float(x[i]) > found ? to_float(x[i]) : found;
    return found;
}

template <typename T>
struct Exp {
    const T* x;
    float largest;
    LANES_MEMBER Lanes operator()(int64_t i, int64_t count) const {
        const Lanes v = exp_lanes<float>(load(x + i, count) - largest);
        if (count >= WIDTH) return v;
        float part[WIDTH];
        save(part, v);
        return load(part, count);
    }
};

template <typename T>
struct Numbers {
    const T* x;
    LANES_MEMBER Lanes operator()(int64_t i, int64_t count) const { return load(x + i, count); }
};

template <typename T>
LANES_INLINE Sum sum_of_exp(const T* x, int64_t n) {
    Sum found{-__builtin_inff(), 0.0};
    for (int64_t start = 0; start < n; start += BLOCK) {
        const int64_t size = n - start < BLOCK ? n - start : BLOCK;
        const float most = largest_in(x + start, size);
        if (most > found.largest) {
            found.sum *= std::exp(static_cast<double>(found.largest) - most);
            found.largest = most;
        }
        // Without a larger number so far, all are -infinity or NaN.
        found.sum += row_sum(Exp<T>{x + start, found.largest > -__builtin_inff() ? found.largest : 0.0f}, size);
    }
    return found;
}

template <typename T>
struct Gradient {
    T* x;
    float largest, factor, each;
    LANES_MEMBER void operator()(int64_t i, int64_t count) const {
        save(x + i, exp_lanes<T>(load(x + i, count) - largest) * factor - each, count);
    }
};

// Replace numbers by exp(number - largest) and return them.
struct ExpInPlace {
    float* x;
    float largest;
    LANES_MEMBER Lanes operator()(int64_t i, int64_t count) const {
        save(x + i, exp_lanes<float>(load(x + i, count) - largest), count);
        return load(x + i, count);
    }
};

struct Scaled {
    float *x, factor;
    LANES_MEMBER void operator()(int64_t i, int64_t count) const { save(x + i, load(x + i, count) * factor, count); }
};

// In fp32 there is room for exp of the logits, so that it is computed once.
LANES_INLINE Sum gradient_over(float* logits, int64_t n, float scale) {
    Sum all{largest_in(logits, n), 0.0};
    for (int64_t start = 0; start < n; start += BLOCK)
        all.sum += row_sum(ExpInPlace{logits + start, all.largest}, n - start < BLOCK ? n - start : BLOCK);
    for_row(Scaled{logits, static_cast<float>(scale / all.sum)}, n);
    return all;
}

LANES_INLINE Sum gradient_over(uint16_t* logits, int64_t n, float scale) {
    const Sum all = sum_of_exp(logits, n);
    for_row(Gradient<uint16_t>{logits, all.largest, static_cast<float>(scale / all.sum), 0.0f}, n);
    return all;
}

// Return the loss of one row; if requested, overwrite the logits with the gradient.
template <typename T>
LANES_TARGET float row_loss(T* logits, const Row& row) {
    const int64_t n = row.vocabulary;
    const float at_target = to_float(logits[row.target]);
    if (!row.gradient) return loss_of(sum_of_exp(logits, n), at_target);
    const Sum all = gradient_over(logits, n, row.scale);
    const float own = exp_nonpositive(at_target - all.largest);
    store(&logits[row.target], static_cast<float>((own / all.sum - 1.0) * row.scale));
    return loss_of(all, at_target);
}

template <typename T>
LANES_TARGET void column_sums(const Columns& a, int64_t t) {
    const int64_t n = a.vocabulary, target = a.targets[t];
    const T* logits = static_cast<const T*>(a.logits_of(t));
    const Sum all = sum_of_exp(logits, n);
    double wanted = 0.0;
    if (target >= 0) wanted += static_cast<double>(a.of_target) * to_float(logits[target]);
    if (a.of_all != 0.0f) wanted += a.of_all * row_sum(Numbers<T>{logits}, n);
    a.numbers[t] = all.largest;
    a.numbers[a.tokens + t] = static_cast<float>(all.sum);
    a.numbers[2 * a.tokens + t] = static_cast<float>(wanted);
}

template <typename T>
LANES_TARGET void column_slopes(const Columns& a, int64_t t) {
    const int64_t target = a.targets[t], n = target == -2 ? 0 : a.vocabulary;
    const float top = a.factors[t], factor = a.factors[a.tokens + t], share = a.factors[2 * a.tokens + t];
    const float each = a.of_all * share;
    T* logits = static_cast<T*>(a.logits_of(t));
    const float own = target >= 0 ? exp_nonpositive(to_float(logits[target]) - top) : 0.0f;
    for_row(Gradient<T>{logits, top, factor, each}, n);
    if (target >= 0) store(&logits[target], own * factor - each - a.of_target * share);
    std::memset(logits + n, 0, sizeof(T) * static_cast<size_t>(a.columns - n));
}

#endif
