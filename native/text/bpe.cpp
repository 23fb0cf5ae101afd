// Byte-level BPE as in GPT-2: text -> added tokens and words -> bytes -> merges by rank. It is fast because words
// are found without a regular expression, and the ids of words seen before come from a cache.
#include "bpe_merges.h"
#include "bpe_words.h"
#include "../compiled/native.h"
#include "utf8.h"

#include <cstdlib>

NATIVE_TEXT(native_text_of_bpe)

namespace {

constexpr int64_t NO_MEMORY = -1;  // smaller results are -2 - (the first document that is not UTF-8)
constexpr int MOST_THREADS = 256;
constexpr int64_t KEPT = 1 << 20;  // bytes: larger buffers for a word or text are freed after its document
constexpr int64_t SLACK = 16;  // ids that a copy from the cache may write past the end

// The cache of words has a fixed size, so that it takes the same memory for a corpus of any length.

// An entry for nearly every word of a Latin script: up to 15 bytes, and 7 ids of two bytes or 3 of four. Two entries
// share a cache line.
template <typename Id>
struct alignas(32) Brief {
    uint64_t low, high;  // the bytes, padded with zeros; the last byte is the length
    Id ids[16 / sizeof(Id) - 1];
    Id count;
};

// An entry for a longer word.
template <typename Id>
struct Broad {
    uint16_t size, count;
    uint8_t bytes[60];
    Id ids[64 / sizeof(Id)];
};

constexpr int BRIEF_BITS = 15;  // sets of two: 2 MiB
constexpr int BROAD_BITS = 14;  // 2 MiB
constexpr int64_t BRIEF_SIZE = 15, BROAD_SIZE = 60;

struct Key {
    uint64_t low, high;
};

// Nothing at or after `limit` may be read.
NATIVE_INLINE Key key_of_word(const uint8_t* word, int64_t n, const uint8_t* limit) {
    Key key = {0, 0};
    uint8_t bytes[16] = {};
    if (limit - word >= 16) {
        std::memcpy(bytes, word, 16);
    } else {
        std::memcpy(bytes, word, static_cast<size_t>(n));
    }
    std::memcpy(&key.low, bytes, 8);
    std::memcpy(&key.high, bytes + 8, 8);
#if __BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__
    const uint64_t some = (uint64_t{1} << (n % 8 * 8)) - 1;
    key.low &= n < 8 ? some : ~uint64_t{0};
    key.high = (n < 8 ? 0 : key.high & some) | static_cast<uint64_t>(n) << 56;
#else
    std::memset(bytes, 0, sizeof bytes);
    std::memcpy(bytes, word, static_cast<size_t>(n));
    bytes[15] = static_cast<uint8_t>(n);
    std::memcpy(&key.low, bytes, 8);
    std::memcpy(&key.high, bytes + 8, 8);
#endif
    return key;
}

NATIVE_INLINE uint64_t mixed(uint64_t x, uint64_t y) {
    const uint64_t h = (x ^ (y * 0xff51afd7ed558ccdu)) * 0x9e3779b97f4a7c15u;
    return (h ^ h >> 32) * 0xc4ceb9fe1a85ec53u;
}

NATIVE_INLINE uint64_t hash_of(const uint8_t* word, int64_t n) {
    uint64_t h = static_cast<uint64_t>(n);
    for (int64_t i = 0; i < n; i += 8) {
        uint64_t x = 0;
        std::memcpy(&x, word + i, static_cast<size_t>(n - i < 8 ? n - i : 8));
        h = mixed(x, h);
    }
    return h;
}

// ---- the data of one thread: its cache, and buffers for rare cases

template <typename Id>
struct Scratch {
    Brief<Id>* brief;  // (sets, 2): the first of a set was found again after it was added
    Broad<Id>* broad;
    LongWord word;
    int64_t word_room;  // bytes of the longest word that fits
    uint8_t* prefixed;
    int64_t prefixed_room;
    Id* out;
    bool failed;  // out of memory; the rest is skipped
};

template <typename Id>
void drop_word(Scratch<Id>& s) {
    void* all[] = {s.word.ids, s.word.next, s.word.previous, s.word.heap.items};
    for (void* one : all) std::free(one);
    s.word = LongWord{};
    s.word_room = 0;
}

template <typename Id>
void drop_prefixed(Scratch<Id>& s) {
    std::free(s.prefixed);
    s.prefixed = nullptr;
    s.prefixed_room = 0;
}

template <typename Id>
bool make_room(Scratch<Id>& s, int64_t n) {
    if (n <= s.word_room) return true;
    drop_word(s);
    s.word = LongWord{room<uint32_t>(n), room<uint32_t>(n), room<uint32_t>(n), Heap{room<uint64_t>(2 * n), 0}};
    if (!s.word.ids || !s.word.next || !s.word.previous || !s.word.heap.items) return false;
    s.word_room = n;
    return true;
}

// ---- the model

struct Added {
    const uint8_t* text;
    int64_t size;
    uint32_t id;
};

// Tokens that are found before the text is divided into words: those of the first pass, then, in the remaining text,
// those of the second (`normalized` tokens; this code does not normalise).
struct AddedPass {
    Added* tokens;  // longest first
    int64_t count;
    bool first[256];  // whether a token begins with this byte
    int single;       // that byte if there is only one, or -1
};

struct Model {
    Classes classes;
    Merges merges;
    AddedPass passes[2];
    uint8_t* added_text;
    void* scratch;  // (threads)
    int threads;
    bool wide;          // ids have four bytes instead of two
    bool prefix_space;  // each piece of text gets a space in front if it has none
};

template <typename Id>
NATIVE_INLINE void put(Scratch<Id>& s, const uint32_t* ids, int64_t count) {
    for (int64_t i = 0; i < count; ++i) s.out[i] = static_cast<Id>(ids[i]);
    s.out += count;
}

template <typename Id>
void long_word(const Model& m, Scratch<Id>& s, const uint8_t* word, int64_t n) {
    if (!make_room(s, n)) {
        s.failed = true;
        return;
    }
    merge_long(m.merges, word, static_cast<uint32_t>(n), s.word);
    for (uint32_t i = 0; i < n; i = s.word.next[i]) *s.out++ = static_cast<Id>(s.word.ids[i]);
}

// Encode a word that is not in the first cache: take it from the second, or merge it and store the ids.
template <typename Id>
void other_word(const Model& m, Scratch<Id>& s, const uint8_t* word, int64_t n, const Key& key, Brief<Id>* set) {
    Broad<Id>* broad = nullptr;
    if (n <= BROAD_SIZE && (!set || sizeof(Id) > 2)) {
        broad = &s.broad[hash_of(word, n) >> (64 - BROAD_BITS)];
        if (broad->size == n && std::memcmp(broad->bytes, word, static_cast<size_t>(n)) == 0) {
            std::memcpy(s.out, broad->ids, broad->count * sizeof(Id));
            s.out += broad->count;
            return;
        }
    }
    if (n > SHORT) return long_word(m, s, word, n);
    uint32_t ids[SHORT];
    const int count = merge_short(m.merges, word, static_cast<int>(n), ids);
    put(s, ids, count);
    constexpr int brief_ids = sizeof(Brief<Id>::ids) / sizeof(Id), broad_ids = sizeof(Broad<Id>::ids) / sizeof(Id);
    if (set && count <= brief_ids) {
        // A new word goes to the second position, where the next new word replaces it.
        set[1].low = key.low;
        set[1].high = key.high;
        set[1].count = static_cast<Id>(count);
        for (int i = 0; i < count; ++i) set[1].ids[i] = static_cast<Id>(ids[i]);
    } else if (broad && count <= broad_ids) {
        broad->size = static_cast<uint16_t>(n);
        broad->count = static_cast<uint16_t>(count);
        std::memcpy(broad->bytes, word, static_cast<size_t>(n));
        for (int i = 0; i < count; ++i) broad->ids[i] = static_cast<Id>(ids[i]);
    }
}

template <typename Id>
NATIVE_INLINE void one_word(const Model& m, Scratch<Id>& s, const uint8_t* word, int64_t n, const uint8_t* limit) {
    if (n > BRIEF_SIZE) return other_word<Id>(m, s, word, n, Key{}, nullptr);
    const Key key = key_of_word(word, n, limit);
    Brief<Id>* set = s.brief + (mixed(key.low, key.high) >> (64 - BRIEF_BITS)) * 2;
    if (set[0].low != key.low || set[0].high != key.high) {
        if (set[1].low != key.low || set[1].high != key.high) return other_word<Id>(m, s, word, n, key, set);
        const Brief<Id> front = set[0];
        set[0] = set[1];
        set[1] = front;
    }
    std::memcpy(s.out, set[0].ids, sizeof set[0].ids);
    s.out += set[0].count;
}

template <typename Id>
void words(const Model& m, Scratch<Id>& s, const uint8_t* p, const uint8_t* end, const uint8_t* limit) {
    while (p < end) {
        const uint8_t* next = word_end(m.classes, p, end);
        one_word(m, s, p, next - p, limit);
        p = next;
    }
}

// Encode a piece of text between added tokens.
template <typename Id>
void piece(const Model& m, Scratch<Id>& s, const uint8_t* p, const uint8_t* end, const uint8_t* limit) {
    if (!m.prefix_space || p == end || *p == ' ') return words(m, s, p, end, limit);
    const int64_t size = end - p + 1;
    if (size > s.prefixed_room) {
        drop_prefixed(s);
        s.prefixed = room<uint8_t>(size + 16);
        s.prefixed_room = s.prefixed ? size : 0;
        s.failed |= !s.prefixed;
    }
    if (s.failed) return;
    s.prefixed[0] = ' ';
    std::memcpy(s.prefixed + 1, p, static_cast<size_t>(size - 1));
    words(m, s, s.prefixed, s.prefixed + size, s.prefixed + s.prefixed_room + 16);
}

const uint8_t* next_candidate(const AddedPass& pass, const uint8_t* p, const uint8_t* end) {
    if (pass.single >= 0) {
        const void* found = std::memchr(p, pass.single, static_cast<size_t>(end - p));
        return found ? static_cast<const uint8_t*>(found) : end;
    }
    while (p < end && !pass.first[*p]) ++p;
    return p;
}

// Return the longest added token at p, or null.
const Added* added_at(const AddedPass& pass, const uint8_t* p, const uint8_t* end) {
    for (int64_t i = 0; i < pass.count; ++i) {
        const Added& one = pass.tokens[i];
        if (one.size <= end - p && std::memcmp(one.text, p, static_cast<size_t>(one.size)) == 0) return &one;
    }
    return nullptr;
}

template <typename Id>
void split_added(const Model& m, Scratch<Id>& s, int number, const uint8_t* p, const uint8_t* end, const uint8_t* limit) {
    if (number == 2) return piece(m, s, p, end, limit);
    const AddedPass& own = m.passes[number];
    const uint8_t* from = p;
    while (own.count && (p = next_candidate(own, p, end)) < end) {
        const Added* found = added_at(own, p, end);
        if (!found) {
            ++p;
            continue;
        }
        split_added(m, s, number + 1, from, p, limit);
        *s.out++ = static_cast<Id>(found->id);
        from = p += found->size;
    }
    split_added(m, s, number + 1, from, end, limit);
}

// ---- many documents

struct Job {
    const uint8_t* text;
    const int64_t* starts;  // (documents), like `ends`; ascending and without overlap
    const int64_t* ends;
    int64_t documents;
    int64_t readable;  // number of bytes of `text`
    void* ids;         // (ids per byte * bytes + documents + threads * SLACK)
    int32_t* lengths;  // (documents)
    int64_t eod;       // appended to each document that has ids, or -1
    int threads;
};

int64_t ids_a_byte(const Model& m) { return m.prefix_space ? 2 : 1; }

struct Part {
    int64_t from, to;  // documents
    int64_t at;        // the position of its first id
    int64_t count;
    int64_t fault;
};

template <typename Id>
void encode_part(const Model& m, Scratch<Id>& s, const Job& job, Part& part) {
    Id* const begin = static_cast<Id*>(job.ids) + part.at;
    s.out = begin;
    s.failed = false;
    for (int64_t d = part.from; d < part.to && !part.fault; ++d) {
        const uint8_t* p = job.text + job.starts[d];
        const uint8_t* end = job.text + job.ends[d];
        Id* const start = s.out;
        if (!is_utf8(p, end)) {
            part.fault = -2 - d;
            return;
        }
        split_added(m, s, 0, p, end, job.text + job.readable);
        if (job.eod >= 0 && s.out > start) *s.out++ = static_cast<Id>(job.eod);
        job.lengths[d] = static_cast<int32_t>(s.out - start);
        if (s.failed) part.fault = NO_MEMORY;
        if (s.word_room > KEPT) drop_word(s);
        if (s.prefixed_room > KEPT) drop_prefixed(s);
    }
    part.count = s.out - begin;
}

// Divide the documents into parts of about equal bytes, one per thread.
int divide(const Model& m, const Job& job, Part* parts) {
    const int64_t first = job.documents ? job.starts[0] : 0;
    const int64_t bytes = job.documents ? job.ends[job.documents - 1] - first : 0;
    const int most = job.threads < m.threads ? job.threads : m.threads;
    const int count = job.documents < most ? static_cast<int>(job.documents) : most;
    int64_t document = 0;
    for (int i = 0; i < count; ++i) {
        parts[i].from = document;
        while (document < job.documents && (i + 1 == count || job.ends[document] - first <= bytes / count * (i + 1)))
            ++document;
        parts[i].to = document;
        const int64_t before = parts[i].from < job.documents ? job.starts[parts[i].from] - first : bytes;
        parts[i].at = ids_a_byte(m) * before + parts[i].from + i * SLACK;
        parts[i].count = parts[i].fault = 0;
    }
    return count;
}

template <typename Id>
int64_t encode(const Model& m, const Job& job) {
    Part parts[MOST_THREADS];
    const int count = divide(m, job, parts);
    Scratch<Id>* scratch = static_cast<Scratch<Id>*>(m.scratch);
    if (count == 1) {
        encode_part(m, scratch[0], job, parts[0]);  // starts no threads, so that the process can still fork later
    } else {
#pragma omp parallel for schedule(static, 1) num_threads(count)
        for (int i = 0; i < count; ++i) encode_part(m, scratch[i], job, parts[i]);
    }
    Id* ids = static_cast<Id*>(job.ids);
    int64_t total = 0;
    for (int i = 0; i < count; ++i) {
        if (parts[i].fault) return parts[i].fault;
        std::memmove(ids + total, ids + parts[i].at, static_cast<size_t>(parts[i].count) * sizeof(Id));
        total += parts[i].count;
    }
    return total;
}

// ---- creating and freeing a model

struct Spec {
    const uint32_t* byte_ids;     // (256)
    const uint32_t* merges;       // (merge_count, 3): left, right, made
    const uint8_t* added_text;    // concatenated, the longest of each pass first
    const int64_t* added_ends;    // (added_count)
    const uint32_t* added_ids;    // (added_count)
    const uint8_t* added_passes;  // (added_count): 0 or 1
    int64_t merge_count, added_count;
    int prefix_space, wide, threads;
};

void add(AddedPass& pass, const Added& token) {
    const uint8_t first = token.text[0];
    pass.single = pass.count == 0 || pass.single == first ? first : -1;
    pass.first[first] = true;
    pass.tokens[pass.count++] = token;
}

bool load_added(Model& m, const Spec& spec) {
    const int64_t bytes = spec.added_count ? spec.added_ends[spec.added_count - 1] : 0;
    m.added_text = room<uint8_t>(bytes);
    for (AddedPass& pass : m.passes) pass.tokens = room<Added>(spec.added_count);
    if (!m.added_text || !m.passes[0].tokens || !m.passes[1].tokens) return false;
    std::memcpy(m.added_text, spec.added_text, static_cast<size_t>(bytes));
    int64_t at = 0;
    for (int64_t i = 0; i < spec.added_count; at = spec.added_ends[i++])
        add(m.passes[spec.added_passes[i]], Added{m.added_text + at, spec.added_ends[i] - at, spec.added_ids[i]});
    return true;
}

template <typename Id>
bool load_scratch(Model& m) {
    Scratch<Id>* scratch = room<Scratch<Id>>(m.threads);
    m.scratch = scratch;
    for (int i = 0; scratch && i < m.threads; ++i) {
        void* brief = nullptr;
        const size_t size = sizeof(Brief<Id>) * 2 << BRIEF_BITS;
        if (posix_memalign(&brief, 64, size)) return false;
        std::memset(brief, 0, size);
        scratch[i].brief = static_cast<Brief<Id>*>(brief);
        scratch[i].broad = room<Broad<Id>>(int64_t{1} << BROAD_BITS);
        if (!scratch[i].broad) return false;
    }
    return scratch != nullptr;
}

template <typename Id>
void free_scratch(Model& m) {
    Scratch<Id>* scratch = static_cast<Scratch<Id>*>(m.scratch);
    for (int i = 0; scratch && i < m.threads; ++i) {
        Scratch<Id>& s = scratch[i];
        drop_word(s);
        drop_prefixed(s);
        std::free(s.brief);
        std::free(s.broad);
    }
    std::free(scratch);
}

}  // namespace

