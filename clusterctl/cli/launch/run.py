"""`launch`, `resume` and `attach`: start a run, or an ended one again, and follow it to its end."""

from __future__ import annotations

import signal
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from clusterctl.backends.backend import Backend, of_run
from clusterctl.cli import choices, options, screen
from clusterctl.cli.declared import flag
from clusterctl.cli.launch.plan import show_plan
from clusterctl.client.attempts import Launch, Reports, Resume, Target, start_and_control
from clusterctl.client.interrupt import stop_interrupted
from clusterctl.errors import RunFailed
from clusterctl.interrupts import EXIT_INTERRUPTED
from clusterctl.text import plural

if TYPE_CHECKING:
    from clusterctl.cli.views.waiting import Waiting
    from clusterctl.client.handover import Starter
    from clusterctl.jobs.run_folder import RunDir
    from clusterctl.report.summary import RunSummary
    from clusterctl.runs.overview import TrainProgress
    from clusterctl.transport.fanout import Connections


def launch_job(
    target: Target,
    *,
    no_checks: bool = False,
    detach: bool = False,
    accept_new: bool = False,
    as_json: bool = False,
    quiet: bool = False,
    run: RunDir | None = None,
) -> None:
    """Start a job on its nodes, or the part of this pod; follow it to its end, or leave it with `detach`."""
    from clusterctl.cli.views.waiting import shown_while

    with shown_while("the check of the job"):
        launch = Launch.of(target, options.runs_folder(), checks=not no_checks, run=run)
    _run_to_the_end(launch, detach=detach, accept_new=accept_new, as_json=as_json, quiet=quiet)


def _run_to_the_end(
    attempt: Launch | Resume,
    *,
    detach: bool,
    accept_new: bool = False,
    as_json: bool,
    quiet: bool = False,
) -> None:
    """Start an attempt and follow it to the end of its run, or leave it to its controller with `detach`."""
    from clusterctl.client.background import deliver_signals

    run, known = attempt.run, attempt.run.written_metrics()
    first = begin(attempt, accept_new=accept_new)
    with choices.connected(attempt.reached) as connections:
        if detach:
            try:
                deliver_signals()
            except (KeyboardInterrupt, SystemExit) as interrupt:
                stop_now(run, connections, interrupt)
                raise
            leave(run, as_json=as_json)
            return
        follow_to_the_end(
            run,
            connections,
            stop_on_interrupt=True,
            quiet=quiet,
            as_json=as_json,
            first=first,
            known=known,
        )


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
    found = options.run_named(run)
    attempt = Resume.of(found, overrides)
    if summary := attempt.complete():
        show_complete(found, summary, as_json=as_json)
        return
    if selection.narrows:
        elsewhere = options.with_devices(selection.chosen(), remote=not dry_run)
        attempt = replace(attempt, elsewhere=elsewhere)
    attempt.check()
    job = attempt.next_job
    if dry_run:
        # The check has read `notify`.
        cluster = attempt.elsewhere or found.read_record().cluster
        show_plan(cluster, replace(job, notify=""), as_json=as_json, argv=True)
        show_continuation(found)
    elif attempt.resubmits:
        report_submitted(found, of_run(found), attempt.submit(), as_json=as_json)
    else:
        _run_to_the_end(attempt, detach=detach, as_json=as_json)


def report_submitted(run: RunDir, backend: Backend, number: int, *, as_json: bool) -> None:
    """Print the number of a job, and how it is followed."""
    if as_json:
        screen.show_json({"run": run.run_id, "folder": str(run.root), "job": number})
    else:
        screen.log(f"{backend.title} job {number}; follow it with: clusterctl logs -f {run.run_id}")
        screen.write(f"{run.run_id}\n")


def show_complete(run: RunDir, summary: RunSummary, *, as_json: bool) -> None:
    """Report that all steps of a training are done."""
    from clusterctl.report.summary import nothing_left

    done = summary.steps_done or 0
    if as_json:
        screen.show_json({"run": run.run_id, "folder": str(run.root), "phase": "finished", "steps": done})
    else:
        screen.log(f"finished   {nothing_left(summary)}")
        screen.log(f"next       clusterctl resume {run.run_id} --set train.steps={2 * done}")


def show_continuation(run: RunDir) -> None:
    """Report from which step the next attempt of a training would continue."""
    from clusterctl.report.summary import resume_text, summarise

    summary = summarise(run)
    text = resume_text(summary)
    if not text and summary.checkpoint:
        text = f"continues after step {summary.checkpoint.step}"
    if text:
        screen.log(f"resume     {text}")


def begin(attempt: Launch | Resume, *, accept_new: bool = False) -> int:
    """Start an attempt in a process that becomes the run's controller; return the number of the first attempt that is
    to be shown.

    Signals are held until `deliver_signals`.
    """
    from clusterctl.client.background import start_in_background

    def work(starter: Starter) -> None:
        with choices.connected(attempt.reached, accept_new) as connections:
            start_and_control(attempt, connections, starter, Reports(phases, stop_now, put_in_charge))

    first: int = start_in_background(work)
    return first


