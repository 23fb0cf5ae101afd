"""How many handshakes are under way with one server, and what became of them: for the child processes of OpenSSH,
which know nothing of each other."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

from clusterctl.errors import NodeError

AT_ONCE = 8  # handshakes at once; a default sshd begins to drop them at 10
REMEMBERED = 10.0  # seconds for which a gateway that failed is not tried for other nodes


class Door:
    """One server that this machine connects to. The first node behind a gateway goes alone: a login that the
    gateway refuses is refused once, and one that does not answer costs one time-out, whatever the number of nodes."""

    def __init__(self) -> None:
        self._places = threading.Semaphore(AT_ONCE)
        self._first = threading.Lock()
        self._open = threading.Event()
        self._failed: NodeError | None = None
        self._failed_at = 0.0

    @contextmanager
    def passed(self, node: str, is_gateway: bool) -> Iterator[None]:
        """A place for one handshake; raises at once what kept another node from getting through."""
        alone = is_gateway and self._goes_first()
        try:
            if self._failed is not None and time.monotonic() - self._failed_at < REMEMBERED:
                raise type(self._failed)(node, self._failed.reason, self._failed.hint)
            with self._places:
                yield
            self._open.set()
        finally:
            if alone:
                self._first.release()

    def _goes_first(self) -> bool:
        if not self._open.is_set():
            self._first.acquire()
            if not self._open.is_set():
                return True
            self._first.release()
        return False

    def failed(self, name: str, problem: NodeError) -> None:
        """Nobody comes through: it is the gateway itself, not what lies behind."""
        self._failed = type(problem)(problem.node, f"its gateway {name}: {problem.reason}", problem.hint)
        self._failed_at = time.monotonic()
        self._open.clear()