NATIVE_EXPORT void native_bpe_free(Model* m) {
    if (m->wide) {
        free_scratch<int32_t>(*m);
    } else {
        free_scratch<uint16_t>(*m);
    }
    void* all[] = {m->classes.cells,     m->merges.byte_ranks,  m->merges.slots, m->merges.made,
                   m->passes[0].tokens, m->passes[1].tokens, m->added_text};
    for (void* one : all) std::free(one);
    std::free(m);
}

// Return a model, or null if memory is short. The data of `spec` may be freed afterwards.
NATIVE_EXPORT Model* native_bpe_new(const Spec* spec) {
    Model* m = room<Model>(1);
    if (!m) return nullptr;
    m->threads = spec->threads < 1 ? 1 : spec->threads > MOST_THREADS ? MOST_THREADS : spec->threads;
    m->wide = spec->wide != 0;
    m->prefix_space = spec->prefix_space != 0;
    const bool loaded = load_classes(m->classes) &&
                        load_merges(m->merges, spec->byte_ids, spec->merges, spec->merge_count) &&
                        load_added(*m, *spec) &&
                        (m->wide ? load_scratch<int32_t>(*m) : load_scratch<uint16_t>(*m));
    if (loaded) return m;
    native_bpe_free(m);
    return nullptr;
}

