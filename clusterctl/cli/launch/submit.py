"""`submit`: submit a job to a cluster that another program manages."""

from __future__ import annotations

import shutil
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from clusterctl.cli import options, screen
from clusterctl.errors import Fault, InputFaults, UsageError

if TYPE_CHECKING:
    from clusterctl.jobs.job import Job
    from clusterctl.jobs.parts.slurm import SlurmOptions
    from clusterctl.jobs.run_folder import RunDir
    from clusterctl.wire.fields import Key

JobFile = Annotated[Path, typer.Argument(metavar="JOB", help="A job file (YAML).")]
Overrides = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="KEY=VALUE", help="Override a key of the job file: --set train.steps=100."),
]
Print = Annotated[bool, typer.Option("--print", help="Print what would be submitted; submit nothing.")]
# Seconds for a checkpoint before the time limit; Slurm may send the early signal this much earlier.
GRAIN = 60


def slurm(
    job: JobFile,
    *,
    overrides: Overrides = None,
    only_print: Print = False,
    test: Annotated[
        bool, typer.Option("--test", help="Ask Slurm whether and when the job could start; submit nothing.")
    ] = False,
    no_checks: Annotated[
        bool, typer.Option("--no-checks", help="Start without the checks of doctor on the nodes.")
    ] = False,
    as_json: options.Json = False,
) -> None:
    """Write the batch file of a job and submit it to Slurm. The job's `slurm` part says what to ask for. The run is
    listed by `runs` immediately; its command line is that of `launch`."""
    from clusterctl.jobs import job as jobs
    from clusterctl.jobs import job_check
    from clusterctl.jobs.parts.grace import with_grace
    from clusterctl.jobs.parts.slurm import SlurmOptions
    from clusterctl.jobs.run_folder import new_run
    from clusterctl.platforms import slurm as program
    from clusterctl.platforms import submission

    loaded = jobs.load(job, overrides or (), _faults)
    if faults := _faults(loaded):
        raise InputFaults(faults)
    cluster = submission.imagined(loaded.slurm or SlurmOptions())
    # The node that runs the batch file calls `notify`, and checks it there.
    loaded = _with_times(with_grace(loaded, job_check.check(replace(loaded, notify=""), cluster)))
    if faults := _faults(loaded):
        raise InputFaults(faults)
    wanted = loaded.slurm or SlurmOptions()
    run = new_run(loaded.name, options.runs_folder())
    text = _batch_file(run, loaded, wanted, no_checks=no_checks)
    if only_print:
        screen.write(text)
        return
    # The job inherits this environment.
    job_check.forwarded(loaded)
    answer = program.refuse_impossible(text)
    if test:
        screen.write(f"{answer}\n")
        return
    submission.write_waiting(run, loaded, cluster)
    try:
        (run.root / "batch.sh").write_text(text)
        number = program.submit(text)
    except BaseException:
        # Nothing was submitted, so there is no run.
        shutil.rmtree(run.root)
        raise
    submission.write_submission(run, submission.Submission(number, time.time()))
    _report(run, number, as_json=as_json)


def submit_again(run: RunDir, job: Job, *, as_json: bool) -> None:
    """Submit a run whose Slurm job has ended to Slurm again: it continues from its newest checkpoint."""
    from clusterctl.platforms import slurm as program
    from clusterctl.platforms import submission

    before = submission.read_submission(run)
    if before is None or not before.ended:
        problem = f"the Slurm job of {run.run_id} has not ended"
        raise UsageError(problem, f"clusterctl status {run.run_id}")
    text = (run.root / "batch.sh").read_text()
    program.refuse_impossible(text)
    run.write_record(replace(run.read_record(), job=job))
    run.stop_asked.unlink(missing_ok=True)
    number = program.submit(text)
    submission.write_pending(run, "submitted to Slurm again")
    submission.write_submission(run, submission.Submission(number, time.time()))
    run.add_event("note", text=f"submitted again as Slurm job {number}")
    _report(run, number, as_json=as_json)


def _report(run: RunDir, number: int, *, as_json: bool) -> None:
    if as_json:
        screen.show_json({"run": run.run_id, "folder": str(run.root), "job": number})
    else:
        screen.log(f"Slurm job {number}; follow it with: clusterctl logs -f {run.run_id}")
        screen.write(f"{run.run_id}\n")


def _batch_file(run: RunDir, job: Job, wanted: SlurmOptions, *, no_checks: bool) -> str:
    from clusterctl.platforms import batch, submission

    command = [sys.executable, "-m", "clusterctl", "submit", "start", str(run.root)]
    command += ["--no-checks"] * no_checks
    return batch.batch_file(job.name, wanted, str(submission.log_file(run)), command)


def _with_times(job: Job) -> Job:
    """Return a job whose run saves early enough before the time limit, unless the job says when."""
    from clusterctl.jobs.parts.slurm import SlurmOptions

    wanted = job.slurm or SlurmOptions()
    given = job.document.value.get("slurm") if job.document else None
    if isinstance(given, dict) and "signal" in given:
        return job
    return replace(job, slurm=replace(wanted, signal=max(wanted.signal, int(job.grace) + GRAIN)))


def _faults(job: Job) -> list[Fault]:
    """Return the contradictions between the `slurm` part and the rest of a job."""
    from clusterctl.jobs.parts import notify
    from clusterctl.jobs.parts.slurm import minutes_of

    wanted = job.slurm
    if wanted is None:
        return []
    found: list[tuple[Key, str, str]] = []
    if wanted.signal and wanted.requeue and wanted.signal < job.grace:
        problem = f"{wanted.signal} s before the time limit are shorter than the {job.grace:g} s of `grace`"
        found.append((("slurm", "signal"), problem, f"signal: {int(job.grace) + GRAIN}"))
    if wanted.time and wanted.signal and minutes_of(wanted.time) * 60 <= wanted.signal + GRAIN:
        problem = f"a save {wanted.signal} s before the end (or {GRAIN} s earlier) leaves no time of {wanted.time!r}"
        found.append((("slurm", "time"), problem, "a longer time, or a smaller signal"))
    if job.nodes:
        found.append(
            (("nodes",), "Slurm chooses the nodes of a submitted job", "slurm: {nodes: 4}, or exclude")
        )
    if notify.masked(job.notify) != job.notify:
        found.append((("notify",), "this address would have to be in the record of the run", notify.REMEDY))
    document = job.document
    if document is None:
        return [Fault(job.source, problem, remedy) for _, problem, remedy in found]
    return [document.fault(path, problem, remedy) for path, problem, remedy in found]


def is_submitted(run: RunDir) -> bool:
    """Return whether a run was submitted to Slurm."""
    return (run.root / "batch.sh").exists()


def require_submitted(run: RunDir) -> None:
    """Raise a UsageError if no job of Slurm belongs to a run."""
    if not is_submitted(run):
        raise UsageError(f"{run.run_id} was not submitted to Slurm", "clusterctl submit slurm JOB")
