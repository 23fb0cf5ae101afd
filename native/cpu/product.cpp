// Products of two matrices in fp32 or bf16 on AVX-512, with sums in fp32, and optionally a bias or a sum with the
// values that `out` had.
//
// A tile of 6 rows and 64 columns of the result stays in 24 registers. The second matrix is copied by panels of 64
// columns, in the order in which tiles read it. The first is read where it is if its rows are contiguous; if its
// columns are, as in the gradient of a weight, it is copied by blocks of rows. A step of the inner dimension has 32
// bits of each row: one number, or two in bf16. Each number is a sum over chunks of at most CHUNK steps, so that errors
// stay small.
#include "../compiled/native.h"
#include "../compiled/transpose_avx512.h"

#include <algorithm>

NATIVE_TEXT(native_text_of_product)

struct Product {
    const void *a, *b, *bias;  // (m, k), (k, n) and (n,), or no bias
    void *out, *space;         // (m, n), and as many bytes as native_product_space returns, on a multiple of 64
    // In numbers; one of the two strides of `a`, and one of `b`, is 1.
    int64_t m, n, k, a_row, a_column, b_row, b_column, out_row;
    float scale;  // of the product, not of the bias
    int is_bf16, out_is_bf16, bias_is_bf16, adds, threads;
};

namespace {

constexpr int64_t ROWS = 6, PANEL = 64;    // of a tile
constexpr int64_t LINE = PANEL * 4;        // the bytes of a step of a panel
constexpr int64_t CHUNK = 768;             // steps: a panel has at most 192 KB, a part of a second-level cache
constexpr int64_t BLOCK = 192;             // rows of `a` that are copied at a time
constexpr int64_t NEAR = 8 << 20;          // bytes that a third-level cache keeps

int64_t over(int64_t x, int64_t by) { return (x + by - 1) / by; }
int64_t whole(int64_t x, int64_t by) { return over(x, by) * by; }

// How a product is divided. The result does not depend on it, except for `chunk`.
struct Plan {
    bool copies_a;
    int64_t steps, chunk, panels;
    int64_t rows;    // of a task
    int64_t group;   // panels of a task, or with copies_a panels that are copied at a time
    int64_t shared;  // bytes for all threads
    int64_t sums;    // bytes of a thread's sums, if they are not in `out`
    int64_t each;    // bytes for each thread
    bool past;       // the result is larger than caches, and each of its rows begins at a whole line

    explicit Plan(const Product& p) {
        const int64_t wide = p.is_bf16 ? 2 : 4;
        steps = over(p.k * wide, 4);
        const int64_t chunks = std::max<int64_t>(1, over(steps, CHUNK));
        chunk = std::max<int64_t>(16, whole(over(steps, chunks), 16));
        panels = over(p.n, PANEL);
        copies_a = p.a_column != 1;
        const bool sums_apart = chunks > 1 && p.out_is_bf16;
        if (copies_a) {
            rows = BLOCK;
            while (rows > 48 && over(p.m, rows) < 3 * p.threads) rows /= 2;
            group = std::min(panels, std::max<int64_t>(1, NEAR / (whole(steps, 16) * LINE + 1)));
            shared = group * whole(steps, 16) * LINE;
            each = chunk * rows * 4;
        } else {
            rows = NEAR / (p.k * wide + 1) / ROWS * ROWS;
            group = 1;
            // If few rows of `a` fit into a cache, each chunk of them is used for many panels.
            const bool is_deep = rows < 256;
            if (is_deep) rows = 1020;
            while (rows > 96 && over(p.m, rows) * panels < 3 * p.threads) rows = whole(rows / 2, ROWS);
            rows = std::min(rows, std::max(ROWS, whole(p.m, ROWS)));
            if (is_deep && panels > 0) {
                const int64_t ranges = std::max<int64_t>(1, over(p.m, rows));
                group = over(panels, std::min(panels, over((ranges == 1 ? 1 : 8) * p.threads, ranges)));
            }
            shared = 0;
            each = chunk * LINE;
        }
        sums = sums_apart ? rows * group * LINE : 0;
        each += sums + ROWS * LINE;
        past = write_past(p.out, p.m, p.out_row * (p.out_is_bf16 ? 2 : 4));
    }
    int64_t space(int threads) const { return shared + threads * each; }
};

}  // namespace

// Return how many bytes `space` must have.
NATIVE_EXPORT int64_t native_product_space(const Product* p) { return Plan(*p).space(p->threads); }

#if defined(NATIVE_X86) && (defined(__clang__) || __GNUC__ >= 10)
#include <immintrin.h>

