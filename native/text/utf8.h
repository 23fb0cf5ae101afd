// Check whether bytes are UTF-8, and count their characters.
#pragma once

#include "../compiled/native.h"

NATIVE_TEXT(native_text_of_utf8)

namespace {

NATIVE_INLINE bool continues(const uint8_t* p, int count) {
    for (int i = 0; i < count; ++i)
        if ((p[i] & 0xc0u) != 0x80u) return false;
    return true;
}

// Return the bytes of the well-formed character at p, or 0; surrogates, overlong forms and values above 10FFFF are
// invalid.
NATIVE_INLINE int well_formed(const uint8_t* p, int64_t left) {
    const uint32_t c = *p;
    if (c < 0x80) return 1;
    const int size = c < 0xc2 ? 0 : c < 0xe0 ? 2 : c < 0xf0 ? 3 : c < 0xf5 ? 4 : 0;
    if (size == 0 || left < size || !continues(p + 1, size - 1)) return 0;
    if ((c == 0xe0 && p[1] < 0xa0) || (c == 0xed && p[1] > 0x9f)) return 0;
    if ((c == 0xf0 && p[1] < 0x90) || (c == 0xf4 && p[1] > 0x8f)) return 0;
    return size;
}

inline bool is_utf8(const uint8_t* p, const uint8_t* end) {
    while (p < end) {
        uint64_t eight;
        if (end - p >= 8 && (std::memcpy(&eight, p, 8), (eight & 0x8080808080808080u) == 0)) {
            p += 8;
            continue;
        }
        // The fast path for most characters of three bytes, except first bytes that may start an overlong form or a
        // surrogate.
        if (end - p >= 3 && *p > 0xe0 && *p < 0xed && (p[1] & 0xc0u) == 0x80u && (p[2] & 0xc0u) == 0x80u) {
            p += 3;
            continue;
        }
        const int size = well_formed(p, end - p);
        if (size == 0) return false;
        p += size;
    }
    return true;
}

// Count all bytes except continuation bytes.
inline int64_t characters_in(const uint8_t* p, int64_t n) {
    int64_t count = 0;
    for (int64_t i = 0; i < n; ++i) count += (p[i] & 0xc0u) != 0x80u;
    return count;
}

}  // namespace
