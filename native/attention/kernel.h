// Attention that never stores all scores: blocks of 64 queries by 64 keys, in fp32 and bf16, for any width of register.
//
// Each file that includes this one compiles it for one instruction set: it defines LANES_OF_REGISTER and the few
// operations below that need intrinsics. Everything is computed transposed, scores as (keys, queries). The lanes of a
// register are queries, so that the softmax's maxima and sums need no work across lanes, and the scores of a block are,
// without rearrangement, an operand of the products that follow. The unit of a product's inner dimension is 32 bits: one
// number in fp32, two in bf16.
#pragma once

#include "../compiled/native.h"

#include <cmath>

NATIVE_TEXT(native_text_of_attention_kernel)

struct Span {  // (batch, heads, rows, dim): the address, and the distances between batches, heads and rows
    void* at;
    int64_t batch, head, row;
};

// Which keys are hidden and which probabilities are dropped; a null pointer or 0 turns the feature off.
struct Hiding {
    const int32_t* documents;  // (batch, keys): a query sees the keys of its own document
    const int32_t* source;     // (batch): a causal query sees the keys before it too, wherever they are
    int64_t window;            // keys that a causal query sees, up to its own
    uint64_t seed;             // of the dropped probabilities
    int64_t first_head, all_heads;  // number of this call's first head, and of the heads of all tensor parallel ranks
    uint32_t threshold;        // a probability is dropped if its random word is smaller
    float grow;                // factor of the probabilities that are kept
};

struct AttentionArguments {
    Span q, k, v, out;
    Span out_gradient, dq, dk, dv;  // used only by the backward pass
    float* logs;                    // (batch, heads, queries): logarithm of each query's sum
    char* scratch;                  // `threads` times native_attention_scratch() bytes, aligned to 64 bytes
    Hiding hiding;
    int64_t batch, heads, groups, queries, keys, dim, scratch_size;
    float scale;
    int causal, threads, chunks;  // chunks: parts of the queries that the forward pass computes at the same time
};

using AttentionKernel = void (*)(const AttentionArguments&, bool backward);
// The kernels by instruction set; null where the compiler has none. `bf16`: the type of all tensors.
AttentionKernel attention_plain(bool bf16);
AttentionKernel attention_avx2(bool bf16);
// products: with those of AVX512-BF16, which the processor must have.
AttentionKernel attention_avx512(bool bf16, bool products);
// For AVX-512 with the tiles of AMX, in bf16 alone; null also where this processor has no tiles.
AttentionKernel attention_amx();

#ifdef LANES_OF_REGISTER