// Return what the kernel can multiply on this processor: 0 nothing, 1 fp32, 2 fp32 and bf16.
NATIVE_EXPORT int native_product_level() {
    __builtin_cpu_init();
    if (best_level() < 2) return 0;
    return __builtin_cpu_supports("avx512bf16") ? 2 : 1;
}

// Return whether it is faster than torch here. On AMD's processors torch's products of fp32 use registers of 256 bits.
// Intel's have AMX for bf16.
NATIVE_EXPORT int native_product_is_faster() {
    __builtin_cpu_init();
    return __builtin_cpu_is("amd") != 0;
}

// Valid to the end of the file, so that it also applies to templates that are instantiated later.
#ifdef __clang__
#pragma clang attribute push( \
    __attribute__((target("avx512f,avx512bw,avx512dq,avx512vl,avx512bf16,avx2,fma"))), apply_to = function)
#else
#pragma GCC target("avx512f,avx512bw,avx512dq,avx512vl,avx512bf16,avx2,fma,prefer-vector-width=512")
#endif

namespace {

struct F32 {
    static constexpr int64_t WIDE = 4, EACH = 1;
    static inline __attribute__((always_inline)) __m512 add(__m512 sum, __m512i x, __m512i y) {
        return _mm512_fmadd_ps(_mm512_castsi512_ps(x), _mm512_castsi512_ps(y), sum);
    }
    static inline __attribute__((always_inline)) __m512i part(const char* from, int64_t count) {
        return _mm512_maskz_loadu_epi32(static_cast<__mmask16>((1u << count) - 1), from);
    }
};

struct BF16 {
    static constexpr int64_t WIDE = 2, EACH = 2;
    static inline __attribute__((always_inline)) __m512 add(__m512 sum, __m512i x, __m512i y) {
        return _mm512_dpbf16_ps(sum, (__m512bh)x, (__m512bh)y);
    }
    static inline __attribute__((always_inline)) __m512i part(const char* from, int64_t count) {
        return _mm512_maskz_loadu_epi16(static_cast<__mmask32>((1ull << count) - 1), from);
    }
};

// Where the sums of a tile go.
struct Target {
    float* sums;     // in fp32: written, or added to what is there
    int64_t sums_row;
    bool adds;
    uint16_t* out;   // or null; in bf16: the sums, with those that are there if `adds`, and the bias
    int64_t out_row;
    const float* bias;
    bool past;  // write past the caches
};

// Compute a tile. `row`, `step`: the bytes between rows and steps of `a`.
template <typename N, int COUNT>
NATIVE_INLINE void tile(int64_t steps, const char* a, int64_t row, int64_t step, const char* b, const Target& to) {
    __m512 sum[COUNT][4];
#pragma GCC unroll 6
    for (int i = 0; i < COUNT; ++i)
#pragma GCC unroll 4
        for (int j = 0; j < 4; ++j) sum[i][j] = _mm512_setzero_ps();
    // Sums that are added to are often in memory only.
    if (to.adds)
#pragma GCC unroll 6
        for (int i = 0; i < COUNT; ++i)
#pragma GCC unroll 4
            for (int j = 0; j < 4; ++j) __builtin_prefetch(to.sums + i * to.sums_row + 16 * j, 1);
    const char* high = a + 3 * row;
    for (int64_t s = 0; s < steps; ++s, a += step, high += step, b += LINE) {
        __m512i y[4];
#pragma GCC unroll 4
        for (int j = 0; j < 4; ++j) y[j] = _mm512_load_si512(b + 64 * j);
#pragma GCC unroll 6
        for (int i = 0; i < COUNT; ++i) {
            int word;
            std::memcpy(&word, i < 3 ? a + i * row : high + (i - 3) * row, sizeof word);
            const __m512i x = _mm512_set1_epi32(word);
#pragma GCC unroll 4
            for (int j = 0; j < 4; ++j) sum[i][j] = N::add(sum[i][j], x, y[j]);
        }
    }
    if (to.adds)
#pragma GCC unroll 6
        for (int i = 0; i < COUNT; ++i)
#pragma GCC unroll 4
            for (int j = 0; j < 4; ++j)
                sum[i][j] = _mm512_add_ps(sum[i][j], _mm512_loadu_ps(to.sums + i * to.sums_row + 16 * j));
    if (!to.out) {
#pragma GCC unroll 6
        for (int i = 0; i < COUNT; ++i)
#pragma GCC unroll 4
            for (int j = 0; j < 4; ++j) {
                float* at = to.sums + i * to.sums_row + 16 * j;
                to.past ? _mm512_stream_ps(at, sum[i][j]) : _mm512_storeu_ps(at, sum[i][j]);
            }
        return;
    }
#pragma GCC unroll 4
    for (int j = 0; j < 4; j += 2) {
        const __m512 low = _mm512_loadu_ps(to.bias + 16 * j), high = _mm512_loadu_ps(to.bias + 16 * j + 16);
#pragma GCC unroll 6
        for (int i = 0; i < COUNT; ++i) {
            const __m512 one = _mm512_add_ps(sum[i][j], low), two = _mm512_add_ps(sum[i][j + 1], high);
            const __m512i both = (__m512i)_mm512_cvtne2ps_pbh(two, one);
            auto* at = reinterpret_cast<__m512i*>(to.out + i * to.out_row + 16 * j);
            to.past ? _mm512_stream_si512(at, both) : _mm512_storeu_si512(at, both);
        }
    }
}

template <typename N>
void tile_of(int64_t count, int64_t steps, const char* a, int64_t row, int64_t step, const char* b, const Target& to) {
    switch (count) {
        case 6: return tile<N, 6>(steps, a, row, step, b, to);
        case 5: return tile<N, 5>(steps, a, row, step, b, to);
        case 4: return tile<N, 4>(steps, a, row, step, b, to);
        case 3: return tile<N, 3>(steps, a, row, step, b, to);
        case 2: return tile<N, 2>(steps, a, row, step, b, to);
        default: return tile<N, 1>(steps, a, row, step, b, to);
    }
}

// Copy `count` <= 64 columns, each contiguous and `column` bytes after the one before, into a panel. Fill the other
// columns, and the steps up to a multiple of 16, with zeros.
template <typename N>
void copy_columns(const char* from, int64_t column, int64_t count, int64_t numbers, char* to) {
    for (int64_t k = 0; k < numbers; k += 16 * N::EACH) {
        const int64_t left = std::min(numbers - k, 16 * N::EACH);
        for (int64_t c = 0; c < PANEL; c += 16) {
            __m512i words[16];
#pragma GCC unroll 16
            for (int i = 0; i < 16; ++i)
                words[i] = c + i < count ? N::part(from + (c + i) * column + k * N::WIDE, left)
                                         : _mm512_setzero_si512();
            transpose_words(words);
#pragma GCC unroll 16
            for (int i = 0; i < 16; ++i) _mm512_store_si512(to + k / N::EACH * LINE + i * LINE + c * 4, words[i]);
        }
    }
}

// Copy `count` of the contiguous numbers of each row; pairs of rows become rows of pairs in bf16. Fill up to a multiple
// of `width` columns with zeros.
NATIVE_INLINE void copy_rows(F32, const char* from, int64_t row, int64_t count, int64_t numbers, int64_t width,
                             char* to) {
    for (int64_t k = 0; k < numbers; ++k, from += row, to += width * 4)
        for (int64_t c = 0; c < width; c += 16) {
            const int64_t left = std::max<int64_t>(0, std::min<int64_t>(16, count - c));
            _mm512_store_si512(to + c * 4, F32::part(from + c * 4, left));
        }
}

NATIVE_INLINE void copy_rows(BF16, const char* from, int64_t row, int64_t count, int64_t numbers, int64_t width,
                             char* to) {
    alignas(64) uint16_t order[2][32];
    for (int i = 0; i < 32; ++i) {
        order[0][i] = static_cast<uint16_t>(i / 2 + i % 2 * 32);
        order[1][i] = static_cast<uint16_t>(order[0][i] + 16);
    }
    const __m512i first = _mm512_load_si512(order[0]), second = _mm512_load_si512(order[1]);
    for (int64_t k = 0; k < numbers; k += 2, from += 2 * row, to += width * 4) {
        int64_t c = 0;
        for (; k + 1 < numbers && c + 32 <= count; c += 32) {
            const __m512i low = _mm512_loadu_si512(from + c * 2), high = _mm512_loadu_si512(from + row + c * 2);
            _mm512_store_si512(to + c * 4, _mm512_permutex2var_epi16(low, first, high));
            _mm512_store_si512(to + c * 4 + 64, _mm512_permutex2var_epi16(low, second, high));
        }
        for (; c < width; c += 16) {
            const int64_t left = std::max<int64_t>(0, std::min<int64_t>(16, count - c));
            const auto mask = static_cast<__mmask16>((1u << left) - 1), empty = static_cast<__mmask16>(0);
            const __m256i low = _mm256_maskz_loadu_epi16(mask, from + c * 2);
            const __m256i high = _mm256_maskz_loadu_epi16(k + 1 < numbers ? mask : empty, from + row + c * 2);
            const __m512i raised = _mm512_slli_epi32(_mm512_cvtepu16_epi32(high), 16);
            _mm512_store_si512(to + c * 4, _mm512_or_si512(_mm512_cvtepu16_epi32(low), raised));
        }
    }
}

// Write `rows` x `columns` sums to `out` at this row and column; the bias is added with the last chunk.
void finish(const Product& p, const float* sums, int64_t sums_row, int64_t row, int64_t rows, int64_t column,
            int64_t columns, bool adds, bool is_last) {
    const __m512 scale = _mm512_set1_ps(p.scale);
    const bool has_bias = p.bias && is_last;
    for (int64_t c = 0; c < columns; c += 16) {
        const auto mask = static_cast<__mmask16>((1u << std::min<int64_t>(16, columns - c)) - 1);
        const auto load = [mask](const void* from, int64_t at, bool is_bf16) {
            if (!is_bf16) return _mm512_maskz_loadu_ps(mask, static_cast<const float*>(from) + at);
            const __m256i x = _mm256_maskz_loadu_epi16(mask, static_cast<const uint16_t*>(from) + at);
            return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(x), 16));
        };
        const __m512 bias = has_bias ? load(p.bias, column + c, p.bias_is_bf16) : _mm512_setzero_ps();
        for (int64_t i = 0; i < rows; ++i) {
            const int64_t at = (row + i) * p.out_row + column + c;
            __m512 x = _mm512_fmadd_ps(_mm512_loadu_ps(sums + i * sums_row + c), scale, bias);
            if (adds) x = _mm512_add_ps(x, load(p.out, at, p.out_is_bf16));
            if (p.out_is_bf16)
                _mm256_mask_storeu_epi16(static_cast<uint16_t*>(p.out) + at, mask, (__m256i)_mm512_cvtneps_pbh(x));
            else _mm512_mask_storeu_ps(static_cast<float*>(p.out) + at, mask, x);
        }
    }
}

