// Merge the bytes of a word to ids: the pair with the lowest rank first, the leftmost of equals, until no pair can
// merge.
#pragma once

#include "../compiled/native.h"

#include <cstdlib>

NATIVE_TEXT(native_text_of_bpe_merges)

namespace {

template <typename T>
T* room(int64_t count) { return static_cast<T*>(std::calloc(static_cast<size_t>(count ? count : 1), sizeof(T))); }

// A slot of the hash table is one number: left << 43 | right << 23 | rank. Eight slots are a bucket and fill a cache
// line. They are compared together, because a branch on whether a pair is in the table would often be mispredicted.
constexpr int RANK_BITS = 23, ID_BITS = 20;
constexpr uint32_t NEVER = (1u << RANK_BITS) - 1;  // the rank of a pair that does not merge
constexpr uint32_t NOBODY = (1u << ID_BITS) - 1;   // an id that does not merge with any
constexpr uint64_t FREE = ~uint64_t{0};
constexpr int64_t BUCKET = 8;

struct Merges {
    uint32_t byte_ids[256];
    uint32_t* byte_ranks;  // (256, 256), for the first step
    uint64_t* slots;       // (buckets, BUCKET), at most half full
    int shift;
    uint32_t* made;  // by rank
};

NATIVE_INLINE uint64_t pair_of(uint32_t left, uint32_t right) { return static_cast<uint64_t>(left) << ID_BITS | right; }

NATIVE_INLINE uint64_t* bucket_of(const Merges& merges, uint64_t pair) {
    return merges.slots + ((pair * 0x9e3779b97f4a7c15u) >> merges.shift) * BUCKET;
}

// If a bucket is full, the next one is used.
NATIVE_INLINE uint64_t* bucket_after(const Merges& merges, uint64_t* bucket) {
    const int64_t size = (int64_t{1} << (64 - merges.shift)) * BUCKET;
    return merges.slots + (bucket - merges.slots + BUCKET) % size;
}

NATIVE_INLINE uint32_t rank_of(const Merges& merges, uint32_t left, uint32_t right) {
    const uint64_t pair = pair_of(left, right);
    for (uint64_t* bucket = bucket_of(merges, pair);; bucket = bucket_after(merges, bucket)) {
        uint64_t found = FREE;  // at most one slot holds the pair
#pragma omp simd reduction(& : found)
        for (int j = 0; j < BUCKET; ++j) found &= bucket[j] >> RANK_BITS == pair ? bucket[j] : FREE;
        if (bucket[BUCKET - 1] == FREE || found != FREE) return static_cast<uint32_t>(found) & NEVER;
    }
}

// Words up to this many bytes are merged by searching for the smallest key, rank << 8 | place, 16 keys at a time.
// The compiler's default vectors are best here: wider ones took a sixth longer, because they wait for smaller writes
// that have just been made.
constexpr int SHORT = 256;

NATIVE_INLINE uint32_t least(const uint32_t* keys, int n) {
    int32_t lane[16];  // signed, because baseline vectors have no other minimum; keys never have the top bit
    std::memcpy(lane, keys, sizeof lane);
    for (int i = 16; i < n; i += 16) {
#pragma omp simd
        for (int j = 0; j < 16; ++j) {
            const int32_t key = static_cast<int32_t>(keys[i + j]);
            lane[j] = key < lane[j] ? key : lane[j];
        }
    }
    int32_t best = lane[0];
#pragma omp simd reduction(min : best)
    for (int j = 0; j < 16; ++j) best = lane[j] < best ? lane[j] : best;
    return static_cast<uint32_t>(best);
}

// Write the ids of a word of at most SHORT bytes to `out`; return their number. Place n is a sentinel before the
// first and after the last byte.
int merge_short(const Merges& merges, const uint8_t* word, int n, uint32_t* out) {
    uint32_t ids[SHORT + 1], keys[SHORT + 16];  // a key belongs to the pair that begins at its place
    uint16_t next[SHORT + 1], previous[SHORT + 1];
    for (int i = 0; i < n; ++i) {
        ids[i] = merges.byte_ids[word[i]];
        next[i] = static_cast<uint16_t>(i + 1);
        previous[i] = static_cast<uint16_t>(i ? i - 1 : n);
    }
    ids[n] = NOBODY;
    for (int i = 0; i + 1 < n; ++i)
        keys[i] = merges.byte_ranks[word[i] << 8 | word[i + 1]] << 8 | static_cast<uint32_t>(i);
    for (int i = n - 1; i < ((n + 15) & ~15); ++i) keys[i] = NEVER << 8;
    for (uint32_t key = least(keys, n); key < NEVER << 8; key = least(keys, n)) {
        const uint32_t at = key & 0xffu, right = next[at], after = next[right], before = previous[at];
        const uint32_t made = merges.made[key >> 8];
        ids[at] = made;
        next[at] = static_cast<uint16_t>(after);
        previous[after] = static_cast<uint16_t>(at);
        keys[right] = NEVER << 8;
        keys[at] = rank_of(merges, made, ids[after]) << 8 | at;
        keys[before] = rank_of(merges, ids[before], made) << 8 | before;
    }
    int count = 0;
    for (int i = 0; i < n; i = next[i]) out[count++] = ids[i];
    return count;
}

// The pairs of a long word are in a heap by rank and place: n log n for any word. It takes 28 bytes per byte of the
// word.
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
    if (rank == NEVER) return;
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
    Heap heap;  // at most two pairs per byte: a merge removes one and adds two
};

