"""`launch` and `resume`: start a job, a sweep or an ended run, and follow it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from clusterctl.cli import choices, options, screen
from clusterctl.cli.declared import flag, option
from clusterctl.cli.launch.job_request import JobRequest
from clusterctl.cli.launch.options import Detach, JobChanges
from clusterctl.cli.launch.plan import show_plan
from clusterctl.cli.launch.run import launch_job, resume_run
from clusterctl.cli.views.waiting import shown_while
from clusterctl.client.attempts import Target
from clusterctl.client.node_choice import Choice
from clusterctl.errors import Collected, UsageError

if TYPE_CHECKING:
    from clusterctl.jobs.job import Job


def launch(
    request: JobRequest,
    changes: JobChanges,
    *,
    sweep: list[str] | None = option(
        "Run the job once for each value and compare the runs; several keys give all combinations.",
        metavar="KEY=V1,V2",
    ),
    each: str | None = option(
        "With --sweep: run variants side by side, each on so many nodes, or devices of a node.",
        metavar="nodes=N|devices=N",
    ),
    no_checks: bool = flag("Skip the checks of disks, devices and ports before the start."),
    detach: Detach = False,
    dry_run: options.DryRun = False,
    accept_new: options.AcceptNew = False,
    as_json: options.Json = False,
) -> None:
    """Push the code and data of a job, start its ranks and follow them. Also starts a command of your own, given after
    `--`. Ctrl-C stops the run; a second Ctrl-C kills it."""
    if sweep or each:
        from clusterctl.cli.launch.sweep import launch_sweep

        if detach:
            raise UsageError("--sweep and --detach cannot be combined", "leave out --detach")
        launch_sweep(request, sweep or [], each, changes, no_checks, dry_run=dry_run, as_json=as_json)
        return
    with shown_while("the check of the job"):
        choice, errors = request.choice(asks=not dry_run, accept_new=accept_new), Collected()
        with errors:
            changes.check()
        with errors:
            job = request.job(choice)
        errors.raise_all()
        job = changes.made_in(job)
    target = _target_of(request, choice, job, waits=not dry_run)
    if dry_run:
        show_plan(target.nodes, target.job, as_json=as_json, argv=True)
        return
    launch_job(target, no_checks=no_checks, detach=detach, accept_new=accept_new, as_json=as_json)


def _target_of(request: JobRequest, choice: Choice, job: Job, *, waits: bool) -> Target:
    """Return the job and nodes of a command line; with `waits`, wait until the platform has completed its rank
    table.
    """
    place = choices.place_here() if request.cluster is None else None
    if place is None:
        chosen, spares = choice.of(job)
        return Target(job, chosen, spares)
    from clusterctl.backends.pods import pod

    if request.nodes or request.exclude or request.include:
        problem = f"{place.platform.title} has chosen the nodes, and each starts its own ranks"
        raise UsageError(problem, "leave out --nodes, --exclude and --include, or name an inventory: -c FILE")
    part = pod.part_of(place, job, _tell, waits=waits)
    return Target(pod.adapted(job, _tell), part.whole, part=part)


def _tell(phase: str, text: str) -> None:
    screen.log(f"{phase}: {text}")


def resume(
    run: options.RunName,
    selection: options.NodeOptions,
    overrides: list[str] | None = option(
        "Change the training: --set train.steps=1000.", "--set", metavar="KEY=VALUE"
    ),
    *,
    detach: Detach = False,
    dry_run: options.DryRun = False,
    as_json: options.Json = False,
) -> None:
    """Start an ended run again on its nodes, or with --nodes on others, which get its code, data and the files of its
    newest checkpoint that they lack. A training continues from its newest valid checkpoint; one that is finished
    needs --set train.steps=N. Also continues a sweep."""
    from clusterctl.jobs.sweep import is_sweep

    if is_sweep(options.runs_folder(), run):
        from clusterctl.cli.launch.sweep import resume_sweep

        if overrides:
            raise UsageError(f"--set: {run} is a sweep", "give --set and the name of one of its runs")
        resume_sweep(run, as_json=as_json)
        return
    resume_run(run, selection, overrides or (), detach=detach, dry_run=dry_run, as_json=as_json)
