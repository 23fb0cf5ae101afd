"""Show what a command waits for, so that no command is silent for longer than two seconds.

On a terminal one line with the seconds is redrawn and erased; elsewhere a line is written after ten seconds, and again
each time the wait has doubled.
"""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from types import TracebackType

from clusterctl.cli import screen
from clusterctl.environment import inherited
from clusterctl.inventory import nodeset
from clusterctl.text import duration

# Seconds before a wait is shown on a terminal, and between two redraws.
PATIENCE, REDRAW = 0.7, 0.25
# Seconds before a wait is reported without a terminal.
QUIET = 10.0
# The wait that follows each phase of a start.
NEXT = {
    "": "the nodes",
    "check": "the logins",
    **dict.fromkeys(("reach", "push code", "setup", "push data"), "the preparation of the ranks"),
    "ranktable": "the start of the ranks",
    "start": "the first output",
}


@contextmanager
def shown_while(subject: str) -> Iterator[None]:
    """Show on a terminal what a command waits for during the block, as a fixed line without a thread."""
    shows = sys.stdin.isatty() and sys.stderr.isatty() and inherited(("TERM",)).get("TERM") != "dumb"
    if shows:
        sys.stderr.write(f"\r\x1b[2Kwaiting    for {subject}")
        sys.stderr.flush()
    try:
        yield
    finally:
        if shows:
            sys.stderr.write("\r\x1b[2K")
            sys.stderr.flush()


class Waiting:
    """Shows the current wait from a separate thread; `log` writes a line and begins the next wait."""

    def __init__(
        self,
        subject: str = "",
        *,
        quiet: bool = False,
        at_once: bool = False,
        unanswered: Callable[[], Sequence[str]] = tuple,
    ) -> None:
        """`quiet` shows nothing; `at_once` shows the first wait from its beginning; `unanswered` returns the nodes
        that have not answered.
        """
        self.began = time.monotonic()
        self._subject, self._quiet, self._unanswered = subject, quiet, unanswered
        self._patience = 0.0 if at_once else PATIENCE
        self._since = self.began
        self._next_report = QUIET
        self._shown = False
        self._lock = threading.Lock()
        self._closed = threading.Event()
        self._animated = screen.on_terminal()

    def __enter__(self) -> Waiting:
        if not self._quiet:
            if not self._patience:
                self._show()
            threading.Thread(target=self._work, daemon=True, name="waiting").start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __call__(self, phase: str, text: str) -> None:
        """Log a finished phase with the seconds since the beginning, and wait for the next one."""
        with self._lock:
            self._erase()
            screen.log(f"{phase:<10} {text}  [{time.monotonic() - self.began:.1f} s]")
            self._begin(NEXT.get(phase, "the next phase"))

    def line(self, text: str, style: str = "", *, then: str = "") -> None:
        """Write a line above the wait; `then` names what is waited for next."""
        with self._lock:
            self._erase()
            screen.log(text, style)
            if then:
                self._begin(then)

    def on(self, subject: str) -> None:
        """Change the shown wait; its time continues."""
        with self._lock:
            self._subject = subject

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Erase the line, so that other output can be written within the block."""
        with self._lock:
            self._erase()
            yield

    def close(self) -> None:
        """End the wait and erase its line."""
        with self._lock:
            self._closed.set()
            self._erase()

    def _begin(self, subject: str) -> None:
        self._subject, self._since, self._next_report = subject, time.monotonic(), QUIET
        self._patience = PATIENCE

    def _work(self) -> None:
        while not self._closed.wait(REDRAW):
            with self._lock:
                if not self._closed.is_set():
                    self._show()

    def _show(self) -> None:
        waited, names = time.monotonic() - self._since, self._unanswered()
        subject = f"{self._subject}: {nodeset.fold(names)}" if names else self._subject
        if self._animated and waited >= self._patience:
            width = max(screen.error_console().width - 1, 20)
            line = f"waiting    for {subject}  {duration(waited)}"
            sys.stderr.write(f"\r\x1b[2K{line[:width]}")
            sys.stderr.flush()
            self._shown = True
        elif not self._animated and waited > self._next_report:
            self._next_report = 2 * waited
            screen.log(f"waiting    for {subject}  [{waited:.0f} s]")

    def _erase(self) -> None:
        if self._shown:
            sys.stderr.write("\r\x1b[2K")
            sys.stderr.flush()
            self._shown = False
