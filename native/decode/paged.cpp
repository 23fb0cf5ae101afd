// Attention of a few new tokens over keys and values in pages of 16 positions.
//
// A page holds, for each head, keys as [size][16] and values as [16][size]. The result of a token is computed in the
// order of the positions it sees, whatever else is in the batch, so that it does not depend on it.
#include "paged.h"

#include <algorithm>

NATIVE_TEXT(native_text_of_paged)

namespace {

// Each number of a vector is a sum of its own, so results do not depend on the width.
typedef float V8 __attribute__((vector_size(32)));
typedef float V16 __attribute__((vector_size(64)));

struct Query {
    const float* q;
    float* out;
    int64_t first, last;
};

template <typename V, int ROWS>
NATIVE_INLINE void scores_of(const Batch& b, const Query* rows, const int32_t* table, int64_t group, float* scores) {
    constexpr int LONG = sizeof(V) / sizeof(float), PARTS = PAGE / LONG;
    int64_t first = rows[0].first, last = rows[0].last;
    for (int r = 1; r < ROWS; ++r) {
        first = std::min(first, rows[r].first);
        last = std::max(last, rows[r].last);
    }
    for (int64_t page = first / PAGE; page * PAGE < last; ++page) {
        const float* keys = b.keys + (table[page] * b.groups + group) * b.size * PAGE;
        V sums[ROWS][PARTS] = {};
        for (int64_t d = 0; d < b.size; ++d) {
            V low, high;
            std::memcpy(&low, keys + d * PAGE, sizeof low);
            if (PARTS == 2) std::memcpy(&high, keys + d * PAGE + 8, sizeof high);
            for (int r = 0; r < ROWS; ++r) {
                sums[r][0] += low * rows[r].q[d];
                if (PARTS == 2) sums[r][PARTS - 1] += high * rows[r].q[d];
            }
        }
        for (int r = 0; r < ROWS; ++r)
            for (int h = 0; h < PARTS; ++h) {
                const V scaled = sums[r][h] * b.scale;
                std::memcpy(scores + r * b.room + page * PAGE + h * LONG, &scaled, sizeof scaled);
            }
    }
}

// Turn the scores that a row sees into probabilities.
NATIVE_INLINE void softmax(float* scores, int64_t n) {
    const float top = max_of(scores, n);
    int64_t i = 0;
    for (; i + 16 <= n; i += 16) {
#pragma omp simd
        for (int j = 0; j < 16; ++j) scores[i + j] = exp_nonpositive(scores[i + j] - top);
    }
    if (i < n) {
        float rest[16];
        for (int j = 0; j < 16; ++j) rest[j] = i + j < n ? scores[i + j] - top : 0.0f;
#pragma omp simd
        for (int j = 0; j < 16; ++j) rest[j] = exp_nonpositive(rest[j]);
        for (int j = 0; i + j < n; ++j) scores[i + j] = rest[j];
    }
    const float total = 1.0f / sum_of(scores, n);
    for (i = 0; i < n; ++i) scores[i] *= total;
}

// Add up WIDE vectors of the values, from number `at` of a head.
template <typename V, int WIDE>
NATIVE_INLINE void mix_part(const Batch& b, const Query& row, const int32_t* table, int64_t group, const float* p,
                            int64_t at) {
    constexpr int LONG = sizeof(V) / sizeof(float);
    V sums[WIDE] = {};
    for (int64_t position = row.first; position < row.last;) {
        const int64_t page = position / PAGE, end = std::min(row.last, (page + 1) * PAGE);
        const float* values = b.values + (table[page] * b.groups + group) * b.size * PAGE - page * PAGE * b.size + at;
        for (; position < end; ++position)
            for (int w = 0; w < WIDE; ++w) {
                V value;
                std::memcpy(&value, values + position * b.size + w * LONG, sizeof value);
                sums[w] += value * p[position];
            }
    }
    std::memcpy(row.out + at, sums, sizeof sums);
}

// Add the values of positions [begin, end) to the sums of rows.
template <int ROWS, int WIDE>
NATIVE_INLINE void add_values(const Batch& b, const int32_t* table, int64_t group, const float* scores, int64_t begin,
                              int64_t end, int64_t at, V16 (*sums)[WIDE]) {
    // Copies in registers: for the compiler, writes to `sums` might change the scores.
    V16 own[ROWS][WIDE];
    std::memcpy(own, sums, sizeof own);
    for (int64_t position = begin; position < end;) {
        const int64_t page = position / PAGE, stop = std::min(end, (page + 1) * PAGE);
        const float* values = b.values + (table[page] * b.groups + group) * b.size * PAGE - page * PAGE * b.size + at;
        for (; position < stop; ++position) {
            V16 part[WIDE];
            std::memcpy(part, values + position * b.size, sizeof part);
            for (int r = 0; r < ROWS; ++r)
                for (int w = 0; w < WIDE; ++w) own[r][w] += part[w] * scores[r * b.room + position];
        }
    }
    std::memcpy(sums, own, sizeof own);
}

// The same for four rows. Values of positions that all four see are read once; each row adds them in order.
template <int WIDE>
NATIVE_INLINE void mix_four(const Batch& b, const Query* rows, const int32_t* table, int64_t group,
                            const float* scores, int64_t at) {
    int64_t begin = rows[0].first, end = rows[0].last;
    for (int r = 1; r < 4; ++r) {
        begin = std::max(begin, rows[r].first);
        end = std::min(end, rows[r].last);
    }
    if (begin > end) begin = end = rows[0].first;
    V16 sums[4][WIDE] = {};
    for (int r = 0; r < 4; ++r)
        add_values<1, WIDE>(b, table, group, scores + r * b.room, rows[r].first, std::min(begin, rows[r].last), at,
                            sums + r);
    add_values<4, WIDE>(b, table, group, scores, begin, end, at, sums);
    for (int r = 0; r < 4; ++r) {
        add_values<1, WIDE>(b, table, group, scores + r * b.room, std::max(end, rows[r].first), rows[r].last, at,
                            sums + r);
        std::memcpy(rows[r].out + at, sums[r], sizeof sums[r]);
    }
}

NATIVE_INLINE void mix_rest(const Batch& b, const Query& row, const int32_t* table, int64_t group, const float* p,
                            int64_t at) {
    for (; at + 8 <= b.size; at += 8) mix_part<V8, 1>(b, row, table, group, p, at);
    for (; at < b.size; ++at) {
        float sum = 0.0f;
        for (int64_t position = row.first; position < row.last; ++position) {
            const int64_t page = position / PAGE;
            sum += p[position] *
                   b.values[((table[page] * b.groups + group) * PAGE + position % PAGE) * b.size + at];
        }
        row.out[at] = sum;
    }
}

template <typename V>
NATIVE_INLINE void mix(const Batch& b, const Query& row, const int32_t* table, int64_t group, const float* p) {
    int64_t at = 0;
    for (; at + 64 <= b.size; at += 64) mix_part<V, 64 * sizeof(float) / sizeof(V)>(b, row, table, group, p, at);
    mix_rest(b, row, table, group, p, at);
}

template <typename V, int ROWS>
NATIVE_INLINE void rows_of(const Batch& b, const Query* rows, const int32_t* table, int64_t group, float* scratch) {
    scores_of<V, ROWS>(b, rows, table, group, scratch);
    for (int r = 0; r < ROWS; ++r) softmax(scratch + r * b.room + rows[r].first, rows[r].last - rows[r].first);
    if (sizeof(V) < sizeof(V16) || ROWS < 4) {
        for (int r = 0; r < ROWS; ++r) mix<V>(b, rows[r], table, group, scratch + r * b.room);
        return;
    }
    for (int r = 0; r + 4 <= ROWS; r += 4) {
        float* scores = scratch + r * b.room;
        int64_t at = 0;
        for (; at + 32 <= b.size; at += 32) mix_four<2>(b, rows + r, table, group, scores, at);
        for (int each = 0; each < 4; ++each) mix_rest(b, rows[r + each], table, group, scores + each * b.room, at);
    }
}

// Tokens [from, to) of one sequence, for the heads that share one head of keys.
template <typename V, int MOST>
NATIVE_INLINE void task(const Batch& b, int64_t sequence, int64_t group, int64_t from, int64_t to, float* scratch) {
    const int64_t share = b.heads / b.groups;
    const int32_t* table = b.tables + sequence * b.table_stride;
    Query rows[MOST];
    int count = 0;
    for (int64_t i = from * share; i < to * share; ++i) {
        const int64_t token = i / share, head = group * share + i % share;
        rows[count++] = Query{b.q + token * b.q_stride + head * b.size, b.out + (token * b.heads + head) * b.size,
                              b.first[token], b.last[token]};
        if (count == MOST) {
            rows_of<V, MOST>(b, rows, table, group, scratch);
            count = 0;
        }
    }
    int r = 0;
    for (; r + 4 <= count; r += 4) rows_of<V, 4>(b, rows + r, table, group, scratch);
    for (; r < count; ++r) rows_of<V, 1>(b, rows + r, table, group, scratch);
}

using Task = void (*)(const Batch&, int64_t, int64_t, int64_t, int64_t, float*);

void task_plain(const Batch& b, int64_t sequence, int64_t group, int64_t from, int64_t to, float* scratch) {
    task<V8, 4>(b, sequence, group, from, to, scratch);
}
#ifdef NATIVE_X86
NATIVE_AVX2 void task_avx2(const Batch& b, int64_t sequence, int64_t group, int64_t from, int64_t to,
                           float* scratch) {
    task<V8, 4>(b, sequence, group, from, to, scratch);
}
// AVX-512 has twice as many registers, of twice the width.
NATIVE_AVX512 void task_avx512(const Batch& b, int64_t sequence, int64_t group, int64_t from, int64_t to,
                               float* scratch) {
    task<V16, TILE>(b, sequence, group, from, to, scratch);
}
#endif

}  // namespace

