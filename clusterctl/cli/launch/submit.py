"""`submit`: submit a job to a cluster that another program manages."""

from __future__ import annotations

import shutil
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from clusterctl.cli import options, screen
from clusterctl.errors import Fault, InputFaults

if TYPE_CHECKING:
    from clusterctl.backends.backend import Backend
    from clusterctl.backends.queue import Queue
    from clusterctl.jobs.job import Job
    from clusterctl.jobs.run_folder import RunDir
    from clusterctl.wire.fields import Key

JobFile = Annotated[Path, typer.Argument(metavar="JOB", help="A job file (YAML).")]
Overrides = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="KEY=VALUE", help="Override a key of the job file: --set train.steps=100."),
]
Print = Annotated[bool, typer.Option("--print", help="Print what would be submitted; submit nothing.")]
# Seconds for a checkpoint before the time limit; the early signal may come this much earlier.
GRAIN = 60


Test = Annotated[
    bool, typer.Option("--test", help="Ask whether and when the job could start; submit nothing.")
]
NoChecks = Annotated[
    bool, typer.Option("--no-checks", help="Start without the checks of doctor on the nodes.")
]


def to_queue(name: str) -> Callable[..., None]:
    """Return the command that submits a job to a batch system."""
    from clusterctl.backends.backend import QUEUES

    def submit(
        job: JobFile,
        *,
        overrides: Overrides = None,
        only_print: Print = False,
        test: Test = False,
        no_checks: NoChecks = False,
        as_json: options.Json = False,
    ) -> None:
        _submit(name, job, overrides, only_print=only_print, test=test, no_checks=no_checks, as_json=as_json)

    submit.__doc__ = f"""Write the batch file of a job and submit it to {QUEUES[name].title}. The job's `{name}` part
    says what to ask for. The run is listed by `runs` immediately; its command line is that of `launch`."""
    return submit


def _submit(
    name: str,
    file: Path,
    overrides: list[str] | None,
    *,
    only_print: bool,
    test: bool,
    no_checks: bool,
    as_json: bool,
) -> None:
    """Submit a job to a batch system; or print what would be submitted, or ask whether it could start."""
    from clusterctl.backends import backend as backends
    from clusterctl.backends.queue import Queue, Submission, write_waiting
    from clusterctl.jobs import job as jobs
    from clusterctl.jobs import job_check
    from clusterctl.jobs.parts.grace import with_grace
    from clusterctl.jobs.run_folder import new_run

    queue = backends.named(name)
    assert isinstance(queue, Queue)
    loaded = jobs.load(file, overrides or (), partial(_faults, queue))
    if faults := _faults(queue, loaded):
        raise InputFaults(faults)
    cluster = queue.imagined(queue.options(loaded))
    # The node that runs the batch file calls `notify`, and checks it there.
    loaded = _with_times(queue, with_grace(loaded, job_check.check(replace(loaded, notify=""), cluster)))
    if faults := _faults(queue, loaded):
        raise InputFaults(faults)
    run = new_run(loaded.name, options.runs_folder())
    command = [sys.executable, "-m", "clusterctl", "submit", "start", str(run.root)]
    text = queue.batch_file(run, loaded, [*command, *["--no-checks"] * no_checks])
    if only_print:
        screen.write(text)
        return
    # The job inherits this environment.
    job_check.forwarded(loaded)
    answer = queue.test(text)
    if test:
        screen.write((answer or f"{queue.title} checks a job only when it is submitted") + "\n")
        return
    write_waiting(run, loaded, cluster, f"submitted to {queue.title}")
    try:
        run.batch_file.write_text(text)
        number = queue.submit(text)
    except BaseException:
        # Nothing was submitted, so there is no run.
        shutil.rmtree(run.root)
        raise
    queue.note_submission(run, Submission(number, time.time()))
    report_submitted(run, queue, number, as_json=as_json)


def report_submitted(run: RunDir, backend: Backend, number: int, *, as_json: bool) -> None:
    """Print the number of a job, and how it is followed."""
    if as_json:
        screen.show_json({"run": run.run_id, "folder": str(run.root), "job": number})
    else:
        screen.log(f"{backend.title} job {number}; follow it with: clusterctl logs -f {run.run_id}")
        screen.write(f"{run.run_id}\n")


def _with_times(queue: Queue, job: Job) -> Job:
    """Return a job whose run saves early enough before the time limit, unless the job says when."""
    wanted = queue.options(job)
    given = job.document.value.get(queue.name) if job.document else None
    if isinstance(given, dict) and "signal" in given:
        return job
    return queue.with_options(job, replace(wanted, signal=max(wanted.signal, int(job.grace) + GRAIN)))


def _faults(queue: Queue, job: Job) -> list[Fault]:
    """Return the contradictions between the part of a batch system and the rest of a job."""
    from clusterctl.jobs.parts import notify
    from clusterctl.jobs.parts.queue import minutes_of

    part = queue.name
    if getattr(job, part) is None:
        return []
    wanted = queue.options(job)
    found: list[tuple[Key, str, str]] = []
    if wanted.signal and wanted.requeue and wanted.signal < job.grace:
        problem = f"{wanted.signal} s before the time limit are shorter than the {job.grace:g} s of `grace`"
        found.append(((part, "signal"), problem, f"signal: {int(job.grace) + GRAIN}"))
    if wanted.time and wanted.signal and minutes_of(wanted.time) * 60 <= wanted.signal + GRAIN:
        problem = f"a save {wanted.signal} s before the end (or {GRAIN} s earlier) leaves no time of {wanted.time!r}"
        found.append(((part, "time"), problem, "a longer time, or a smaller signal"))
    if job.nodes:
        problem = f"{queue.title} chooses the nodes of a submitted job"
        found.append((("nodes",), problem, queue.choose_nodes))
    if notify.masked(job.notify) != job.notify:
        found.append((("notify",), "this address would have to be in the record of the run", notify.REMEDY))
    document = job.document
    if document is None:
        return [Fault(job.source, problem, remedy) for _, problem, remedy in found]
    return [document.fault(path, problem, remedy) for path, problem, remedy in found]
