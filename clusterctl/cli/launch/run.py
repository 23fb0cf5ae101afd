"""`plan`, `launch`, `resume` and `attach`: check a job, start it, follow it."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from clusterctl.cli import options, screen, ssh_option
from clusterctl.cli.launch.interrupt import InterruptGuard
from clusterctl.cli.launch.job_request import JobRequest
from clusterctl.cli.launch.target import Target
from clusterctl.errors import FindingsError, RunFailed, UsageError
from clusterctl.text import plural

if TYPE_CHECKING:
    from clusterctl.cli.views.waiting import Waiting
    from clusterctl.handover import Starter
    from clusterctl.inventory.cluster import Cluster
    from clusterctl.jobs.job import Job
    from clusterctl.jobs.run_folder import RunDir
    from clusterctl.report.summary import RunSummary
    from clusterctl.runs.overview import TrainProgress
    from clusterctl.transport.fanout import Connections
    from clusterctl.wire.train_summary import TrainSummary


# Seconds after which another controller may replace a new one.
AGAIN = 60.0
# Limit of files that a dry run names.
MOST_SHOWN = 5


def plan(
    request: JobRequest,
    *,
    what_if: Annotated[
        str | None,
        typer.Option(
            metavar="nodes=N[,devices=N,kind=K]",
            help="Plan for imaginary nodes that are like the first node of the inventory.",
        ),
    ] = None,
    rehearse: Annotated[
        bool,
        typer.Option(
            "--rehearse",
            help="Build one rank of the layout on this machine and run a step, with tensors that take no memory.",
        ),
    ] = False,
    as_json: options.Json = False,
) -> None:
    """Show what a job would start on which node, the memory it needs and about how long it takes. Lists every error.
    Contacts no node. Exits with 1 if a training does not fit its devices."""
    from clusterctl.jobs import what_if as what_ifs

    imagined = what_ifs.read(what_if) if what_if is not None else None
    request = request.with_what_if(imagined) if imagined else request
    choice = request.choice(imagined)
    job = request.job(choice)
    summary = show_plan(choice.of(job)[0], job, as_json=as_json, rehearse=rehearse)
    if summary is not None and summary.fits is False:
        raise FindingsError(
            "the training does not fit its devices",
            "try parallel: auto, recompute: full, a higher zero, or a smaller micro_batch",
        )


def show_plan(
    cluster: Cluster, job: Job, *, as_json: bool = False, argv: bool = False, rehearse: bool = False
) -> TrainSummary | None:
    """Print the plan and return the trainer's summary (None for a command)."""
    from clusterctl.cli.views import layout, tables
    from clusterctl.jobs import job_check, what_if
    from clusterctl.jobs import plan as plans
    from clusterctl.wire.typed_json import encode

    summary = job_check.check(job, cluster)
    made = plans.make_plan(cluster, job)
    if rehearse and job.train is None:
        raise UsageError(
            "--rehearse is only for a training", f"leave it out: {job.source} runs its own command"
        )
    rehearsal = job_check.rehearse(job, cluster) if rehearse else None
    if as_json:
        answer = encode(summary) if summary else {}
        if rehearsal:
            answer["rehearsed"] = encode(rehearsal)
        screen.show_json({**made.as_json(), "summary": answer})
    else:
        nodes = [] if cluster.source == what_if.SOURCE else [tables.plan_table(made)]
        verdict = layout.verdict(summary) if summary else ""
        if summary and verdict:
            screen.show(verdict if summary.fits else f"[bold red]{verdict}[/]")
        training = layout.training(summary, rehearsal) if summary else ()
        screen.show(tables.plan_facts(made, summary), *training, *nodes)
        if argv:
            screen.show(tables.commands_table(made))
            show_pushes(job, len(made.nodes))
        for note in (*_assumptions(cluster), *(layout.notes(summary) if summary else ())):
            screen.log(f"note: {note}", "yellow")
    return summary


def _assumptions(cluster: Cluster) -> Iterator[str]:
    """Yield what the plan takes for granted about nodes that a start would ask."""
    from clusterctl.inventory import nodeset

    if unnamed := [node.name for node in cluster.nodes if node.is_asked]:
        subject = f"{cluster.source} does not name the devices of {nodeset.fold(unnamed)}"
        yield f"{subject}: planned for CPUs; `launch` asks the nodes"


