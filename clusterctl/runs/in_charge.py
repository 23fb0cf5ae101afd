"""The process that controls a run: become it, wait for its end, or end it."""

from __future__ import annotations

import contextlib
import signal
import time
from collections.abc import Callable, Iterable, Iterator
from itertools import chain
from typing import TYPE_CHECKING

from clusterctl.agent.processes import identity, is_alive, signal_recorded
from clusterctl.errors import ClusterctlError, StopIncomplete, UsageError, WorkFailed
from clusterctl.jobs.run_folder import RunDir
from clusterctl.memory import trim
from clusterctl.runs import abandoned
from clusterctl.runs.controller import Control
from clusterctl.runs.query import log_in
from clusterctl.runs.stop import stop_run, will_stop
from clusterctl.runs.watching.kept_watch import KeptWatch
from clusterctl.runs.watching.updates import Update

if TYPE_CHECKING:
    from clusterctl.transport.fanout import Connections

# Seconds that a controller which is replaced has to exit.
LEAVE = 5.0
# Seconds between the first two attempts to end what is left on lost nodes; the pause doubles up to the longest.
CHASE, LONGEST_PAUSE = 5.0, 30.0
# Seconds after the end of a run until its lost nodes are given up: a machine that is away for so long was restarted.
STAY = 12 * 3600.0


@contextlib.contextmanager
def following(watch: KeptWatch, connections: Connections) -> Iterator[Iterable[Update]]:
    """Yield the updates of a run: those of `watch`, or of a controller in this process if the run has none.

    Both begin where `watch` does.
    """
    run = watch.run
    with run.hold() as ours:
        if ours and not run.phase().is_final:
            # A controller reports only lines that it copies itself; an earlier one may have copied lines before it
            # died.
            yield chain(watch.present(), Control(run, connections))
        else:
            yield watch


def wait_for_end(run: RunDir, connections: Connections) -> None:
    """Return once the end of a stopped run is recorded; copy the last output here if no other process does."""
    with run.hold() as ours:
        ours = ours and not run.phase().is_final
        for _ in Control(run, connections, lines=False) if ours else KeptWatch(run):
            pass


def ignore_terminal() -> None:
    """Ignore Ctrl-C and the end of the terminal: a controller outlives both."""
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    signal.signal(signal.SIGINT, signal.SIG_IGN)


def serve(
    run: RunDir, connections: Connections, tell: Callable[[], object], *, started: bool = False
) -> bool:
    """Control the run until its end and call `tell` at the beginning; return False if another process controls it.

    `started`: this process has just started the attempt, on every node.
    """
    with run.hold(patience=10.0) as ours:
        if not ours:
            return False
        ignore_terminal()
        over = run.phase().is_final
        if not over:
            log_in(run.read_record().cluster.nodes, connections)
        tell()
        trim()
        for _ in () if over else Control(run, connections, lines=False, started=started):
            pass
    clear_lost(run, connections)
    return True


def clear_lost(run: RunDir, connections: Connections) -> None:
    """Stop what is left of an ended run on nodes that were lost, once they answer, for at most STAY seconds.

    Return immediately if nothing is left or another process does this already, and when the run is resumed or removed.
    """
    if not run.read_record().abandoned:
        return
    with run.hold_clearer() as ours:
        for node in run.read_record().cluster.nodes:
            connections.drop(node)
        deadline, pause = time.monotonic() + STAY, CHASE
        while ours and time.monotonic() < deadline:
            try:
                left = run.read_record().abandoned
            except UsageError:
                return
            if not left or not run.phase().is_final:
                return
            abandoned.clear(run, connections, run.hold)
            time.sleep(pause)
            pause = min(2 * pause, LONGEST_PAUSE)


def stop(
    run: RunDir, connections: Connections, grace: float | None, start: Callable[[], object]
) -> dict[str, int]:
    """Stop a run and return once its end is recorded, with the number of processes left on each node.

    If nodes do not answer, a controller stays that stops them when they do, which `start` starts; the error says so.
    """
    over = run.phase().is_final
    try:
        left = stop_run(run, connections, grace)
    except StopIncomplete as missed:
        if over:
            abandoned.note(run, missed.nodes)
        if missed.nodes and not (run.controller() or run.clearer()):
            # Without a controller, the error has its own hint.
            with contextlib.suppress(ClusterctlError, OSError):
                start()
                missed.hint = will_stop(run, missed.nodes)
        raise
    if not over and run.controller() is None and not run.phase().is_final:
        # Without a controller, the last output is copied and the end recorded here.
        wait_for_end(run, connections)
    return left


def end(run: RunDir) -> None:
    """End the controller of a run; the run continues."""
    pid = run.controller()
    if pid is None:
        return
    owner = identity(pid)
    for number, seconds in ((signal.SIGTERM, LEAVE), (signal.SIGKILL, LEAVE)):
        signal_recorded(owner, number)
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            if not is_alive(owner):
                return
            time.sleep(0.05)
    raise WorkFailed(
        f"process {pid}, the controller of {run.run_id}, does not exit", "end it yourself, then try again"
    )
