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

// Rows that a thread takes at a time: choosing experts waits for one instruction after the other, so two rows overlap.
constexpr int64_t PAIR = 2;

alignas(64) constexpr uint32_t PLACES_OF_LANES[] = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};

}  // namespace

#define LANES_FILE "../cpu/route.cpp"
#include "../compiled/levels.h"

namespace {

void all_rows(const Arguments& a, void (*rows)(const Arguments&, int64_t, int64_t, float*)) {
    const int64_t each = 2 * ((a.experts + 15) / 16 * 16);
#pragma omp parallel for schedule(static) num_threads(a.threads) if (a.tokens * a.experts > 16384)
    for (int64_t t = 0; t < a.tokens; t += PAIR) {
        const int64_t end = t + PAIR < a.tokens ? t + PAIR : a.tokens;
#ifdef _OPENMP
        rows(a, t, end, a.scratch + omp_get_thread_num() * each);
#else
        rows(a, t, end, a.scratch);
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

// The logits of a row that can still be chosen; a chosen one becomes a NaN. The row is padded to whole registers.
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

#if LANES_LEVEL >= 2
// Choose the experts of ROWS rows of up to 64 logits, which stay in registers. There are no branches: which logit is the
// largest cannot be predicted.
template <typename T, int ROWS>
LANES_INLINE void choose_in_registers(const Arguments& a, int64_t t) {
    constexpr int MOST = 4;
    const Lanes low = all(-__builtin_inff()), gone = all(__builtin_nanf(""));
    Lanes v[ROWS][MOST];
#pragma GCC unroll 2
    for (int q = 0; q < ROWS; ++q)
#pragma GCC unroll 4
        for (int r = 0; r < MOST; ++r) {
            const int64_t left = a.experts - r * WIDTH;
            v[q][r] = gone;
            if (left > 0) v[q][r] = load(static_cast<const T*>(a.logits) + (t + q) * a.experts + r * WIDTH, left);
            if (left < WIDTH) v[q][r] = (Lanes)((Words)v[q][r] | (Words)((Signed)PLACES >= static_cast<int32_t>(left)));
        }
    for (int64_t j = 0; j < a.top_k; ++j)
#pragma GCC unroll 2
        for (int q = 0; q < ROWS; ++q) {
            // The largest number, in all lanes. The second operand is the result if the first one is a NaN.
            Lanes most = largest(largest(v[q][0], low), largest(v[q][1], low));
            most = largest(most, largest(largest(v[q][2], low), largest(v[q][3], low)));
            most = largest(most, _mm512_shuffle_f32x4(most, most, 0x4e));
            most = largest(most, _mm512_shuffle_f32x4(most, most, 0xb1));
            most = largest(most, _mm512_permute_ps(most, 0x4e));
            most = largest(most, _mm512_permute_ps(most, 0xb1));
            uint64_t equal = 0;
#pragma GCC unroll 4
            for (int r = 0; r < MOST; ++r)
                equal |= static_cast<uint64_t>(_mm512_cmp_ps_mask(v[q][r], most, _CMP_EQ_OQ)) << (WIDTH * r);
            // If no number is equal, only NaNs are left, and the first expert is chosen.
            const uint64_t first = equal & (~equal + 1);
            a.chosen[(t + q) * a.top_k + j] = equal ? __builtin_ctzll(equal) : 0;
#pragma GCC unroll 4
            for (int r = 0; r < MOST; ++r)
                v[q][r] = _mm512_mask_mov_ps(v[q][r], static_cast<__mmask16>(first >> (WIDTH * r)), gone);
        }
}
#endif

// Compute the softmax of a row, and with `choose` also its experts.
template <typename T>
LANES_INLINE void softmax(const Arguments& a, int64_t t, float* scratch, bool choose) {
    const int64_t n = a.experts;
    const T* logits = static_cast<const T*>(a.logits) + t * n;
    float* chances = a.chances + t * n;
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
    if (!choose) return;
    for (int64_t j = 0; j < a.top_k; ++j) a.chosen[t * a.top_k + j] = left.take(j == 0 ? top : left.most());
}

// Write the weights of the chosen experts of a row.
LANES_INLINE void weigh(const Arguments& a, int64_t t) {
    const float* chances = a.chances + t * a.experts;
    const int64_t* chosen = a.chosen + t * a.top_k;
    float *weights = a.weights + t * a.top_k, total = 0.0f;
    for (int64_t j = 0; j < a.top_k; ++j) {
        weights[j] = chances[chosen[j]];
        total += weights[j];
    }
    if (!a.renormalize) return;
    for (int64_t j = 0; j < a.top_k; ++j) weights[j] = weights[j] / total;
}

template <typename T>
LANES_TARGET void choose(const Arguments& a, int64_t first, int64_t end, float* scratch) {
    const bool few = LANES_LEVEL >= 2 && a.experts <= 64;
    for (int64_t t = first; t < end; ++t) softmax<T>(a, t, scratch, !few);
#if LANES_LEVEL >= 2
    if (few) end - first == PAIR ? choose_in_registers<T, 2>(a, first) : choose_in_registers<T, 1>(a, first);
#endif
    for (int64_t t = first; t < end; ++t) weigh(a, t);
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
LANES_INLINE void row_slopes(const Arguments& a, int64_t t, float* slope) {
    const int64_t n = a.experts, k = a.top_k;
    const float* chances = a.chances + t * n;
    const int64_t* chosen = a.chosen + t * k;
    T* out = static_cast<T*>(a.out) + t * n;
    const size_t bytes = sizeof(float) * static_cast<size_t>(n);
    if (a.of_chances) std::memcpy(slope, a.of_chances + t * n, bytes);
    else std::memset(slope, 0, bytes);
    if (a.of_weights) {
        const float* upstream = a.of_weights + t * k;
        // weights = chances / total, so the weighted mean of the gradients is subtracted from each.
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

template <typename T>
LANES_TARGET void slopes(const Arguments& a, int64_t first, int64_t end, float* slope) {
    for (int64_t t = first; t < end; ++t) row_slopes<T>(a, t, slope);
}

#undef PLACES
#endif
