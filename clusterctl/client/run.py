"""A run as an object: state, logs, metrics, waiting for its end, stopping it."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from clusterctl.backends import backend as backends
from clusterctl.backends.backend import Ending
from clusterctl.client.session import Reach
from clusterctl.client.submitted import refresh, refresh_all, require_nodes
from clusterctl.errors import ClusterctlError, RunFailed, WorkFailed
from clusterctl.jobs import run_folder
from clusterctl.jobs.phase import Phase
from clusterctl.jobs.run_folder import RunDir
from clusterctl.runs.state import RunState, read_state
from clusterctl.settings import load_settings
from clusterctl.transport.fanout import Connections

if TYPE_CHECKING:
    from clusterctl.logs.lines import LogChunk, LogLine
    from clusterctl.runs.watching.kept_watch import KeptWatch
    from clusterctl.runs.watching.updates import Update
    from clusterctl.runs.watching.usage import DeviceUsage
    from clusterctl.runs.watching.watch import RunWatcher

# Seconds between two checks of the run's folder.
POLL = 0.05
# Seconds between two requests to a batch system or platform.
ASK_QUEUE = 2.0
# Seconds after which another controller may replace a new one.
AGAIN = 60.0


Note = Callable[[str], object]
"""Called with each message for the user."""


def _silent(text: str) -> None:
    """Show nothing."""


@dataclass(frozen=True)
class Stopped:
    """The answer to a stop."""

    phase: Phase
    left: dict[str, int]
    """How many processes are left on each node."""
    text: str = ""
    """What the batch system or platform did, where it ended the run."""
    deleted: list[str] | None = None
    """The names of deleted objects, where there are such."""

    def require_none_left(self) -> None:
        """Raise WorkFailed if processes are left."""
        if names := ", ".join(f"{node} ({count})" for node, count in self.left.items() if count):
            raise WorkFailed(
                f"processes that cannot be killed are left on {names}",
                "they wait inside the kernel, for a disk or a device: see `ps -eo pid,stat,wchan,args` there",
            )


class Run:
    """One execution of a job. Its state is in its folder and on its nodes, so any process can create such an object."""

    def __init__(self, folder: RunDir, reach: Reach | None = None) -> None:
        """Use `Cluster.launch`, or `find_run` for a run that exists."""
        self._folder = folder
        self.reach = reach or Reach()
        self._renewed = -AGAIN

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

    def state(self, connections: Connections | None = None) -> RunState:
        """Return the state of every node and rank: as the nodes report it, or as it is recorded where that is enough.

        It is enough for a run in pods, for one that waits for its nodes, and for an ended one whose nodes may belong
        to others now.
        """
        from clusterctl.runs.query import current_state

        backend, run = backends.of_run(self._folder), self._folder
        waits = run.phase() is Phase.PENDING
        if waits or backend.records_all or (not backend.keeps_nodes and run.phase().is_final):
            recorded = read_state(run)
            if recorded is not None:
                return replace(recorded, controller=run.controller())
        if connections is not None:
            return current_state(run, connections)
        with self.connected() as connections:
            return current_state(run, connections)

    def wait(self, timeout: float | None = None) -> Run:
        """Wait for the end and return the run itself.

        Raises RunFailed with the root cause if the run did not finish, and TimeoutError after `timeout` seconds; the
        run then continues. If the run's controller died, a new one is started.
        """
        deadline = None if timeout is None else time.monotonic() + timeout
        while not self.is_ended:
            if deadline is not None and time.monotonic() > deadline:
                raise TimeoutError(f"{self.id} is still {self.phase} after {timeout:g} s")
            if self._folder.phase() is Phase.PENDING or backends.of_run(self._folder).records_all:
                # A batch system or platform tells the state; no controller is started here.
                time.sleep(ASK_QUEUE)
                refresh(self._folder)
                continue
            gone = self._folder.controller() is None
            time.sleep(POLL)
            # The old one may have just recorded the end of the run.
            if gone and not self.is_ended and self._folder.controller() is None:
                self.renew_controller()
        if self.phase != "finished":
            hint = f"clusterctl logs show {self.id} --errors"
            raise RunFailed(f"{self.id} {self.phase}: {self.cause or 'stopped before its end'}", hint)
        return self

    @property
    def cause(self) -> str:
        """The root cause of a failed run in one line, else ""."""
        from clusterctl.runs.causes.cause import read_cause

        cause = read_cause(self._folder)
        return cause.title if cause else ""

    def stop(self, grace: float | None = None) -> None:
        """Stop the run's processes on every node. A training saves a checkpoint within `grace` seconds.

        A run that waits for its nodes is taken out of the queue; pods are deleted.
        """
        self.end(grace).require_none_left()

    def ending(self, grace: float | None) -> Ending | None:
        """Return how a run in pods, or one that waits for nodes, is ended; None: its processes are stopped."""
        return backends.of_run(self._folder).ending(self._folder, grace)

    def end(self, grace: float | None = None, note: Note = _silent) -> Stopped:
        """Stop the run, and record its end as far as the disk here allows it; return what is left."""
        from clusterctl.runs.query import current_state

        run, ending = self._folder, self.ending(grace)
        if ending is not None:
            text, deleted = ending.end()
            return Stopped(run.phase(), {}, text, deleted)
        with self.connected() as connections:
            left = self._stop(connections, grace, note)
            return Stopped(current_state(run, connections).phase, left)

    def _stop(self, connections: Connections, grace: float | None, note: Note) -> dict[str, int]:
        from clusterctl.client import launcher
        from clusterctl.runs import in_charge
        from clusterctl.runs.stop import stop_run
        from clusterctl.runs.watching.watch import NotCopied

        run = self._folder
        try:
            return in_charge.stop(run, connections, grace, partial(launcher.start, run, self.reach))
        except NotCopied as problem:
            reason = problem.message
        except OSError as problem:
            reason = f"{problem.filename or run.root}: {problem.strerror}"
        note(f"the end of the run is not recorded: {reason}")
        return stop_run(run, connections, grace)

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
        for file in kept_files(self._folder, attempt or self._folder.read_record().attempt):
            if stream in (None, file.stream):
                yield from file.lines(wanted)

    def metrics(self) -> list[dict[str, Any]]:
        """Return the records of the run's metrics.jsonl so far."""
        return [metric.as_json() for metric in self._folder.metric_lines()]

    def start_controller(self, note: Note = _silent) -> str:
        """Start a controller process that outlives this one; return why it could not be started, or ""."""
        from clusterctl.client import launcher
        from clusterctl.jobs.job_check import missing_variables

        job = self._folder.read_record().job
        if missing := missing_variables(job) if job.restart is not None else []:
            note(f"not set in this shell: {', '.join(missing)}; the run cannot be restarted from here")
        try:
            launcher.start(self._folder, self.reach)
        except (ClusterctlError, OSError) as problem:
            return str(problem)
        return ""

    def renew_controller(self, note: Note = _silent) -> bool:
        """Start a controller in place of one that died, and return whether it is in charge.

        Not again within a minute: it would probably fail for the same reason.
        """
        now = time.monotonic()
        if now - self._renewed < AGAIN:
            return False
        self._renewed = now
        note(f"the controller of {self.id} is gone; starting a new one")
        return not self.start_controller(note)

    def end_controller(self) -> None:
        """End the controller process; the run continues."""
        from clusterctl.runs import in_charge

        in_charge.end(self._folder)

    @contextmanager
    def updates(
        self,
        connections: Connections,
        first: int | None = None,
        known: Mapping[Path, int] | None = None,
        note: Note = _silent,
    ) -> Iterator[Iterable[Update]]:
        """Yield what happens in the run, from attempt `first` and from the byte `known` of each file.

        A controller that dies is replaced; if none can be started, this process controls the run.
        """
        from clusterctl.runs.in_charge import following
        from clusterctl.runs.watching.kept_watch import KeptWatch

        kept = KeptWatch(self._folder, first, known, partial(self.renew_controller, note))
        with following(kept, connections) as watch:
            yield watch

    def observe(self, patience: float) -> Iterator[tuple[RunState, dict[int, DeviceUsage]]]:
        """Yield the state of an active run and how each rank uses its device; wait `patience` seconds for a node.

        A node that does not answer has no usage.
        """
        from clusterctl.runs.query import query_nodes
        from clusterctl.runs.watching.usage import UsageMeter

        meter = UsageMeter()
        with self.connected() as connections:
            while not self._folder.phase().is_final:
                state = query_nodes(self._folder, connections, patience=patience)
                nodes = self._folder.read_record().cluster.nodes
                yield state, meter.usage(nodes, state.ranks, connections, patience)

    def fetch_logs(self, note: Note = _silent) -> None:
        """Copy the log bytes that are still only on the nodes; do nothing for an ended run.

        If they cannot be written here, say so: what was copied before can be read.
        """
        from clusterctl.runs.watching.watch import NotCopied, RunWatcher, open_watch

        run = self._folder
        if run.phase().is_final or run.phase() is Phase.PENDING:
            return
        if (backend := backends.of_run(run)).records_all:
            backend.fetch_logs(run)
            return
        try:
            with self.connected() as connections, open_watch(run, connections, now=True) as watch:
                for update in watch if isinstance(watch, RunWatcher) else ():
                    if update.note:
                        note(update.note)
        except NotCopied as problem:
            note(problem.message)
        except OSError as problem:
            note(f"{problem.filename or run.root}: the newest lines are missing: {problem.strerror}")

    def follow_logs(
        self, begin: Callable[..., Mapping[Path, int]], note: Note = _silent
    ) -> Iterator[LogChunk]:
        """Yield what the ranks write until the run ends, after what `begin` has shown of the files here.

        `begin` takes whether more follows, and returns how far it has read each file.
        """
        from clusterctl.runs.watching.watch import open_watch

        run = self._folder
        while run.phase() is Phase.PENDING:
            self._await_nodes(note)
        if backends.of_run(run).records_all:
            yield from self._fetched_chunks(begin, note)
            return
        if not run.phase().is_final:
            with self.connected() as connections, open_watch(run, connections) as watch:
                # The run may have ended meanwhile; its backend has then taken its nodes away.
                if not run.phase().is_final:
                    yield from self._watched(watch, begin(goes_on=True), connections, note)
                    return
        self.fetch_logs(note)
        begin(goes_on=False)

    def _await_nodes(self, note: Note) -> None:
        """Say why a submitted run is pending, and return when that changes."""
        state = read_state(self._folder)
        before = state.verdict if state else ""
        note(f"{self.id}: {before}")
        queried_at = time.monotonic()
        while (
            self._folder.phase() is Phase.PENDING
            and (now := read_state(self._folder))
            and now.verdict == before
        ):
            time.sleep(POLL)
            if time.monotonic() - queried_at > ASK_QUEUE:
                refresh(self._folder)
                queried_at = time.monotonic()

    def _fetched_chunks(self, begin: Callable[..., Mapping[Path, int]], note: Note) -> Iterator[LogChunk]:
        """Yield what is written by ranks whose nodes are not reached from here."""
        from clusterctl.logs.store import kept_files

        self.fetch_logs(note)
        read, ended = dict(begin(goes_on=True)), False
        while not ended:
            refresh(self._folder)
            ended = self._folder.phase().is_final
            self.fetch_logs(note)
            for file in kept_files(self._folder):
                yield from file.chunks(read.get(file.path, 0))
                read[file.path] = file.path.stat().st_size
            if not ended:
                time.sleep(ASK_QUEUE)

    def _watched(
        self, watch: RunWatcher | KeptWatch, read: Mapping[Path, int], connections: Connections, note: Note
    ) -> Iterator[LogChunk]:
        """Yield what a watch copies, or another process does, from where each file was read."""
        from clusterctl.runs.query import current_state
        from clusterctl.runs.watching.kept_watch import KeptWatch

        if isinstance(watch, KeptWatch):
            watch.offsets.update(read)
        else:
            note(f"{self.id} has no controller; `clusterctl attach --take-over {self.id}` starts one")
        for update in watch:
            if update.chunk:
                yield update.chunk
            elif update.note:
                note(update.note)
        if not isinstance(watch, KeptWatch):
            # Record the state of the nodes, unless it is the end, which a controller records.
            current_state(self._folder, connections)

    def connected(self) -> Connections:
        """Return connections to the run's own nodes; `with` closes them."""
        require_nodes(self._folder)
        return self.reach.connect(self._folder.read_record().cluster)


def runs_folder(runs: str | Path | None = None) -> Path:
    """Return the folder of runs: the one given, else that of the settings."""
    return Path(runs or load_settings().runs).expanduser().absolute()


def find_run(name: str = "last", runs: str | Path | None = None) -> Run:
    """Return a run by its id, a unique prefix of the id, or "last"."""
    found = run_folder.find_run(runs_folder(runs), name)
    refresh(found)
    return Run(found)


def list_runs(runs: str | Path | None = None) -> list[Run]:
    """Return all runs of a folder, newest first."""
    found = run_folder.all_runs(runs_folder(runs))
    refresh_all(found, _silent)
    return [Run(folder) for folder in found]
