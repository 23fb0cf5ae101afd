// Routing of tokens to experts: chances by softmax, the top_k largest of a row, and their weights, in one pass.
#include "../compiled/native.h"

NATIVE_TEXT(native_text_of_route)

namespace {

struct Arguments {
    const void* logits;     // (tokens, experts); backward: unused
    float *chances, *weights;
    int64_t* chosen;        // (tokens, top_k): of equal logits the lower number comes first
    const float *of_chances, *of_weights;  // backward: gradients of the results, each may be null
    void* out;              // backward: the gradient of the logits
    float* scratch;         // (threads, experts)
    int64_t tokens, experts, top_k;
    int renormalize, threads, level;
};

// Return the place of the first number that is `wanted`, or 0 without any: only NaNs are left then.
NATIVE_INLINE int64_t place_of(const float* x, int64_t n, float wanted) {
    int64_t i = 0;
    for (; i + LANES <= n; i += LANES) {
        int32_t found = 0;
        for (int j = 0; j < LANES; ++j) found |= x[i + j] == wanted;
        if (found) break;
    }
    while (i < n && x[i] != wanted) ++i;
    return i < n ? i : 0;
}

// Return the sum of the products, added in the order of sum_of.
NATIVE_INLINE float dot_of(const float* x, const float* y, int64_t n) {
    float lane[LANES] = {};
    int64_t i = 0;
    for (; i + LANES <= n; i += LANES)
        for (int j = 0; j < LANES; ++j) lane[j] += x[i + j] * y[i + j];
    for (int j = 0; i + j < n; ++j) lane[j] += x[i + j] * y[i + j];
    return sum_of(lane, LANES);
}

template <typename T>
struct Row {
    NATIVE_INLINE void run(const Arguments& a, int64_t t, float* left) {
        const int64_t n = a.experts, k = a.top_k;
        const T* logits = static_cast<const T*>(a.logits) + t * n;
        float *chances = a.chances + t * n, *weights = a.weights + t * k;
        int64_t* chosen = a.chosen + t * k;
        for (int64_t i = 0; i < n; ++i) left[i] = to_float(logits[i]);
        const float top = max_of(left, n);
#pragma omp simd
        for (int64_t i = 0; i < n; ++i) chances[i] = exp_nonpositive(left[i] - top);
        const float sum = sum_of(chances, n);
#pragma omp simd
        for (int64_t i = 0; i < n; ++i) chances[i] = chances[i] / sum;
        float total = 0.0f;
        for (int64_t j = 0; j < k; ++j) {
            const float most = j == 0 ? top : max_of(left, n);
            const int64_t at = place_of(left, n, most);
            left[at] = __builtin_nanf("");
            chosen[j] = at;
            weights[j] = chances[at];
            total += weights[j];
        }
        if (a.renormalize)
            for (int64_t j = 0; j < k; ++j) weights[j] = weights[j] / total;
    }
};

template <typename T>
struct Slope {
    NATIVE_INLINE void run(const Arguments& a, int64_t t, float* slope) {
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
        const float mean = dot_of(slope, chances, n);
#pragma omp simd
        for (int64_t i = 0; i < n; ++i) store(&out[i], chances[i] * (slope[i] - mean));
    }
};

template <template <typename> class Work, typename T>
void all_rows(const Arguments& a) {
    const auto row = for_level<Work<T>, const Arguments&, int64_t, float*>(a.level);
#pragma omp parallel for schedule(static) num_threads(a.threads) if (a.tokens * a.experts > 16384)
    for (int64_t t = 0; t < a.tokens; ++t) {
#ifdef _OPENMP
        row(a, t, a.scratch + omp_get_thread_num() * a.experts);
#else
        row(a, t, a.scratch);
#endif
    }
}

}  // namespace

NATIVE_EXPORT void native_route_f32(const Arguments* a) { all_rows<Row, float>(*a); }
NATIVE_EXPORT void native_route_bf16(const Arguments* a) { all_rows<Row, uint16_t>(*a); }
NATIVE_EXPORT void native_route_backward_f32(const Arguments* a) { all_rows<Slope, float>(*a); }
NATIVE_EXPORT void native_route_backward_bf16(const Arguments* a) { all_rows<Slope, uint16_t>(*a); }

NATIVE_EXPORT const char* native_source_route() { return native_text_of_route; }
