"""The small files in which a node keeps what became of a run: whole, and kept on a disk that is full too.

Runs on nodes too: standard library only, Python 3.8 and newer.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import time
from typing import Any, Dict, Optional

FULL = (errno.ENOSPC, errno.EDQUOT)
# Bytes: a disk with less is full, for logs that are written by the page.
LEAST = 1 << 16
# Seconds between two tries to write the last word, and until it is given up.
AGAIN, PATIENCE = 0.5, 30.0


def write_json(path: str, value: Dict[str, Any], durable: bool = True) -> None:
    """Aside, fsync, rename; for its owner's eyes only. What is written again soon needs no fsync: it may take long.

    Where the disk is full a file that is there is written over in place: it has its block, and these fit into one.
    """
    aside, text = f"{path}.{os.getpid()}.aside", json.dumps(value).encode()
    try:
        with open(os.open(aside, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "wb") as file:
            file.write(text)
            if durable:
                file.flush()
                os.fsync(file.fileno())
        os.replace(aside, path)
    except OSError as problem:
        with contextlib.suppress(OSError):
            os.unlink(aside)
        if problem.errno not in FULL or not os.path.exists(path):
            raise
        _write_over(path, text)


def _write_over(path: str, text: bytes) -> None:
    with open(path, "r+b", buffering=0) as file:
        file.write(text)
        file.truncate()


def read_json(path: str) -> Optional[Dict[str, Any]]:
    """A state file's content; None where it is not there or is no state file."""
    try:
        with open(path, encoding="utf-8") as file:
            value = json.load(file)
    except (OSError, ValueError):
        return None
    return value if isinstance(value, dict) else None


def fullness(folder: str) -> Dict[str, str]:
    """What is recorded of a rank that failed while its disk was full: its own words on it could not be written."""
    try:
        found = os.statvfs(folder)
    except OSError:
        return {}
    full = found.f_bavail * found.f_frsize < LEAST or (found.f_files and not found.f_favail)
    return {"full": folder} if full else {}


def remove_halves(run_dir: str) -> None:
    """Checkpoints whose writer was killed in the middle; nobody writes here any more, and they will never be whole."""
    folder = os.path.join(run_dir, "checkpoints")
    halves = (
        [name for name in os.listdir(folder) if name.startswith(".tmp-")] if os.path.isdir(folder) else []
    )
    for name in halves:
        # 1 MB that a supervisor does without.
        import shutil

        shutil.rmtree(os.path.join(folder, name), ignore_errors=True)


class Records:
    """A supervisor's own: what can't be written waits, since the ranks must not die of a full disk for it."""

    def __init__(self) -> None:
        self.waiting: Dict[str, Dict[str, Any]] = {}

    def write(self, path: str, value: Dict[str, Any], durable: bool = True) -> None:
        """Now, or when there is room again."""
        try:
            write_json(path, value, durable)
            self.waiting.pop(path, None)
        except OSError:
            self.waiting[path] = value

    def again(self) -> None:
        """Try what waits."""
        for path, value in list(self.waiting.items()):
            self.write(path, value)

    def finish(self) -> None:
        """The same until all is written, or for half a minute."""
        deadline = time.monotonic() + PATIENCE
        while self.waiting and time.monotonic() < deadline:
            time.sleep(AGAIN)
            self.again()
