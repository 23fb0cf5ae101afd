// Attention that never stores all scores: blocks of 64 queries by 64 keys, on AVX-512 (fp32) and AVX512-BF16.
//
// Everything is computed transposed, scores as (keys, queries). The lanes of a register are queries, so that the
// softmax's maxima and sums need no work across lanes, and the scores of a block are, without rearrangement, an
// operand of the products that follow. The unit of a product's inner dimension is 32 bits: one number in fp32, two
// in bf16.
#include "../compiled/native.h"

#include <cmath>

NATIVE_TEXT(native_text_of_attention)

#if defined(NATIVE_X86) && (defined(__clang__) || __GNUC__ >= 10)
#define NATIVE_HAS_ATTENTION 1
#include <immintrin.h>
#endif

struct Span {  // (batch, heads, rows, dim): the address, and the distances between batches, heads and rows
    void* at;
    int64_t batch, head, row;
};

struct Arguments {
    Span q, k, v, out;
    Span out_gradient, dq, dk, dv;  // used only by the backward pass
    float* logs;                    // (batch, heads, queries): logarithm of each query's sum
    char* scratch;                  // `threads` times native_attention_scratch() bytes, aligned to 64 bytes
    int64_t batch, heads, queries, keys, dim, scratch_size;
    float scale;
    int causal, threads;
};

#ifdef NATIVE_HAS_ATTENTION

// Return 0 if the kernels cannot run on this processor, 1 if the fp32 kernel can, 2 if both can.
NATIVE_EXPORT int native_attention_level() {
    if (best_level() < 2) return 0;
    return __builtin_cpu_supports("avx512bf16") ? 2 : 1;
}

// Valid to the end of the file, so that it also applies to templates that are instantiated later.
#ifdef __clang__
#pragma clang attribute push( \
    __attribute__((target("avx512f,avx512bw,avx512dq,avx512vl,avx512bf16,avx2,fma"))), apply_to = function)
#else
#pragma GCC target("avx512f,avx512bw,avx512dq,avx512vl,avx512bf16,avx2,fma,prefer-vector-width=512")
#endif

namespace {

constexpr int64_t B = 64;  // queries and keys per block
constexpr int VECTORS = B / 16;

struct F32 {
    using Number = float;
    static constexpr int64_t EACH = 1;  // numbers per unit
    static inline __attribute__((always_inline)) __m512 dot(__m512 sum, __m512i a, __m512i b) {
        return _mm512_fmadd_ps(_mm512_castsi512_ps(a), _mm512_castsi512_ps(b), sum);
    }
};

struct BF16 {
    using Number = uint16_t;
    static constexpr int64_t EACH = 2;
    static inline __attribute__((always_inline)) __m512 dot(__m512 sum, __m512i a, __m512i b) {
        return _mm512_dpbf16_ps(sum, (__m512bh)a, (__m512bh)b);
    }
};

NATIVE_INLINE int64_t up(int64_t n, int64_t to) { return (n + to - 1) / to * to; }

// exp(x) for x <= 0, as in native.h; exactly 0 below -87, so that hidden keys have no weight.
NATIVE_INLINE __m512 exp_lanes(__m512 x) {
    const __m512 clamped = _mm512_max_ps(_mm512_set1_ps(-88.0f), x);  // a NaN stays NaN
    const __mmask16 there = _mm512_cmp_ps_mask(x, _mm512_set1_ps(-87.0f), _CMP_NLT_UQ);
    const __m512 n = _mm512_roundscale_ps(_mm512_mul_ps(clamped, _mm512_set1_ps(1.44269504f)), 0);
    __m512 r = _mm512_fnmadd_ps(n, _mm512_set1_ps(0.693359375f), clamped);
    r = _mm512_fmadd_ps(n, _mm512_set1_ps(2.12194440e-4f), r);
    __m512 p = _mm512_set1_ps(1.9875691500e-4f);
    p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(1.3981999507e-3f));
    p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(8.3334519073e-3f));
    p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(4.1665795894e-2f));
    p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(1.6666665459e-1f));
    p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(5.0000001201e-1f));
    p = _mm512_fmadd_ps(_mm512_mul_ps(p, r), r, _mm512_add_ps(r, _mm512_set1_ps(1.0f)));
    return _mm512_maskz_scalef_ps(there, p, n);
}