void merge_long(const Merges& merges, const uint8_t* word, uint32_t n, LongWord& w) {
    w.heap.size = 0;
    for (uint32_t i = 0; i < n; ++i) {
        w.ids[i] = merges.byte_ids[word[i]];
        w.next[i] = i + 1;
        w.previous[i] = i ? i - 1 : n;
        const uint32_t rank = i + 1 < n ? merges.byte_ranks[word[i] << 8 | word[i + 1]] : NEVER;
        if (rank != NEVER) w.heap.items[w.heap.size++] = static_cast<uint64_t>(rank) << 32 | i;
    }
    for (int64_t i = w.heap.size / 2 - 1; i >= 0; --i) sink(w.heap, i);
    while (w.heap.size) {
        const uint64_t top = pop(w.heap);
        const uint32_t at = static_cast<uint32_t>(top), right = w.next[at];
        // Skip a pair that has changed since it was pushed; merged ids are NOBODY.
        if (w.ids[at] == NOBODY || right >= n || rank_of(merges, w.ids[at], w.ids[right]) != top >> 32) continue;
        const uint32_t after = w.next[right], before = w.previous[at];
        w.ids[at] = merges.made[top >> 32];
        w.ids[right] = NOBODY;
        w.next[at] = after;
        if (after < n) {
            w.previous[after] = at;
            push(w.heap, rank_of(merges, w.ids[at], w.ids[after]), at);
        }
        if (before < n) push(w.heap, rank_of(merges, w.ids[before], w.ids[at]), before);
    }
}

// Return the slot of a pair, or the free slot for it.
uint64_t* slot_for(const Merges& merges, uint64_t pair) {
    for (uint64_t* bucket = bucket_of(merges, pair);; bucket = bucket_after(merges, bucket))
        for (int64_t j = 0; j < BUCKET; ++j)
            if (bucket[j] == FREE || bucket[j] >> RANK_BITS == pair) return bucket + j;
}

// Build the tables for `count` merges, each (left, right, made), in the order of their ranks. If a pair occurs
// twice, the last one counts. Return false if memory is short; `merges` must be all zeros before.
bool load_merges(Merges& merges, const uint32_t* byte_ids, const uint32_t* rows, int64_t count) {
    int bits = 1;
    while ((BUCKET << bits) < 2 * count) ++bits;
    const int64_t size = BUCKET << bits;
    void* slots = nullptr;
    if (posix_memalign(&slots, 64, static_cast<size_t>(size) * sizeof(uint64_t))) return false;
    merges.shift = 64 - bits;
    merges.slots = static_cast<uint64_t*>(slots);
    merges.made = room<uint32_t>(count);
    merges.byte_ranks = room<uint32_t>(256 * 256);
    if (!merges.made || !merges.byte_ranks) return false;
    for (int64_t i = 0; i < size; ++i) merges.slots[i] = FREE;
    for (int64_t rank = 0; rank < count; ++rank) {
        const uint64_t pair = pair_of(rows[3 * rank], rows[3 * rank + 1]);
        *slot_for(merges, pair) = pair << RANK_BITS | static_cast<uint64_t>(rank);
        merges.made[rank] = rows[3 * rank + 2];
    }
    std::memcpy(merges.byte_ids, byte_ids, sizeof merges.byte_ids);
    for (uint32_t a = 0; a < 256; ++a)
        for (uint32_t b = 0; b < 256; ++b) merges.byte_ranks[a << 8 | b] = rank_of(merges, byte_ids[a], byte_ids[b]);
    return true;
}

}  // namespace