Tasks::Tasks(const Batch& batch) : b(batch), run(task_plain) {
#ifdef NATIVE_X86
    if (b.level >= 1) run = task_avx2;
    if (b.level >= 2) run = task_avx512;
#endif
    int64_t most = 0;
    for (int64_t s = 0; s < b.sequences; ++s) most = std::max<int64_t>(most, b.begins[s + 1] - b.begins[s]);
    pieces = (most + TOKENS - 1) / TOKENS;
    count = b.sequences * b.groups * pieces;
}

void Tasks::compute(int64_t i, float* scratch) const {
    const int64_t sequence = i / (b.groups * pieces), group = i / pieces % b.groups;
    const int64_t from = b.begins[sequence] + i % pieces * TOKENS;
    const int64_t to = std::min<int64_t>(b.begins[sequence + 1], from + TOKENS);
    if (from >= to) return;
    run(b, sequence, group, from, to, scratch);
    if (!b.rounded) return;
    const int64_t width = b.heads / b.groups * b.size, stride = b.heads * b.size;
    for (int64_t token = from; token < to; ++token) {
        const int64_t at = token * stride + group * width;
        for (int64_t j = 0; j < width; ++j) store(&b.rounded[at + j], b.out[at + j]);
    }
}

NATIVE_EXPORT void native_paged_attention(const Batch* batch) {
    const Batch& b = *batch;
    const Tasks tasks(b);
    int64_t work = 0;
    for (int64_t t = 0; t < b.begins[b.sequences]; ++t) work += b.last[t] - b.first[t];
#pragma omp parallel for schedule(dynamic) num_threads(b.threads) if (work * b.heads * b.size > 16384)
    for (int64_t i = 0; i < tasks.count; ++i) {
#ifdef _OPENMP
        tasks.compute(i, b.scratch + omp_get_thread_num() * TILE * b.room);
#else
        tasks.compute(i, b.scratch);
#endif
    }
}

void store_token(const float* key, const float* value, float* key_pages, float* value_pages, int64_t slot,
                 int64_t groups, int64_t size) {
    const int64_t page = slot / PAGE, offset = slot % PAGE;
    for (int64_t g = 0; g < groups; ++g) {
        float* at = key_pages + (page * groups + g) * size * PAGE;
        for (int64_t d = 0; d < size; ++d) at[d * PAGE + offset] = key[g * size + d];
        std::memcpy(value_pages + ((page * groups + g) * PAGE + offset) * size, value + g * size,
                    static_cast<size_t>(size) * sizeof(float));
    }
}

// Put keys and values of new tokens, (tokens, groups, size) with rows `stride` apart, into their slots (16 page + place).
NATIVE_EXPORT void native_paged_store(const float* keys, const float* values, int64_t stride, float* key_pages,
                                      float* value_pages, const int64_t* slots, int64_t tokens, int64_t groups,
                                      int64_t size) {
    for (int64_t t = 0; t < tokens; ++t)
        store_token(keys + t * stride, values + t * stride, key_pages, value_pages, slots[t], groups, size);
}

NATIVE_EXPORT const char* native_source_paged() { return native_text_of_paged; }