// Four rows of a product: c[4][16 V] (+)= a[4][units] b[units][16 V]. If `factor` is given, the old c is multiplied
// by it.
template <typename N, int V, bool ADD>
NATIVE_INLINE void four_rows(const uint32_t* a, int64_t a_row, const uint32_t* b, int64_t b_row, int64_t units,
                             float* c, int64_t c_row, const __m512* factor) {
    __m512 sum[4][V];
#pragma GCC unroll 4
    for (int r = 0; r < 4; ++r)
#pragma GCC unroll 4
        for (int v = 0; v < V; ++v) {
            sum[r][v] = _mm512_setzero_ps();
            if (ADD) sum[r][v] = _mm512_loadu_ps(c + r * c_row + 16 * v);
            if (ADD && factor) sum[r][v] = _mm512_mul_ps(sum[r][v], factor[v]);
        }
    for (int64_t u = 0; u < units; ++u) {
        __m512i right[V];
#pragma GCC unroll 4
        for (int v = 0; v < V; ++v) right[v] = _mm512_loadu_si512(b + u * b_row + 16 * v);
#pragma GCC unroll 4
        for (int r = 0; r < 4; ++r) {
            const __m512i left = _mm512_set1_epi32(static_cast<int>(a[r * a_row + u]));
#pragma GCC unroll 4
            for (int v = 0; v < V; ++v) sum[r][v] = N::dot(sum[r][v], left, right[v]);
        }
    }
#pragma GCC unroll 4
    for (int r = 0; r < 4; ++r)
#pragma GCC unroll 4
        for (int v = 0; v < V; ++v) _mm512_storeu_ps(c + r * c_row + 16 * v, sum[r][v]);
}

// c[rows][columns] (+)= a b, computed by four rows and up to 64 columns at a time.
template <typename N, bool ADD>
NATIVE_INLINE void product(const uint32_t* a, int64_t a_row, const uint32_t* b, int64_t b_row, int64_t units,
                           float* c, int64_t c_row, int64_t rows, int64_t columns,
                           const __m512* factor = nullptr) {
    for (int64_t left = 0; left < columns; left += 64) {
        const int64_t vectors = (columns - left) / 16;
        const __m512* own = factor ? factor + left / 16 : nullptr;
        for (int64_t r = 0; r < rows; r += 4) {
            const uint32_t* from = a + r * a_row;
            float* to = c + r * c_row + left;
            if (vectors >= 4) four_rows<N, 4, ADD>(from, a_row, b + left, b_row, units, to, c_row, own);
            else if (vectors == 3) four_rows<N, 3, ADD>(from, a_row, b + left, b_row, units, to, c_row, own);
            else if (vectors == 2) four_rows<N, 2, ADD>(from, a_row, b + left, b_row, units, to, c_row, own);
            else four_rows<N, 1, ADD>(from, a_row, b + left, b_row, units, to, c_row, own);
        }
    }
}

