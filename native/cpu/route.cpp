// Routing of tokens to experts: chances by softmax, the top_k largest of a row, and their weights, in one pass.
#ifndef LANES_LEVEL
#include "../compiled/native.h"

NATIVE_TEXT(native_text_of_route)

namespace {

struct Arguments {
    const void* logits;     // (tokens, experts); backward: unused
    float *chances, *weights;
    int64_t* chosen;        // (tokens, top_k): of equal logits the lower number comes first
    const float *of_chances, *of_weights;  // backward: gradients of the results, each may be null
    void* out;              // backward: the gradient of the logits
    float* scratch;         // (threads, experts rounded up to 16, twice)
    int64_t tokens, experts, top_k;
    int renormalize, threads, level;
};

alignas(64) constexpr uint32_t PLACES_OF_LANES[] = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};

}  // namespace

#define LANES_FILE "../cpu/route.cpp"
#include "../compiled/levels.h"

namespace {

void all_rows(const Arguments& a, void (*row)(const Arguments&, int64_t, float*)) {
    const int64_t each = 2 * ((a.experts + 15) / 16 * 16);
#pragma omp parallel for schedule(static) num_threads(a.threads) if (a.tokens * a.experts > 16384)
    for (int64_t t = 0; t < a.tokens; ++t) {
#ifdef _OPENMP
        row(a, t, a.scratch + omp_get_thread_num() * each);
#else
        row(a, t, a.scratch);
#endif
    }
}

}  // namespace

NATIVE_EXPORT void native_route_f32(const Arguments* a) { all_rows(*a, BEST_OF(a->level, choose<float>)); }
NATIVE_EXPORT void native_route_bf16(const Arguments* a) { all_rows(*a, BEST_OF(a->level, choose<uint16_t>)); }
NATIVE_EXPORT void native_route_backward_f32(const Arguments* a) { all_rows(*a, BEST_OF(a->level, slopes<float>)); }
NATIVE_EXPORT void native_route_backward_bf16(const Arguments* a) { all_rows(*a, BEST_OF(a->level, slopes<uint16_t>)); }

NATIVE_EXPORT const char* native_source_route() { return native_text_of_route; }

#else  // for each instruction set

#define PLACES load_words(PLACES_OF_LANES)

// The numbers of a row that may still be chosen; those that were are NaNs. All registers are whole.
struct Left {
    float* x;
    int64_t registers;
    LANES_MEMBER float most() const {
        Lanes found = all(-__builtin_inff());
        for (int64_t i = 0; i < registers; ++i) found = largest(load(x + i * WIDTH), found);
        return largest_of(found);
    }
    // Return the place of the first number that is `wanted`, or 0 without any: only NaNs are left then. Whole registers
    // are written, because processors wait when a register is read of which a part was just written.
    LANES_MEMBER int64_t take(float wanted) const {
        for (int64_t i = 0; i < registers; ++i) {
            const Lanes v = load(x + i * WIDTH);
            const int at = first_equal(v, wanted);
            if (at < 0) continue;
            save(x + i * WIDTH, (Lanes)((Words)v | (Words)(PLACES == static_cast<uint32_t>(at))));
            return i * WIDTH + at;
        }
        return 0;
    }
};

template <typename T>
LANES_TARGET void choose(const Arguments& a, int64_t t, float* scratch) {
    const int64_t n = a.experts, k = a.top_k;
    const T* logits = static_cast<const T*>(a.logits) + t * n;
    float *chances = a.chances + t * n, *weights = a.weights + t * k;
    int64_t* chosen = a.chosen + t * k;
    const Left left{scratch, (n + WIDTH - 1) / WIDTH};
    for (int64_t i = 0; i < n; i += WIDTH) {
        Lanes v = load(logits + i, n - i);
        if (n - i < WIDTH) v = (Lanes)((Words)v | (Words)(PLACES >= static_cast<uint32_t>(n - i)));
        save(scratch + i, v);
    }
    const float top = left.most();
    Lanes sums{};
    float* powers = scratch + left.registers * WIDTH;
    for (int64_t i = 0; i < n; i += WIDTH) {
        const Lanes v = exp_lanes<float>(load(logits + i, n - i) - top);
        const Lanes own = n - i < WIDTH ? (Lanes)((Words)v & (Words)(PLACES < static_cast<uint32_t>(n - i))) : v;
        save(powers + i, own);
        sums += own;
    }
    const float sum = sum_of(sums);
    for (int64_t i = 0; i < n; i += WIDTH) save(chances + i, load(powers + i) / sum, n - i);
    float total = 0.0f;
    for (int64_t j = 0; j < k; ++j) {
        chosen[j] = left.take(j == 0 ? top : left.most());
        weights[j] = powers[chosen[j]] / sum;
        total += weights[j];
    }
    if (a.renormalize)
        for (int64_t j = 0; j < k; ++j) weights[j] = weights[j] / total;
}

struct Products {
    const float *x, *y;
    LANES_MEMBER Lanes operator()(int64_t i, int64_t count) const { return load(x + i, count) * load(y + i, count); }
};

template <typename T>
struct Gradient {
    const float *chances, *slope;
    T* out;
    float mean;
    LANES_MEMBER void operator()(int64_t i, int64_t count) const {
        save(out + i, load(chances + i, count) * (load(slope + i, count) - mean), count);
    }
};

template <typename T>
LANES_TARGET void slopes(const Arguments& a, int64_t t, float* slope) {
    const int64_t n = a.experts, k = a.top_k;
    const float* chances = a.chances + t * n;
    const int64_t* chosen = a.chosen + t * k;
    T* out = static_cast<T*>(a.out) + t * n;
    const size_t bytes = sizeof(float) * static_cast<size_t>(n);
    if (a.of_chances) std::memcpy(slope, a.of_chances + t * n, bytes);
    else std::memset(slope, 0, bytes);
    if (a.of_weights) {
        const float* upstream = a.of_weights + t * k;
        // weights = chances / total: the mean slope is taken off.
        float total = 1.0f, mean = 0.0f;
        if (a.renormalize) {
            total = 0.0f;
            for (int64_t j = 0; j < k; ++j) {
                total += chances[chosen[j]];
                mean += upstream[j] * chances[chosen[j]];
            }
            mean /= total;
        }
        for (int64_t j = 0; j < k; ++j) slope[chosen[j]] += (upstream[j] - mean) / total;
    }
    const float mean = static_cast<float>(row_sum(Products{slope, chances}, n));
    for_row(Gradient<T>{chances, slope, out, mean}, n);
}

#undef PLACES
#endif