namespace {

constexpr int64_t B = 64;  // queries and keys per block
constexpr int W = LANES_OF_REGISTER;
constexpr int VECTORS = B / W;
// A product is computed for this many rows, and registers of columns, at a time. The sums, one row of the right operand
// and one number of the left operand fit into the registers. AVX2 has 16 of them; twelve sums hide the latency of its
// additions.
constexpr int ROWS = W == 8 ? 6 : 4;
constexpr int TILE = W == 16 ? 4 : 2;

typedef float F __attribute__((vector_size(4 * W)));
typedef int32_t I __attribute__((vector_size(4 * W)));

NATIVE_INLINE F load(const float* at) {
    F x;
    std::memcpy(&x, at, sizeof x);
    return x;
}
NATIVE_INLINE F lanes_of(const uint32_t* units) {
    F x;
    std::memcpy(&x, units, sizeof x);
    return x;
}
NATIVE_INLINE void save(float* at, F x) { std::memcpy(at, &x, sizeof x); }
NATIVE_INLINE F all(float x) { return x - F{}; }
NATIVE_INLINE I all(int32_t x) { return x - I{}; }

#ifndef HAS_OWN_LARGEST
NATIVE_INLINE F largest(F a, F b) { return a > b ? a : b; }  // if `a` is a NaN, this returns `b`
#endif

#ifndef HAS_OWN_EXP
// exp(x) for x <= 0, as in native.h; exactly 0 below -87, so that hidden keys have no weight.
NATIVE_INLINE F exp_lanes(F x) {
    const F low = all(-88.0f), magic = all(12582912.0f);
    const F clamped = x < low ? low : x;  // a NaN stays NaN
    const F shifted = clamped * 1.44269504f + magic;
    const F n = shifted - magic;
    const F r = (clamped - n * 0.693359375f) + n * 2.12194440e-4f;
    F p = r * 1.9875691500e-4f + 1.3981999507e-3f;
    p = p * r + 8.3334519073e-3f;
    p = p * r + 4.1665795894e-2f;
    p = p * r + 1.6666665459e-1f;
    p = p * r + 5.0000001201e-1f;
    p = p * r * r + r + 1.0f;
    I bits;
    std::memcpy(&bits, &shifted, sizeof bits);
    bits = (bits - (0x4b400000 - 127)) << 23;
    F power;
    std::memcpy(&power, &bits, sizeof power);
    return x < all(-87.0f) ? F{} : p * power;
}
#endif

#ifndef HAS_OWN_TURN
constexpr int64_t TURNED = 1;
NATIVE_INLINE void turn(const uint32_t* from, int64_t, uint32_t* to, int64_t) { *to = *from; }
#endif

struct Nothing {};

// How products are computed in fp32. Each such type has: the numbers of a unit (EACH), the sum of a product (dot), the
// rounding of a block's weights (kept), whether AMX tiles compute the products (TILES), and an object that a thread keeps
// alive while it computes (Session).
struct F32 {
    using Number = float;
    using Session = Nothing;
    static constexpr int64_t EACH = 1;
    static constexpr bool TILES = false;
    static inline __attribute__((always_inline)) F dot(F sum, F a, F b) { return sum + a * b; }
    static inline __attribute__((always_inline)) F kept(F x) { return x; }
};

// The same for tensors in bf16 on processors without products of bf16. Weights and slopes are rounded to bf16, as they
// are on the other processors, so that all compute with the same numbers. A NaN stays a NaN: its lower half is zero here.
struct Rounded : F32 {
    static inline __attribute__((always_inline)) F kept(F x) {
        I bits;
        std::memcpy(&bits, &x, sizeof bits);
        bits = (bits + ((bits >> 16) & all(1)) + all(0x7fff)) & all(static_cast<int32_t>(0xffff0000u));
        F result;
        std::memcpy(&result, &bits, sizeof result);
        return result;
    }
};

#ifndef HAS_OWN_TILES
template <bool ADD, typename... A>
NATIVE_INLINE void tile_product(A...) {}
#endif

NATIVE_INLINE int64_t up(int64_t n, int64_t to) { return (n + to - 1) / to * to; }
NATIVE_INLINE int64_t least(int64_t a, int64_t b) { return a < b ? a : b; }

// Return a register with the unit in all lanes; its bits are not interpreted.
NATIVE_INLINE F unit(uint32_t x) {
    const I lanes = all(static_cast<int32_t>(x));
    F result;
    std::memcpy(&result, &lanes, sizeof result);
    return result;
}

// Some rows of a product: c[R][W V] (+)= a[R][units] b[units][W V]. If `factor` is given, the old c is multiplied by it.
template <typename N, int R, int V, bool ADD>
NATIVE_INLINE void some_rows(const uint32_t* a, int64_t a_row, const uint32_t* b, int64_t b_row, int64_t units,
                             float* c, int64_t c_row, const F* factor) {
    F sum[R][V];
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r)
#pragma GCC unroll 4
        for (int v = 0; v < V; ++v) {
            sum[r][v] = F{};
            if (ADD) sum[r][v] = load(c + r * c_row + W * v);
            if (ADD && factor) sum[r][v] = sum[r][v] * factor[v];
        }
    for (int64_t u = 0; u < units; ++u) {
        F right[V];
#pragma GCC unroll 4
        for (int v = 0; v < V; ++v) right[v] = lanes_of(b + u * b_row + W * v);
#pragma GCC unroll 8
        for (int r = 0; r < R; ++r) {
            const F left = unit(a[r * a_row + u]);
#pragma GCC unroll 4
            for (int v = 0; v < V; ++v) sum[r][v] = N::dot(sum[r][v], left, right[v]);
        }
    }
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r)
#pragma GCC unroll 4
        for (int v = 0; v < V; ++v) save(c + r * c_row + W * v, sum[r][v]);
}

// All columns of R rows, up to TILE registers of them at a time.
template <typename N, int R, bool ADD>
NATIVE_INLINE void rows_of_product(const uint32_t* a, int64_t a_row, const uint32_t* b, int64_t b_row, int64_t units,
                                   float* c, int64_t c_row, int64_t vectors, const F* factor) {
    if (vectors >= TILE) some_rows<N, R, TILE, ADD>(a, a_row, b, b_row, units, c, c_row, factor);
    else if (TILE > 2 && vectors == 3) some_rows<N, R, 3, ADD>(a, a_row, b, b_row, units, c, c_row, factor);
    else if (TILE > 2 && vectors == 2) some_rows<N, R, 2, ADD>(a, a_row, b, b_row, units, c, c_row, factor);
    else some_rows<N, R, 1, ADD>(a, a_row, b, b_row, units, c, c_row, factor);
}