// Transpose 16 x 16 words.
NATIVE_INLINE void turn(const uint32_t* from, int64_t from_row, uint32_t* to, int64_t to_row) {
    __m512i a[16], b[16];
#pragma GCC unroll 16
    for (int i = 0; i < 16; ++i) a[i] = _mm512_loadu_si512(from + i * from_row);
#pragma GCC unroll 8
    for (int i = 0; i < 16; i += 2) {
        b[i] = _mm512_unpacklo_epi32(a[i], a[i + 1]);
        b[i + 1] = _mm512_unpackhi_epi32(a[i], a[i + 1]);
    }
#pragma GCC unroll 4
    for (int i = 0; i < 16; i += 4) {
        a[i] = _mm512_unpacklo_epi64(b[i], b[i + 2]);
        a[i + 1] = _mm512_unpackhi_epi64(b[i], b[i + 2]);
        a[i + 2] = _mm512_unpacklo_epi64(b[i + 1], b[i + 3]);
        a[i + 3] = _mm512_unpackhi_epi64(b[i + 1], b[i + 3]);
    }
#pragma GCC unroll 4
    for (int i = 0; i < 4; ++i) {
        b[i] = _mm512_shuffle_i32x4(a[i], a[i + 4], 0x88);
        b[i + 4] = _mm512_shuffle_i32x4(a[i], a[i + 4], 0xdd);
        b[i + 8] = _mm512_shuffle_i32x4(a[i + 8], a[i + 12], 0x88);
        b[i + 12] = _mm512_shuffle_i32x4(a[i + 8], a[i + 12], 0xdd);
    }
#pragma GCC unroll 4
    for (int i = 0; i < 4; ++i) {
        a[i] = _mm512_shuffle_i32x4(b[i], b[i + 8], 0x88);
        a[i + 8] = _mm512_shuffle_i32x4(b[i], b[i + 8], 0xdd);
        a[i + 4] = _mm512_shuffle_i32x4(b[i + 4], b[i + 12], 0x88);
        a[i + 12] = _mm512_shuffle_i32x4(b[i + 4], b[i + 12], 0xdd);
    }
#pragma GCC unroll 16
    for (int i = 0; i < 16; ++i) _mm512_storeu_si512(to + i * to_row, a[i]);
}

// Transpose units (rows, columns); both sizes are multiples of 16.
NATIVE_INLINE void turn_all(const uint32_t* from, int64_t rows, int64_t columns, int64_t from_row, uint32_t* to,
                            int64_t to_row) {
    for (int64_t r = 0; r < rows; r += 16)
        for (int64_t c = 0; c < columns; c += 16) turn(from + r * from_row + c, from_row, to + c * to_row + r, to_row);
}

// One head of a tensor. In scratch memory its rows are padded to whole blocks, and `width` to whole registers of
// units.
template <typename N>
struct Head {
    const typename N::Number* at;
    int64_t row, rows, dim, width;

    Head(const Span& span, int64_t batch, int64_t head, int64_t rows_, int64_t dim_)
        : at(static_cast<const typename N::Number*>(span.at) + batch * span.batch + head * span.head),
          row(span.row), rows(rows_), dim(dim_), width(up(dim_, 16 * N::EACH)) {}

    // Copy numbers unchanged, padded with zeros: the left operand of a product over `dim`.
    void plain(int64_t first, int64_t count, typename N::Number* to) const {
        const size_t size = sizeof(typename N::Number);
        for (int64_t r = 0; r < count; ++r, to += width) {
            const int64_t there = first + r < rows ? dim : 0;
            if (there) std::memcpy(to, at + (first + r) * row, size * static_cast<size_t>(there));
            std::memset(to + there, 0, size * static_cast<size_t>(width - there));
        }
    }
};

// In fp32 rows are units already; in bf16 each pair of rows becomes one row of pairs.
NATIVE_INLINE void pair_rows(const float* from, int64_t rows, int64_t width, uint32_t* to) {
    std::memcpy(to, from, sizeof(float) * static_cast<size_t>(rows * width));
}
NATIVE_INLINE void pair_rows(const uint16_t* from, int64_t rows, int64_t width, uint32_t* to) {
    for (int64_t r = 0; r < rows; r += 2)
        for (int64_t c = 0; c < width; c += 16, to += 16) {
            const auto* low = reinterpret_cast<const __m256i*>(from + r * width + c);
            const auto* high = reinterpret_cast<const __m256i*>(from + (r + 1) * width + c);
            const __m512i a = _mm512_cvtepu16_epi32(_mm256_loadu_si256(low));
            const __m512i b = _mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_loadu_si256(high)), 16);
            _mm512_storeu_si512(to, _mm512_or_si512(a, b));
        }
}