def show_pushes(job: Job, nodes: int) -> None:
    """Print which folders the start would push, and how large they are."""
    from clusterctl.runs.prepare.stage import pushes
    from clusterctl.text import escape_controls, size

    for name, root, manifest in pushes(job, options.runs_folder()):
        files = f"{plural(len(manifest.files), 'file')}, {size(manifest.size)}"
        where = f"to {plural(nodes, 'node')}, unless they have it"
        screen.write(f"pushes {name} {escape_controls(str(root))} ({files}) {where}\n")
        largest = sorted(manifest.files, key=lambda file: -file.size)[:MOST_SHOWN]
        if len(manifest.files) > MOST_SHOWN:
            names = ", ".join(f"{escape_controls(file.path)} ({size(file.size)})" for file in largest)
            screen.write(f"       largest: {names}\n")
        for warning in manifest.warnings:
            screen.log(f"warning: {warning}", "yellow")


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
    from clusterctl.cli.launch.background import deliver_signals
    from clusterctl.jobs import job_check
    from clusterctl.jobs.parts.grace import with_grace
    from clusterctl.jobs.run_folder import new_run

    job, reached = target.job, target.reached
    # A job that is refused leaves no folder.
    summary = check_job(target)
    job = with_grace(job, summary)
    target = replace(target, job=job)
    # Report this before the code is pushed.
    job_check.forwarded(job)
    run = run or new_run(job.name, options.runs_folder())
    first = begin(run, target, summary, no_checks=no_checks, accept_new=accept_new)
    trains = job.train is not None
    with options.connected(reached) as connections:
        if detach:
            with stopping_on_interrupt(run, connections):
                deliver_signals()
            leave(run, as_json=as_json)
            return
        follow_to_the_end(
            run,
            connections,
            stop_on_interrupt=True,
            trains=trains,
            quiet=quiet,
            as_json=as_json,
            first=first,
        )


def check_job(target: Target) -> TrainSummary | None:
    """Return the trainer's summary of a job, None without a training; raise InputFaults with all errors."""
    from clusterctl.cli.views.waiting import shown_while
    from clusterctl.jobs import job_check

    with shown_while("the check of the job"):
        return job_check.check(target.job, target.nodes)


def begin(
    run: RunDir,
    target: Target,
    summary: TrainSummary | None,
    *,
    no_checks: bool = False,
    accept_new: bool = False,
) -> int:
    """Start a checked job in a process that becomes its controller; return the number of the attempt.

    Signals are held until `deliver_signals`.
    """
    from concurrent.futures import ThreadPoolExecutor

    from clusterctl.checks import doctor
    from clusterctl.cli.launch.background import start_in_background
    from clusterctl.runs import start as runs
    from clusterctl.runs.prepare.stage import code_of

    job, reached, part = target.job, target.reached, target.part

    def start_up(connections: Connections) -> bool:
        folder = options.runs_folder()
        with (
            stopping_on_interrupt(run, connections),
            phases(connections) as log,
            ThreadPoolExecutor() as aside,
        ):
            # The files are looked through while the nodes are reached.
            found = None if part else aside.submit(code_of, job, folder).result
            if not no_checks:
                doctor.before_launch(reached, target.checked_job, connections, log, summary)
            if part:
                part.start(job, connections, folder, log, run)
            else:
                runs.launch(reached, job, connections, folder, log, run, target.spares, found=found)
            become_steady()
        return True

    first: int = start_in_background(becoming_controller(run, reached, start_up, accept_new))
    return first


def become_steady() -> None:
    """Ignore the terminal, and SIGTERM until the terminal's process knows that the ranks run.

    If this process ended in between, no process would stop the ranks. The terminal's process, which passes its signals
    on, acts on the same one. Blocking the signal is not enough: another thread of this process would receive it.
    """
    from clusterctl.runs import in_charge

    in_charge.ignore_terminal()
    signal.signal(signal.SIGTERM, signal.SIG_IGN)