// c[rows][columns] (+)= a b, computed by ROWS rows and up to TILE registers of columns at a time; `rows` is even.
template <typename N, bool ADD>
NATIVE_INLINE void product(const uint32_t* a, int64_t a_row, const uint32_t* b, int64_t b_row, int64_t units,
                           float* c, int64_t c_row, int64_t rows, int64_t columns, const F* factor = nullptr) {
    if (N::TILES) {
        for (int64_t r = 0; factor && r < rows; ++r)
            for (int64_t i = 0; i < columns; i += W) save(c + r * c_row + i, load(c + r * c_row + i) * factor[i / W]);
        tile_product<ADD>(a, a_row, b, b_row, units, c, c_row, rows, columns);
        return;
    }
    for (int64_t left = 0; left < columns; left += W * TILE) {
        const int64_t vectors = (columns - left) / W;
        const F* own = factor ? factor + left / W : nullptr;
        const uint32_t* from = b + left;
        float* to = c + left;
        int64_t r = 0;
        for (; r + ROWS <= rows; r += ROWS)
            rows_of_product<N, ROWS, ADD>(a + r * a_row, a_row, from, b_row, units, to + r * c_row, c_row, vectors, own);
        for (; ROWS > 4 && r + 4 <= rows; r += 4)
            rows_of_product<N, 4, ADD>(a + r * a_row, a_row, from, b_row, units, to + r * c_row, c_row, vectors, own);
        for (; ROWS > 4 && r + 2 <= rows; r += 2)
            rows_of_product<N, 2, ADD>(a + r * a_row, a_row, from, b_row, units, to + r * c_row, c_row, vectors, own);
    }
}

// Transpose units (rows, columns); both sizes are multiples of 16.
NATIVE_INLINE void turn_all(const uint32_t* from, int64_t rows, int64_t columns, int64_t from_row, uint32_t* to,
                            int64_t to_row) {
    for (int64_t r = 0; r < rows; r += TURNED)
        for (int64_t c = 0; c < columns; c += TURNED)
            turn(from + r * from_row + c, from_row, to + c * to_row + r, to_row);
}

NATIVE_INLINE void copy_numbers(const float* from, float* to, int64_t n) {
    std::memcpy(to, from, sizeof(float) * static_cast<size_t>(n));
}
NATIVE_INLINE void copy_numbers(const uint16_t* from, uint16_t* to, int64_t n) {
    std::memcpy(to, from, sizeof(uint16_t) * static_cast<size_t>(n));
}
NATIVE_INLINE void copy_numbers(const uint16_t* from, float* to, int64_t n) {
    for (int64_t i = 0; i < n; ++i) to[i] = to_float(from[i]);
}

// One head of a tensor of T. In scratch memory its rows are padded to whole blocks, and `width` to whole registers of
// units.
template <typename N, typename T>
struct Head {
    const T* at;
    int64_t row, rows, dim, width;

    Head(const Span& span, int64_t batch, int64_t head, int64_t rows_, int64_t dim_)
        : at(static_cast<const T*>(span.at) + batch * span.batch + head * span.head),
          row(span.row), rows(rows_), dim(dim_), width(up(dim_, 16 * N::EACH)) {}

    // Copy numbers, padded with zeros: the left operand of a product over `dim`.
    void plain(int64_t first, int64_t count, typename N::Number* to) const {
        for (int64_t r = 0; r < count; ++r, to += width) {
            const int64_t size = first + r < rows ? dim : 0;
            if (size) copy_numbers(at + (first + r) * row, to, size);
            std::memset(to + size, 0, sizeof(typename N::Number) * static_cast<size_t>(width - size));
        }
    }
};

// In fp32 rows are units already.
NATIVE_INLINE void pair_rows(const float* from, int64_t rows, int64_t width, uint32_t* to) {
    std::memcpy(to, from, sizeof(float) * static_cast<size_t>(rows * width));
}

// Write two rows of a block, (keys k and k + 1) x W queries: as rows of numbers, or (put_units) as a row of units.
NATIVE_INLINE void put_rows(float* rows, F one, F two) {
    save(rows, one);
    save(rows + B, two);
}
NATIVE_INLINE void put_units(float* units, F one, F two) { put_rows(units, one, two); }

