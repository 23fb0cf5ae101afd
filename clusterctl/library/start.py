"""Start a run for a Python program: the same steps as `clusterctl launch`."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from clusterctl.checks import kinds
from clusterctl.jobs import job as jobs
from clusterctl.jobs import job_check
from clusterctl.jobs.parts.grace import with_grace
from clusterctl.jobs.restarts import Restart
from clusterctl.jobs.run_folder import new_run
from clusterctl.library import launcher
from clusterctl.library.run import Run, runs_folder

if TYPE_CHECKING:
    from clusterctl.inventory.cluster import Cluster, Node
    from clusterctl.jobs.job import Job
    from clusterctl.library.session import Session

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
        """Return the checked job; raise one error that lists all faults of the job file."""
        if isinstance(self.job, (str, Path)):
            texts = [f"{key}={value}" for key, value in self.overrides.items()]
            job = jobs.load(Path(self.job), texts)
            jobs.refuse_secrets(self.env)
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
    job: Job,
    session: Session,
    checks: bool,
    runs: str | Path | None,
    report: Callable[[str, str], None],
) -> Run:
    """Check, push and start a job; return its run, which a controller process supervises from then on."""
    chosen, spares = nodes_of(job)
    if any(node.is_asked for node in chosen.nodes):
        chosen = kinds.completed(chosen, session.connections())
    summary = job_check.check(job, chosen)
    job = with_grace(job, summary)
    folder = new_run(job.name, runs_folder(runs))
    launcher.start(launcher.Start(folder, chosen, spares, job, session.reach, checks, summary), report)
    return Run(folder, session.reach)