def attach(
    run: options.RunName = "last",
    *,
    take_over: bool = flag("Start a new controller, even if the old one is still running."),
    quiet: bool = flag("Print nothing; wait for the end of the run.", "--quiet", "-q"),
    as_json: options.Json = False,
) -> None:
    """Follow an active run; Ctrl-C leaves it running. If its controller died, a new one is started."""
    from clusterctl.client.run import Run
    from clusterctl.runs.overview import read_progress
    from clusterctl.runs.state import read_state

    found = options.run_named(run)
    if take_over:
        Run(found).end_controller()
    state = read_state(found) if found.controller() is None and found.phase().is_final else None
    if state is not None:
        # The end is recorded here: no node is contacted.
        conclude(found, state, as_json=as_json, quiet=quiet)
        return
    with options.connected_to(found) as connections:
        if found.controller() is None and not found.phase().is_final:
            screen.log(f"{found.run_id} has no controller; starting a new one")
            put_in_charge(found)
        known = found.written_metrics()
        try:
            follow_to_the_end(
                found,
                connections,
                stop_on_interrupt=False,
                quiet=quiet,
                as_json=as_json,
                known=known,
                progress=read_progress(found.metric_lines()),
            )
        except KeyboardInterrupt:
            # The run is not interrupted, only this command.
            again = f"clusterctl attach {found.run_id}"
            screen.log(f"the run continues; {again} follows it again, clusterctl stop {found.run_id} ends it")
            raise typer.Exit(EXIT_INTERRUPTED) from None


def warn(text: str) -> None:
    """Show a warning."""
    screen.log(text, "yellow")


def put_in_charge(run: RunDir) -> bool:
    """Start a controller process that outlives this terminal; return False if it could not be started."""
    from clusterctl.client.run import Run

    if reason := Run(run, choices.reach()).start_controller(warn):
        warn(f"no controller could be started ({reason}); this command controls the run instead")
    return not reason


def phases(connections: Connections) -> Waiting:
    """Return a function that logs each phase of a start with the seconds since this call, and shows the current
    wait, with the nodes that have not answered.
    """
    from clusterctl.cli.views.waiting import NEXT, Waiting

    return Waiting(NEXT[""], at_once=True, unanswered=connections.unanswered)


def leave(run: RunDir, *, as_json: bool) -> None:
    """Leave a started run to its controller, and show how to follow it."""
    screen.log(f"the run continues without this terminal; follow it with: clusterctl attach {run.run_id}")
    if as_json:
        screen.show_json({"run": run.run_id, "folder": str(run.root)})
    else:
        screen.write(run.run_id + "\n")


def follow_to_the_end(
    run: RunDir,
    connections: Connections,
    *,
    stop_on_interrupt: bool,
    quiet: bool = False,
    as_json: bool = False,
    outlives_terminal: bool = True,
    first: int | None = None,
    known: Mapping[Path, int] | None = None,
    progress: TrainProgress | None = None,
) -> None:
    """Show a run until it has ended; raise RunFailed with the root cause if it failed.

    The first `known` bytes of its metrics are not shown again; `progress` is the progress that they show.
    """
    # The imports are inside: an interrupt while they load must stop the run too.
    try:
        from clusterctl.cli.launch.follow import Follower
        from clusterctl.client.background import deliver_signals
        from clusterctl.client.run import Run

        deliver_signals()
        with (
            Run(run, choices.reach()).updates(connections, first, known, warn) as watch,
            Follower(run, quiet=quiet, as_json=as_json, progress=progress) as follower,
        ):
            for update in watch:
                follower.show(update)
    except OSError:
        # Its output is lost, for example because a disk is full; the run continues.
        if run.is_watched() or put_in_charge(run):
            screen.log(f"the run continues; follow it again with: clusterctl attach {run.run_id}")
        raise
    except (KeyboardInterrupt, SystemExit) as interrupt:
        if outlives_terminal and getattr(interrupt, "code", None) == 128 + signal.SIGHUP:
            if not run.is_watched():
                # The terminal is gone; the run continues.
                put_in_charge(run)
        elif stop_on_interrupt:
            stop_now(run, connections, interrupt)
        raise
    from clusterctl.runs.state import read_state

    state = read_state(run)
    assert state is not None
    conclude(run, state, as_json=as_json, quiet=quiet)


def conclude(run: RunDir, state: Any, *, as_json: bool, quiet: bool = False) -> None:
    """Show the summary of a run and how it ended; raise RunFailed unless it finished."""
    from clusterctl.cli.views import tables
    from clusterctl.report.summary import summarise
    from clusterctl.runs.causes import cause as runs_cause

    summary = summarise(run)
    if as_json:
        facts = {"run": run.run_id, "folder": str(run.root), **state.as_json()}
        screen.show_json_line({**facts, "summary": summary.as_json()})
    if state.phase == "finished":
        screen.log(f"finished   {run.root}")
    if not as_json and not quiet and (summary.trains or state.phase == "finished"):
        show_end(summary)
    if state.phase == "finished":
        return
    if state.phase == "stopped" and not state.failure:
        raise RunFailed("the run was stopped before its end", f"clusterctl logs show {run.run_id}")
    cause = runs_cause.find_cause(run, state, run.read_record().attempt)
    screen.error_console().print(tables.cause_text(cause))
    hint = cause.hint or f"clusterctl logs show {run.run_id} --errors"
    raise RunFailed(f"root cause: {cause.title}", "\n".join(filter(None, (hint, state.verdict))))


def show_end(summary: RunSummary) -> None:
    """Write the summary of a run to stderr."""
    from clusterctl.cli.views.run_end import end_block

    screen.log_block(end_block(summary, unicode=screen.has_unicode(screen.error_console())))


def stop_now(run: RunDir, connections: Connections, interrupt: BaseException) -> None:
    """Stop an interrupted run: end every rank and fetch its last output."""
    left = stop_interrupted(run, connections, interrupt, screen.log)
    from clusterctl.report.summary import summarise

    screen.log(f"stopped    {plural(left, 'process', 'es')} left; {run.root}")
    show_end(summarise(run))
