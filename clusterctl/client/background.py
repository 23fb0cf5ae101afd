"""Start a run in a separate process, which then becomes the run's controller.

One process logs in to the nodes, starts the run and controls it, so that a launch needs one login per node. The
terminal's process waits until the run has started and then only follows it.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import sys
from collections.abc import Callable, Iterator
from typing import Any

from clusterctl.client.handover import STARTED, Starter, messages_of
from clusterctl.memory import use_one_arena

# Signals by which a terminal or a caller ends a command.
FORWARDED = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


def start_in_background(work: Callable[[Starter], None]) -> Any:
    """Run `work` in a separate process; return the value that it passes to `started`, or raise its error.

    Signals that came too late for the new process are held until `deliver_signals`.
    """
    ours, theirs = socket.socketpair()
    sys.stdout.flush()
    sys.stderr.flush()
    # A signal between the fork and the handlers that send it on would miss the new process.
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, FORWARDED)
    pid = os.fork()
    if pid == 0:
        # Never returns: only the terminal's process continues with the caller.
        os._exit(_run(work, ours, theirs, mask))
    theirs.close()
    came: list[int] = []
    with ours, _forwarding_signals(pid, came):
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        kind, value = next(messages_of(ours))
        signal.pthread_sigmask(signal.SIG_BLOCK, FORWARDED)
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


def _run(
    work: Callable[[Starter], None],
    ours: socket.socket,
    theirs: socket.socket,
    mask: set[int | signal.Signals],
) -> int:
    """Do the work in the new process, which Ctrl-C at the terminal does not reach; return its exit code.

    `mask` are the signals that stay blocked, as before the fork.
    """
    ours.close()
    os.setsid()
    use_one_arena()
    _release_files(theirs.fileno())
    starter = Starter(theirs)
    # The outermost handler of this process: the terminal's process shows the error.
    try:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        work(starter)
    except BaseException as problem:
        starter.failed(problem)
        return 1
    return 0


def _release_files(needed: int) -> None:
    """Let go of every file but the standard streams and `needed`: a caller may wait for the end of one of them.

    Their numbers stay in use, for /dev/null: an object that is collected later closes its own number, which must not be
    a file that was opened since.
    """
    with open(os.devnull, "rb") as nothing:
        for name in os.listdir("/proc/self/fd"):
            if int(name) > 2 and int(name) not in (needed, nothing.fileno()):
                os.dup2(nothing.fileno(), int(name), inheritable=False)


@contextlib.contextmanager
def _forwarding_signals(pid: int, came: list[int]) -> Iterator[None]:
    """Forward each signal to the new process, and record it in `came`."""

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
