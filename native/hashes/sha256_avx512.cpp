// SHA-256 of 16 blocks at a time: lane i of each register belongs to block i.
#include "sha256.h"
#include "../compiled/transpose_avx512.h"

NATIVE_TEXT(native_text_of_sha256_avx512)

#ifdef NATIVE_X86
#include <immintrin.h>

namespace {

#define WIDE __attribute__((target("avx512f,avx512bw,avx512dq,avx512vl")))
#define WIDE_INLINE WIDE static inline __attribute__((always_inline))

template <int N>
WIDE_INLINE __m512i turned(__m512i x) { return _mm512_ror_epi32(x, N); }

// Functions of three inputs, each given to the instruction as a table of eight bits: xor, choice and majority.
WIDE_INLINE __m512i parity(__m512i x, __m512i y, __m512i z) { return _mm512_ternarylogic_epi32(x, y, z, 0x96); }
WIDE_INLINE __m512i choice(__m512i x, __m512i y, __m512i z) { return _mm512_ternarylogic_epi32(x, y, z, 0xca); }
WIDE_INLINE __m512i majority(__m512i x, __m512i y, __m512i z) { return _mm512_ternarylogic_epi32(x, y, z, 0xe8); }
WIDE_INLINE __m512i sum(__m512i x, __m512i y) { return _mm512_add_epi32(x, y); }

// Mix 64 bytes of each block, whose words are in `m`, into the state.
WIDE_INLINE void mix(__m512i (&state)[8], __m512i (&m)[16]) {
    __m512i s[8];
#pragma GCC unroll 8
    for (int i = 0; i < 8; ++i) s[i] = state[i];
#pragma GCC unroll 64
    for (int round = 0; round < 64; ++round) {
        __m512i& w = m[round & 15];
        if (round >= 16) {
            const __m512i x = m[(round + 1) & 15], y = m[(round + 14) & 15];
            const __m512i low = parity(turned<7>(x), turned<18>(x), _mm512_srli_epi32(x, 3));
            const __m512i high = parity(turned<17>(y), turned<19>(y), _mm512_srli_epi32(y, 10));
            w = sum(sum(w, low), sum(m[(round + 9) & 15], high));
        }
        // The names of the words move by one place each round; nothing is copied.
        __m512i &a = s[(64 - round) & 7], &b = s[(65 - round) & 7], &c = s[(66 - round) & 7], &d = s[(67 - round) & 7],
                &e = s[(68 - round) & 7], &f = s[(69 - round) & 7], &g = s[(70 - round) & 7], &h = s[(71 - round) & 7];
        const __m512i key = _mm512_set1_epi32(static_cast<int>(SHA256_K[round]));
        const __m512i first = sum(sum(sum(h, key), w), sum(parity(turned<6>(e), turned<11>(e), turned<25>(e)), choice(e, f, g)));
        d = sum(d, first);
        h = sum(first, sum(parity(turned<2>(a), turned<13>(a), turned<22>(a)), majority(a, b, c)));
    }
#pragma GCC unroll 8
    for (int i = 0; i < 8; ++i) state[i] = sum(state[i], s[i]);
}

WIDE_INLINE void load(const uint8_t* const* blocks, int64_t at, __m512i (&m)[16]) {
    const __m512i order = _mm512_broadcast_i32x4(_mm_set_epi64x(0x0c0d0e0f08090a0bLL, 0x0405060700010203LL));
#pragma GCC unroll 16
    for (int i = 0; i < 16; ++i) m[i] = _mm512_shuffle_epi8(_mm512_loadu_si512(blocks[i] + at), order);
    transpose_words(m);
}

}  // namespace

bool sha256_is_wide() { return best_level() == 2; }

WIDE void sha256_of_16(const uint8_t* const* blocks, int64_t size, uint8_t* out) {
    __m512i state[8], m[16];
    for (int i = 0; i < 8; ++i) state[i] = _mm512_set1_epi32(static_cast<int>(SHA256_START[i]));
    const int64_t count = size / SHA256_BLOCK, rest = size % SHA256_BLOCK;
    for (int64_t block = 0; block < count; ++block) {
        load(blocks, SHA256_BLOCK * block, m);
        mix(state, m);
    }
    // The last bytes, a 1 bit, zeros, and the number of bits.
    uint8_t ends[16][2 * SHA256_BLOCK] = {};
    const uint8_t* places[16];
    const int64_t tail = rest < SHA256_BLOCK - 8 ? 1 : 2;
    for (int i = 0; i < 16; ++i) {
        std::memcpy(ends[i], blocks[i] + SHA256_BLOCK * count, rest);
        ends[i][rest] = 0x80;
        for (int j = 0; j < 8; ++j)
            ends[i][SHA256_BLOCK * tail - 1 - j] = static_cast<uint8_t>(8 * size >> 8 * j);
        places[i] = ends[i];
    }
    for (int64_t block = 0; block < tail; ++block) {
        load(places, SHA256_BLOCK * block, m);
        mix(state, m);
    }
    uint32_t words[8][16];
    for (int i = 0; i < 8; ++i) _mm512_storeu_si512(words[i], state[i]);
    for (int lane = 0; lane < 16; ++lane)
        for (int i = 0; i < 8; ++i)
            for (int j = 0; j < 4; ++j) *out++ = static_cast<uint8_t>(words[i][lane] >> (24 - 8 * j));
}
#else
bool sha256_is_wide() { return false; }
void sha256_of_16(const uint8_t* const*, int64_t, uint8_t*) {}
#endif