// Write two rows of a block, (keys k and k + 1) x 16 queries: as rows of numbers, or (put_units) as a row of units.
NATIVE_INLINE void put_rows(float* rows, __m512 one, __m512 two) {
    _mm512_storeu_ps(rows, one);
    _mm512_storeu_ps(rows + B, two);
}
NATIVE_INLINE void put_rows(uint16_t* rows, __m512 one, __m512 two) {
    const __m512i both = (__m512i)_mm512_cvtne2ps_pbh(two, one);
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(rows), _mm512_castsi512_si256(both));
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(rows + B), _mm512_extracti64x4_epi64(both, 1));
}
NATIVE_INLINE void put_units(float* units, __m512 one, __m512 two) { put_rows(units, one, two); }
NATIVE_INLINE void put_units(uint16_t* units, __m512 one, __m512 two) {
    const __m512i a = _mm512_cvtepu16_epi32((__m256i)_mm512_cvtneps_pbh(one));
    const __m512i b = _mm512_slli_epi32(_mm512_cvtepu16_epi32((__m256i)_mm512_cvtneps_pbh(two)), 16);
    _mm512_storeu_si512(units, _mm512_or_si512(a, b));
}

template <typename T>
NATIVE_INLINE uint32_t* units_of(T* numbers) { return reinterpret_cast<uint32_t*>(numbers); }
template <typename T>
NATIVE_INLINE const uint32_t* units_of(const T* numbers) { return reinterpret_cast<const uint32_t*>(numbers); }

// Return the lanes, of 16 queries from `query` on, that see the key.
NATIVE_INLINE __mmask16 seen(int64_t query, int64_t key, const Arguments& a) {
    const int64_t behind = key - (query + a.keys - a.queries);  // the first lane that sees the key
    if (key >= a.keys) return 0;
    if (!a.causal || behind <= 0) return 0xffff;
    return behind > 15 ? 0 : static_cast<__mmask16>(0xffff << behind);
}

// Return whether all queries of a block see all its keys.
NATIVE_INLINE bool all_seen(int64_t query, int64_t key, const Arguments& a) {
    return key + B <= a.keys && (!a.causal || key + B - 1 <= query + a.keys - a.queries);
}

// Return how many keys the last query of a block sees, rounded up to whole blocks.
NATIVE_INLINE int64_t keys_of(int64_t query, const Arguments& a) {
    const int64_t last = a.causal ? query + B + a.keys - a.queries : a.keys;
    return up(last < a.keys ? last : a.keys, B);
}

// Write rows of numbers from (dim, queries) in fp32, each query multiplied by its factor.
template <typename T>
NATIVE_INLINE void write_turned(const float* from, int64_t width, const float* factor, T* to, int64_t row,
                                int64_t rows, int64_t dim, float* room) {
    turn_all(units_of(from), width, B, B, units_of(room), width);
    for (int64_t r = 0; r < rows; ++r)
        for (int64_t d = 0; d < dim; ++d) store(&to[r * row + d], room[r * width + d] * factor[r]);
}

// A thread's scratch memory, allocated from its beginning.
struct Room {
    char* next;
    template <typename T>
    T* take(int64_t count) {
        T* taken = reinterpret_cast<T*>(next);
        next += up(count * static_cast<int64_t>(sizeof(T)), 64);
        return taken;
    }
};

