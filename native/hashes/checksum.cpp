// A checksum of 128 bits that costs less than reading the memory. It notices damage; it does not resist an attacker.
//
// The words of 64 bits of a block go to 32 lanes in turn. A lane takes in a word by `s = (s ^ w) * FACTOR; s ^= s >> 32`. For
// a given word this is one to one in `s`, and for a given `s` one to one in the word. So two blocks that differ in one
// word end with one different lane. In the end the lanes go into two sums in the same way, one after the other, so that
// both sums differ: a change within one word is noticed for certain. Damage at random is missed once in about 2^64 times.
// A change can be computed that is missed: the top bit of a word, and with it bits 63 and 31 of the word 256 bytes later.
// The last words of a block are filled up with zeros, and both sums begin with its size. All instruction sets give the
// same result.
#include "../compiled/native.h"

NATIVE_TEXT(native_text_of_checksum)

namespace {

constexpr int CHECKED_LANES = 32;
constexpr int64_t STRIPE = 8 * CHECKED_LANES;
constexpr uint64_t FACTOR = 0x9e3779b97f4a7c15ULL, OTHER_FACTOR = 0xd6e8feb86659fd93ULL;

NATIVE_INLINE void mix(uint64_t& state, uint64_t word, uint64_t factor) {
    state = (state ^ word) * factor;
    state ^= state >> 32;
}

// `BYTES`: of a vector, for which the compiler has the instructions; 8 for one word at a time.
template <int BYTES>
struct Checksum {
    static constexpr int COUNT = STRIPE / BYTES;
    typedef uint64_t Register __attribute__((vector_size(BYTES)));
    // The same type for addresses without alignment.
    typedef uint64_t Memory __attribute__((vector_size(BYTES), aligned(1), may_alias));

    NATIVE_INLINE void add(Register* lanes, const uint8_t* stripe) {
        const Memory* words = reinterpret_cast<const Memory*>(stripe);
#pragma GCC unroll 32
        for (int i = 0; i < COUNT; ++i) {
            const Register x = (lanes[i] ^ words[i]) * FACTOR;
            lanes[i] = x ^ (x >> 32);
        }
    }

    NATIVE_INLINE void run(const uint8_t* block, int64_t size, uint64_t* out) {
        uint64_t words[CHECKED_LANES];
        Register lanes[COUNT];
        for (int i = 0; i < CHECKED_LANES; ++i) words[i] = (i + 1) * FACTOR;
        std::memcpy(lanes, words, sizeof lanes);
        int64_t at = 0;
        for (; at + STRIPE <= size; at += STRIPE) add(lanes, block + at);
        if (at < size) {
            uint8_t last[STRIPE] = {};
            std::memcpy(last, block + at, size - at);
            add(lanes, last);
        }
        std::memcpy(words, lanes, sizeof lanes);
        out[0] = out[1] = static_cast<uint64_t>(size);
        for (int i = 0; i < CHECKED_LANES; ++i) {
            mix(out[0], words[i], FACTOR);
            mix(out[1], words[i], OTHER_FACTOR);
        }
    }
};

}  // namespace

// Write the checksum of a block of `size` bytes: two words. `level`: the instruction set to use at most.
NATIVE_EXPORT void native_checksum(int level, const uint8_t* block, int64_t size, uint64_t* out) {
    // Vectors of 512 bits are no faster than those of 256 bits. AVX-512 helps because it multiplies words of 64 bits.
    if (level > 0) return for_level<Checksum<32>, const uint8_t*, int64_t, uint64_t*>(level)(block, size, out);
    Checksum<8>::run(block, size, out);
}