template <typename T>
NATIVE_INLINE uint32_t* units_of(T* numbers) { return reinterpret_cast<uint32_t*>(numbers); }
template <typename T>
NATIVE_INLINE const uint32_t* units_of(const T* numbers) { return reinterpret_cast<const uint32_t*>(numbers); }

// Divides a thread's scratch memory into arrays, one after the other.
struct Room {
    char* next;
    template <typename T>
    T* take(int64_t count) {
        T* taken = reinterpret_cast<T*>(next);
        next += up(count * static_cast<int64_t>(sizeof(T)), 64);
        return taken;
    }
};

enum class Seen { NONE, SOME, ALL };

// Which keys the queries of one sample see. A query's place is the number of the key of the same token: the last query
// and the last key belong to the same token.
struct Sight {
    const AttentionArguments& a;
    int32_t* documents;  // of all places, and a block behind them; null if there are none
    int64_t source, past;

    Sight(const AttentionArguments& arguments, int64_t batch, Room& room)
        : a(arguments), documents(nullptr), source(a.hiding.source ? a.hiding.source[batch] : 0),
          past(a.keys - a.queries) {
        if (!a.hiding.documents) return;
        const int64_t size = up(a.keys, B) + B;
        documents = room.take<int32_t>(size);
        std::memcpy(documents, a.hiding.documents + batch * a.keys, sizeof(int32_t) * static_cast<size_t>(a.keys));
        std::memset(documents + a.keys, 0, sizeof(int32_t) * static_cast<size_t>(size - a.keys));
    }

    // Return whether the queries of a block see all keys of a block, some of them or none.
    Seen block(int64_t query, int64_t key) const {
        const int64_t first = query + past, last = least(query + B, a.queries) - 1 + past;
        const int64_t end = least(key + B, a.keys) - 1;  // the last key
        bool every = key + B <= a.keys;
        if (a.causal) {
            if (key > last && key >= source) return Seen::NONE;
            every &= end <= first || end < source;
            if (a.hiding.window) {
                if (end <= first - a.hiding.window && key >= source) return Seen::NONE;
                every &= last - key < a.hiding.window;
            }
        }
        if (documents) {
            int32_t low[2] = {documents[first], documents[key]}, high[2] = {low[0], low[1]};
            for (int64_t at = first; at <= last; ++at) {
                low[0] = documents[at] < low[0] ? documents[at] : low[0];
                high[0] = documents[at] > high[0] ? documents[at] : high[0];
            }
            for (int64_t at = key; at <= end; ++at) {
                low[1] = documents[at] < low[1] ? documents[at] : low[1];
                high[1] = documents[at] > high[1] ? documents[at] : high[1];
            }
            if (high[0] < low[1] || high[1] < low[0]) return Seen::NONE;
            every &= low[0] == high[1] && high[0] == low[1];
        }
        return every ? Seen::ALL : Seen::SOME;
    }

    // Return a mask of the lanes whose query, of W queries from `query` on, sees the key.
    NATIVE_INLINE I lanes(const Sight& own, int64_t query, int64_t key) {
        if (key >= own.a.keys) return I{};
        I result = ~I{};
        if (own.a.causal && key >= own.source) {
            int32_t numbers[W];
            for (int i = 0; i < W; ++i) numbers[i] = i;
            I at;
            std::memcpy(&at, numbers, sizeof at);
            // How far each lane's place is behind the key.
            at = at + static_cast<int32_t>(query + own.past - key);
            result = at >= 0;
            if (own.a.hiding.window) result &= at < static_cast<int32_t>(own.a.hiding.window);
        }
        if (own.documents) {
            I document;
            std::memcpy(&document, own.documents + query + own.past, sizeof document);
            result &= document == own.documents[key];
        }
        return result;
    }
};

// The random words of Philox 4x32-10. Probabilities are numbered as in a tensor (batch, all heads, queries, keys rounded
// up to a multiple of four). The counter of a probability is its number divided by four; the remainder chooses one of the
// counter's four words.
struct Dropout {
    const AttentionArguments& a;
    uint64_t begin;  // the counter of this head's first query and key

    Dropout(const AttentionArguments& arguments, int64_t batch, int64_t head)
        : a(arguments), begin(static_cast<uint64_t>((batch * a.hiding.all_heads + a.hiding.first_head + head) *
                                                    a.queries * (up(a.keys, 4) / 4))) {}

