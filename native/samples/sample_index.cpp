// Samples of a stream of documents: where each begins, which corpus of a blend it comes from, and the tokens of a
// batch. The order is exactly Megatron-core's. The code uses no tensors, so that it works before torch is loaded.
#include "../compiled/native.h"

NATIVE_TEXT(native_text_of_sample_index)

namespace {

// Read one element; an index is mapped directly from its file and may not be aligned.
template <typename T>
NATIVE_INLINE T at(const void* array, int64_t i) {
    T value;
    std::memcpy(&value, static_cast<const char*>(array) + i * static_cast<int64_t>(sizeof(T)), sizeof value);
    return value;
}

struct Stream {
    const void* lengths;    // int32 per sequence of the corpus
    const void* documents;  // int32: the sequences in the order of the stream
};

NATIVE_INLINE int64_t length_of(const Stream& stream, int64_t place) {
    return at<int32_t>(stream.lengths, at<int32_t>(stream.documents, place));
}

// The prefetch distance for lengths: those of 1e6 sequences (4 MB) do not fit into the nearest caches.
constexpr int64_t AHEAD = 24;

// Write the rows [row, rows) of the samples that begin at the places [first, last). `left` is the number of tokens
// from the start of the first place to the first of these samples.
template <typename T>
void write_starts(const Stream& stream, int64_t first, int64_t last, int64_t left, int64_t sequence, T* row,
                  const T* rows) {
    for (int64_t place = first; place < last && row < rows; ++place) {
        if (place + AHEAD < last)
            __builtin_prefetch(static_cast<const char*>(stream.lengths) +
                               4 * static_cast<int64_t>(at<int32_t>(stream.documents, place + AHEAD)));
        const int64_t length = length_of(stream, place);
        // The row is always written, but counts only if the sample begins in this document. A document is about as long
        // as a sample, so a branch would be mispredicted about every second time.
        row[0] = static_cast<T>(place);
        row[1] = static_cast<T>(left);
        const bool kept = left < length;
        row += kept ? 2 : 0;
        left += kept ? sequence : 0;
        for (; left < length && row < rows; left += sequence, row += 2) {
            row[0] = static_cast<T>(place);
            row[1] = static_cast<T>(left);
        }
        left -= length;
    }
}

int64_t tokens_in(const Stream& stream, int64_t first, int64_t last) {
    int64_t tokens = 0;
    for (int64_t place = first; place < last; ++place) tokens += length_of(stream, place);
    return tokens;
}

constexpr int MOST_THREADS = 64;

// Each thread takes a part of the places; the tokens before the part give the start of its first sample.
template <typename T>
void all_starts(const Stream& stream, int64_t places, int64_t sequence, int64_t count, T* out, int threads) {
    int64_t before[MOST_THREADS + 1] = {};
    const auto edge = [&](int64_t part) { return places * part / threads; };
#pragma omp parallel for num_threads(threads) schedule(static)
    for (int part = 0; part < threads - 1; ++part)
        before[part + 1] = tokens_in(stream, edge(part), edge(part + 1));
    for (int part = 1; part < threads; ++part) before[part] += before[part - 1];
#pragma omp parallel for num_threads(threads) schedule(static)
    for (int part = 0; part < threads; ++part) {
        const auto row_after = [&](int64_t tokens) {
            const int64_t row = (tokens + sequence - 1) / sequence;
            return row < count + 1 ? row : count + 1;
        };
        const int64_t row = row_after(before[part]);
        const int64_t rows = part + 1 < threads ? row_after(before[part + 1]) : count + 1;
        write_starts(stream, edge(part), edge(part + 1), row * sequence - before[part], sequence, out + 2 * row,
                     out + 2 * rows);
    }
    out[0] = out[1] = 0;  // also if the first documents are empty, as in Megatron
}

// Forbids fused multiply-add. The x86-64 baseline has none; elsewhere the attribute forbids it, but GCC then does
// not vectorise.
#if defined(__clang__) || defined(__x86_64__)
#define NATIVE_EXACT
#else
#define NATIVE_EXACT __attribute__((optimize("fp-contract=off")))
#endif

// Return the corpus that is furthest behind its share of `j` samples, the first of equals. Product and difference
// are rounded separately on every processor, because the order must be the same on all machines.
NATIVE_EXACT int64_t lagging_of_few(const double* weights, const double* taken, int64_t corpora, double j) {
#ifdef __clang__
#pragma clang fp contract(off)
#endif
    int64_t most = 0;
    double worst = weights[0] * j - taken[0];
    for (int64_t i = 1; i < corpora; ++i) {
        const double lag = weights[i] * j - taken[i];
        most = lag > worst ? i : most;
        worst = lag > worst ? lag : worst;
    }
    return most;
}

// The number of doubles processed together; the length of a blend's arrays is a multiple of it.
constexpr int64_t SIDE_BY_SIDE = 8;

// The same for many corpora: find the largest lag with vectors, then its index. It is faster from about 20 corpora
// on.
NATIVE_EXACT int64_t lagging_of_many(const double* __restrict weights, const double* __restrict taken,
                                     double* __restrict lag, int64_t corpora, double j) {
#ifdef __clang__
#pragma clang fp contract(off)
#endif
    for (int64_t i = 0; i < corpora; ++i) lag[i] = weights[i] * j - taken[i];
    double worst[SIDE_BY_SIDE];
    for (int64_t k = 0; k < SIDE_BY_SIDE; ++k) worst[k] = lag[k];
    for (int64_t i = SIDE_BY_SIDE; i < corpora; i += SIDE_BY_SIDE)
        for (int64_t k = 0; k < SIDE_BY_SIDE; ++k) worst[k] = lag[i + k] > worst[k] ? lag[i + k] : worst[k];
    double most = worst[0];
    for (int64_t k = 1; k < SIDE_BY_SIDE; ++k) most = worst[k] > most ? worst[k] : most;
    int64_t corpus = 0;
    while (corpus < corpora - 1 && lag[corpus] != most) ++corpus;
    return corpus;
}

constexpr int64_t MANY = 24;

// NumPy's RandomState: a Mersenne Twister with 624 words, the first `pos` of which are used up.
constexpr int WORDS = 624, MIDDLE = 397;

struct Twister {
    uint32_t* key;
    int32_t* pos;
    uint32_t ready[WORDS];  // the words after tempering, as the generator returns them