template <typename N>
void forward_head(const Arguments& a, int64_t batch, int64_t head, Room room) {
    using Number = typename N::Number;
    const Head<N> q(a.q, batch, head, a.queries, a.dim), k(a.k, batch, head, a.keys, a.dim),
        v(a.v, batch, head, a.keys, a.dim);
    const int64_t keys = up(a.keys, B), width = q.width, units = width / N::EACH;
    Number* left = room.take<Number>(keys * width);          // keys (keys, dim)
    uint32_t* values = room.take<uint32_t>(width * keys / N::EACH);  // (dim, units of keys)
    Number* plain = room.take<Number>(B * width);
    uint32_t* pairs = room.take<uint32_t>(B * width);
    uint32_t* right = room.take<uint32_t>(units * B);        // queries (units of dim, queries)
    float* scores = room.take<float>(B * B);
    Number* weights = room.take<Number>(B * B);
    float* out = room.take<float>(width * B);                // (dim, queries)
    float* turned = room.take<float>(width * B);
    k.plain(0, keys, left);
    for (int64_t key = 0; key < keys; key += B) {
        v.plain(key, B, plain);
        pair_rows(plain, B, width, pairs);
        turn_all(pairs, B / N::EACH, width, width, values + key / N::EACH, keys / N::EACH);
    }
    const __m512 scale = _mm512_set1_ps(a.scale);
    auto* to = static_cast<Number*>(a.out.at) + batch * a.out.batch + head * a.out.head;
    float* logs = a.logs + (batch * a.heads + head) * a.queries;
    for (int64_t query = 0; query < a.queries; query += B) {
        q.plain(query, B, plain);
        turn_all(units_of(plain), B, units, units, right, B);
        std::memset(out, 0, sizeof(float) * static_cast<size_t>(width * B));
        __m512 top[VECTORS], sums[VECTORS];
        for (int i = 0; i < VECTORS; ++i) {
            top[i] = _mm512_set1_ps(-INFINITY);
            sums[i] = _mm512_setzero_ps();
        }
        const int64_t last = keys_of(query, a);
        for (int64_t key = 0; key < last; key += B) {
            product<N, false>(units_of(left + key * width), units, right, B, units, scores, B, B, B);
            const bool whole = all_seen(query, key, a);
            __m512 again[VECTORS];
            for (int i = 0; i < VECTORS; ++i) {
                float* own = scores + 16 * i;
                __m512 most = top[i];
                for (int64_t r = 0; r < B; ++r) {
                    __m512 s = _mm512_loadu_ps(own + r * B);
                    if (!whole) {
                        s = _mm512_mask_mov_ps(_mm512_set1_ps(-INFINITY), seen(query + 16 * i, key + r, a), s);
                        _mm512_storeu_ps(own + r * B, s);
                    }
                    most = _mm512_max_ps(most, s);
                }
                again[i] = exp_lanes(_mm512_mul_ps(_mm512_sub_ps(top[i], most), scale));
                top[i] = most;
                const __m512 shift = _mm512_mul_ps(most, scale);
                __m512 sum = _mm512_setzero_ps();
                for (int64_t r = 0; r < B; r += 2) {
                    const __m512 one = exp_lanes(_mm512_fmsub_ps(_mm512_loadu_ps(own + r * B), scale, shift));
                    const __m512 two =
                        exp_lanes(_mm512_fmsub_ps(_mm512_loadu_ps(own + (r + 1) * B), scale, shift));
                    sum = _mm512_add_ps(sum, _mm512_add_ps(one, two));
                    put_units(weights + r * B + 16 * N::EACH * i, one, two);
                }
                sums[i] = _mm512_fmadd_ps(sums[i], again[i], sum);
            }
            product<N, true>(values + key / N::EACH, keys / N::EACH, units_of(weights), B, B / N::EACH, out, B,
                             width, B, again);
        }
        alignas(64) float inverse[B], highest[B], sum[B];
        for (int i = 0; i < VECTORS; ++i) {
            _mm512_store_ps(sum + 16 * i, sums[i]);
            _mm512_store_ps(highest + 16 * i, top[i]);
            _mm512_store_ps(inverse + 16 * i, _mm512_div_ps(_mm512_set1_ps(1.0f), sums[i]));
        }
        const int64_t rows = query + B < a.queries ? B : a.queries - query;
        for (int64_t r = 0; r < rows; ++r) logs[query + r] = highest[r] * a.scale + std::log(sum[r]);
        write_turned(out, width, inverse, to + query * a.out.row, a.out.row, rows, a.dim, turned);
    }
}

// A block of queries (or of their gradients) for the backward pass, as right operands of products.
template <typename N>
struct Queries {
    uint32_t *turned, *rows;  // (units of dim, 64) and (units of queries, dim) of each block
};

template <typename N>
void prepare(const Head<N>& head, int64_t rows, const Queries<N>& to, typename N::Number* plain) {
    const int64_t units = head.width / N::EACH;
    for (int64_t first = 0; first < rows; first += B) {
        head.plain(first, B, plain);
        turn_all(units_of(plain), B, units, units, to.turned + first * units, B);
        pair_rows(plain, B, head.width, to.rows + first / N::EACH * head.width);
    }
}

