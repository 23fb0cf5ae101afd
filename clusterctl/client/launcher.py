"""Start a run, or only its controller, in a process of its own: one login per node for both.

A program that uses the library may have threads and devices open, so it is not forked.
"""

from __future__ import annotations

import pickle
import signal
import socket
import subprocess
import sys
import threading
from dataclasses import replace

from clusterctl.client.handover import RAISED, REPORT, Report, messages_of, report_nothing
from clusterctl.client.session import Reach
from clusterctl.errors import WorkFailed
from clusterctl.jobs.run_folder import RunDir

# Seconds for a new controller of a run that continues to log in to every node.
READY_LIMIT = 60.0


def start(work: object, reach: Reach, report: Report = report_nothing) -> None:
    """Start a Launch or Resume, or a controller for a RunDir that continues, and return; raise the error if that fails.

    An interrupt stops what has started. A controller stays, also after an interrupt.
    """
    # The new process has no terminal to ask at or to write to.
    reach, new = replace(reach, ask=None, notice=None), not isinstance(work, RunDir)
    ours, theirs = socket.socketpair()
    with ours:
        with theirs:
            process = subprocess.Popen(
                [sys.executable, "-m", "clusterctl.client.controlling", str(theirs.fileno())],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                pass_fds=[theirs.fileno()],
                start_new_session=True,
            )
        timer = threading.Timer(READY_LIMIT, process.kill)
        if not new:
            timer.start()
        try:
            ours.sendall(pickle.dumps((work, reach)))
            ours.shutdown(socket.SHUT_WR)
            problem = _result(ours, report)
        except BaseException:
            if new:
                process.send_signal(signal.SIGINT)
                _result(ours, report_nothing)
                process.wait()
            raise
        finally:
            timer.cancel()
    if problem is not None:
        process.wait()
        raise problem


def _result(channel: socket.socket, report: Report) -> BaseException | None:
    """Report phases until the start has succeeded or failed; return why it failed."""
    for kind, value in messages_of(channel):
        if kind == REPORT:
            report(*value)
        elif kind == RAISED:
            return value if isinstance(value, BaseException) else WorkFailed(str(value))
    return None
