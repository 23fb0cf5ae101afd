"""A 128-bit checksum that detects damage and is faster than memory; it is not secure against attackers.

`checksum.cpp` describes the algorithm. It always detects a change within one word of eight bytes.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence

import numpy as np

from native.compiled import arguments
from native.compiled.arguments import INT, POINTER, function
from native.compiled.library import Library, LibraryMissing, load

__all__ = ["SIZE", "block_checksums", "is_available"]

# The bytes of a checksum.
SIZE = 16


def block_checksums(blocks: Sequence[memoryview]) -> bytes:
    """Return the checksum of each block, 16 bytes each; only call this if `is_available`."""
    library = _library()
    assert library is not None, "the compiled library is missing"
    run = function("native_checksum", None, INT, POINTER, arguments.SIZE, POINTER)
    out = np.empty(SIZE * len(blocks), np.uint8)
    start = out.ctypes.data
    for at, block in enumerate(blocks):
        # frombuffer also accepts read-only memory.
        source = np.frombuffer(block, np.uint8).ctypes.data if len(block) else 0
        run(library.level, source, len(block), start + SIZE * at)
    return out.tobytes()


def is_available() -> bool:
    """Return whether the compiled library is present; without it, SHA-256 is as fast as any Python code."""
    return _library() is not None


@functools.cache
def _library() -> Library | None:
    try:
        return load()
    except LibraryMissing:
        return None
