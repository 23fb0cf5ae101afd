"""Read many links in one thread: a thread per link would cost memory, and two context switches per beat."""

from __future__ import annotations

import contextlib
import os
import selectors
import socket
import threading
import time
from collections import deque
from typing import Protocol

# Seconds after which a new link is checked for the first time; it then says when it must be checked again.
FIRST_CHECK = 0.5
# Bytes of wake-ups per read.
WAKES = 4096


class Polled(Protocol):
    """A link as the poller sees it. No method waits."""

    def pump(self) -> bool:
        """Process received bytes; return False if this link no longer needs the poller."""

    def check(self, now: float) -> float | None:
        """Send a beat if one is due; return when to check again, or None if the link has ended."""


class Poller:
    """One thread that waits for the files of all links, and checks their beats."""

    def __init__(self) -> None:
        self._selector = selectors.DefaultSelector()
        self._links: dict[int, Polled] = {}
        # When some link must be checked.
        self._due = float("inf")
        self._change = threading.Lock()
        self._woken: deque[int] = deque()
        self._waking, woken = socket.socketpair()
        self._wakes = woken
        for end in (self._waking, self._wakes):
            end.setblocking(False)
        self._selector.register(self._wakes, selectors.EVENT_READ)
        # Started by the first link.
        self._thread: threading.Thread | None = None

    def add(self, file: int, link: Polled) -> None:
        """Call the link whenever its file can be read."""
        with self._change:
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, daemon=True, name="links")
                self._thread.start()
            self._links[file] = link
            self._due = min(self._due, time.monotonic() + FIRST_CHECK)
            self._selector.register(file, selectors.EVENT_READ)
        # It may have bytes that were read before, and the thread may wait without a time limit.
        self.wake(file)

    def remove(self, file: int, link: Polled) -> None:
        """Forget a link before its file is closed: the file's number may soon belong to another link."""
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
        # A full buffer also wakes the thread.
        with contextlib.suppress(BlockingIOError):
            self._waking.send(b"\0")

    def _run(self) -> None:
        wakes = self._wakes.fileno()
        while True:
            wait = max(0.0, self._due - time.monotonic()) if self._links else None
            ready = {key.fd for key, _ in self._selector.select(wait)}
            if wakes in ready:
                ready.discard(wakes)
                with contextlib.suppress(BlockingIOError):
                    self._wakes.recv(WAKES)
                while self._woken:
                    ready.add(self._woken.popleft())
            for file in ready:
                self._pump(file)
            # Received bytes are read first, so that no link counts as silent because this machine was suspended.
            if time.monotonic() >= self._due:
                self._check_all()

    def _pump(self, file: int) -> None:
        with self._change:
            link = self._links.get(file)
        if link is not None and not link.pump():
            self.remove(file, link)

    def _check_all(self) -> None:
        """Check every link: beats are due for all of them at the same moment, so that one wake-up sends them all."""
        now = time.monotonic()
        with self._change:
            links = list(self._links.items())
            # A link that is added meanwhile makes this time earlier.
            self._due = float("inf")
        due = float("inf")
        for file, link in links:
            again = link.check(now)
            if again is None:
                self.remove(file, link)
            else:
                due = min(due, again)
        with self._change:
            self._due = min(self._due, due)


# By process id: a fork gets a new poller.
_POLLERS: dict[int, Poller] = {}


def poller() -> Poller:
    """Return the poller of this process. All threads share it, even if several of them need it first."""
    return _POLLERS.get(os.getpid()) or _POLLERS.setdefault(os.getpid(), Poller())