    void temper() {
        for (int i = 0; i < WORDS; ++i) {
            uint32_t y = key[i];
            y ^= y >> 11;
            y ^= (y << 7) & 0x9d2c5680u;
            y ^= (y << 15) & 0xefc60000u;
            ready[i] = y ^ (y >> 18);
        }
    }

    void twist() {
        const auto mixed = [](uint32_t high, uint32_t low, uint32_t far) {
            const uint32_t y = (high & 0x80000000u) | (low & 0x7fffffffu);
            return far ^ (y >> 1) ^ ((0u - (low & 1u)) & 0x9908b0dfu);
        };
        for (int i = 0; i < WORDS - MIDDLE; ++i) key[i] = mixed(key[i], key[i + 1], key[i + MIDDLE]);
        for (int i = WORDS - MIDDLE; i < WORDS - 1; ++i) key[i] = mixed(key[i], key[i + 1], key[i + MIDDLE - WORDS]);
        key[WORDS - 1] = mixed(key[WORDS - 1], key[0], key[MIDDLE - 1]);
        *pos = 0;
        temper();
    }
};

// This many places are drawn and prefetched before their items are swapped.
constexpr int DRAWN = 256;

// As RandomState.shuffle: from the last item down, swap each with a random one of those up to it.
template <typename T>
void shuffle(T* items, int64_t n, uint32_t* key, int32_t* pos) {
    Twister random{key, pos, {}};
    random.temper();
    uint32_t places[DRAWN + 1];
    for (int64_t last = n - 1; last > 0;) {
        int64_t i = last;
        int drawn = 0;
        while (drawn < DRAWN && i > 0) {
            if (*pos == WORDS) random.twist();
            // A number greater than i is skipped; without a branch, which would be mispredicted often.
            const uint32_t place = random.ready[(*pos)++] & (0xffffffffu >> __builtin_clz(static_cast<uint32_t>(i)));
            __builtin_prefetch(items + place, 1);
            places[drawn] = place;
            const bool taken = place <= static_cast<uint64_t>(i);
            drawn += taken;
            i -= taken;
        }
        for (int k = 0; k < drawn; ++k) {
            const T item = items[last - k];
            items[last - k] = items[places[k]];
            items[places[k]] = item;
        }
        last = i;
    }
}

template <typename T>
NATIVE_INLINE void widen(int64_t* to, const void* from, int64_t first, int64_t tokens) {
    for (int64_t i = 0; i < tokens; ++i) to[i] = at<T>(from, first + i);
}

bool copy_tokens(int type, int64_t* to, const void* from, int64_t first, int64_t tokens) {
    switch (type) {
        case 1: widen<uint8_t>(to, from, first, tokens); return true;
        case 2: widen<int8_t>(to, from, first, tokens); return true;
        case 3: widen<int16_t>(to, from, first, tokens); return true;
        case 4: widen<int32_t>(to, from, first, tokens); return true;
        case 5: widen<int64_t>(to, from, first, tokens); return true;
        case 8: widen<uint16_t>(to, from, first, tokens); return true;
        default: return false;
    }
}

}  // namespace