template <typename N>
struct Multiply {
    const Product& p;
    const Plan& plan;
    char* const shared;

    Multiply(const Product& product, const Plan& divided)
        : p(product), plan(divided), shared(static_cast<char*>(product.space)) {}

    void copy_panel(int64_t panel, int64_t step, int64_t steps, char* to) const {
        const int64_t k = step * N::EACH, numbers = std::min(steps * N::EACH, p.k - k), c = panel * PANEL;
        const char* from = static_cast<const char*>(p.b) + (k * p.b_row + c * p.b_column) * N::WIDE;
        const int64_t count = std::min(PANEL, p.n - c);
        if (p.b_column == 1) copy_rows(N(), from, p.b_row * N::WIDE, count, numbers, PANEL, to);
        else copy_columns<N>(from, p.b_column * N::WIDE, count, numbers, to);
    }

    // Compute a panel's columns of `rows` rows of the result for the steps from `step`. The sums of bf16 results are
    // kept in `sums` until the last chunk.
    void panel_of(int64_t row, int64_t rows, int64_t panel, int64_t step, int64_t steps, const char* a, int64_t a_row,
                  int64_t a_step, const char* b, float* sums, int64_t sums_row, float* few) const {
        const bool first = step == 0, last = step + steps >= plan.steps, bf16 = p.out_is_bf16;
        const int64_t column = panel * PANEL, columns = std::min(PANEL, p.n - column);
        const bool plain = columns == PANEL && p.scale == 1.0f && !(bf16 && p.adds) && (bf16 || !(p.bias && last));
        const bool adds = p.adds || (!first && !plan.sums);
        alignas(64) float bias[PANEL] = {};
        if (plain && bf16 && last && p.bias)
            for (int64_t c = 0; c < PANEL; ++c)
                bias[c] = p.bias_is_bf16 ? to_float(static_cast<const uint16_t*>(p.bias)[column + c])
                                         : static_cast<const float*>(p.bias)[column + c];
        for (int64_t i = 0; i < rows; i += ROWS, a += ROWS * a_row) {
            const int64_t count = std::min(ROWS, rows - i), at = (row + i) * p.out_row + column;
            Target to{few, PANEL, false, nullptr, p.out_row, bias, false};
            if (plan.sums) to = {sums + i * sums_row, sums_row, !first, nullptr, p.out_row, bias, false};
            if (plain && bf16 && last) {
                to.out = static_cast<uint16_t*>(p.out) + at;
                to.past = plan.past;
            } else if (plain && !bf16) {
                const bool past = plan.past && last && !adds;
                to = {static_cast<float*>(p.out) + at, p.out_row, adds, nullptr, 0, nullptr, past};
            }
            tile_of<N>(count, steps, a, a_row, a_step, b, to);
            if (!plain && (last || !plan.sums))
                finish(p, to.sums, to.sums_row, row + i, count, column, columns, adds, last);
        }
        // Other threads see what was written past the caches.
        if (plan.past) _mm_sfence();
    }

