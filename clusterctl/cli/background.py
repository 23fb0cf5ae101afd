"""Start a run in a process of its own, which then becomes the run's controller.

One process logs in to the nodes, starts the run and controls it, so that a launch needs one login per node. The
terminal's process waits until the run has started and then only follows it.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import signal
import socket
import sys
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from clusterctl.errors import WorkFailed

# What a terminal or a caller sends to end a command.
FORWARDED = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
STARTED, RAISED = "started", "raised"
KILLED = WorkFailed("the process that starts the run was killed", "clusterctl runs, clusterctl stop")


class Starter:
    """The starting process's end: reports that the run has started, and leaves the terminal."""

    def __init__(self, channel: socket.socket) -> None:
        self._channel = channel
        self.has_started = False

    def started(self, value: Any, log: Path) -> None:
        """Hand `value` to the terminal's process, which continues; standard error goes to `log` from now on."""
        with log.open("ab") as errors, open(os.devnull, "r+b") as nothing:
            for number, file in ((0, nothing), (1, nothing), (2, errors)):
                os.dup2(file.fileno(), number)
        self.has_started = True
        self._send(STARTED, value)

    def failed(self, problem: BaseException) -> None:
        """Hand an error to the terminal's process, which raises it; later errors go to the log."""
        if self.has_started:
            os.write(2, "".join(traceback.format_exception(problem)).encode(errors="replace"))
            return
        try:
            self._send(RAISED, problem)
        except (pickle.PicklingError, TypeError, AttributeError):
            self._send(RAISED, RuntimeError("".join(traceback.format_exception(problem))))

    def _send(self, kind: str, value: Any) -> None:
        message = pickle.dumps((kind, value))
        # The terminal's process may be gone.
        with contextlib.suppress(OSError), self._channel:
            self._channel.sendall(message)


def start_in_background(work: Callable[[Starter], None]) -> Any:
    """Run `work` in a process of its own; return what it hands to `started`, or raise what it raised before that.

    Signals that came too late for the new process to act on are held until `deliver_signals`.
    """
    ours, theirs = socket.socketpair()
    sys.stdout.flush()
    sys.stderr.flush()
    pid = os.fork()
    if pid == 0:
        # Never returns: what the caller would do next is the terminal's.
        os._exit(_run(work, ours, theirs))
    theirs.close()
    came: list[int] = []
    with ours, _forwarding_signals(pid, came):
        message = b"".join(iter(lambda: ours.recv(65536), b""))
        signal.pthread_sigmask(signal.SIG_BLOCK, FORWARDED)
    # Written by our own child.
    kind, value = pickle.loads(message) if message else (RAISED, KILLED)
    if kind == STARTED:
        for number in came:
            os.kill(os.getpid(), number)
        return value
    os.waitpid(pid, 0)
    deliver_signals()
    raise value


def deliver_signals() -> None:
    """Act on the signals that `start_in_background` has held."""
    signal.pthread_sigmask(signal.SIG_UNBLOCK, FORWARDED)


def _run(work: Callable[[Starter], None], ours: socket.socket, theirs: socket.socket) -> int:
    """Do the work in the new process, which Ctrl-C at the terminal does not reach; return its exit code."""
    ours.close()
    os.setsid()
    _release_files(theirs.fileno())
    starter = Starter(theirs)
    # The outermost handler of this process: the terminal's process shows the error.
    try:
        work(starter)
    except BaseException as problem:
        starter.failed(problem)
        return 1
    return 0


def _release_files(kept: int) -> None:
    """Let go of every file but the standard streams and `kept`: a caller may wait for the end of one of them.

    Their numbers stay in use, for /dev/null: an object that is collected later closes its own number, which must not be
    a file that was opened since.
    """
    with open(os.devnull, "rb") as nothing:
        for name in os.listdir("/proc/self/fd"):
            if int(name) > 2 and int(name) not in (kept, nothing.fileno()):
                os.dup2(nothing.fileno(), int(name), inheritable=False)


@contextlib.contextmanager
def _forwarding_signals(pid: int, came: list[int]) -> Iterator[None]:
    """Send each signal on to the new process, and note it in `came`."""

    def forward(number: int, _: object) -> None:
        came.append(number)
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, number)

    before = {number: signal.signal(number, forward) for number in FORWARDED}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
