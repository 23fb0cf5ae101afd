"""Show the progress of a transfer to or from many nodes in one line of the terminal."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, TypeVar

from clusterctl.cli import screen

if TYPE_CHECKING:
    from clusterctl.transfer.push import Progress

T = TypeVar("T")
# Seconds between two redraws; each one adds up all nodes.
REDRAW = 0.1


class Bar:
    """Collects the bytes of all nodes and the slowest node; shows nothing without a terminal."""

    def __init__(self, update: Callable[[int, int, str], None] | None = None) -> None:
        self._update = update
        self._seen: dict[str, tuple[int, int]] = {}
        self._drawn = 0.0
        self._change = threading.Lock()

    def of(self, node: str) -> Progress:
        """Return the function to which the transfer of a node reports."""

        def report(done: int, total: int) -> None:
            with self._change:
                self._seen[node] = (done, total)
                now = time.monotonic()
                if self._update is None or (now - self._drawn < REDRAW and done < total):
                    return
                self._drawn = now
                self._update(*self._sums(), self.behind())

        return report

    def _sums(self) -> tuple[int, int]:
        return sum(done for done, _ in self._seen.values()), sum(total for _, total in self._seen.values())

    def behind(self) -> str:
        """Return the slowest node if it has at most half the progress of the median, else ""."""
        shares = sorted((done / total, node) for node, (done, total) in self._seen.items() if total)
        if len(shares) < 3 or shares[0][0] > shares[len(shares) // 2][0] / 2:
            return ""
        return f"slowest: {shares[0][1]}, {shares[0][0]:.0%}"


def promised() -> Future[Any]:
    """Return a future that its creator fills."""
    return Future()


def begun(work: Callable[[], T]) -> Future[T]:
    """Start `work` in a daemon thread; return its future result."""
    future: Future[T] = Future()

    def run() -> None:
        try:
            future.set_result(work())
        except BaseException as problem:
            # result() raises it.
            future.set_exception(problem)

    threading.Thread(target=run, daemon=True).start()
    return future


@contextmanager
def bar(verb: str) -> Iterator[Bar]:
    """Show a progress bar on stderr during a transfer."""
    if not screen.on_terminal():
        yield Bar()
        return
    from rich.progress import (
        BarColumn,
        DownloadColumn,
        Progress,
        TextColumn,
        TimeRemainingColumn,
        TransferSpeedColumn,
    )

    columns = (
        TextColumn(verb),
        BarColumn(),
        DownloadColumn(),
        TransferSpeedColumn(),
        TimeRemainingColumn(),
        TextColumn("{task.fields[behind]}", markup=False),
    )
    with Progress(*columns, console=screen.error_console(), transient=True) as drawn:
        task = drawn.add_task(verb, total=None, behind="")
        yield Bar(lambda done, total, behind: drawn.update(task, completed=done, total=total, behind=behind))
