"""Wait until files change: Linux's inotify, called through ctypes; without it, a fixed pause."""

from __future__ import annotations

import os
import select
import time
from typing import Iterable, Set

# From <sys/inotify.h>: a file of the folder was written, created, or renamed into it.
IN_MODIFY, IN_MOVED_TO, IN_CREATE = 0x2, 0x80, 0x100
# IN_NONBLOCK and IN_CLOEXEC have the values of the flags of open().
FLAGS = os.O_NONBLOCK | os.O_CLOEXEC


class Changes:
    """Watches folders. Where the system gives no inotify (its limit is 128 per user), `wait` is a fixed pause."""

    def __init__(self) -> None:
        # Importing it takes 10 ms or more.
        import ctypes

        try:
            self._libc = ctypes.CDLL(None, use_errno=True)
            self._descriptor = int(self._libc.inotify_init1(FLAGS))
        except (OSError, AttributeError):
            self._descriptor = -1
        self._watched: Set[str] = set()
        self._poll = select.poll()
        if self._descriptor >= 0:
            self._poll.register(self._descriptor, select.POLLIN)

    def watch(self, folders: Iterable[str]) -> bool:
        """Watch more folders; return True if every one of them is watched, and all their changes are reported."""
        if self._descriptor < 0:
            return False
        for folder in folders:
            if folder not in self._watched:
                mask = IN_MODIFY | IN_MOVED_TO | IN_CREATE
                if self._libc.inotify_add_watch(self._descriptor, os.fsencode(folder), mask) < 0:
                    return False
                self._watched.add(folder)
        return True

    def wait(self, seconds: float) -> bool:
        """Return as soon as something changes, at the latest after `seconds`; return whether something did."""
        if self._descriptor < 0:
            time.sleep(seconds)
            return False
        if not self._poll.poll(1000 * seconds):
            return False
        try:
            # Which file changed does not matter: all files are checked.
            while len(os.read(self._descriptor, 1 << 16)) > 1 << 15:
                pass
        except BlockingIOError:
            pass
        return True

    def close(self) -> None:
        """Stop watching."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1
