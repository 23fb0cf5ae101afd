"""`submit`: submit a job to a cluster that another program manages."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Annotated

import typer

from clusterctl.cli import options, screen
from clusterctl.cli.declared import flag

JobFile = Annotated[Path, typer.Argument(metavar="JOB", help="A job file (YAML).")]
Overrides = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="KEY=VALUE", help="Override a key of the job file: --set train.steps=100."),
]
Print = Annotated[bool, typer.Option("--print", help="Print what would be submitted; submit nothing.")]


def to_queue(name: str) -> Callable[..., None]:
    """Return the command that submits a job to a batch system."""
    from clusterctl.backends.backend import QUEUES

    def submit(
        job: JobFile,
        *,
        overrides: Overrides = None,
        only_print: Print = False,
        test: bool = flag("Ask whether and when the job could start; submit nothing."),
        no_checks: bool = flag("Start without the checks of doctor on the nodes."),
        as_json: options.Json = False,
    ) -> None:
        from clusterctl.cli.launch.run import report_submitted
        from clusterctl.client.batch import BatchJob

        batch = BatchJob.of(name, job, overrides or (), checks=not no_checks, runs=options.runs_folder())
        queue = batch.queue
        if only_print:
            screen.write(batch.text)
        elif test:
            screen.write((batch.test() or f"{queue.title} checks a job only when it is submitted") + "\n")
        else:
            report_submitted(batch.run, queue, batch.submit(), as_json=as_json)

    submit.__doc__ = f"""Write the batch file of a job and submit it to {QUEUES[name].title}. The job's `{name}` part
    says what to ask for. The run is listed by `runs` immediately; its command line is that of `launch`."""
    return submit
