"""Read many links in one thread: a thread for each would cost memory, and two context switches for each beat."""

from __future__ import annotations

import contextlib
import os
import selectors
import socket
import threading
import time
from collections import deque
from functools import lru_cache
from typing import Protocol

# Seconds between two checks of every link for silence and for beats that are due.
TICK = 0.5
# Bytes of wake-ups per read.
WAKES = 4096


class Polled(Protocol):
    """A link as the poller sees it. No method waits."""

    def pump(self) -> bool:
        """Process what has arrived; return False if this link needs the poller no longer."""

    def check(self, now: float) -> bool:
        """Send a beat if one is due; return False if the link is silent for too long, and so has ended."""


class Poller:
    """One thread that waits for the files of all links, and keeps their time."""

    def __init__(self) -> None:
        self._selector = selectors.DefaultSelector()
        self._links: dict[int, Polled] = {}
        self._change = threading.Lock()
        self._woken: deque[int] = deque()
        self._waking, woken = socket.socketpair()
        self._wakes = woken
        for end in (self._waking, self._wakes):
            end.setblocking(False)
        self._selector.register(self._wakes, selectors.EVENT_READ)
        self._thread = threading.Thread(target=self._run, daemon=True, name="links")
        self._thread.start()

    def add(self, file: int, link: Polled) -> None:
        """Call the link whenever its file can be read."""
        with self._change:
            self._links[file] = link
            self._selector.register(file, selectors.EVENT_READ)
        # It may have bytes that were read before, and the thread may wait without a time limit.
        self.wake(file)

    def remove(self, file: int, link: Polled) -> None:
        """Forget a link, before its file is closed: the number may soon be another one's."""
        with self._change:
            if self._links.get(file) is link:
                del self._links[file]
                with contextlib.suppress(KeyError, ValueError, OSError):
                    self._selector.unregister(file)

    def wake(self, file: int) -> None:
        """Let the thread call a link for which another thread has read something."""
        if threading.current_thread() is self._thread:
            return
        self._woken.append(file)
        # A full buffer wakes it as well.
        with contextlib.suppress(BlockingIOError):
            self._waking.send(b"\0")

    def _run(self) -> None:
        due = time.monotonic() + TICK
        while True:
            wait = max(0.0, due - time.monotonic()) if self._links else None
            ready = {key.fd for key, _ in self._selector.select(wait)}
            if self._wakes.fileno() in ready:
                ready.discard(self._wakes.fileno())
                with contextlib.suppress(BlockingIOError):
                    self._wakes.recv(WAKES)
                while self._woken:
                    ready.add(self._woken.popleft())
            for file in ready:
                self._pump(file)
            # What had arrived was read first: after a pause of this machine, no link counts as silent for it.
            if time.monotonic() >= due:
                self._check_all()
                due = time.monotonic() + TICK

    def _pump(self, file: int) -> None:
        with self._change:
            link = self._links.get(file)
        if link is not None and not link.pump():
            self.remove(file, link)

    def _check_all(self) -> None:
        now = time.monotonic()
        with self._change:
            links = list(self._links.items())
        for file, link in links:
            if not link.check(now):
                self.remove(file, link)


def poller() -> Poller:
    """Return this process's poller; a fork gets a new one."""
    return _poller_of(os.getpid())


@lru_cache(maxsize=1)
def _poller_of(process: int) -> Poller:
    return Poller()