    // Write the factors, 0 or `grow`, of the probabilities of W queries and of four keys from `key` on.
    NATIVE_INLINE void factors(const Dropout& own, int64_t query, int64_t key, F* factor) {
        const uint64_t row = static_cast<uint64_t>(up(own.a.keys, 4) / 4);
        const uint64_t start = own.begin + static_cast<uint64_t>(query) * row + static_cast<uint64_t>(key / 4);
        uint32_t c0[W], c1[W], c2[W], c3[W];
        for (int i = 0; i < W; ++i) {
            const uint64_t counter = start + static_cast<uint64_t>(i) * row;
            c0[i] = static_cast<uint32_t>(counter);
            c1[i] = static_cast<uint32_t>(counter >> 32);
            c2[i] = c3[i] = 0;
        }
        uint32_t k0 = static_cast<uint32_t>(own.a.hiding.seed), k1 = static_cast<uint32_t>(own.a.hiding.seed >> 32);
        for (int round = 0; round < 10; ++round) {
            for (int i = 0; i < W; ++i) {
                const uint64_t one = static_cast<uint64_t>(c0[i]) * 0xd2511f53u;
                const uint64_t two = static_cast<uint64_t>(c2[i]) * 0xcd9e8d57u;
                c0[i] = static_cast<uint32_t>(two >> 32) ^ c1[i] ^ k0;
                c1[i] = static_cast<uint32_t>(two);
                c2[i] = static_cast<uint32_t>(one >> 32) ^ c3[i] ^ k1;
                c3[i] = static_cast<uint32_t>(one);
            }
            k0 += 0x9e3779b9u;
            k1 += 0xbb67ae85u;
        }
        const uint32_t* word[4] = {c0, c1, c2, c3};
        for (int j = 0; j < 4; ++j) {
            float grow[W];
            for (int i = 0; i < W; ++i) grow[i] = word[j][i] < own.a.hiding.threshold ? 0.0f : own.a.hiding.grow;
            factor[j] = load(grow);
        }
    }
};

// Write rows of numbers from (dim, queries) in fp32, each query multiplied by its factor.
template <typename T>
NATIVE_INLINE void write_turned(const float* from, int64_t width, const float* factor, T* to, int64_t row,
                                int64_t rows, int64_t dim, float* room) {
    turn_all(units_of(from), width, B, B, units_of(room), width);
    for (int64_t r = 0; r < rows; ++r)
        for (int64_t d = 0; d < dim; ++d) store(&to[r * row + d], room[r * width + d] * factor[r]);
}

template <typename N>
struct Forward {  // the scratch memory of one thread
    typename N::Number *left, *plain, *weights;  // left: keys (keys, dim)
    uint32_t *values, *pairs, *right;  // values: (dim, units of keys); right: queries (units of dim, queries)
    float *scores, *out, *turned;      // out: (dim, queries)

    Forward(Room room, int64_t keys, int64_t width)
        : left(room.take<typename N::Number>(keys * width)), plain(room.take<typename N::Number>(B * width)),
          weights(room.take<typename N::Number>(B * B)), values(room.take<uint32_t>(width * keys / N::EACH)),
          pairs(room.take<uint32_t>(B * width)), right(room.take<uint32_t>(width / N::EACH * B)),
          scores(room.take<float>(B * B)), out(room.take<float>(width * B)), turned(room.take<float>(width * B)) {}
};

// Replace the scores of a block by weights. `top` and `sums` are the maxima and the sums of the blocks so far and are
// updated; `again` receives the factors that the results of the earlier blocks need.
template <typename N, bool DROP>
NATIVE_INLINE void soften(const Sight& sight, const Dropout& dropout, int64_t query, int64_t key, bool whole,
                          const Forward<N>& own, F* top, F* sums, F* again) {
    const F scale = all(sight.a.scale);
    for (int i = 0; i < VECTORS; ++i) {
        float* scores = own.scores + W * i;
        F most = top[i];
        for (int64_t r = 0; r < B; ++r) {
            F s = load(scores + r * B);
            if (!whole) {
                s = Sight::lanes(sight, query + W * i, key + r) ? s : all(-INFINITY);
                save(scores + r * B, s);
            }
            most = largest(most, s);
        }
        // A query may have seen no key yet.
        const F base = most == all(-INFINITY) ? F{} : most;
        again[i] = exp_lanes((top[i] - base) * scale);
        top[i] = most;
        const F shift = base * scale;
        F sum = F{};
        for (int64_t r = 0; r < B; r += 4) {
            F p[4], factor[4];
            for (int j = 0; j < 4; ++j) p[j] = exp_lanes(load(scores + (r + j) * B) * scale - shift);
            sum = sum + (p[0] + p[1]);
            sum = sum + (p[2] + p[3]);
            if (DROP) {
                Dropout::factors(dropout, query + W * i, key + r, factor);
                for (int j = 0; j < 4; ++j) p[j] = p[j] * factor[j];
            }
            put_units(own.weights + r * B + W * N::EACH * i, N::kept(p[0]), N::kept(p[1]));
            put_units(own.weights + (r + 2) * B + W * N::EACH * i, N::kept(p[2]), N::kept(p[3]));
        }
        sums[i] = sums[i] * again[i] + sum;
    }
}

