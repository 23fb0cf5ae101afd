"""Handle Ctrl-C while a run is being stopped: the second one kills the run."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from types import TracebackType


class InterruptGuard:
    """Defer a Ctrl-C until `may_force`, so that it cannot end this process before the run is stopped.

    100 ms or more pass between the first Ctrl-C and the request to stop. Without the guard, a second Ctrl-C in that
    time would end the command while the run continues.
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
        """Within the block, raise the first Ctrl-C as KeyboardInterrupt, also one from before the block."""
        if self.came:
            raise KeyboardInterrupt
        self.armed = True
        try:
            yield
        finally:
            self.armed = False
