// Cross-entropy over a vocabulary, forward and backward in one pass over the logits: a row is read from memory once,
// processed in cache, and overwritten with its gradient. Sums are fp32 within a block and fp64 over a row.
#include "../compiled/native.h"

#include <cmath>

NATIVE_TEXT(native_text_of_cross_entropy)

namespace {

// Number of elements summed in fp32 before they are added to the fp64 sum. A lane that holds the largest term, 1,
// loses terms below 6e-8: with 4,096 elements the measured error of the sum was 5e-6, with 256 it is 2e-7.
constexpr int64_t BLOCK = 256;

struct Row {
    int64_t vocabulary;
    int64_t target;
    float scale;     // of the gradient: 1 / number of targets that are not ignored
    float* scratch;  // a row of fp32; unused where the logits themselves are fp32
    bool gradient;
};

NATIVE_INLINE int64_t block_end(int64_t start, int64_t n) { return start + BLOCK < n ? start + BLOCK : n; }

// Return the largest logit; bf16 logits are converted to fp32 in `wide` in the same loop.
NATIVE_INLINE float widen_and_max(const uint16_t* logits, float* wide, int64_t n) {
    float largest = -INFINITY;
    for (int64_t start = 0; start < n; start += BLOCK) {
        const int64_t end = block_end(start, n);
#pragma omp simd
        for (int64_t i = start; i < end; ++i) wide[i] = to_float(logits[i]);
        const float here = max_of(wide + start, end - start);
        largest = here > largest ? here : largest;
    }
    return largest;
}
NATIVE_INLINE float widen_and_max(const float* logits, float*, int64_t n) { return max_of(logits, n); }

NATIVE_INLINE float exp_block(float* x, int64_t n, float largest) {
#pragma omp simd
    for (int64_t i = 0; i < n; ++i) x[i] = exp_nonpositive(x[i] - largest);
    return sum_of(x, n);
}

// Replace each element by exp(x - largest); return their sum.
NATIVE_INLINE double exp_and_sum(float* x, int64_t n, float largest) {
    double total = 0.0;
    for (int64_t start = 0; start < n; start += BLOCK) {
        total += exp_block(x + start, block_end(start, n) - start, largest);
    }
    return total;
}

// Return the same sum without changing the elements.
NATIVE_INLINE double sum_of_exp(const float* x, int64_t n, float largest) {
    float block[BLOCK];
    double total = 0.0;
    for (int64_t start = 0; start < n; start += BLOCK) {
        const int64_t size = block_end(start, n) - start;
        std::memcpy(block, x + start, sizeof(float) * static_cast<size_t>(size));
        total += exp_block(block, size, largest);
    }
    return total;
}

NATIVE_INLINE float* wide_row(uint16_t*, float* scratch) { return scratch; }
NATIVE_INLINE float* wide_row(float* logits, float*) { return logits; }

// Subtract first: added to a logit of 1e38 the logarithm would be lost.
NATIVE_INLINE float loss(double sum, float largest, float at_target) {
    return static_cast<float>(std::log(sum) + (static_cast<double>(largest) - at_target));
}

// Return the loss of one row; if requested, overwrite the logits with the gradient.
template <typename T>
NATIVE_INLINE float row_loss(T* logits, const Row& row) {
    const int64_t n = row.vocabulary;
    float* wide = wide_row(logits, row.scratch);
    const float at_target = to_float(logits[row.target]);
    const float largest = widen_and_max(logits, wide, n);
    if (!row.gradient) return loss(sum_of_exp(wide, n, largest), largest, at_target);
    const double sum = exp_and_sum(wide, n, largest);
    const float factor = static_cast<float>(row.scale / sum);
    const float own = wide[row.target];
#pragma omp simd
    for (int64_t i = 0; i < n; ++i) store(&logits[i], wide[i] * factor);
    store(&logits[row.target], static_cast<float>((own / sum - 1.0) * row.scale));
    return loss(sum, largest, at_target);
}

template <typename T>
using RowLoss = float (*)(T*, const Row&);

template <typename T>
float row_plain(T* logits, const Row& row) { return row_loss(logits, row); }
#ifdef NATIVE_X86
template <typename T>
NATIVE_AVX2 float row_avx2(T* logits, const Row& row) { return row_loss(logits, row); }
template <typename T>
NATIVE_AVX512 float row_avx512(T* logits, const Row& row) { return row_loss(logits, row); }
#endif

template <typename T>
RowLoss<T> row_for(int level) {
#ifdef NATIVE_X86
    if (level == 2) return row_avx512<T>;
    if (level == 1) return row_avx2<T>;
#endif
    (void)level;
    return row_plain<T>;
}

int thread_number() {
#ifdef _OPENMP
    return omp_get_thread_num();
#else
    return 0;
#endif
}

struct Arguments {
    const int64_t* targets;  // each is within the vocabulary, or ignored
    float* losses;           // (tokens): 0 where the target is ignored
    float* scratch;          // (threads, vocabulary)
    int64_t tokens, vocabulary, columns, counted, ignore_index;  // columns from `vocabulary` on are padding
    int gradient, threads, level;
};

template <typename T>
void cross_entropy(T* logits, const Arguments& a) {
    const RowLoss<T> loss_of = row_for<T>(a.level);
    const float scale = a.counted ? 1.0f / static_cast<float>(a.counted) : 0.0f;
    // Below 64 Ki elements, waking the other threads takes longer than they save.
#pragma omp parallel for schedule(static) num_threads(a.threads) if (a.tokens * a.vocabulary > 65536)
    for (int64_t i = 0; i < a.tokens; ++i) {
        T* row = logits + i * a.columns;
        const int64_t real = a.targets[i] == a.ignore_index ? 0 : a.vocabulary;
        a.losses[i] = 0.0f;
        if (real) {
            float* scratch = a.scratch + thread_number() * a.vocabulary;
            a.losses[i] = loss_of(row, Row{a.vocabulary, a.targets[i], scale, scratch, a.gradient != 0});
        }
        if (a.gradient) std::memset(row + real, 0, sizeof(T) * static_cast<size_t>(a.columns - real));
    }
}

// A rank's columns of the logits, for a vocabulary that ranks divide.
struct Columns {
    void* logits;
    const int64_t* targets;  // the column of each token's target; -1: another rank's; -2: the token is not counted
    float* numbers;          // (3, tokens): the largest logit, the sum of exp(logit - largest), the weighted sum of logits
    const float* factors;    // (3, tokens), or null: what the gradient is computed from
    float* scratch;          // (threads, vocabulary), for bf16
    int64_t tokens, vocabulary, columns, row;  // columns from `vocabulary` on are padding; `row`: from one to the next
    float of_target, of_all;  // weights of the target's logit and of every logit
    int threads, level, bf16;

