// The bytes of a word -> ids: the pair of the least rank is merged, the leftmost of equals first, until none is left.
#pragma once

#include "native.h"

#include <cstdlib>

NATIVE_TEXT(native_text_of_bpe_merges)

namespace {

constexpr uint32_t NONE = 0xffffffffu;

template <typename T>
T* room(int64_t count) { return static_cast<T*>(std::calloc(static_cast<size_t>(count ? count : 1), sizeof(T))); }

struct Slot {
    uint64_t pair;  // left << 32 | right
    uint32_t rank;  // NONE: free
    uint32_t unused;
};

struct Merges {
    uint32_t byte_ids[256];
    uint32_t* byte_ranks;  // (256, 256), for the first round
    Slot* slots;           // a hash table, at most half full
    int shift;
    uint32_t* made;  // by rank
};

NATIVE_INLINE uint64_t pair_of(uint32_t left, uint32_t right) { return static_cast<uint64_t>(left) << 32 | right; }

NATIVE_INLINE Slot* slot_of(const Merges& merges, uint64_t pair) {
    const uint64_t mask = (uint64_t{1} << (64 - merges.shift)) - 1;
    uint64_t at = ((pair ^ pair >> 31) * 0x9e3779b97f4a7c15u) >> merges.shift;
    while (merges.slots[at].rank != NONE && merges.slots[at].pair != pair) at = (at + 1) & mask;
    return &merges.slots[at];
}

NATIVE_INLINE uint32_t rank_of(const Merges& merges, uint32_t left, uint32_t right) {
    return slot_of(merges, pair_of(left, right))->rank;
}

// Words up to this many bytes are merged by scanning for the least rank, which vectors do at 16 pairs an
// instruction; it shares 31 bits with the rank.
constexpr int SHORT = 256;
constexpr int32_t NEVER = 0x7fffffff;

NATIVE_INLINE int32_t key_of(uint32_t rank, int at) {
    return rank == NONE ? NEVER : static_cast<int32_t>(rank << 8 | static_cast<uint32_t>(at));
}

NATIVE_INLINE int32_t least(const int32_t* keys, int n) {
    int32_t lane[16];
    for (int j = 0; j < 16; ++j) lane[j] = keys[j];
    for (int i = 16; i < n; i += 16)
        for (int j = 0; j < 16; ++j) lane[j] = keys[i + j] < lane[j] ? keys[i + j] : lane[j];
    for (int half = 8; half > 0; half /= 2)
        for (int j = 0; j < half; ++j) lane[j] = lane[j + half] < lane[j] ? lane[j + half] : lane[j];
    return lane[0];
}

// The ids of a word of at most SHORT bytes, in `ids`; how many. The leftmost of equal ranks goes first.
NATIVE_INLINE int merge_short(const Merges& merges, const uint8_t* word, int n, uint32_t* ids) {
    int32_t keys[SHORT];  // of the pair that begins here: rank << 8 | place
    int16_t next[SHORT], previous[SHORT];
    const int lanes = (n + 15) & ~15;
    for (int i = 0; i < n; ++i) {
        ids[i] = merges.byte_ids[word[i]];
        next[i] = static_cast<int16_t>(i + 1);
        previous[i] = static_cast<int16_t>(i - 1);
    }
    for (int i = 0; i + 1 < n; ++i) keys[i] = key_of(merges.byte_ranks[word[i] << 8 | word[i + 1]], i);
    for (int i = n - 1; i < lanes; ++i) keys[i] = NEVER;
    for (int32_t key = least(keys, lanes); key != NEVER; key = least(keys, lanes)) {
        const int at = key & 0xff, right = next[at], after = next[right], before = previous[at];
        ids[at] = merges.made[key >> 8];
        keys[right] = NEVER;
        next[at] = static_cast<int16_t>(after);
        keys[at] = NEVER;
        if (after < n) {
            previous[after] = static_cast<int16_t>(at);
            keys[at] = key_of(rank_of(merges, ids[at], ids[after]), at);
        }
        if (before >= 0) keys[before] = key_of(rank_of(merges, ids[before], ids[at]), before);
    }
    int count = 0;
    for (int i = 0; i < n; i = next[i]) ids[count++] = ids[i];
    return count;
}

using MergeShort = int (*)(const Merges&, const uint8_t*, int, uint32_t*);

int short_plain(const Merges& m, const uint8_t* word, int n, uint32_t* ids) { return merge_short(m, word, n, ids); }
#ifdef NATIVE_X86
NATIVE_AVX2 int short_avx2(const Merges& m, const uint8_t* word, int n, uint32_t* ids) {
    return merge_short(m, word, n, ids);
}
NATIVE_AVX512 int short_avx512(const Merges& m, const uint8_t* word, int n, uint32_t* ids) {
    return merge_short(m, word, n, ids);
}
#endif

MergeShort short_for(int level) {
#ifdef NATIVE_X86
    if (level == 2) return short_avx512;
    if (level == 1) return short_avx2;
#endif
    (void)level;
    return short_plain;
}

// A long word's pairs wait in a heap by rank and place: n log n, whatever the word. 28 bytes a byte of the word.
struct Heap {
    uint64_t* items;  // rank << 32 | place
    int64_t size;
};

void sink(Heap& heap, int64_t at) {
    const uint64_t item = heap.items[at];
    for (int64_t child = 2 * at + 1; child < heap.size; child = 2 * at + 1) {
        if (child + 1 < heap.size && heap.items[child + 1] < heap.items[child]) ++child;
        if (heap.items[child] >= item) break;
        heap.items[at] = heap.items[child];
        at = child;
    }
    heap.items[at] = item;
}

void push(Heap& heap, uint32_t rank, uint32_t place) {
    if (rank == NONE) return;
    const uint64_t item = static_cast<uint64_t>(rank) << 32 | place;
    int64_t at = heap.size++;
    for (; at > 0 && heap.items[(at - 1) / 2] > item; at = (at - 1) / 2) heap.items[at] = heap.items[(at - 1) / 2];
    heap.items[at] = item;
}

uint64_t pop(Heap& heap) {
    const uint64_t top = heap.items[0];
    heap.items[0] = heap.items[--heap.size];
    if (heap.size) sink(heap, 0);
    return top;
}

struct LongWord {
    uint32_t* ids;
    uint32_t* next;
    uint32_t* previous;
    Heap heap;  // never more than two pairs a byte: a merge takes one out and puts two in
};

void merge_long(const Merges& merges, const uint8_t* word, uint32_t n, LongWord& w) {
    w.heap.size = 0;
    for (uint32_t i = 0; i < n; ++i) {
        w.ids[i] = merges.byte_ids[word[i]];
        w.next[i] = i + 1;
        w.previous[i] = i - 1;  // of the first: NONE
        const uint32_t rank = i + 1 < n ? merges.byte_ranks[word[i] << 8 | word[i + 1]] : NONE;
        if (rank != NONE) w.heap.items[w.heap.size++] = static_cast<uint64_t>(rank) << 32 | i;
    }
    for (int64_t i = w.heap.size / 2 - 1; i >= 0; --i) sink(w.heap, i);
    while (w.heap.size) {
        const uint64_t top = pop(w.heap);
        const uint32_t at = static_cast<uint32_t>(top), right = w.next[at];
        // A pair that has changed since: a byte that was merged away has no id.
        if (w.ids[at] == NONE || right >= n || rank_of(merges, w.ids[at], w.ids[right]) != top >> 32) continue;
        const uint32_t after = w.next[right], before = w.previous[at];
        w.ids[at] = merges.made[top >> 32];
        w.ids[right] = NONE;
        w.next[at] = after;
        if (after < n) {
            w.previous[after] = at;
            push(w.heap, rank_of(merges, w.ids[at], w.ids[after]), at);
        }
        if (before != NONE) push(w.heap, rank_of(merges, w.ids[before], w.ids[at]), before);
    }
}

// Tables for `count` merges, each (left, right, made) in the order of their ranks. Of a pair given twice the last
// counts. False without memory; `merges` is all zeros before.
bool load_merges(Merges& merges, const uint32_t* byte_ids, const uint32_t* rows, int64_t count) {
    merges.shift = 60;
    while ((int64_t{1} << (64 - merges.shift)) < 2 * count) --merges.shift;
    const int64_t size = int64_t{1} << (64 - merges.shift);
    merges.slots = room<Slot>(size);
    merges.made = room<uint32_t>(count);
    merges.byte_ranks = room<uint32_t>(256 * 256);
    if (!merges.slots || !merges.made || !merges.byte_ranks) return false;
    for (int64_t i = 0; i < size; ++i) merges.slots[i].rank = NONE;
    for (int64_t rank = 0; rank < count; ++rank) {
        const uint64_t pair = pair_of(rows[3 * rank], rows[3 * rank + 1]);
        *slot_of(merges, pair) = Slot{pair, static_cast<uint32_t>(rank), 0};
        merges.made[rank] = rows[3 * rank + 2];
    }
    std::memcpy(merges.byte_ids, byte_ids, sizeof merges.byte_ids);
    for (uint32_t a = 0; a < 256; ++a)
        for (uint32_t b = 0; b < 256; ++b) merges.byte_ranks[a << 8 | b] = rank_of(merges, byte_ids[a], byte_ids[b]);
    return true;
}

}  // namespace
