"""Ctrl-C while a run is being stopped: the second one forces, whenever it comes."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from types import TracebackType


class InterruptGuard:
    """Keeps a Ctrl-C that comes too early until it can do what it is meant for, and never lets one end us half-way.

    Between the first one and the request to stop stand imports and files, 100 ms and more: a second one in there ended
    the command, and the run went on.
    """

    def __init__(self) -> None:
        self.came = self.armed = False

    def __enter__(self) -> InterruptGuard:
        self.before = signal.signal(signal.SIGINT, self._note)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        signal.signal(signal.SIGINT, self.before)

    def _note(self, *_: object) -> None:
        self.came = True
        if self.armed:
            self.armed = False
            raise KeyboardInterrupt

    @contextmanager
    def may_force(self) -> Iterator[None]:
        """Within, a Ctrl-C is raised at once, also one that came before; it is the last that is."""
        if self.came:
            raise KeyboardInterrupt
        self.armed = True
        try:
            yield
        finally:
            self.armed = False