    void* logits_of(int64_t t) const {
        return static_cast<char*>(logits) + t * row * (bf16 ? 2 : 4);
    }
};

NATIVE_INLINE double sum_in_blocks(const float* x, int64_t n) {
    double total = 0.0;
    for (int64_t start = 0; start < n; start += BLOCK) total += sum_of(x + start, block_end(start, n) - start);
    return total;
}

template <typename T>
struct ColumnSums {
    NATIVE_INLINE void run(const Columns& a, int64_t t, float* scratch) {
        const int64_t n = a.vocabulary, target = a.targets[t];
        T* logits = static_cast<T*>(a.logits_of(t));
        float* wide = wide_row(logits, scratch);
        const float largest = widen_and_max(logits, wide, n);
        double wanted = 0.0;
        if (target >= 0) wanted += static_cast<double>(a.of_target) * wide[target];
        if (a.of_all != 0.0f) wanted += a.of_all * sum_in_blocks(wide, n);
        a.numbers[t] = largest;
        a.numbers[a.tokens + t] = static_cast<float>(sum_of_exp(wide, n, largest));
        a.numbers[2 * a.tokens + t] = static_cast<float>(wanted);
    }
};

template <typename T>
struct ColumnSlopes {
    NATIVE_INLINE void run(const Columns& a, int64_t t, float*) {
        const int64_t target = a.targets[t], n = target == -2 ? 0 : a.vocabulary;
        const float top = a.factors[t], factor = a.factors[a.tokens + t], share = a.factors[2 * a.tokens + t];
        const float each = a.of_all * share;
        T* logits = static_cast<T*>(a.logits_of(t));
        const float own = target >= 0 ? exp_nonpositive(to_float(logits[target]) - top) : 0.0f;
#pragma omp simd
        for (int64_t i = 0; i < n; ++i) store(&logits[i], exp_nonpositive(to_float(logits[i]) - top) * factor - each);
        if (target >= 0) store(&logits[target], own * factor - each - a.of_target * share);
        std::memset(logits + n, 0, sizeof(T) * static_cast<size_t>(a.columns - n));
    }
};

template <typename Work>
void all_columns(const Columns& a) {
    const auto row = for_level<Work, const Columns&, int64_t, float*>(a.level);
#pragma omp parallel for schedule(static) num_threads(a.threads) if (a.tokens * a.vocabulary > 65536)
    for (int64_t t = 0; t < a.tokens; ++t) row(a, t, a.scratch + thread_number() * a.vocabulary);
}

template <typename T>
void columns(const Columns& a) {
    if (a.factors) all_columns<ColumnSlopes<T>>(a);
    else all_columns<ColumnSums<T>>(a);
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
