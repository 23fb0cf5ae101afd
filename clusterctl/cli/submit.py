"""`submit`: hand a job to a cluster that another program manages."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from clusterctl.cli import screen

if TYPE_CHECKING:
    from clusterctl.jobs.job import Job

JobFile = Annotated[Path, typer.Argument(metavar="JOB", help="A job file (YAML).")]
Overrides = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="KEY=VALUE", help="Override a key of the job file: --set train.steps=100."),
]
Print = Annotated[bool, typer.Option("--print", help="Print what would be submitted; submit nothing.")]


def slurm(job: JobFile, *, overrides: Overrides = None, only_print: Print = False) -> None:
    """Write the batch file of a job and submit it to Slurm. The job's `slurm` part says what to ask for."""
    from clusterctl.jobs import job as jobs
    from clusterctl.jobs.slurm import SlurmOptions
    from clusterctl.platforms import batch

    loaded: Job = jobs.load(job, overrides or ())
    command = [sys.executable, "-m", "clusterctl", "launch", str(job.resolve())]
    text = batch.batch_file(loaded.name, loaded.slurm or SlurmOptions(), f"{loaded.name}-%j.log", command)
    if only_print:
        screen.write(text)
        return
    from clusterctl.platforms import slurm as program

    screen.write(f"{program.submit(text)}\n")