template <typename N>
void backward_head(const Arguments& a, int64_t batch, int64_t head, Room room) {
    using Number = typename N::Number;
    const Head<N> q(a.q, batch, head, a.queries, a.dim), k(a.k, batch, head, a.keys, a.dim),
        v(a.v, batch, head, a.keys, a.dim), out(a.out, batch, head, a.queries, a.dim),
        above(a.out_gradient, batch, head, a.queries, a.dim);
    const int64_t queries = up(a.queries, B), keys = up(a.keys, B), width = q.width, units = width / N::EACH;
    const Queries<N> query_side{room.take<uint32_t>(queries * units), room.take<uint32_t>(queries * units)};
    const Queries<N> above_side{room.take<uint32_t>(queries * units), room.take<uint32_t>(queries * units)};
    float* delta = room.take<float>(queries);
    float* logs = room.take<float>(queries);
    float* dq = room.take<float>(queries * width);  // (dim, 64) of each block
    Number* plain = room.take<Number>(B * width);
    Number* values = room.take<Number>(B * width);
    uint32_t* pairs = room.take<uint32_t>(B * width);
    uint32_t* turned_keys = room.take<uint32_t>(B * width);  // (dim, units of 64 keys)
    float* scores = room.take<float>(B * B);
    float* through = room.take<float>(B * B);
    Number* weights = room.take<Number>(B * B);  // (keys, queries)
    Number* slopes = room.take<Number>(B * B);   // (keys, queries)
    Number* slope_units = room.take<Number>(B * B);  // (units of keys, queries)
    float* dk = room.take<float>(B * width);
    float* dv = room.take<float>(B * width);
    prepare(q, queries, query_side, plain);
    prepare(above, queries, above_side, plain);
    const float* given = a.logs + (batch * a.heads + head) * a.queries;
    for (int64_t r = 0; r < queries; ++r) {
        float sum = 0.0f;
        if (r < a.queries)
            for (int64_t d = 0; d < a.dim; ++d) sum += to_float(above.at[r * above.row + d]) * to_float(out.at[r * out.row + d]);
        delta[r] = sum;
        logs[r] = r < a.queries ? given[r] : 0.0f;
    }
    std::memset(dq, 0, sizeof(float) * static_cast<size_t>(queries * width));
    const __m512 scale = _mm512_set1_ps(a.scale);
    for (int64_t key = 0; key < keys; key += B) {
        k.plain(key, B, plain);
        v.plain(key, B, values);
        pair_rows(plain, B, width, pairs);
        turn_all(pairs, B / N::EACH, width, width, turned_keys, B / N::EACH);
        std::memset(dk, 0, sizeof(float) * static_cast<size_t>(B * width));
        std::memset(dv, 0, sizeof(float) * static_cast<size_t>(B * width));
        for (int64_t query = 0; query < queries; query += B) {
            if (key >= keys_of(query, a)) continue;
            product<N, false>(units_of(plain), units, query_side.turned + query * units, B, units, scores, B, B, B);
            product<N, false>(units_of(values), units, above_side.turned + query * units, B, units, through, B, B, B);
            const bool whole = all_seen(query, key, a);
            for (int i = 0; i < VECTORS; ++i) {
                const __m512 shift = _mm512_loadu_ps(logs + query + 16 * i);
                const __m512 mean = _mm512_loadu_ps(delta + query + 16 * i);
                for (int64_t r = 0; r < B; r += 2) {
                    __m512 p[2], slope[2];
#pragma GCC unroll 2
                    for (int j = 0; j < 2; ++j) {
                        const int64_t at = (r + j) * B + 16 * i;
                        p[j] = exp_lanes(_mm512_fmsub_ps(_mm512_loadu_ps(scores + at), scale, shift));
                        if (!whole) p[j] = _mm512_maskz_mov_ps(seen(query + 16 * i, key + r + j, a), p[j]);
                        slope[j] = _mm512_mul_ps(p[j], _mm512_sub_ps(_mm512_loadu_ps(through + at), mean));
                    }
                    put_rows(weights + r * B + 16 * i, p[0], p[1]);
                    put_rows(slopes + r * B + 16 * i, slope[0], slope[1]);
                    put_units(slope_units + r * B + 16 * N::EACH * i, slope[0], slope[1]);
                }
            }
            product<N, true>(units_of(weights), B / N::EACH, above_side.rows + query / N::EACH * width, width,
                             B / N::EACH, dv, width, B, width);
            product<N, true>(units_of(slopes), B / N::EACH, query_side.rows + query / N::EACH * width, width,
                             B / N::EACH, dk, width, B, width);
            product<N, true>(turned_keys, B / N::EACH, units_of(slope_units), B, B / N::EACH, dq + query * width, B,
                             width, B);
        }
        const int64_t rows = key + B < a.keys ? B : a.keys - key;
        auto* to_k = static_cast<Number*>(a.dk.at) + batch * a.dk.batch + head * a.dk.head + key * a.dk.row;
        auto* to_v = static_cast<Number*>(a.dv.at) + batch * a.dv.batch + head * a.dv.head + key * a.dv.row;
        for (int64_t r = 0; r < rows; ++r)
            for (int64_t d = 0; d < a.dim; ++d) {
                store(&to_k[r * a.dk.row + d], dk[r * width + d] * a.scale);
                store(&to_v[r * a.dv.row + d], dv[r * width + d]);
            }
    }
    alignas(64) float factor[B];
    for (int64_t r = 0; r < B; ++r) factor[r] = a.scale;
    auto* to_q = static_cast<Number*>(a.dq.at) + batch * a.dq.batch + head * a.dq.head;
    for (int64_t query = 0; query < a.queries; query += B) {
        const int64_t rows = query + B < a.queries ? B : a.queries - query;
        float* room_for_turned = reinterpret_cast<float*>(pairs);
        write_turned(dq + query * width, width, factor, to_q + query * a.dq.row, a.dq.row, rows, a.dim, room_for_turned);
    }
}

