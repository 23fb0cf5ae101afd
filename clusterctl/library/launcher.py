"""Start a run in a process of its own, which then controls it: one login per node for both.

`python -m clusterctl.library.launcher FD` reads what to start from the socket FD, and reports on it. A program that
uses the library may have threads and devices open, so it is not forked.
"""

from __future__ import annotations

import pickle
import signal
import socket
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from clusterctl.errors import WorkFailed
from clusterctl.handover import RAISED, REPORT, Starter, messages_of
from clusterctl.jobs.run_folder import RunDir
from clusterctl.library.session import Reach
from clusterctl.memory import use_one_arena

if TYPE_CHECKING:
    from clusterctl.inventory.cluster import Cluster, Node
    from clusterctl.jobs.job import Job
    from clusterctl.transport.fanout import Connections
    from clusterctl.wire.train_summary import TrainSummary


@dataclass(frozen=True)
class Start:
    """What to start, where, and how to reach it."""

    run: RunDir
    cluster: Cluster
    spares: tuple[Node, ...]
    job: Job
    reach: Reach
    checks: bool
    summary: TrainSummary | None
    """The needs of a training, for the checks of the nodes."""


def start(order: Start, report: Callable[[str, str], None]) -> None:
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
            # The document only gives errors of the job file their place, and the job is already checked.
            ours.sendall(pickle.dumps(replace(order, job=replace(order.job, document=None))))
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
        order: Start = pickle.load(file)
    starter = Starter(channel)
    # The outermost handler of this process: the program that waits shows the error.
    try:
        _start_and_serve(order, starter)
    except BaseException as problem:
        starter.failed(problem)
        return 1
    return 0


def _start_and_serve(order: Start, starter: Starter) -> None:
    from clusterctl.runs import in_charge

    with order.reach.connect(order.cluster) as connections:
        _start(order, connections, starter.report)

        def started() -> None:
            starter.started(None, order.run.controller_log)

        if not in_charge.serve(order.run, connections, started):
            started()


def _start(order: Start, connections: Connections, report: Callable[[str, str], Any]) -> None:
    from clusterctl.checks import doctor
    from clusterctl.runs import in_charge
    from clusterctl.runs import start as run_start
    from clusterctl.runs.stop import stop_run

    if order.checks:
        doctor.before_launch(order.cluster, order.job, connections, report, order.summary)
    try:
        run_start.launch(
            order.cluster, order.job, connections, order.run.root.parent, report, order.run, order.spares
        )
        in_charge.ignore_terminal()
    except BaseException:
        if order.run.record.exists():
            stop_run(order.run, connections, grace=0.0)
            in_charge.finish_alone(order.run, connections)
        raise


if __name__ == "__main__":
    sys.exit(main())
