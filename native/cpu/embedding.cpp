// The gradient of an embedding: each row of the table gets the sum of the gradients of its tokens, in fp32 and in the
// order of the tokens, so that the result is the same for any number of threads. Every row is written once, also those
// without tokens; or the sums are added to rows that have values.
#include "../compiled/native.h"

#ifdef NATIVE_X86
#include <emmintrin.h>
#endif

NATIVE_TEXT(native_text_of_embedding)

namespace {

constexpr int64_t BLOCK = 256;  // numbers that are summed at a time

struct Arguments {
    const int64_t* ids;    // (tokens), each within the table
    const void* upstream;  // (tokens, width)
    void* out;             // (rows, width), which has values if `adds`
    int64_t *ends, *order; // scratch, (rows) and (tokens): where the tokens of each row end, and the tokens sorted by row
    int64_t tokens, rows, width;
    int threads, level, adds;
};

constexpr int64_t LARGE = 4 << 20;  // bytes of a table that does not stay in a core's caches

// Write zeros. In a large table they bypass the caches, which would read each line before it is overwritten.
NATIVE_INLINE void zero(char* at, int64_t bytes, bool is_large) {
#ifdef NATIVE_X86
    if (is_large && bytes >= 256) {
        const int64_t before = -reinterpret_cast<int64_t>(at) & 63;
        std::memset(at, 0, static_cast<size_t>(before));
        at += before;
        bytes -= before;
        const __m128i none = _mm_setzero_si128();
        for (; bytes >= 64; at += 64, bytes -= 64)
            for (int i = 0; i < 4; ++i) _mm_stream_si128(reinterpret_cast<__m128i*>(at) + i, none);
    }
#endif
    (void)is_large;
    std::memset(at, 0, static_cast<size_t>(bytes));
}

template <typename T>
struct Table {
    // Fill the rows from `first` to `last`.
    NATIVE_INLINE void run(const Arguments& a, int64_t first, int64_t last) {
        const int64_t row = static_cast<int64_t>(sizeof(T)) * a.width;
        for (int64_t r = first; r < last; ++r) {
            const int64_t begin = r ? a.ends[r - 1] : 0, end = a.ends[r];
            T* out = static_cast<T*>(a.out) + r * a.width;
            if (begin == end) {
                int64_t next = r + 1;
                while (next < last && a.ends[next] == end) ++next;
                if (!a.adds) zero(reinterpret_cast<char*>(out), (next - r) * row, a.rows * row > LARGE);
                r = next - 1;
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
                if (a.adds) {
#pragma omp simd
                    for (int64_t j = 0; j < n; ++j) sum[j] += to_float(out[start + j]);
                }
#pragma omp simd
                for (int64_t j = 0; j < n; ++j) store(&out[start + j], sum[j]);
            }
        }
#ifdef NATIVE_X86
        _mm_sfence();
#endif
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
    // This moves each row's entry from the beginning of its tokens to their end.
    for (int64_t i = 0; i < a.tokens; ++i) a.order[a.ends[a.ids[i]]++] = i;
}

template <typename T>
void embedding(const Arguments& a) {
    sort(a);
    const auto table = for_level<Table<T>, const Arguments&, int64_t, int64_t>(a.level);
    constexpr int64_t EACH = 64;  // rows at a time; frequent tokens are spread unevenly over the table
    const int64_t pieces = (a.rows + EACH - 1) / EACH;
#pragma omp parallel for schedule(dynamic, 4) num_threads(a.threads) if (((a.adds ? 0 : a.rows) + a.tokens) * a.width > 65536)
    for (int64_t p = 0; p < pieces; ++p) table(a, p * EACH, (p + 1) * EACH < a.rows ? (p + 1) * EACH : a.rows);
}

}  // namespace

NATIVE_EXPORT void native_embedding_f32(const Arguments* a) { embedding<float>(*a); }
NATIVE_EXPORT void native_embedding_bf16(const Arguments* a) { embedding<uint16_t>(*a); }

NATIVE_EXPORT const char* native_source_embedding() { return native_text_of_embedding; }