template <typename N>
void all_heads(const Arguments& a, bool backward) {
    const int64_t tasks = a.batch * a.heads;
#pragma omp parallel for schedule(static) num_threads(a.threads) if (tasks > 1)
    for (int64_t task = 0; task < tasks; ++task) {
#ifdef _OPENMP
        const Room room{a.scratch + omp_get_thread_num() * a.scratch_size};
#else
        const Room room{a.scratch};
#endif
        if (backward) backward_head<N>(a, task / a.heads, task % a.heads, room);
        else forward_head<N>(a, task / a.heads, task % a.heads, room);
    }
}

}  // namespace

#ifdef __clang__
#pragma clang attribute pop
#endif

NATIVE_EXPORT void native_attention_f32(const Arguments* a, int backward) { all_heads<F32>(*a, backward != 0); }
NATIVE_EXPORT void native_attention_bf16(const Arguments* a, int backward) { all_heads<BF16>(*a, backward != 0); }

// Return the bytes of scratch memory per thread, a multiple of 64; at least what the functions above take.
NATIVE_EXPORT int64_t native_attention_scratch(int64_t queries, int64_t keys, int64_t dim, int backward) {
    const int64_t width = up(dim, 32), q = up(queries, B), k = up(keys, B);
    const int64_t words = backward ? q * (5 * width + 2) + 7 * B * width + 5 * B * B : 2 * k * width + 5 * B * width + 2 * B * B;
    return up(words * 4 + 20 * 64, 64);
}

#else

NATIVE_EXPORT void native_attention_f32(const Arguments*, int) {}
NATIVE_EXPORT void native_attention_bf16(const Arguments*, int) {}
NATIVE_EXPORT int64_t native_attention_scratch(int64_t, int64_t, int64_t, int) { return 0; }
NATIVE_EXPORT int native_attention_level() { return 0; }

#endif

NATIVE_EXPORT const char* native_source_attention() { return native_text_of_attention; }