    int64_t chunk_at(int64_t step) const { return std::min(plan.chunk, plan.steps - step); }

    // Of all threads: each task computes `group` panels of `rows` rows.
    void with_rows_of_a() const {
        const int64_t groups = over(plan.panels, plan.group), tasks = over(p.m, plan.rows) * groups;
#pragma omp parallel num_threads(p.threads) if (p.threads > 1)
        {
            char* own = mine();
            float* few = reinterpret_cast<float*>(own + plan.chunk * LINE);
            float* sums = few + ROWS * PANEL;
#pragma omp for schedule(dynamic)
            for (int64_t task = 0; task < tasks; ++task) {
                const int64_t row = task / groups * plan.rows, rows = std::min(plan.rows, p.m - row);
                const int64_t start = task % groups * plan.group, end = std::min(start + plan.group, plan.panels);
                for (int64_t step = 0; step < plan.steps; step += plan.chunk) {
                    const int64_t steps = chunk_at(step);
                    const char* a = static_cast<const char*>(p.a) + row * p.a_row * N::WIDE + step * 4;
                    for (int64_t panel = start; panel < end; ++panel) {
                        copy_panel(panel, step, steps, own);
                        panel_of(row, rows, panel, step, steps, a, p.a_row * N::WIDE, 4, own,
                                 sums + (panel - start) * PANEL, plan.group * PANEL, few);
                    }
                }
            }
        }
    }

