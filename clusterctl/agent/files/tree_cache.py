"""Cache the content of files: a file whose inode shows no change since is not read again.

Both sides use it: a node for the trees that were pushed to it, the launcher for the folders that it pushes.
"""

from __future__ import annotations

import json
import os
import time
from typing import Any, Dict, Iterable, List, NamedTuple, Optional, Tuple

from clusterctl.agent import compact_json
from clusterctl.agent.files.tree import content_of
from clusterctl.agent.processes import read_limited

VERSION = 1
# Limit of bytes of a cache file; a million files take 150 MB.
LARGEST = 1 << 30
# Nanoseconds: kernels stamp files every 1 to 10 ms; a second change within one stamp leaves no trace.
TICK = 50_000_000
# Nanoseconds, on a file system that keeps whole seconds.
COARSE_TICK = 2_000_000_000


class CacheEntry(NamedTuple):
    """A file as it was when it was read."""

    size: int
    mtime: int
    ctime: int
    inode: int
    content: str
    digests: str
    """Of its pieces, in hexadecimal."""

    def fits(self, status: os.stat_result) -> bool:
        return (self.size, self.mtime, self.ctime, self.inode) == (
            status.st_size,
            status.st_mtime_ns,
            status.st_ctime_ns,
            status.st_ino,
        )


def seen(status: os.stat_result, content: str, digests: bytes = b"") -> CacheEntry:
    return CacheEntry(
        status.st_size, status.st_mtime_ns, status.st_ctime_ns, status.st_ino, content, digests.hex()
    )


class Memory:
    """Cached contents by path, and which of them were used in this run."""

    def __init__(self, rows: Optional[Dict[str, CacheEntry]] = None) -> None:
        self._rows = rows or {}
        self.now: Dict[str, CacheEntry] = {}
        self.read_bytes = 0

    def read(self, path: str, full: str, status: os.stat_result) -> Tuple[int, str, bytes]:
        """Return the result of `content_of`; the file is read only if it differs from the cached state."""
        known = self._rows.get(path)
        if known is None or not known.fits(status):
            size, content, digests = content_of(full)
            self.read_bytes += size
            if size != status.st_size:
                # The file is being written and cannot be remembered.
                return size, content, digests
            known = seen(status, content, digests)
        self.now[path] = known
        return known.size, known.content, bytes.fromhex(known.digests)


def is_settled(changed: int, now: int) -> bool:
    """Return True if any later change must show in the times of a file; for one just written, it may not."""
    return changed + (TICK if changed % 1_000_000_000 else COARSE_TICK) < now


def settled(rows: Dict[str, CacheEntry]) -> Dict[str, CacheEntry]:
    """Those that may be remembered."""
    now = time.time_ns()
    return {path: entry for path, entry in rows.items() if is_settled(entry.ctime, now)}


def rows_to_json(rows: Dict[str, CacheEntry]) -> List[List[Any]]:
    return [[path, *entry] for path, entry in rows.items()]


def rows_from_json(value: Iterable[List[Any]]) -> Dict[str, CacheEntry]:
    """Return remembered rows; raise ValueError or TypeError for anything that `rows_to_json` did not make."""
    return {str(path): CacheEntry(*rest) for path, *rest in value}


def load(path: str) -> Dict[str, CacheEntry]:
    """Return the remembered rows of a file; empty if there is none, or none that can be read."""
    try:
        value = json.loads(read_limited(path, LARGEST))
        return rows_from_json(value["rows"]) if value["version"] == VERSION else {}
    except (OSError, ValueError, TypeError, KeyError, RecursionError):
        return {}


def save(path: str, rows: Dict[str, CacheEntry]) -> None:
    """Keep the settled rows; the file is written aside and renamed."""
    os.makedirs(os.path.dirname(path), mode=0o700, exist_ok=True)
    aside = f"{path}.{os.getpid()}.aside"
    with open(os.open(aside, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "w", encoding="utf-8") as file:
        value = {"version": VERSION, "rows": rows_to_json(settled(rows))}
        file.write(compact_json.dumps(value))
    os.replace(aside, path)