extern "C" {
// The same layout as `_Source` in sample_index.py.
struct SampleSource {
    const void* tokens;
    const void* offsets;    // int64 per sequence: its first token
    const void* lengths;    // int32 per sequence
    const void* documents;  // int32 per place of the stream
    const void* starts;     // (samples + 1, 2)
    int64_t count;          // number of tokens
    int64_t sequences;
    int64_t places;
    int64_t samples;
    int type;  // the code of the token type in Megatron's index files
    int wide;  // starts are int64 instead of int32
};
}

// `out` has (count + 1) rows of two int32 numbers, or of two int64 numbers if `wide`.
NATIVE_EXPORT void native_sample_starts(const void* lengths, const void* documents, int64_t places,
                                        int64_t sequence, int64_t count, void* out, int wide, int threads) {
    const Stream stream{lengths, documents};
    const int most = threads < MOST_THREADS ? threads : MOST_THREADS;
    const int used = most < 1 || places < 100000 ? 1 : most;
    if (wide)
        all_starts(stream, places, sequence, count, static_cast<int64_t*>(out), used);
    else
        all_starts(stream, places, sequence, count, static_cast<int32_t*>(out), used);
}

// Shuffle fewer than 2^32 items of 4 bytes, or of 8 bytes if `wide`; the state of the generator advances.
NATIVE_EXPORT void native_shuffle(void* items, int64_t n, int wide, uint32_t* key, int32_t* pos) {
    if (wide)
        shuffle(static_cast<uint64_t*>(items), n, key, pos);
    else
        shuffle(static_cast<uint32_t*>(items), n, key, pos);
}

// Choose the corpus and the sample number for each sample of a blend. With MANY corpora or more, the arrays have a
// multiple of 8 entries; those after the last corpus have the weight -infinity. `there` is the number of samples of
// each corpus; a corpus that is used up also gets the weight -infinity. `taken` starts with zeros; `lag` is scratch
// memory.
NATIVE_EXPORT void native_blend(double* weights, double* taken, const double* there, double* lag, int64_t corpora,
                                int64_t size, int16_t* corpus, int64_t* sample) {
    for (int64_t j = 0; j < size; ++j) {
        const double wanted = j > 1 ? static_cast<double>(j) : 1.0;
        const int64_t next = corpora < MANY ? lagging_of_few(weights, taken, corpora, wanted)
                                            : lagging_of_many(weights, taken, lag, corpora, wanted);
        corpus[j] = static_cast<int16_t>(next);
        sample[j] = static_cast<int64_t>(taken[next]);
        taken[next] += 1.0;
        if (taken[next] >= there[next]) weights[next] = -__builtin_inf();
    }
}

// Write `each` tokens of each of `n` samples as int64; return n, or -1 - i if sample i is outside its corpus.
NATIVE_EXPORT int64_t native_read_samples(const SampleSource* source, const int64_t* numbers, int64_t n,
                                          int64_t each, int64_t* out) {
    for (int64_t i = 0; i < n; ++i) {
        if (numbers[i] < 0 || numbers[i] >= source->samples) return -1 - i;
        int64_t place = source->wide ? at<int64_t>(source->starts, 2 * numbers[i])
                                     : at<int32_t>(source->starts, 2 * numbers[i]);
        int64_t begin = source->wide ? at<int64_t>(source->starts, 2 * numbers[i] + 1)
                                     : at<int32_t>(source->starts, 2 * numbers[i] + 1);
        for (int64_t have = 0; have < each; ++place, begin = 0) {
            if (place < 0 || place >= source->places) return -1 - i;
            const int64_t number = at<int32_t>(source->documents, place);
            if (number < 0 || number >= source->sequences) return -1 - i;
            const int64_t length = at<int32_t>(source->lengths, number) - begin;
            const int64_t first = at<int64_t>(source->offsets, number) + begin;
            const int64_t taken = length < each - have ? length : each - have;
            if (begin < 0 || taken < 0 || first < 0 || first + taken > source->count) return -1 - i;
            if (!copy_tokens(source->type, out + i * each + have, source->tokens, first, taken)) return -1 - i;
            have += taken;
        }
    }
    return n;
}
