"""Start an ended run again: check whether steps are left, change the training if requested, and follow the run."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from clusterctl.cli import options, screen
from clusterctl.cli.launch.run import (
    become_steady,
    becoming_controller,
    follow_to_the_end,
    lacks_controller,
    leave,
    phases,
    show_plan,
    stopping_on_interrupt,
)
from clusterctl.cli.launch.submit import report_submitted
from clusterctl.errors import UsageError

if TYPE_CHECKING:
    from clusterctl.inventory.cluster import Cluster
    from clusterctl.jobs.job import Job
    from clusterctl.jobs.run_folder import RunDir
    from clusterctl.transport.fanout import Connections


def resume_run(
    run: str,
    selection: options.NodeOptions,
    overrides: Sequence[str] = (),
    *,
    detach: bool = False,
    dry_run: bool = False,
    as_json: bool = False,
) -> None:
    """Start an ended run again; follow it to its end, or leave it to its controller with `detach`.

    A finished training is left as it is, unless `overrides` raise its steps.
    """
    from clusterctl.backends.backend import of_run
    from clusterctl.cli.launch.background import deliver_signals, start_in_background

    found = options.run_named(run)
    record = found.read_record()
    job, cluster = changed(record.job, overrides), record.cluster
    if is_complete(found, job, as_json=as_json):
        return
    elsewhere = selection.chosen() if selection.nodes or selection.exclude else None
    elsewhere = options.with_devices(elsewhere, remote=not dry_run) if elsewhere else None
    backend = of_run(found)
    resubmits = elsewhere is None and backend.resubmits
    cluster = elsewhere or cluster
    _check(found, job, cluster if elsewhere or overrides else None, resubmits=resubmits)
    if dry_run:
        # _check has checked `notify`.
        show_plan(cluster, replace(job, notify=""), as_json=as_json, argv=True)
        show_continuation(found)
        return
    if resubmits:
        # The batch system chooses the nodes, as it did before.
        report_submitted(found, backend, backend.submit_again(found, job), as_json=as_json)
        return
    names = set(cluster.names)
    former = [node for node in record.cluster.nodes if node.name not in names]
    both = replace(cluster, nodes=(*cluster.nodes, *former))

    known = found.written_metrics()
    first = start_in_background(
        becoming_controller(found, both, _starter(found, job if overrides else None, elsewhere))
    )
    with options.connected(both) as connections:
        if detach:
            deliver_signals()
            leave(found, as_json=as_json)
            return
        follow_to_the_end(
            found,
            connections,
            stop_on_interrupt=True,
            trains=job.train is not None,
            as_json=as_json,
            first=first,
            known=known,
        )


def _check(run: RunDir, job: Job, cluster: Cluster | None, *, resubmits: bool) -> None:
    """Raise all errors of the next attempt: of its job on `cluster`, unless that is None, and of its `notify`."""
    from clusterctl.errors import Collected
    from clusterctl.jobs import job_check

    errors = Collected()
    if cluster is not None:
        with errors:
            job_check.check(replace(job, notify=""), cluster)
    # A submitted job checks `notify` where it starts. A run that seems to be active may only need a new controller.
    if not resubmits and run.phase().is_final:
        with errors:
            require_notify(run, job)
    errors.raise_all()


def _starter(run: RunDir, job: Job | None, elsewhere: Cluster | None) -> Callable[[Connections], bool]:
    """Return a function that starts the next attempt: of `job` if it was changed, on other nodes with `elsewhere`.

    It returns False if the last attempt is still running, without a controller.
    """

    def start_up(connections: Connections) -> bool:
        from clusterctl.runs import controller
        from clusterctl.runs.prepare.elsewhere import resume_on

        with stopping_on_interrupt(run, connections):
            is_running = lacks_controller(run, connections)
            if is_running:
                screen.log(f"{run.run_id} is running without a controller; starting a new one")
            else:
                require_notify(run, run.read_record().job)
                if job is not None:
                    run.write_record(replace(run.read_record(), job=job))
                with phases(connections) as log:
                    if elsewhere is not None:
                        resume_on(run, elsewhere, connections, log)
                    else:
                        controller.Control(run, connections).resume(log)
            become_steady()
        return not is_running

    return start_up


def require_notify(run: RunDir, job: Job) -> None:
    """Raise a UsageError if the command of `notify` cannot start on this machine, where the controller will run."""
    from clusterctl.jobs.parts.notify import program_problem

    if problem := program_problem(job.notify):
        remedy = "put the program back, or resume in the folder and with the PATH of the launch"
        raise UsageError(f"{run.run_id}: notify: {problem[0]}", f"a run keeps its `notify`: {remedy}")


def changed(job: Job, overrides: Sequence[str]) -> Job:
    """Return the job of a run with keys of its training changed; raise a UsageError for any other key."""
    from clusterctl.document import Document
    from clusterctl.jobs.overrides import with_overrides

    if not overrides:
        return job
    for text in overrides:
        if job.train is None or not text.startswith("train."):
            raise UsageError(
                f"--set {text}: an ended run keeps its job; only keys of `train` can be changed",
                "as in --set train.steps=1000; to change others, launch a new run",
            )
    document = with_overrides(Document(f"{job.name} as launched", {"train": job.train}, {(): 1}), overrides)
    return replace(job, train=document.value["train"], document=document)


def is_complete(run: RunDir, job: Job, *, as_json: bool) -> bool:
    """Return whether all steps of a training are done, and print this; raise a UsageError if fewer steps are requested
    now.
    """
    from clusterctl.report.advice import nothing_left
    from clusterctl.report.summary import summarise

    summary = summarise(run)
    done, wanted = summary.steps_done, (job.train or {}).get("steps")
    if not summary.is_final or job.train is None or done is None:
        return False
    if job.document is not None and isinstance(wanted, int):
        if wanted < done:
            problem = f"--set train.steps={wanted}: {done:,} steps of {run.run_id} are done"
            raise UsageError(problem, f"set train.steps to more than {done}")
        if wanted > done:
            return False
    text = nothing_left(summary)
    if text and as_json:
        screen.show_json({"run": run.run_id, "folder": str(run.root), "phase": "finished", "steps": done})
    elif text:
        screen.log(f"finished   {text}")
        screen.log(f"next       clusterctl resume {run.run_id} --set train.steps={2 * done}")
    return bool(text)


def show_continuation(run: RunDir) -> None:
    """Report from which step the next attempt of a training would continue."""
    from clusterctl.report.advice import resume_text
    from clusterctl.report.summary import summarise

    summary = summarise(run)
    text = resume_text(summary)
    if not text and summary.checkpoint:
        text = f"continues after step {summary.checkpoint.step}"
    if text:
        screen.log(f"resume     {text}")
