"""A run as an object: state, logs, metrics, waiting for its end, stopping it."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from clusterctl.client.session import Reach
from clusterctl.errors import RunFailed
from clusterctl.jobs import run_folder
from clusterctl.jobs.run_folder import RunDir
from clusterctl.settings import load_settings

if TYPE_CHECKING:
    from clusterctl.logs.lines import LogLine
    from clusterctl.runs.state import RunState
    from clusterctl.transport.fanout import Connections

# Seconds between two checks of the run's folder.
POLL = 0.05


class Run:
    """One execution of a job. Its state is in its folder and on its nodes, so any process can create such an object."""

    def __init__(self, folder: RunDir, reach: Reach | None = None) -> None:
        """Use `Cluster.launch`, or `find_run` for a run that exists."""
        self._folder = folder
        self._reach = reach or Reach()

    def __repr__(self) -> str:
        return f"<Run {self.id}: {self.phase}>"

    @property
    def id(self) -> str:
        return self._folder.run_id

    @property
    def folder(self) -> Path:
        """The run's folder on this machine: logs, metrics, record."""
        return self._folder.root

    @property
    def phase(self) -> str:
        """The phase that the controller wrote last: "running", "restarting", "finished", "failed", "stopped" or
        "lost"."""
        return self._folder.phase().value

    @property
    def is_ended(self) -> bool:
        """Whether the run has ended and all its logs and collected files are on this machine."""
        return self._folder.phase().is_final and self._folder.controller() is None

    def state(self) -> RunState:
        """Query the nodes; return the state of every node and rank."""
        from clusterctl.runs.query import current_state

        with self.connected() as connections:
            return current_state(self._folder, connections)

    def wait(self, timeout: float | None = None) -> Run:
        """Wait for the end and return the run itself.

        Raises RunFailed with the root cause if the run did not finish, and TimeoutError after `timeout` seconds; the
        run then continues. If the run's controller died, a new one is started.
        """
        deadline = None if timeout is None else time.monotonic() + timeout
        while not self.is_ended:
            if deadline is not None and time.monotonic() > deadline:
                raise TimeoutError(f"{self.id} is still {self.phase} after {timeout:g} s")
            if self._folder.controller() is None:
                self._replace_controller()
            time.sleep(POLL)
        if self.phase != "finished":
            raise RunFailed(f"{self.id} {self.phase}: {self.cause or 'stopped before its end'}", self._hint())
        return self

    @property
    def cause(self) -> str:
        """The root cause of a failed run in one line, else ""."""
        from clusterctl.runs.causes.cause import read_cause

        cause = read_cause(self._folder)
        return cause.title if cause else ""

    def stop(self, grace: float | None = None) -> None:
        """Stop the run's processes on every node. A training saves a checkpoint within `grace` seconds."""
        from clusterctl.runs import in_charge

        with self.connected() as connections:
            in_charge.stop(self._folder, connections, grace, self._reach.ssh_choice())

    def stop_if_active(self) -> None:
        """Stop the run unless it has ended."""
        if not self.is_ended:
            self.stop(grace=0.0)

    def logs(
        self, rank: int | None = None, *, stream: str | None = None, attempt: int | None = None
    ) -> Iterator[LogLine]:
        """Return the log lines that are on this machine, rank by rank; each has node, rank, stream and text.

        `stream` is "out" or "err"; the lines are of the newest attempt unless `attempt` names another.
        """
        from clusterctl.logs.select import LogFilter
        from clusterctl.logs.store import kept_files

        ranks = None if rank is None else frozenset([rank])
        wanted = LogFilter(ranks=ranks, everybody=True)
        for file in kept_files(self._folder, attempt or self._attempt()):
            if stream in (None, file.stream):
                yield from file.lines(wanted)

    def metrics(self) -> list[dict[str, Any]]:
        """Return the records of the run's metrics.jsonl so far."""
        return [metric.as_json() for metric in self._folder.metric_lines()]

    @contextmanager
    def connected(self) -> Iterator[Connections]:
        """Open connections to the run's own nodes, and close them afterwards."""
        with self._reach.connect(self._folder.read_record().cluster) as connections:
            yield connections

    def _attempt(self) -> int:
        return self._folder.read_record().attempt

    def _hint(self) -> str:
        return f"clusterctl logs show {self.id} --errors"

    def _replace_controller(self) -> None:
        """Start a new controller, unless the old one has just recorded the end of the run."""
        from clusterctl.runs import in_charge

        time.sleep(POLL)
        if not self.is_ended and self._folder.controller() is None:
            in_charge.start(self._folder, self._reach.ssh_choice())


def runs_folder(runs: str | Path | None = None) -> Path:
    """Return the folder of runs: the one given, else that of the settings."""
    return Path(runs or load_settings().runs).expanduser().absolute()


def find_run(name: str = "last", runs: str | Path | None = None) -> Run:
    """Return a run by its id, a unique prefix of the id, or "last"."""
    return Run(run_folder.find_run(runs_folder(runs), name))


def list_runs(runs: str | Path | None = None) -> list[Run]:
    """Return all runs of a folder, newest first."""
    return [Run(folder) for folder in run_folder.all_runs(runs_folder(runs))]
