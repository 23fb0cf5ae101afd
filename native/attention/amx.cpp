// Attention in bf16 for AVX-512 with AMX: tiles of 16 x 16 results compute the products, and registers everything else.
//
// A tile of the left operand is 16 rows of 16 units, one of the right operand 16 units of 16 columns. Both have
// the layout that kernel.h prepares for the products of AVX512-BF16, so nothing is rearranged.
#include "../compiled/native.h"

NATIVE_TEXT(native_text_of_attention_amx)

#if defined(NATIVE_X86) && defined(__linux__) && (defined(__clang__) || __GNUC__ >= 11)
#include <cpuid.h>
#include <immintrin.h>
#include <sys/syscall.h>
#include <unistd.h>
// Included before the target changes, because its functions must run on every processor.
#include <cmath>

// Ask Linux to save and restore the tiles of this process's threads; it refuses if it does not support AMX.
static bool take_tiles() {
    unsigned a, b, c, d;
    constexpr unsigned BF16_TILES = 1u << 22, TILES = 1u << 24;
    if (best_level() < 2 || !__builtin_cpu_supports("avx512bf16") || !__get_cpuid_count(7, 0, &a, &b, &c, &d)) return false;
    if (!(d & BF16_TILES) || !(d & TILES)) return false;
    constexpr long REQUEST = 0x1023, TILE_DATA = 18;
    return syscall(SYS_arch_prctl, REQUEST, TILE_DATA) == 0;
}

static bool has_tiles() {
    static const bool taken = take_tiles();
    return taken;
}

// Valid to the end of the file, so that it also applies to templates that are instantiated later.
#ifdef __clang__
#pragma clang attribute push( \
    __attribute__((target("avx512f,avx512bw,avx512dq,avx512vl,avx512bf16,amx-tile,amx-bf16,avx2,fma"))), \
    apply_to = function)
#else
#pragma GCC target("avx512f,avx512bw,avx512dq,avx512vl,avx512bf16,amx-tile,amx-bf16,avx2,fma,prefer-vector-width=512")
#endif

#define LANES_OF_REGISTER 16
#define HAS_OWN_TILES 1
#include "avx512_lanes.h"

namespace {

// A barrier: GCC does not know which memory the operations on tiles read and write, so it must not move others across.
NATIVE_INLINE void settle(const void* at) { __asm__ volatile("" : : "r"(at) : "memory"); }

struct alignas(64) TileSizes {  // the processor's layout
    uint8_t palette = 1, start = 0, unused[14] = {};
    uint16_t bytes[16] = {64, 64, 64, 64, 64, 64, 64, 64};
    uint8_t rows[16] = {16, 16, 16, 16, 16, 16, 16, 16};
};

// While this object lives, the thread's tiles have 16 rows of 64 bytes. Then they are as before, for other libraries.
struct TileSession {
    TileSizes before;
    TileSession() {
        const TileSizes own;
        settle(&own);
        _tile_storeconfig(&before);
        _tile_loadconfig(&own);
        settle(&before);
    }
    ~TileSession() {
        settle(&before);
        _tile_loadconfig(&before);
    }
};

struct Tiles : BF16 {
    using Session = TileSession;
    static constexpr bool TILES = true;
};

// c[rows][columns] (+)= a b. Rows and columns are multiples of 32, and units of 16.
template <bool ADD>
NATIVE_INLINE void tile_product(const uint32_t* a, int64_t a_row, const uint32_t* b, int64_t b_row, int64_t units,
                                float* c, int64_t c_row, int64_t rows, int64_t columns) {
    settle(c);
    const int64_t a_bytes = 4 * a_row, b_bytes = 4 * b_row, c_bytes = 4 * c_row;
    for (int64_t r = 0; r < rows; r += 32)
        for (int64_t at = 0; at < columns; at += 32) {
            float *upper = c + r * c_row + at, *lower = upper + 16 * c_row;
            if (ADD) {
                _tile_loadd(0, upper, c_bytes);
                _tile_loadd(1, upper + 16, c_bytes);
                _tile_loadd(2, lower, c_bytes);
                _tile_loadd(3, lower + 16, c_bytes);
            } else {
                _tile_zero(0);
                _tile_zero(1);
                _tile_zero(2);
                _tile_zero(3);
            }
            for (int64_t u = 0; u < units; u += 16) {
                const uint32_t *left = a + r * a_row + u, *right = b + u * b_row + at;
                _tile_loadd(4, left, a_bytes);
                _tile_loadd(6, right, b_bytes);
                _tile_loadd(5, left + 16 * a_row, a_bytes);
                _tile_loadd(7, right + 16, b_bytes);
                _tile_dpbf16ps(0, 4, 6);
                _tile_dpbf16ps(1, 4, 7);
                _tile_dpbf16ps(2, 5, 6);
                _tile_dpbf16ps(3, 5, 7);
            }
            _tile_stored(0, upper, c_bytes);
            _tile_stored(1, upper + 16, c_bytes);
            _tile_stored(2, lower, c_bytes);
            _tile_stored(3, lower + 16, c_bytes);
        }
    settle(c);
}

}  // namespace

#include "kernel.h"

AttentionKernel attention_amx() { return has_tiles() ? attention_of<Tiles, uint16_t> : nullptr; }

#ifdef __clang__
#pragma clang attribute pop
#endif

#else

// Never called: it keeps the embedded source text in the library.
#include "avx512_lanes.h"
#include "kernel.h"

AttentionKernel attention_amx() { return nullptr; }

#endif
