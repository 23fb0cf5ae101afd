// Cross-entropy over a vocabulary, forward and backward. For the loss alone, a row of logits is read once: the sum of exp
// is scaled again when a block has a larger logit. For the gradient, which overwrites the logits, the largest logit is
// found first; then each exp is computed once and scaled by the sum. Sums are fp32 within a block and fp64 over a row.
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
    float* scratch;          // (threads, vocabulary): for the gradient of logits in bf16
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
#ifdef _OPENMP
        float* scratch = a.scratch + omp_get_thread_num() * a.vocabulary;
#else
        float* scratch = a.scratch;
#endif
        a.losses[i] = real ? row_loss(row, Row{a.vocabulary, a.targets[i], scale, a.gradient != 0}, scratch) : 0.0f;
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

// Add exp(x - largest) of a row's numbers, 64 registers in fp32 at most; write them to `out` unless it is null.
template <typename T, bool WRITE>
struct Exp {
    const T* x;
    float* out;
    float largest;
    Lanes* sum;  // REGISTERS sums
    template <int N>
    LANES_MEMBER void run(int64_t i, int64_t count) const {
        Lanes v[N];
        EACH_REGISTER v[k] = load(x + i + k * WIDTH, count) - largest;
        exp_of<float>(v);
        if (WRITE) EACH_REGISTER save(out + i + k * WIDTH, v[k], count);
        if (count < WIDTH) {
            float part[WIDTH];
            save(part, v[0]);
            v[0] = load(part, count);
        }
        EACH_REGISTER sum[k] += v[k];
    }
};

template <typename T, bool WRITE>
LANES_INLINE double exp_sum(const T* x, float* out, float largest, int64_t n) {
    Lanes sums[REGISTERS] = {}, whole{};
    for_row_together(Exp<T, WRITE>{x, out, largest, sums}, n);
    for (const Lanes& each : sums) whole += each;
    return sum_of(whole);
}

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
        const float shift = found.largest > -__builtin_inff() ? found.largest : 0.0f;
        found.sum += exp_sum<T, false>(x + start, nullptr, shift, size);
    }
    return found;
}

template <typename T>
struct Gradient {
    T* x;
    float largest, factor, each;
    template <int N>
    LANES_MEMBER void run(int64_t i, int64_t count) const {
        Lanes v[N];
        EACH_REGISTER v[k] = load(x + i + k * WIDTH, count) - largest;
        exp_of<T>(v);
        EACH_REGISTER save(x + i + k * WIDTH, v[k] * factor - each, count);
    }
};

template <typename T>
struct Scaled {
    const float* x;
    T* out;
    float factor;
    LANES_MEMBER void operator()(int64_t i, int64_t count) const { save(out + i, load(x + i, count) * factor, count); }
};

// Replace a row of logits by the gradient. Each exp is computed once: in fp32 it is stored over its logit, in bf16 in
// `scratch`, which stays in the cache.
template <typename T>
LANES_INLINE Sum gradient_over(T* logits, float* scratch, int64_t n, float scale) {
    float* powers = sizeof(T) == 4 ? reinterpret_cast<float*>(logits) : scratch;
    Sum all{largest_in(logits, n), 0.0};
    // Without a number, all are -infinity or NaN.
    const float shift = all.largest > -__builtin_inff() ? all.largest : 0.0f;
    for (int64_t start = 0; start < n; start += BLOCK)
        all.sum += exp_sum<T, true>(logits + start, powers + start, shift, n - start < BLOCK ? n - start : BLOCK);
    for_row(Scaled<T>{powers, logits, static_cast<float>(scale / all.sum)}, n);
    return all;
}

// Return the loss of one row; if requested, overwrite the logits with the gradient.
template <typename T>
LANES_TARGET float row_loss(T* logits, const Row& row, float* scratch) {
    const int64_t n = row.vocabulary;
    const float at_target = to_float(logits[row.target]);
    if (!row.gradient) return loss_of(sum_of_exp(logits, n), at_target);
    const Sum all = gradient_over(logits, scratch, n, row.scale);
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
    for_row_together(Gradient<T>{logits, top, factor, each}, n);
    if (target >= 0) store(&logits[target], own * factor - each - a.of_target * share);
    std::memset(logits + n, 0, sizeof(T) * static_cast<size_t>(a.columns - n));
}

#endif