// Return the number of ids written; -1 if memory is short, -2 - i if document i is not UTF-8. One call at a time per
// model.
NATIVE_EXPORT int64_t native_bpe_encode(const Model* m, const Job* job) {
    return m->wide ? encode<int32_t>(*m, *job) : encode<uint16_t>(*m, *job);
}

// Write the ends of the words of a UTF-8 text without added tokens, for tests and the comparison with `tokenizers`;
// return their number.
NATIVE_EXPORT int64_t native_bpe_words(const Model* m, const uint8_t* text, int64_t size, int64_t* ends) {
    int64_t count = 0;
    for (const uint8_t* p = text; p < text + size; ends[count++] = p - text) p = word_end(m->classes, p, text + size);
    return count;
}

// Return the number of ranges of code points in the table, and their address: (first, end, kind).
NATIVE_EXPORT int64_t native_bpe_ranges(const uint32_t** ranges) {
    *ranges = &UNICODE_RANGES[0].first;
    return UNICODE_RANGE_COUNT;
}

NATIVE_EXPORT const char* native_source_bpe(int part) {
    const char* texts[] = {native_text_of_bpe, native_text_of_bpe_words, native_text_of_bpe_merges,
                           native_text_of_unicode_classes, native_text_of_utf8};
    return texts[part];
}
