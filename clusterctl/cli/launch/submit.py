"""`submit`: submit a job to a cluster that another program manages."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Annotated

import typer

from clusterctl.backends.backend import PLATFORMS, QUEUES
from clusterctl.cli import options, screen
from clusterctl.cli.declared import flag, option
from clusterctl.errors import UsageError

JobFile = Annotated[Path, typer.Argument(metavar="JOB", help="A job file (YAML).")]
Overrides = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="KEY=VALUE", help="Override a key of the job file: --set train.steps=100."),
]
Print = Annotated[bool, typer.Option("--print", help="Print what would be submitted; submit nothing.")]
Image = Annotated[str, typer.Option("--image", metavar="IMAGE", help="Override the image of the job file.")]
Name = Annotated[str, typer.Option("--name", metavar="NAME", help="Name of the objects. Default: the job's.")]
Follow = Annotated[bool, typer.Option("--follow", help="Submit nothing; follow what was submitted before.")]
Detach = Annotated[bool, typer.Option("--detach", "-d", help="Return when the job is submitted.")]
Delete = Annotated[bool, typer.Option("--delete", help="Delete the job and all that was created for it.")]


def to_queue(name: str) -> Callable[..., None]:
    """Return the command that submits a job to a batch system."""

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


def to_pods(name: str) -> Callable[..., None]:
    """Return the command that submits a job to a platform as pods."""
    verb = PLATFORMS[name]

    def submit(
        job: JobFile,
        *,
        kind: str = option(
            "Kind of the object: job (default), jobset, trainjob, vcjob or acjob.",
            default="job",
            metavar="KIND",
        ),
        image: Image = "",
        name: Name = "",
        overrides: Overrides = None,
        only_print: Print = False,
        detach: Detach = False,
        follow_only: Follow = False,
        delete: Delete = False,
    ) -> None:
        from clusterctl.backends.pods.submission import PodsJob

        if follow_only and delete:
            raise UsageError("--follow and --delete cannot be given together", "use one after the other")
        pods = PodsJob.of(job, overrides or (), kind=kind, image=image, name=name)
        if only_print:
            screen.write(pods.text)
        elif delete:
            for deleted in pods.api.delete():
                screen.log(f"deleted {deleted}")
        else:
            if not follow_only:
                run = pods.submit(options.runs_folder(), screen.log).run_id
                screen.log(f"it is a run: clusterctl status {run}, logs -f {run}, stop {run}")
            for line in [pods.request.name] if detach else pods.follow():
                screen.write(f"{line}\n")

    submit.__doc__ = f"""Submit a job to {verb.title} and follow it. The job's `{verb.part}` part says what to ask for.
    Ctrl-C leaves it running; --follow follows it again."""
    return submit


def to_service(name: str) -> Callable[..., None]:
    """Return the command that prints a job as a request of a service."""
    verb = PLATFORMS[name]

    def submit(
        job: JobFile, *, image: Image = "", overrides: Overrides = None, only_print: Print = False
    ) -> None:
        from clusterctl.backends.pods.submission import request_text

        text = request_text(job, overrides or (), image)
        if not only_print:
            hint = "add --print, and send it: POST /v2/{project_id}/training-jobs, with a token of yours"
            problem = f"clusterctl has no credentials of {verb.title}, and only prints the request"
            raise UsageError(problem, hint)
        screen.write(text)

    submit.__doc__ = f"""Print a job as a request to {verb.title}. The job's `{verb.part}` part says what to ask
    for."""
    return submit
