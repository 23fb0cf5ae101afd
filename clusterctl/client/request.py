"""What a Python program launches, as a job."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from clusterctl.jobs import job as jobs
from clusterctl.jobs.restarts import Restart

if TYPE_CHECKING:
    from clusterctl.jobs.job import Job


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
