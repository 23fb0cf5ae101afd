"""Options of `launch`."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Annotated

import typer

from clusterctl.cli.declared import flag, option
from clusterctl.errors import Collected, UsageError
from clusterctl.jobs.parts.notify import FORMS, problem_of, program_problem
from clusterctl.settings import duration

if TYPE_CHECKING:
    from clusterctl.jobs.job import Job

Detach = Annotated[
    bool, typer.Option("--detach", "-d", help="Return once the run has started; follow it with `attach`.")
]


@dataclass(frozen=True)
class JobChanges:
    """The options of `launch` that change a job."""

    restarts: int | None = option(
        "Restart after a failure, at most N times; see `restart` in the job file.", metavar="N", min=0
    )
    hang_after: str | None = option(
        "Treat the run as hung after this long without a step (or, for your own program, without output): 10m.",
        metavar="TIME",
    )
    share: bool = flag("Allow devices that another run of yours is using.", "--share-devices")
    notify: str | None = option(
        "Call a command or webhook when the run ends, fails, restarts or stalls; see `notify` in the job file.",
        metavar="CMD|URL",
    )

    def check(self) -> None:
        """Raise all errors of the values."""
        errors = Collected()
        with errors:
            _seconds(self.hang_after or "off")
        with errors:
            _check_notify(self.notify)
        errors.raise_all()

    def made_in(self, job: Job) -> Job:
        """Return the job with the changes; raise all errors of the values."""
        from clusterctl.jobs.restarts import Restart

        self.check()
        if self.restarts is not None:
            job = replace(job, restart=replace(job.restart or Restart(), max=self.restarts))
        job = replace(job, share_devices=True) if self.share else job
        job = replace(job, notify=self.notify) if self.notify else job
        return replace(job, hang_after=_seconds(self.hang_after)) if self.hang_after else job


def _check_notify(target: str | None) -> None:
    if target is not None and not target.strip():
        raise UsageError("--notify is empty", f"give {FORMS}")
    if problem := problem_of(target or ""):
        raise UsageError(f"--notify: {problem}", FORMS)
    if missing := program_problem(target or ""):
        raise UsageError(f"--notify: {missing[0]}", missing[1])


def _seconds(text: str) -> float:
    try:
        return duration(text)
    except UsageError:
        raise UsageError(f"--hang-after {text}: not a duration", "use 90s, 10m or off") from None
