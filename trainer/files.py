"""Replace, link, extend, sync and hash files, and read a text from each line of a JSON-lines file.

Compiled code reads the lines that it understands completely. Python's json reads all others, so that the same lines
are refused with the same messages without compiled code.
"""

from __future__ import annotations

import hashlib
import os
import pickle
import shutil
import struct
from collections.abc import Iterator, Sequence
from pathlib import Path

from native.text import json_lines

BAD_PICKLE = (
    pickle.UnpicklingError,
    ArithmeticError,
    AssertionError,
    AttributeError,
    EOFError,
    ImportError,
    LookupError,
    MemoryError,
    NotImplementedError,
    RecursionError,
    TypeError,
    ValueError,
    struct.error,
)
"""What reading a damaged or hostile pickle can raise."""


def replace_file(path: Path, content: bytes) -> None:
    """Write a temporary file, sync it and rename it to `path`: a reader never sees half of the content."""
    aside = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        aside.write_bytes(content)
        sync(aside)
        os.replace(aside, path)
    finally:
        aside.unlink(missing_ok=True)
    sync(path.parent)


def link_or_copy(source: Path, target: Path) -> None:
    """Create a hard link to a file; copy the file where a link is not possible, as on another disk."""
    try:
        os.link(source, target)
    except OSError:
        shutil.copyfile(source, target)


def first_of(names: Sequence[str], count: int = 3) -> str:
    """Return the first names, and how many more there are, for a message."""
    more = f" and {len(names) - count:,} more" if len(names) > count else ""
    return ", ".join(names[:count]) + more


def open_lines(path: Path) -> int:
    """Open a file of lines to append to it; end an incomplete last line, which a full disk or a kill leaves behind.

    Otherwise the next line would become a part of the incomplete one, and be lost.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o644)
    size = os.fstat(handle).st_size
    if size and os.pread(handle, 1, size - 1) != b"\n":
        write_whole(handle, b"\n")
    return handle


def write_whole(handle: int, data: bytes | memoryview) -> None:
    """Write all bytes; if the disk accepts only some of them, writing the others raises OSError."""
    while data:
        data = data[os.write(handle, data) :]


def varint(number: int) -> bytes:
    """Return a number as protocol buffers write it: 7 bits in each byte, the lowest first."""
    found = bytearray()
    while number > 0x7F:
        found.append(number & 0x7F | 0x80)
        number >>= 7
    return bytes([*found, number])


def sync(path: Path) -> None:
    """Write a file's content, or a folder's entries, to the disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def sha256(path: Path) -> str:
    """Return the hex digest of a file."""
    digest = hashlib.sha256()
    for block in blocks(path):
        digest.update(block)
    return digest.hexdigest()


def blocks(path: Path, size: int = 1 << 20) -> Iterator[bytes]:
    """Yield the bytes of a file, `size` at a time."""
    with path.open("rb") as stream:
        while block := stream.read(size):
            yield block


def texts(data: bytes, key: str) -> Iterator[tuple[int, str | bytes]]:
    """Yield (line number from 0, text under `key`); for Python's json to read, the line as bytes. Skip blank lines."""
    if json_lines.why_not():
        yield from _lines(data)
        return
    lines = json_lines.read(data, key)
    text = memoryview(lines.text.data)
    rows = zip(
        lines.numbers.tolist(), lines.plain.tolist(), lines.starts.tolist(), lines.ends.tolist(), strict=True
    )
    for number, plain, start, end in rows:
        yield number, str(text[start:end], "utf-8") if plain else data[start:end]


def _lines(data: bytes) -> Iterator[tuple[int, bytes]]:
    for number, line in enumerate(data.split(b"\n")):
        if line and not line.isspace():
            yield number, line
