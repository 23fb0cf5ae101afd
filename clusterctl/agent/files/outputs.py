"""Find what a run wrote into its working folder.

Runs on nodes: standard library only, Python 3.8 and newer.
"""

from __future__ import annotations

import os
import stat
from typing import Set

from clusterctl.agent.files.file_calls import status_of
from clusterctl.agent.files.tree import Scanned, scan


def scan_outputs(path: str, code: str) -> Scanned:
    """Return what a run wrote into its working folder: neither pushed files that are unchanged, nor Python's caches."""

    status = status_of(code)
    pushed = status.st_ctime_ns if status is not None else 0

    def skip(name: str, is_dir: bool) -> bool:
        if is_dir:
            return os.path.basename(name) == "__pycache__"
        return _is_pushed(f"{path}/{name}", f"{code}/{name}", pushed)

    scanned = scan(path, skip)
    needed: Set[str] = set()
    for entry in scanned.entries:
        if entry.kind != "d" or not os.path.isdir(f"{code}/{entry.path}"):
            parts = entry.path.split("/")
            needed |= {"/".join(parts[:count]) for count in range(1, len(parts) + 1)}
    return scanned._replace(entries=[entry for entry in scanned.entries if entry.path in needed])


def _is_pushed(path: str, code: str, pushed: int) -> bool:
    """Return whether a file of a working folder is still the one that was pushed, at this time in nanoseconds."""
    here, stored = status_of(path), status_of(code)
    if here is None or stored is None or stat.S_IFMT(here.st_mode) != stat.S_IFMT(stored.st_mode):
        return False
    if stat.S_ISLNK(here.st_mode):
        return os.readlink(path) == os.readlink(code)
    same = (here.st_size, here.st_mtime_ns) == (stored.st_size, stored.st_mtime_ns)
    # A link that was written in place has a newer time.
    return same and here.st_mtime_ns <= pushed
