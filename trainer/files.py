"""Whole-file replace, hashes and syncs: a reader never sees half of a file.

Lines of JSON -> the text under one key of each, by compiled code where there is some.

It answers for lines of which it is certain, and Python's own reader judges all others: what is refused, in which
words, is the same with it and without.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator
from pathlib import Path

from native.text import json_lines


def replace_file(path: Path, content: bytes) -> None:
    """Write aside, sync, rename over `path`."""
    aside = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        aside.write_bytes(content)
        sync(aside)
        os.replace(aside, path)
    finally:
        aside.unlink(missing_ok=True)
    sync(path.parent)


def sync(path: Path) -> None:
    """Have the disk hold what was written to a file, or to a folder's list of names."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def sha256(path: Path) -> str:
    """Hex digest of a file, read in pieces."""
    digest = hashlib.sha256()
    with path.open("rb") as stream:
        while piece := stream.read(1 << 20):
            digest.update(piece)
    return digest.hexdigest()


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