def becoming_controller(
    run: RunDir, cluster: Cluster, start_up: Callable[[Connections], bool], accept_new: bool = False
) -> Callable[[Starter], None]:
    """Return the work of a process that starts a run and then controls it, with one login per node for both.

    `start_up` returns whether it started an attempt; if not, an attempt of another process continues. The work reports
    the number of the first attempt that is to be shown.
    """
    from clusterctl.runs import in_charge

    def work(starter: Starter) -> None:
        leave_on_sigterm = signal.getsignal(signal.SIGTERM)
        with options.connected(cluster, accept_new) as connections:
            has_started = start_up(connections)
            first = run.read_record().attempt

            def started() -> None:
                starter.started(first, run.controller_log)
                signal.signal(signal.SIGTERM, leave_on_sigterm)

            if not in_charge.serve(run, connections, started, started=has_started):
                started()

    return work


def put_in_charge(run: RunDir) -> bool:
    """Start a controller process that outlives this terminal; return False if it could not be started."""
    from clusterctl.logs.store import last_lines
    from clusterctl.runs import in_charge

    if in_charge.start(run, ssh_option.chosen()):
        return True
    reason = (last_lines(run.controller_log, 3) or ["its log is empty"])[0].removeprefix("error: ")
    screen.log(f"no controller could be started ({reason}); this command controls the run instead", "yellow")
    return False


def warn_about_missing_variables(run: RunDir) -> None:
    """Warn if a controller that is started from this shell could not restart the run."""
    from clusterctl.jobs.job_check import missing_variables

    job = run.read_record().job
    missing = missing_variables(job) if job.restart is not None else []
    if missing:
        screen.log(
            f"not set in this shell: {', '.join(missing)}; the run cannot be restarted from here", "yellow"
        )


class NewController:
    """Starts a new controller for a run whose controller died while a terminal follows the run."""

    def __init__(self, run: RunDir) -> None:
        self.run, self._last = run, -AGAIN

    def __call__(self) -> bool:
        """Start it and return whether it is in charge; not again within a minute, because it would probably fail for
        the same reason.
        """
        from clusterctl.runs import in_charge

        now = time.monotonic()
        if now - self._last < AGAIN:
            return False
        self._last = now
        screen.log(f"the controller of {self.run.run_id} is gone; starting a new one", "yellow")
        warn_about_missing_variables(self.run)
        return in_charge.start(self.run, ssh_option.chosen())


@contextmanager
def stopping_on_interrupt(run: RunDir, connections: Connections) -> Iterator[None]:
    """Stop what was already started when a start is interrupted."""
    try:
        yield
    except (KeyboardInterrupt, SystemExit) as interrupt:
        if run.record.exists():
            stop_now(run, connections, interrupt)
        raise


def start(cluster: Cluster, job: Job, connections: Connections) -> RunDir:
    """Start a run and log each phase."""
    from clusterctl.runs import start as runs

    with phases(connections) as log:
        return runs.launch(cluster, job, connections, options.runs_folder(), log)


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


def lacks_controller(run: RunDir, connections: Connections) -> bool:
    """Return whether a run is still active and has no controller."""
    from clusterctl.runs.query import current_state

    state = current_state(run, connections)
    return not state.is_final and state.controller is None


def follow_to_the_end(
    run: RunDir,
    connections: Connections,
    *,
    stop_on_interrupt: bool,
    trains: bool,
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
        from clusterctl.cli.launch.background import deliver_signals
        from clusterctl.cli.launch.follow import Follower
        from clusterctl.runs.in_charge import following
        from clusterctl.runs.watching.kept_watch import KeptWatch

        deliver_signals()
        kept = KeptWatch(run, first, known, NewController(run))
        with (
            following(kept, connections) as watch,
            Follower(run, trains=trains, quiet=quiet, as_json=as_json, progress=progress) as follower,
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
    # Do this first: the next Ctrl-C may follow immediately.
    with InterruptGuard() as guard:
        from clusterctl.runs.in_charge import wait_for_end
        from clusterctl.runs.stop import stop_run

        grace = run.read_record().job.grace
        screen.log(
            f"stopping {run.run_id}: up to {grace:g} s for a last checkpoint; press Ctrl-C again to kill it"
        )
        run.add_event("interrupted", by=type(interrupt).__name__)
        try:
            with guard.may_force():
                left = stop_run(run, connections)
        except KeyboardInterrupt:
            left = stop_run(run, connections, grace=0.0)
        wait_for_end(run, connections)
    from clusterctl.report.summary import summarise

    screen.log(f"stopped    {plural(sum(left.values()), 'process', 'es')} left; {run.root}")
    show_end(summarise(run))