// The results of the queries from `first` to `end` of a head.
template <typename N, typename T, bool DROP>
void forward_head(const AttentionArguments& a, int64_t batch, int64_t head, int64_t first, int64_t end, Room room) {
    const int64_t group = head / (a.heads / a.groups);
    const Head<N, T> q(a.q, batch, head, a.queries, a.dim), k(a.k, batch, group, a.keys, a.dim),
        v(a.v, batch, group, a.keys, a.dim);
    const int64_t keys = up(a.keys, B), width = q.width, units = width / N::EACH;
    const Sight sight(a, batch, room);
    const Dropout dropout(a, batch, head);
    const Forward<N> own(room, keys, width);
    k.plain(0, keys, own.left);
    for (int64_t key = 0; key < keys; key += B) {
        v.plain(key, B, own.plain);
        pair_rows(own.plain, B, width, own.pairs);
        turn_all(own.pairs, B / N::EACH, width, width, own.values + key / N::EACH, keys / N::EACH);
    }
    T* to = static_cast<T*>(a.out.at) + batch * a.out.batch + head * a.out.head;
    float* logs = a.logs + (batch * a.heads + head) * a.queries;
    for (int64_t query = first; query < end; query += B) {
        q.plain(query, B, own.plain);
        turn_all(units_of(own.plain), B, units, units, own.right, B);
        std::memset(own.out, 0, sizeof(float) * static_cast<size_t>(width * B));
        F top[VECTORS], sums[VECTORS], again[VECTORS];
        for (int i = 0; i < VECTORS; ++i) {
            top[i] = all(-INFINITY);
            sums[i] = F{};
        }
        for (int64_t key = 0; key < keys; key += B) {
            const Seen seen = sight.block(query, key);
            if (seen == Seen::NONE) continue;
            product<N, false>(units_of(own.left + key * width), units, own.right, B, units, own.scores, B, B, B);
            soften<N, DROP>(sight, dropout, query, key, seen == Seen::ALL, own, top, sums, again);
            product<N, true>(own.values + key / N::EACH, keys / N::EACH, units_of(own.weights), B, B / N::EACH, own.out,
                             B, width, B, again);
        }
        alignas(64) float inverse[B], highest[B], sum[B];
        for (int i = 0; i < VECTORS; ++i) {
            save(sum + W * i, sums[i]);
            save(highest + W * i, top[i]);
            save(inverse + W * i, 1.0f / sums[i]);
        }
        const int64_t rows = least(B, a.queries - query);
        for (int64_t r = 0; r < rows; ++r) logs[query + r] = highest[r] * a.scale + std::log(sum[r]);
        write_turned(own.out, width, inverse, to + query * a.out.row, a.out.row, rows, a.dim, own.turned);
    }
}

// A head's queries (or their gradients) for the backward pass, as right operands of products.
struct Side {
    uint32_t *turned, *rows;  // (units of dim, 64) and (units of queries, dim) of each block

    template <typename N, typename T>
    void prepare(const Head<N, T>& head, int64_t rows_, typename N::Number* plain) const {
        const int64_t units = head.width / N::EACH;
        for (int64_t first = 0; first < rows_; first += B) {
            head.plain(first, B, plain);
            turn_all(units_of(plain), B, units, units, turned + first * units, B);
            pair_rows(plain, B, head.width, rows + first / N::EACH * head.width);
        }
    }
};

template <typename N>
struct Backward {  // the scratch memory of one thread
    Side query_side, above_side;
    float *delta, *logs, *dq;  // dq: (dim, 64) of each block
    typename N::Number *plain, *values;
    uint32_t *pairs, *turned_keys;  // turned_keys: (dim, units of 64 keys)
    float *scores, *through;
    typename N::Number *weights, *slopes, *slope_units;  // (keys, queries), and (units of keys, queries)
    float *dk, *dv;  // of all keys

