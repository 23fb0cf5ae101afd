// Extract the text under one key from lines of JSON, as concatenated UTF-8, without creating objects. It handles
// only lines that are certain: objects that Python's reader also accepts, with a text under the key that UTF-8 can
// encode. All other lines, including invalid ones, are left to Python's reader.
#include "../compiled/native.h"
#include "utf8.h"

NATIVE_TEXT(native_text_of_json_lines)

namespace {

constexpr int DEEPEST = 64;            // Python's reader allows some hundreds
constexpr int64_t LONGEST_NUMBER = 64;  // Python's reader refuses integers of 4,301 digits

// A line that is read, and where the text is written meanwhile. Functions return null to leave the line to Python.
struct Line {
    const uint8_t* end;
    const uint8_t* key;
    int64_t key_size;
    uint8_t* text;      // where the found text begins
    uint8_t* text_end;  // null if no text was found yet, or if the last value was not a text
};

NATIVE_INLINE const uint8_t* past_white(const Line& line, const uint8_t* p) {
    while (p < line.end && (*p == ' ' || *p == '\t' || *p == '\r' || *p == '\n')) ++p;
    return p;
}

// Return how many of the eight bytes from p come before the first quote, backslash or control character.
NATIVE_INLINE int plain_bytes(const uint8_t* p) {
#if __BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__
    constexpr uint64_t each = 0x0101010101010101u, high = each << 7;
    uint64_t x;
    std::memcpy(&x, p, 8);
    const uint64_t low = x & ~high;
    // The high bit stays 0 where the difference is zero; bytes whose own high bit is set are none of these
    // characters.
    const uint64_t quote = ((low ^ each * '"') + each * 0x7f), slash = ((low ^ each * '\\') + each * 0x7f);
    const uint64_t stop = (~(quote & slash & (low + each * 0x60))) & ~x & high;
    return stop ? __builtin_ctzll(stop) >> 3 : 8;
#else
    int n = 0;
    while (n < 8 && p[n] >= 0x20 && p[n] != '"' && p[n] != '\\') ++n;
    return n;
#endif
}

int hex(const uint8_t* p) {
    int value = 0;
    for (int i = 0; i < 4; ++i) {
        const int c = p[i], lower = c | 0x20;
        const int digit = c >= '0' && c <= '9' ? c - '0' : lower >= 'a' && lower <= 'f' ? lower - 'a' + 10 : -1;
        if (digit < 0) return -1;
        value = value << 4 | digit;
    }
    return value;
}

uint8_t* put_character(uint8_t* out, int code) {
    if (code < 0x80) {
        *out++ = static_cast<uint8_t>(code);
        return out;
    }
    const int more = code < 0x800 ? 1 : code < 0x10000 ? 2 : 3;
    constexpr int lead[] = {0, 0xc0, 0xe0, 0xf0};
    *out++ = static_cast<uint8_t>(lead[more] | code >> 6 * more);
    for (int i = more - 1; i >= 0; --i) *out++ = static_cast<uint8_t>(0x80 | (code >> 6 * i & 0x3f));
    return out;
}

// Read the escape whose backslash is before p and advance `out`; return null for an invalid escape or a lone
// surrogate.
const uint8_t* escape(const Line& line, const uint8_t* p, uint8_t*& out) {
    if (p >= line.end) return nullptr;
    const char* const names = "\"\\/bfnrt";
    const char* const values = "\"\\/\b\f\n\r\t";
    if (*p != 'u') {
        const void* found = *p ? std::memchr(names, *p, 8) : nullptr;
        if (!found) return nullptr;
        if (out) *out++ = static_cast<uint8_t>(values[static_cast<const char*>(found) - names]);
        return p + 1;
    }
    if (line.end - p < 5) return nullptr;
    int code = hex(p + 1);
    if (code < 0) return nullptr;
    p += 5;
    if (code >= 0xd800 && code < 0xe000) {
        const bool pair = code < 0xdc00 && line.end - p >= 6 && p[0] == '\\' && p[1] == 'u';
        const int second = pair ? hex(p + 2) : -1;
        if (second < 0xdc00 || second > 0xdfff) return nullptr;
        code = 0x10000 + ((code - 0xd800) << 10) + (second - 0xdc00);
        p += 6;
    }
    if (out) out = put_character(out, code);
    return p;
}

// Return the place after the string whose opening quote is before p. With `out`, write its text there and advance
// `out`.
const uint8_t* string(const Line& line, const uint8_t* p, uint8_t** out) {
    uint8_t* to = out ? *out : nullptr;
    while (p < line.end) {
        if (line.end - p >= 8) {
            const int plain = plain_bytes(p);
            if (to) {
                std::memcpy(to, p, 8);  // there is room: an escape is never shorter than its character
                to += plain;
            }
            p += plain;
            if (plain == 8) continue;
        }
        const uint8_t c = *p;
        if (c == '"') {
            if (out) *out = to;
            return p + 1;
        }
        if (c < 0x20) return nullptr;
        if (c == '\\') {
            p = escape(line, p + 1, to);
            if (!p) return nullptr;
            continue;
        }
        if (to) *to++ = c;
        ++p;
    }
    return nullptr;
}

const uint8_t* digits(const Line& line, const uint8_t* p) {
    const uint8_t* from = p;
    while (p < line.end && *p >= '0' && *p <= '9') ++p;
    return p > from && p - from <= LONGEST_NUMBER ? p : nullptr;
}

const uint8_t* number(const Line& line, const uint8_t* p) {
    if (*p == '-' && ++p >= line.end) return nullptr;
    p = *p == '0' ? p + 1 : digits(line, p);
    if (p && p < line.end && *p == '.') p = digits(line, p + 1);
    if (p && p < line.end && (*p | 0x20) == 'e') {
        ++p;
        p = digits(line, p < line.end && (*p == '+' || *p == '-') ? p + 1 : p);
    }
    return p;
}

const uint8_t* word(const Line& line, const uint8_t* p, const char* text, int64_t size) {
    return line.end - p >= size && std::memcmp(p, text, static_cast<size_t>(size)) == 0 ? p + size : nullptr;
}

const uint8_t* members(Line& line, const uint8_t* p, int depth);

const uint8_t* elements(Line& line, const uint8_t* p, int depth);

const uint8_t* value(Line& line, const uint8_t* p, int depth) {
    if (p >= line.end || depth > DEEPEST) return nullptr;
    switch (*p) {
        case '"': return string(line, p + 1, nullptr);
        case '{': return members(line, p + 1, depth);
        case '[': return elements(line, p + 1, depth);
        case 't': return word(line, p, "true", 4);
        case 'f': return word(line, p, "false", 5);
        case 'n': return word(line, p, "null", 4);
        default: return number(line, p);
    }
}

const uint8_t* elements(Line& line, const uint8_t* p, int depth) {
    p = past_white(line, p);
    if (p < line.end && *p == ']') return p + 1;
    for (;;) {
        p = value(line, past_white(line, p), depth + 1);
        if (!p || (p = past_white(line, p)) >= line.end) return nullptr;
        if (*p == ']') return p + 1;
        if (*p++ != ',') return nullptr;
    }
}

// Read the value under the key in the outermost object; if the key occurs again, the last value counts.
const uint8_t* found(Line& line, const uint8_t* p) {
    line.text_end = nullptr;
    if (p >= line.end || *p != '"') return value(line, p, 1);
    uint8_t* to = line.text;
    p = string(line, p + 1, &to);
    line.text_end = to;
    return p;
}

const uint8_t* members(Line& line, const uint8_t* p, int depth) {
    p = past_white(line, p);
    if (p < line.end && *p == '}') return p + 1;
    for (;;) {
        p = past_white(line, p);
        if (p >= line.end || *p != '"') return nullptr;
        const uint8_t* name = p + 1;
        p = string(line, name, nullptr);
        if (!p) return nullptr;
        const int64_t size = p - 1 - name;
        // A name with escapes may be equal to the key.
        if (depth == 0 && std::memchr(name, '\\', static_cast<size_t>(size))) return nullptr;
        const bool is_key =
            depth == 0 && size == line.key_size && std::memcmp(name, line.key, static_cast<size_t>(size)) == 0;
        p = past_white(line, p);
        if (p >= line.end || *p++ != ':') return nullptr;
        p = past_white(line, p);
        p = is_key ? found(line, p) : value(line, p, depth + 1);
        if (!p || (p = past_white(line, p)) >= line.end) return nullptr;
        if (*p == '}') return p + 1;
        if (*p++ != ',') return nullptr;
    }
}

bool is_plain(Line& line, const uint8_t* p) {
    if (!is_utf8(p, line.end)) return false;
    p = past_white(line, p);
    if (p >= line.end || *p != '{') return false;
    p = members(line, p + 1, 0);
    return p && past_white(line, p) == line.end && line.text_end;
}

// The same characters as Python's bytes.isspace.
bool is_blank(const uint8_t* p, const uint8_t* end) {
    while (p < end && (*p == ' ' || (*p >= '\t' && *p <= '\r'))) ++p;
    return p == end;
}

struct Reading {
    const uint8_t* data;
    int64_t size;
    const uint8_t* key;
    int64_t key_size;
    uint8_t* text;        // (size + 8)
    int64_t* starts;      // (lines): position in `text`, or of the line in `data` if it is left to Python
    int64_t* ends;        // (lines)
    int64_t* numbers;     // (lines): number of the line, from 0
    int64_t* characters;  // (lines)
    uint8_t* plain;       // (lines): 0 if the line is left to Python
};

}  // namespace

// Return the number of lines that are not blank; each has an entry in the arrays.
NATIVE_EXPORT int64_t native_json_lines(const Reading* r) {
    const uint8_t* const end = r->data + r->size;
    uint8_t* text = r->text;
    int64_t count = 0, number = 0;
    for (const uint8_t* p = r->data; p < end; ++number) {
        const void* found = std::memchr(p, '\n', static_cast<size_t>(end - p));
        const uint8_t* const stop = found ? static_cast<const uint8_t*>(found) : end;
        if (!is_blank(p, stop)) {
            Line line{stop, r->key, r->key_size, text, nullptr};
            const bool plain = is_plain(line, p);
            r->plain[count] = plain;
            r->numbers[count] = number;
            r->starts[count] = plain ? text - r->text : p - r->data;
            r->ends[count] = plain ? line.text_end - r->text : stop - r->data;
            r->characters[count] = plain ? characters_in(text, line.text_end - text) : 0;
            if (plain) text = line.text_end;
            ++count;
        }
        p = stop + 1;
    }
    return count;
}

NATIVE_EXPORT const char* native_source_json_lines(int part) {
    return part == 0 ? native_text_of_utf8 : native_text_of_json_lines;
}
