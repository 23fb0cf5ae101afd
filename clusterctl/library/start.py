"""Start a run for a Python program: the same steps as `clusterctl launch`."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from clusterctl.errors import WorkFailed
from clusterctl.jobs import job as jobs
from clusterctl.jobs.restarts import Restart
from clusterctl.jobs.run_folder import RunDir
from clusterctl.library.run import Run, runs_folder

if TYPE_CHECKING:
    from clusterctl.inventory.cluster import Cluster, Node
    from clusterctl.jobs.job import Job
    from clusterctl.library.session import Session
    from clusterctl.transport.fanout import Connections

Placement = Callable[["Job"], "tuple[Cluster, tuple[Node, ...]]"]
"""Returns the nodes of a job, and its spare nodes."""


@dataclass(frozen=True)
class Request:
    """What to launch: a job file, or a command and its settings."""

    job: str | Path | Sequence[str]
    overrides: Mapping[str, object]
    devices: Sequence[int] | None
    code: str | Path | None
    env: Mapping[str, str]
    restarts: int | None

    def as_job(self) -> Job:
        """Return the checked job; raise one error that lists everything wrong with the job file."""
        if isinstance(self.job, (str, Path)):
            texts = [f"{key}={value}" for key, value in self.overrides.items()]
            job = jobs.load(Path(self.job), texts)
            job = replace(job, env={**job.env, **self.env})
        else:
            code = Path(self.code).resolve() if self.code is not None else None
            job = jobs.from_command(self.job, code, env=self.env)
        if self.devices is not None:
            job = replace(job, devices=tuple(self.devices))
        if self.restarts is not None:
            job = replace(job, restart=replace(job.restart or Restart(), max=self.restarts))
        return job


def start(
    nodes_of: Placement,
    request: Request,
    session: Session,
    checks: bool,
    runs: str | Path | None,
    report: Callable[[str, str], None],
) -> Run:
    """Check, push and start a job; return its run, which a controller process takes care of from then on."""
    return start_job(nodes_of, request.as_job(), session, checks, runs, report)


def start_job(
    nodes_of: Placement,
    job: Job,
    session: Session,
    checks: bool,
    runs: str | Path | None,
    report: Callable[[str, str], None],
) -> Run:
    """Check, push and start a job; return its run."""
    from clusterctl.checks import doctor
    from clusterctl.runs import start as run_start

    chosen, spares = nodes_of(job)
    summary = jobs.check(job, chosen)
    folder = run_start.new_run(job, runs_folder(runs))
    connections = session.connections()
    if checks:
        doctor.before_launch(chosen, job, connections, report, summary)
    try:
        run_start.launch(chosen, job, connections, folder.root.parent, report, folder, spares)
        _put_in_charge(folder, session.reach.ssh_choice())
    except BaseException:
        _stop_started(folder, connections)
        raise
    return Run(folder, session.reach)


def _put_in_charge(folder: RunDir, ssh: str) -> None:
    """Start the run's controller; raises with its own words where it cannot log in to the nodes."""
    from clusterctl.logs.store import last_lines
    from clusterctl.runs import controller

    if not controller.start(folder, ssh):
        reason = " ".join(last_lines(folder.controller_log, 3)) or "it wrote nothing"
        raise WorkFailed(f"{folder.run_id}: the run's controller could not start: {reason}")


def _stop_started(folder: RunDir, connections: Connections) -> None:
    """Stop the ranks of a start that failed or was interrupted."""
    from clusterctl.runs import controller
    from clusterctl.runs.stop import stop_run

    if folder.record.exists():
        stop_run(folder, connections, grace=0.0)
        controller.finish_alone(folder, connections)
