"""A transfer to or from many nodes as it goes on: in the background, its progress in one line on a terminal."""

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
# Seconds: no eye sees more, and each redraw looks at every node.
REDRAW = 0.1


class Bar:
    """Bytes of all nodes together, and which node is behind the others; nothing off a terminal."""

    def __init__(self, update: Callable[[int, int, str], None] | None = None) -> None:
        self._update = update
        self._seen: dict[str, tuple[int, int]] = {}
        self._drawn = 0.0
        self._change = threading.Lock()

    def of(self, node: str) -> Progress:
        """What one node's transfer reports to."""

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
        """The slowest node, where it lags: half as far as the middle one, or less."""
        shares = sorted((done / total, node) for node, (done, total) in self._seen.items() if total)
        if len(shares) < 3 or shares[0][0] > shares[len(shares) // 2][0] / 2:
            return ""
        return f"slowest: {shares[0][1]}, {shares[0][0]:.0%}"


def promised() -> Future[Any]:
    """A value that comes later."""
    return Future()


def begun(work: Callable[[], T]) -> Future[T]:
    """Something that is done in a thread of its own, which nobody waits for at the program's end."""
    future: Future[T] = Future()

    def run() -> None:
        try:
            future.set_result(work())
        except BaseException as problem:
            # Carried to whoever asks for the result.
            future.set_exception(problem)

    threading.Thread(target=run, daemon=True).start()
    return future


@contextmanager
def bar(verb: str) -> Iterator[Bar]:
    """A bar on standard error while something is transferred."""
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
