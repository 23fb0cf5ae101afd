// Attention over a paged cache, as paged.cpp computes it.
#pragma once

#include "../compiled/native.h"

NATIVE_TEXT(native_text_of_paged_header)

constexpr int64_t PAGE = 16;
constexpr int TILE = 8;         // the most rows of queries that share a pass over the keys
constexpr int64_t TOKENS = 16;  // tokens of a task

// The layout of `_Batch` in paged.py.
struct Batch {
    const float* q;         // (tokens, heads, size), rows `q_stride` apart
    float* out;             // (tokens, heads, size)
    const float* keys;      // (pages, groups, size, 16)
    const float* values;    // (pages, groups, 16, size)
    const int32_t* tables;  // (sequences, `table_stride`): pages of each sequence
    const int32_t* begins;  // (sequences + 1): first token of each sequence
    const int32_t* first;   // (tokens): the first position that a token sees
    const int32_t* last;    // (tokens): one behind the last position that it sees
    float* scratch;         // (threads, TILE, `room`)
    int64_t q_stride, table_stride, room;
    int64_t sequences, heads, groups, size;
    float scale;
    int threads, level;
    uint16_t* rounded;  // (tokens, heads, size): `out` in bf16, or null
};

// The parts of a batch's attention, which may be computed in any order and by any thread.
struct __attribute__((visibility("hidden"))) Tasks {
    explicit Tasks(const Batch& batch);
    // scratch: of this thread, (TILE, `room`).
    void compute(int64_t i, float* scratch) const;

    const Batch& b;
    void (*run)(const Batch&, int64_t, int64_t, int64_t, int64_t, float*);
    int64_t pieces, count;
};

// Put the key and value of a token, (groups, size), into its slot.
__attribute__((visibility("hidden"))) void store_token(const float* key, const float* value, float* key_pages,
                                                       float* value_pages, int64_t slot, int64_t groups,
                                                       int64_t size);
