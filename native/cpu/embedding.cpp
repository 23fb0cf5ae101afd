// The gradient of an embedding: each row of the table gets the sum of the gradients of its tokens, in fp32 and in the
// order of the tokens, so that the result is the same for any number of threads. Every row is written once, also those
// without tokens.
#include "../compiled/native.h"

NATIVE_TEXT(native_text_of_embedding)

namespace {

constexpr int64_t BLOCK = 256;  // numbers that are summed at a time

struct Arguments {
    const int64_t* ids;    // (tokens), each within the table
    const void* upstream;  // (tokens, width)
    void* out;             // (rows, width)
    int64_t *ends, *order; // (rows) and (tokens): room for where each row's tokens end, and the tokens by row
    int64_t tokens, rows, width;
    int threads, level;
};

template <typename T>
struct Table {
    // Fill the rows from `first` to `last`.
    NATIVE_INLINE void run(const Arguments& a, int64_t first, int64_t last) {
        for (int64_t r = first; r < last; ++r) {
            const int64_t begin = r ? a.ends[r - 1] : 0, end = a.ends[r];
            T* out = static_cast<T*>(a.out) + r * a.width;
            if (begin == end) {
                std::memset(out, 0, sizeof(T) * static_cast<size_t>(a.width));
                continue;
            }
            for (int64_t start = 0; start < a.width; start += BLOCK) {
                const int64_t n = a.width - start < BLOCK ? a.width - start : BLOCK;
                float sum[BLOCK] = {};
                for (int64_t i = begin; i < end; ++i) {
                    const T* from = static_cast<const T*>(a.upstream) + a.order[i] * a.width + start;
#pragma omp simd
                    for (int64_t j = 0; j < n; ++j) sum[j] += to_float(from[j]);
                }
#pragma omp simd
                for (int64_t j = 0; j < n; ++j) store(&out[start + j], sum[j]);
            }
        }
    }
};

// Sort the tokens by row and keep their order within a row: count, then place.
void sort(const Arguments& a) {
    std::memset(a.ends, 0, sizeof(int64_t) * static_cast<size_t>(a.rows));
    for (int64_t i = 0; i < a.tokens; ++i) ++a.ends[a.ids[i]];
    int64_t before = 0;
    for (int64_t r = 0; r < a.rows; ++r) {
        const int64_t own = a.ends[r];
        a.ends[r] = before;
        before += own;
    }
    // What was the beginning of a row becomes its end.
    for (int64_t i = 0; i < a.tokens; ++i) a.order[a.ends[a.ids[i]]++] = i;
}

template <typename T>
void embedding(const Arguments& a) {
    sort(a);
    const auto table = for_level<Table<T>, const Arguments&, int64_t, int64_t>(a.level);
    constexpr int64_t EACH = 64;  // rows at a time; frequent tokens are spread unevenly over the table
    const int64_t pieces = (a.rows + EACH - 1) / EACH;
#pragma omp parallel for schedule(dynamic, 4) num_threads(a.threads) if ((a.rows + a.tokens) * a.width > 65536)
    for (int64_t p = 0; p < pieces; ++p) table(a, p * EACH, (p + 1) * EACH < a.rows ? (p + 1) * EACH : a.rows);
}

}  // namespace

NATIVE_EXPORT void native_embedding_f32(const Arguments* a) { embedding<float>(*a); }
NATIVE_EXPORT void native_embedding_bf16(const Arguments* a) { embedding<uint16_t>(*a); }

NATIVE_EXPORT const char* native_source_embedding() { return native_text_of_embedding; }