    Backward(Room room, int64_t queries, int64_t keys, int64_t width) {
        using Number = typename N::Number;
        const int64_t units = width / N::EACH;
        query_side = {room.take<uint32_t>(queries * units), room.take<uint32_t>(queries * units)};
        above_side = {room.take<uint32_t>(queries * units), room.take<uint32_t>(queries * units)};
        delta = room.take<float>(queries), logs = room.take<float>(queries);
        dq = room.take<float>(queries * width);
        plain = room.take<Number>(B * width), values = room.take<Number>(B * width);
        pairs = room.take<uint32_t>(B * width), turned_keys = room.take<uint32_t>(B * width);
        scores = room.take<float>(B * B), through = room.take<float>(B * B);
        weights = room.take<Number>(B * B), slopes = room.take<Number>(B * B);
        slope_units = room.take<Number>(B * B);
        dk = room.take<float>(keys * width), dv = room.take<float>(keys * width);
    }
};

// Turn a block's scores and their upstream gradients into weights and slopes.
template <typename N, bool DROP>
NATIVE_INLINE void slope_block(const Sight& sight, const Dropout& dropout, int64_t query, int64_t key, bool whole,
                               const Backward<N>& own) {
    const F scale = all(sight.a.scale);
    for (int i = 0; i < VECTORS; ++i) {
        const F shift = load(own.logs + query + W * i), mean = load(own.delta + query + W * i);
        for (int64_t r = 0; r < B; r += 4) {
            F p[4], slope[4], factor[4];
            if (DROP) Dropout::factors(dropout, query + W * i, key + r, factor);
            for (int j = 0; j < 4; ++j) {
                const int64_t at = (r + j) * B + W * i;
                p[j] = exp_lanes(load(own.scores + at) * scale - shift);
                if (!whole) p[j] = Sight::lanes(sight, query + W * i, key + r + j) ? p[j] : F{};
                const F above = load(own.through + at);
                slope[j] = N::kept(p[j] * ((DROP ? above * factor[j] : above) - mean));
                p[j] = N::kept(DROP ? p[j] * factor[j] : p[j]);
            }
            for (int j = 0; j < 4; j += 2) {
                const int64_t at = (r + j) * B;
                put_rows(own.weights + at + W * i, p[j], p[j + 1]);
                put_rows(own.slopes + at + W * i, slope[j], slope[j + 1]);
                put_units(own.slope_units + at + W * N::EACH * i, slope[j], slope[j + 1]);
            }
        }
    }
}

