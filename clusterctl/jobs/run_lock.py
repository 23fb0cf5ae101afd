"""Locks in the folder of a run; each contains the identity of the process that holds it."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO

from clusterctl.agent.processes import identity, is_alive, read_limited
from clusterctl.files import make_private_folder
from clusterctl.wire.typed_json import BadValue, parse

# Limit of bytes of an identity.
LARGEST = 1 << 16


@contextlib.contextmanager
def hold_lock(path: Path, patience: float, owner: Callable[[], int | None]) -> Iterator[bool]:
    """Hold a lock and yield True; yield False if `owner` names a process, or after `patience` seconds."""
    make_private_folder(path.parent)
    with open(os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600), "r+b", buffering=0) as lock:
        if not _locked(lock, time.monotonic() + patience, owner):
            yield False
            return
        # Written over, never emptied: on a full disk another file would take the block.
        _write_over(lock, json.dumps(identity(os.getpid())))
        try:
            yield True
        finally:
            _write_over(lock, "{}")


def owner_of(lock: Path, held_elsewhere: Callable[[], bool] = lambda: False) -> int | None:
    """Return the pid of the living process that a lock file names."""
    try:
        owner = parse(read_limited(str(lock), LARGEST))
    except (OSError, BadValue):
        return None
    if not isinstance(owner, dict) or not isinstance(owner.get("pid"), int):
        return None
    return owner["pid"] if is_alive(owner) or held_elsewhere() else None


def _write_over(file: IO[bytes], text: str) -> None:
    """Replace the content of an open file; a disk that is full refuses only the first content."""
    file.seek(0)
    file.write(text.encode())
    file.truncate()


def _locked(lock: IO[bytes], deadline: float, owner: Callable[[], int | None]) -> bool:
    while True:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return True
        except BlockingIOError:
            if owner() is not None or time.monotonic() > deadline:
                return False
            time.sleep(0.02)
