"""SHA-256 of many blocks of memory, several at a time if the processor has instructions for it."""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Sequence
from itertools import groupby

import numpy as np

from native.compiled.arguments import INT, POINTER, SIZE, function
from native.compiled.library import LibraryMissing, load

__all__ = ["block_hashes", "piece_hashes"]


def piece_hashes(data: memoryview, piece: int) -> bytes:
    """Return the SHA-256 of each piece of `piece` bytes of `data`, 32 bytes each; the last piece may be shorter."""
    return block_hashes([data[start : start + piece] for start in range(0, len(data), piece)])


def block_hashes(blocks: Sequence[memoryview]) -> bytes:
    """Return the SHA-256 of each block, 32 bytes each; adjacent blocks of equal size are computed together."""
    if not _is_compiled():
        return b"".join(hashlib.sha256(block).digest() for block in blocks)
    return b"".join(_hashes(list(equal), size) for size, equal in groupby(blocks, key=len))


def _hashes(blocks: Sequence[memoryview], size: int) -> bytes:
    # frombuffer also accepts read-only memory.
    starts = np.array(
        [np.frombuffer(block, np.uint8).ctypes.data if size else 0 for block in blocks], np.uint64
    )
    out = np.empty(32 * len(blocks), np.uint8)
    run = function("native_sha256_blocks", None, INT, POINTER, SIZE, SIZE, POINTER)
    run(load().level, starts.ctypes.data, len(blocks), size, out.ctypes.data)
    return out.tobytes()


@functools.cache
def _is_compiled() -> bool:
    """Return whether the compiled function works here; on other processors, hashlib has its own instructions."""
    try:
        return bool(load().functions.native_sha256_works())
    except LibraryMissing:
        return False