// Add one head's part to dk and dv of its group; write its dq.
template <typename N, typename T, bool DROP>
void backward_head(const AttentionArguments& a, int64_t batch, int64_t head, const Sight& sight,
                   const Backward<N>& own) {
    const int64_t group = head / (a.heads / a.groups);
    const Head<N, T> q(a.q, batch, head, a.queries, a.dim), k(a.k, batch, group, a.keys, a.dim),
        v(a.v, batch, group, a.keys, a.dim), out(a.out, batch, head, a.queries, a.dim),
        above(a.out_gradient, batch, head, a.queries, a.dim);
    const int64_t queries = up(a.queries, B), keys = up(a.keys, B), width = q.width, units = width / N::EACH;
    const Dropout dropout(a, batch, head);
    own.query_side.prepare(q, queries, own.plain);
    own.above_side.prepare(above, queries, own.plain);
    const float* given = a.logs + (batch * a.heads + head) * a.queries;
    for (int64_t r = 0; r < queries; ++r) own.logs[r] = r < a.queries ? given[r] : 0.0f;
    // The sums of `out` times its gradient, in the order in which the products below add, so that the slope of a query
    // that sees only one key is exactly 0.
    for (int64_t query = 0; query < queries; query += B) {
        out.plain(query, B, own.plain);
        turn_all(units_of(own.plain), B, units, units, own.pairs, B);
        const uint32_t* upstream = own.above_side.turned + query * units;
        for (int i = 0; i < VECTORS; ++i) {
            F sum = F{};
            for (int64_t u = 0; u < units; ++u)
                sum = N::dot(sum, lanes_of(own.pairs + u * B + W * i), lanes_of(upstream + u * B + W * i));
            save(own.delta + query + W * i, sum);
        }
    }
    std::memset(own.dq, 0, sizeof(float) * static_cast<size_t>(queries * width));
    for (int64_t key = 0; key < keys; key += B) {
        k.plain(key, B, own.plain);
        v.plain(key, B, own.values);
        pair_rows(own.plain, B, width, own.pairs);
        turn_all(own.pairs, B / N::EACH, width, width, own.turned_keys, B / N::EACH);
        float *dk = own.dk + key * width, *dv = own.dv + key * width;
        for (int64_t query = 0; query < queries; query += B) {
            const Seen seen = sight.block(query, key);
            if (seen == Seen::NONE) continue;
            product<N, false>(units_of(own.plain), units, own.query_side.turned + query * units, B, units, own.scores,
                              B, B, B);
            product<N, false>(units_of(own.values), units, own.above_side.turned + query * units, B, units,
                              own.through, B, B, B);
            slope_block<N, DROP>(sight, dropout, query, key, seen == Seen::ALL, own);
            const int64_t row = query / N::EACH * width, inner = B / N::EACH;
            product<N, true>(units_of(own.weights), inner, own.above_side.rows + row, width, inner, dv, width, B, width);
            product<N, true>(units_of(own.slopes), inner, own.query_side.rows + row, width, inner, dk, width, B, width);
            product<N, true>(own.turned_keys, inner, units_of(own.slope_units), B, inner, own.dq + query * width, B,
                             width, B);
        }
    }
    alignas(64) float factor[B];
    for (int64_t r = 0; r < B; ++r) factor[r] = a.scale;
    T* to = static_cast<T*>(a.dq.at) + batch * a.dq.batch + head * a.dq.head;
    for (int64_t query = 0; query < a.queries; query += B) {
        float* turned = reinterpret_cast<float*>(own.pairs);
        write_turned(own.dq + query * width, width, factor, to + query * a.dq.row, a.dq.row,
                     least(B, a.queries - query), a.dim, turned);
    }
}

// Compute the gradients of the heads that share keys. Their parts of dk and dv are added in the order of the heads.
template <typename N, typename T, bool DROP>
void backward_group(const AttentionArguments& a, int64_t batch, int64_t group, Room room) {
    const int64_t width = up(a.dim, 16 * N::EACH), keys = up(a.keys, B), each = a.heads / a.groups;
    const Sight sight(a, batch, room);
    const Backward<N> own(room, up(a.queries, B), keys, width);
    std::memset(own.dk, 0, sizeof(float) * static_cast<size_t>(keys * width));
    std::memset(own.dv, 0, sizeof(float) * static_cast<size_t>(keys * width));
    for (int64_t head = group * each; head < (group + 1) * each; ++head)
        backward_head<N, T, DROP>(a, batch, head, sight, own);
    T* to_k = static_cast<T*>(a.dk.at) + batch * a.dk.batch + group * a.dk.head;
    T* to_v = static_cast<T*>(a.dv.at) + batch * a.dv.batch + group * a.dv.head;
    for (int64_t r = 0; r < a.keys; ++r)
        for (int64_t d = 0; d < a.dim; ++d) {
            store(&to_k[r * a.dk.row + d], own.dk[r * width + d] * a.scale);
            store(&to_v[r * a.dv.row + d], own.dv[r * width + d]);
        }
}

template <typename N, typename T, bool DROP>
void all_heads(const AttentionArguments& a, bool backward) {
    const int64_t heads = backward ? a.groups : a.heads, chunks = backward ? 1 : a.chunks;
    const int64_t tasks = a.batch * heads * chunks, size = up((a.queries + chunks - 1) / chunks, B);
#pragma omp parallel for schedule(static) num_threads(a.threads) if (tasks > 1)
    for (int64_t task = 0; task < tasks; ++task) {
#ifdef _OPENMP
        const Room room{a.scratch + omp_get_thread_num() * a.scratch_size};
#else
        const Room room{a.scratch};
#endif
        const typename N::Session session;
        (void)session;
        const int64_t at = task / chunks, first = task % chunks * size;
        if (backward) backward_group<N, T, DROP>(a, at / heads, at % heads, room);
        else forward_head<N, T, DROP>(a, at / heads, at % heads, first, least(first + size, a.queries), room);
    }
}

template <typename N, typename T>
void attention_of(const AttentionArguments& a, bool backward) {
    if (a.hiding.threshold) all_heads<N, T, true>(a, backward);
    else all_heads<N, T, false>(a, backward);
}

}  // namespace

#endif
