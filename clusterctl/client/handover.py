"""Messages from the process that starts and then controls a run to the process that waits for the start."""

from __future__ import annotations

import contextlib
import os
import pickle
import socket
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from clusterctl.errors import WorkFailed
from clusterctl.files import open_private

REPORT, STARTED, RAISED = "report", "started", "raised"
KILLED = WorkFailed("the process that starts the run was killed", "clusterctl runs, clusterctl stop")

Report = Callable[[str, str], None]
"""Called with the name of each phase of a start and what it did, as `clusterctl launch` prints them."""


def report_nothing(phase: str, text: str) -> None:
    """Report nothing."""


class Starter:
    """The side of the starting process: it reports that the run has started, and detaches from the terminal."""

    def __init__(self, channel: socket.socket) -> None:
        self._channel = channel
        self.has_started = False

    def started(self, value: Any, log: Path) -> None:
        """Send `value` to the terminal's process, which continues; standard error then goes to `log`."""
        with open_private(log, "ab") as errors, open(os.devnull, "r+b") as nothing:
            for number, file in ((0, nothing), (1, nothing), (2, errors)):
                os.dup2(file.fileno(), number)
        self.has_started = True
        self._send(STARTED, value)

    def report(self, phase: str, text: str) -> None:
        """Report one phase of the start."""
        self._send(REPORT, (phase, text))

    def failed(self, problem: BaseException) -> None:
        """Send an error to the terminal's process, which raises it; later errors go to the log."""
        if self.has_started:
            os.write(2, "".join(traceback.format_exception(problem)).encode(errors="replace"))
            return
        try:
            self._send(RAISED, problem)
        except (pickle.PicklingError, TypeError, AttributeError):
            self._send(RAISED, RuntimeError("".join(traceback.format_exception(problem))))

    def _send(self, kind: str, value: Any) -> None:
        message = pickle.dumps((kind, value))
        # The process that waits may be gone.
        with contextlib.suppress(OSError):
            self._channel.sendall(message)
            if kind != REPORT:
                self._channel.close()


def messages_of(channel: socket.socket) -> Iterator[tuple[str, Any]]:
    """Yield the messages of the child process: REPORTs, then STARTED or RAISED; a killed child counts as RAISED."""
    with channel.makefile("rb") as file:
        while True:
            try:
                kind, value = pickle.load(file)
            except (EOFError, pickle.UnpicklingError):
                kind, value = RAISED, KILLED
            yield kind, value
            if kind != REPORT:
                return
