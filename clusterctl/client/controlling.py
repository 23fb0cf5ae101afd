"""The process that starts a run, or takes charge of one: `python -m clusterctl.client.controlling FD`.

It reads what to do from the socket FD, and reports on it.
"""

from __future__ import annotations

import contextlib
import functools
import pickle
import signal
import socket
import sys

from clusterctl.client import launcher
from clusterctl.client.attempts import Launch, Reports, Resume, start_and_control
from clusterctl.client.handover import Starter
from clusterctl.client.interrupt import stop_interrupted
from clusterctl.client.session import Reach
from clusterctl.jobs.run_folder import RunDir
from clusterctl.memory import use_one_arena
from clusterctl.runs import in_charge


def main() -> int:
    use_one_arena()
    # The program that waits may ignore interrupts, but this process must handle the one that it sends.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    channel = socket.socket(fileno=int(sys.argv[1]))
    with channel.makefile("rb") as file:
        # Written by the program that started this process.
        work, reach = pickle.load(file)
    starter = Starter(channel)
    # The outermost handler of this process: the program that waits shows the error.
    try:
        _control(work, reach, starter)
    except BaseException as problem:
        starter.failed(problem)
        return 1
    return 0


def _control(work: Launch | Resume | RunDir, reach: Reach, starter: Starter) -> None:
    if isinstance(work, RunDir):
        with reach.connect(work.read_record().cluster) as connections:
            started = functools.partial(starter.started, None, work.controller_log)
            # Another process may be in charge already.
            if not in_charge.serve(work, connections, started):
                started()
        return
    with reach.connect(work.reached) as connections:
        silently = functools.partial(stop_interrupted, note=lambda text: None)
        reports = Reports(
            lambda _: contextlib.nullcontext(starter.report), silently, lambda run: launcher.start(run, reach)
        )
        start_and_control(work, connections, starter, reports)


if __name__ == "__main__":
    sys.exit(main())
