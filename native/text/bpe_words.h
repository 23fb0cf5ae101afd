// Divide text into words as GPT-2's regular expression does, without a regular expression: the class of a character
// comes from a table, and ASCII letters are skipped eight at a time.
#pragma once

#include "../compiled/native.h"
#include "unicode_classes.h"

#include <cstdlib>

NATIVE_TEXT(native_text_of_bpe_words)

namespace {

struct Classes {
    uint16_t page[0x110000 >> 8];
    uint8_t* cells;  // (pages, 256); equal pages are stored once: 150 of 4,352
    int pages;
};

bool load_classes(Classes& classes) {
    classes.cells = nullptr;
    classes.pages = 0;
    int range = 0;
    for (uint32_t number = 0; number < (0x110000 >> 8); ++number) {
        uint8_t page[256];
        for (uint32_t i = 0; i < 256; ++i) {
            const uint32_t c = number << 8 | i;
            while (range < UNICODE_RANGE_COUNT && UNICODE_RANGES[range].end <= c) ++range;
            const bool inside = range < UNICODE_RANGE_COUNT && UNICODE_RANGES[range].first <= c;
            page[i] = static_cast<uint8_t>(inside ? UNICODE_RANGES[range].kind : OTHER);
        }
        int same = 0;
        while (same < classes.pages && std::memcmp(classes.cells + same * 256, page, 256) != 0) ++same;
        if (same == classes.pages) {
            void* larger = std::realloc(classes.cells, static_cast<size_t>(++classes.pages) * 256);
            if (!larger) return false;
            classes.cells = static_cast<uint8_t*>(larger);
            std::memcpy(classes.cells + same * 256, page, 256);
        }
        classes.page[number] = static_cast<uint16_t>(same);
    }
    return true;
}

struct Character {
    uint8_t kind;
    uint8_t size;  // bytes
};

// The text must be valid UTF-8.
NATIVE_INLINE Character character(const Classes& classes, const uint8_t* p) {
    const uint32_t c = *p;
    if (c < 0x80) return {classes.cells[c], 1};
    if (c < 0xe0) {
        const uint32_t low = (c & 3u) << 6 | (p[1] & 0x3fu);
        return {classes.cells[classes.page[c >> 2 & 7u] * 256 + low], 2};
    }
    const uint32_t low = (p[1] & 3u) << 6 | (p[2] & 0x3fu);
    if (c < 0xf0) return {classes.cells[classes.page[(c & 0xfu) << 4 | (p[1] >> 2 & 0xfu)] * 256 + low], 3};
    const uint32_t code = (c & 7u) << 18 | (p[1] & 0x3fu) << 12 | (p[2] & 0x3fu) << 6 | (p[3] & 0x3fu);
    return {classes.cells[classes.page[code >> 8] * 256 + (code & 0xffu)], 4};
}

// Words: 's|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+

// Return how many of the eight bytes from p are ASCII letters before the first other byte.
NATIVE_INLINE int leading_letters(const uint8_t* p) {
#if __BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__
    constexpr uint64_t each = 0x0101010101010101u;
    uint64_t x;
    std::memcpy(&x, p, 8);
    const uint64_t lower = (x & ~(each << 7)) | each * 0x20;  // below 0x80, so that additions do not carry
    const uint64_t letter = (lower + each * (0x80 - 'a')) & ~(lower + each * (0x7f - 'z')) & ~x & (each << 7);
    const uint64_t stop = letter ^ (each << 7);
    return stop ? __builtin_ctzll(stop) >> 3 : 8;
#else
    int n = 0;
    while (n < 8 && static_cast<uint8_t>((p[n] | 0x20) - 'a') < 26) ++n;
    return n;
#endif
}

NATIVE_INLINE const uint8_t* run_end(const Classes& classes, const uint8_t* p, const uint8_t* end, uint8_t kind) {
    while (p < end) {
        if (kind == LETTER && end - p >= 8) {
            const int letters = leading_letters(p);
            p += letters;
            if (letters == 8) continue;
        }
        const Character next = character(classes, p);
        if (next.kind != kind) return p;
        p += next.size;
    }
    return p;
}

// Return the number of bytes of the contraction at the apostrophe p, or 0.
NATIVE_INLINE int contraction(const uint8_t* p, const uint8_t* end) {
    if (end - p < 2) return 0;
    const uint8_t a = p[1];
    if (a == 's' || a == 't' || a == 'm' || a == 'd') return 2;
    if (end - p < 3) return 0;
    const uint8_t b = p[2];
    return ((a == 'r' || a == 'v') && b == 'e') || (a == 'l' && b == 'l') ? 3 : 0;
}

// Return the end of white space at p. Its last character belongs to the next word, unless it is the only one.
const uint8_t* white_end(const Classes& classes, const uint8_t* p, const uint8_t* end) {
    const uint8_t* last = p;
    const uint8_t* next = p + character(classes, p).size;
    while (next < end) {
        const Character c = character(classes, next);
        if (c.kind != SPACE) return last == p ? next : last;
        last = next;
        next += c.size;
    }
    return next;
}

NATIVE_INLINE const uint8_t* word_end(const Classes& classes, const uint8_t* p, const uint8_t* end) {
    if (*p == ' ' && p + 1 < end) {
        const Character second = character(classes, p + 1);
        if (second.kind == SPACE) return white_end(classes, p, end);
        return run_end(classes, p + 1 + second.size, end, second.kind);
    }
    if (*p == '\'') {
        const int size = contraction(p, end);
        if (size) return p + size;
    }
    const Character first = character(classes, p);
    if (first.kind == SPACE) return white_end(classes, p, end);
    return run_end(classes, p + first.size, end, first.kind);
}

}  // namespace
