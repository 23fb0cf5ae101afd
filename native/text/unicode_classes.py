"""Write `unicode_classes.h`: what \\p{L}, \\p{N} and \\s match in the regular expressions of `tokenizers`.

    python -m native.text.unicode_classes > native/text/unicode_classes.h

It tests every code point with `tokenizers`, because another table may follow another Unicode version.
"""

from __future__ import annotations

import itertools
import sys
from collections.abc import Iterable, Iterator, Sequence

KINDS = ("OTHER", "LETTER", "NUMBER", "SPACE")
OTHER, LETTER, NUMBER, SPACE = range(len(KINDS))
CODE_POINTS = 0x110000
AT_ONCE = 4096
_SURROGATES = range(0xD800, 0xE000)

# Frames that show the kind of a character: a letter joins the `a`, a number the `1`, and any other character except
# white space the `!`. Line ends separate the three copies of the character.
FRAME = "a{0}\n1{0}\n!{0}\n"
_PLACES = (1, 4, 7)

# One frame per kind. A character that joins its neighbour in one of the first three frames has that kind. White space,
# which joins none, is only visible in the last frame.
FRAMES = ("!{0}\n", "a{0}\n", "1{0}\n", FRAME)

Range = tuple[int, int, int]


def kinds(codes: Sequence[int]) -> list[int]:
    """Return the kind of each code point, determined with `tokenizers`."""
    from tokenizers import pre_tokenizers

    text = "".join(FRAME.format(chr(code)) for code in codes)
    splits = pre_tokenizers.ByteLevel(add_prefix_space=False).pre_tokenize_str(text)
    begun = {span[0] for _, span in splits}
    size = len(FRAME.format("x"))
    return [_kind(*(size * i + bit not in begun for bit in _PLACES)) for i in range(len(codes))]


def _kind(joins_letter: bool, joins_number: bool, joins_other: bool) -> int:
    if joins_letter + joins_number + joins_other > 1:
        raise ValueError("a character has two kinds: `tokenizers` uses another expression")
    return LETTER if joins_letter else NUMBER if joins_number else OTHER if joins_other else SPACE


def ranges(codes: Iterable[int] = range(CODE_POINTS)) -> list[Range]:
    """Return half-open ranges (first, end, kind) of all code points that are not OTHER.

    Surrogates count as OTHER, because they never occur in text.
    """
    found: list[Range] = []
    for code, kind in _code_kinds(codes):
        if kind == OTHER:
            continue
        if found and found[-1][1:] == (code, kind):
            found[-1] = (found[-1][0], code + 1, kind)
        else:
            found.append((code, code + 1, kind))
    return found


def _code_kinds(codes: Iterable[int]) -> Iterator[tuple[int, int]]:
    real = (code for code in codes if code not in _SURROGATES)
    while some := list(itertools.islice(real, AT_ONCE)):
        yield from zip(some, kinds(some), strict=True)


def header(found: Sequence[Range], version: str) -> str:
    """Return the text of `unicode_classes.h`."""
    rows = [f"{{0x{first:x}, 0x{end:x}, {KINDS[kind]}}}," for first, end, kind in found]
    lines = [" ".join(rows[i : i + 4]) for i in range(0, len(rows), 4)]
    return _HEADER.format(version=version, kinds=", ".join(KINDS), count=len(rows), rows="\n    ".join(lines))


_HEADER = """\
// What \\p{{L}}, \\p{{N}} and \\s are to tokenizers {version}; written by `python -m native.text.unicode_classes`.
#pragma once

#include "../compiled/native.h"

NATIVE_TEXT(native_text_of_unicode_classes)

enum : uint32_t {{ {kinds} }};

struct UnicodeRange {{
    uint32_t first, end, kind;  // [first, end)
}};

constexpr int UNICODE_RANGE_COUNT = {count};

// Ascending; every other code point is OTHER.
constexpr UnicodeRange UNICODE_RANGES[] = {{
    {rows}
}};
"""


def main() -> None:
    """Write the header to standard output."""
    import tokenizers

    sys.stdout.write(header(ranges(), tokenizers.__version__))


if __name__ == "__main__":
    main()
