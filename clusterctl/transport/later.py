"""Call functions in a few threads, immediately or after a delay."""

from __future__ import annotations

import heapq
import itertools
import threading
import time
from collections.abc import Callable

from clusterctl.transport.fanout import FANOUT


class Later:
    """A queue of calls with a time for each, and at most `most` threads that live while it has entries."""

    def __init__(self, most: int = FANOUT) -> None:
        self._most = most
        self._calls: list[tuple[float, int, Callable[[], object]]] = []
        self._numbers = itertools.count()
        self._change = threading.Condition()
        self._threads = self._idle = 0
        self._closed = False

    def call(self, work: Callable[[], object], seconds: float = 0.0) -> None:
        """Call `work`, which raises nothing, after so many seconds."""
        with self._change:
            if self._closed:
                return
            heapq.heappush(self._calls, (time.monotonic() + seconds, next(self._numbers), work))
            if self._idle:
                # The thread may be waiting for an entry that is due later.
                self._change.notify()
            elif self._threads < self._most:
                self._threads += 1
                threading.Thread(target=self._run, daemon=True, name="later").start()

    def close(self) -> None:
        """Drop the calls that have not begun."""
        with self._change:
            self._closed = True
            self._calls.clear()
            self._change.notify_all()

    def _run(self) -> None:
        while (work := self._next()) is not None:
            work()

    def _next(self) -> Callable[[], object] | None:
        """Return the next call when it is due, or None if there is none: then this thread ends."""
        with self._change:
            while self._calls:
                left = self._calls[0][0] - time.monotonic()
                if left <= 0:
                    return heapq.heappop(self._calls)[2]
                self._idle += 1
                self._change.wait(left)
                self._idle -= 1
            self._threads -= 1
            return None
