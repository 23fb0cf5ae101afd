"""Lines of JSON -> the text under one key of each, by compiled code where there is some.

It answers for lines of which it is certain, and Python's own reader judges all others: what is refused, in which
words, is the same with it and without.
"""

from __future__ import annotations

from collections.abc import Iterator

from native.cpu import json_lines


def texts(data: bytes, key: str) -> Iterator[tuple[int, str | bytes]]:
    """(number of the line, from 0; its text), or the line itself as bytes for Python to read; no blank ones."""
    if json_lines.why_not():
        yield from _lines(data)
        return
    found = json_lines.read(data, key)
    text = memoryview(found.text.data)
    rows = zip(
        found.numbers.tolist(), found.plain.tolist(), found.starts.tolist(), found.ends.tolist(), strict=True
    )
    for number, plain, start, end in rows:
        yield number, str(text[start:end], "utf-8") if plain else data[start:end]


def _lines(data: bytes) -> Iterator[tuple[int, bytes]]:
    for number, line in enumerate(data.split(b"\n")):
        if line and not line.isspace():
            yield number, line
