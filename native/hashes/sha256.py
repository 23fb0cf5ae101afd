"""SHA-256 of neighbouring pieces of a block: several at a time where the processor has instructions for it."""

from __future__ import annotations

import ctypes
import functools
import hashlib

import numpy as np

from native.compiled.library import LibraryMissing, load

__all__ = ["piece_hashes"]


def piece_hashes(data: memoryview, piece: int) -> bytes:
    """Return the SHA-256 of each `piece` bytes of `data`, the last of which may be shorter: 32 bytes each."""
    if not _is_compiled():
        starts = range(0, len(data), piece)
        return b"".join(hashlib.sha256(data[start : start + piece]).digest() for start in starts)
    out = np.empty(32 * -(-len(data) // piece), np.uint8)
    # frombuffer also takes memory that may not be written.
    start = np.frombuffer(data, np.uint8).ctypes.data if len(data) else None
    load().functions.native_sha256_pieces(
        ctypes.c_void_p(start),
        ctypes.c_int64(len(data)),
        ctypes.c_int64(piece),
        ctypes.c_void_p(out.ctypes.data),
    )
    return out.tobytes()


@functools.cache
def _is_compiled() -> bool:
    """Return whether the compiled function works here; hashlib, on other processors, has its own instructions."""
    try:
        return bool(load().functions.native_sha256_works())
    except LibraryMissing:
        return False
