"""Free the middle of a log that grows too long: its bytes become a hole, and all others keep their places.

Whoever writes the file or follows it by offsets continues as before; a reader skips the hole.

Runs on nodes too: standard library only, Python 3.8 and newer.
"""

from __future__ import annotations

import errno
import os
from typing import Tuple

# Bytes at the beginning that stay: how the program was started.
HEAD = 1 << 20
# Bytes in which disks are freed.
PAGE = 1 << 12
# Of fallocate(2): FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE. Of macOS: F_PUNCHHOLE.
PUNCH, PUNCH_OF_MACOS = 3, 99


def trim(path: str, limit: int) -> int:
    """Free the middle of a file that takes more than `limit` bytes of its disk, so that half of that stays.

    Returns how many bytes became a hole: none if the file is small enough, or if its file system has no holes.
    """
    try:
        status = os.stat(path)
        if status.st_blocks * 512 <= limit:
            return 0
        length = (status.st_size - limit // 2 - HEAD) // PAGE * PAGE
        descriptor = os.open(path, os.O_RDWR)
    except OSError:
        return 0
    try:
        return length if length > 0 and _punch(descriptor, length) else 0
    finally:
        os.close(descriptor)


def _punch(descriptor: int, length: int) -> bool:
    # Few logs need these.
    import sys

    if sys.platform == "darwin":
        import fcntl
        import struct

        try:
            fcntl.fcntl(descriptor, PUNCH_OF_MACOS, struct.pack("IIqq", 0, 0, HEAD, length))
        except OSError:
            return False
        return True
    import ctypes

    fallocate = getattr(ctypes.CDLL(None), "fallocate", None)
    large = ctypes.c_longlong
    return fallocate is not None and fallocate(descriptor, PUNCH, large(HEAD), large(length)) == 0


def read(descriptor: int, offset: int, count: int) -> "Tuple[int, bytes]":
    """Return at most `count` bytes from `offset` on, or from the end of the hole there, and where they begin."""
    data = os.pread(descriptor, count, offset)
    if b"\0" not in data:
        return offset, data
    try:
        hole = os.lseek(descriptor, offset, os.SEEK_HOLE)
        if hole > offset:
            return offset, data[: hole - offset]
        offset = os.lseek(descriptor, offset, os.SEEK_DATA)
    except OSError as problem:
        if problem.errno == errno.ENXIO:
            # Nothing but a hole follows.
            return os.fstat(descriptor).st_size, b""
        # A file system without holes.
        return offset, data
    data = os.pread(descriptor, count, offset)
    return offset, data[: max(1, os.lseek(descriptor, offset, os.SEEK_HOLE) - offset)]