    // Of all threads: they copy some panels, then each task copies a block of rows of `a` and uses these panels.
    void with_columns_of_a() const {
        const int64_t blocks = over(p.m, plan.rows), panel_size = whole(plan.steps, 16) * LINE;
#pragma omp parallel num_threads(p.threads) if (p.threads > 1)
        {
            char* own = mine();
            float* few = reinterpret_cast<float*>(own + plan.chunk * plan.rows * 4);
            float* sums = few + ROWS * PANEL;
            for (int64_t start = 0; start < plan.panels; start += plan.group) {
                const int64_t end = std::min(start + plan.group, plan.panels);
#pragma omp for schedule(dynamic)
                for (int64_t panel = start; panel < end; ++panel)
                    copy_panel(panel, 0, plan.steps, shared + (panel - start) * panel_size);
#pragma omp for schedule(dynamic)
                for (int64_t block = 0; block < blocks; ++block) {
                    const int64_t row = block * plan.rows, rows = std::min(plan.rows, p.m - row);
                    for (int64_t step = 0; step < plan.steps; step += plan.chunk) {
                        const int64_t steps = chunk_at(step), k = step * N::EACH;
                        const char* from = static_cast<const char*>(p.a) + (k * p.a_column + row) * N::WIDE;
                        const int64_t numbers = std::min(steps * N::EACH, p.k - k);
                        copy_rows(N(), from, p.a_column * N::WIDE, rows, numbers, plan.rows, own);
                        for (int64_t panel = start; panel < end; ++panel)
                            panel_of(row, rows, panel, step, steps, own, 4, plan.rows * 4,
                                     shared + (panel - start) * panel_size + step * LINE,
                                     sums + (panel - start) * PANEL, plan.group * PANEL, few);
                    }
                }
            }
        }
    }

    char* mine() const {
#ifdef _OPENMP
        return shared + plan.shared + omp_get_thread_num() * plan.each;
#else
        return shared + plan.shared;
#endif
    }
};

}  // namespace

// Compute out = a b scale + bias, or add it to `out`; k is not 0. In bf16 k is even if the rows of `a` are contiguous.
NATIVE_EXPORT void native_product(const Product* product) {
    const Plan plan(*product);
    if (product->is_bf16) {
        const Multiply<BF16> work(*product, plan);
        plan.copies_a ? work.with_columns_of_a() : work.with_rows_of_a();
    } else {
        const Multiply<F32> work(*product, plan);
        plan.copies_a ? work.with_columns_of_a() : work.with_rows_of_a();
    }
}

#ifdef __clang__
#pragma clang attribute pop
#endif

#else

NATIVE_EXPORT int native_product_level() { return 0; }
NATIVE_EXPORT int native_product_is_faster() { return 0; }
NATIVE_EXPORT void native_product(const Product*) {}

#endif

NATIVE_EXPORT const char* native_source_product() { return native_text_of_product; }
