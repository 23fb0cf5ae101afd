"""Start a run in a process of its own, which then controls it: one login per node for both.

`python -m clusterctl.client.launcher FD` reads what to start from the socket FD, and reports on it. A program that
uses the library may have threads and devices open, so it is not forked.
"""

from __future__ import annotations

import contextlib
import functools
import pickle
import signal
import socket
import subprocess
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING

from clusterctl.client.attempts import Launch, Reports, start_and_control
from clusterctl.client.handover import RAISED, REPORT, Starter, messages_of
from clusterctl.client.interrupt import stop_interrupted
from clusterctl.client.session import Reach
from clusterctl.errors import WorkFailed
from clusterctl.memory import use_one_arena

if TYPE_CHECKING:
    pass


def start(launch: Launch, reach: Reach, report: Callable[[str, str], None]) -> None:
    """Start a run and return; raise the error if it did not start. An interrupt stops what has started."""
    ours, theirs = socket.socketpair()
    with ours:
        with theirs:
            process = subprocess.Popen(
                [sys.executable, "-m", __spec__.name, str(theirs.fileno())],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                pass_fds=[theirs.fileno()],
                start_new_session=True,
            )
        try:
            ours.sendall(pickle.dumps((launch, reach)))
            ours.shutdown(socket.SHUT_WR)
            problem = _result(ours, report)
        except BaseException:
            process.send_signal(signal.SIGINT)
            _result(ours, lambda phase, text: None)
            process.wait()
            raise
    if problem is not None:
        process.wait()
        raise problem


def _result(channel: socket.socket, report: Callable[[str, str], None]) -> BaseException | None:
    """Report phases until the start has succeeded or failed; return why it failed."""
    for kind, value in messages_of(channel):
        if kind == REPORT:
            report(*value)
        elif kind == RAISED:
            return value if isinstance(value, BaseException) else WorkFailed(str(value))
    return None


# -- in the new process


def main() -> int:
    use_one_arena()
    # The program that waits may ignore interrupts, but this process must handle the one that it sends.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    channel = socket.socket(fileno=int(sys.argv[1]))
    with channel.makefile("rb") as file:
        # Written by the program that started this process.
        launch, reach = pickle.load(file)
    starter = Starter(channel)
    # The outermost handler of this process: the program that waits shows the error.
    try:
        _start_and_control(launch, reach, starter)
    except BaseException as problem:
        starter.failed(problem)
        return 1
    return 0


def _start_and_control(launch: Launch, reach: Reach, starter: Starter) -> None:
    with reach.connect(launch.reached) as connections:
        silently = functools.partial(stop_interrupted, note=lambda text: None)
        reports = Reports(lambda _: contextlib.nullcontext(starter.report), silently)
        start_and_control(launch, connections, starter, reports)


if __name__ == "__main__":
    sys.exit(main())
