"""`runs`, `runs prune`, `status` and `stop`."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated, Any

import typer

from clusterctl.backends import backend as backends
from clusterctl.cli import choices, options, screen
from clusterctl.cli.declared import flag, option
from clusterctl.errors import UsageError
from clusterctl.text import escape_controls, plural, size

if TYPE_CHECKING:
    from rich.live import Live

    from clusterctl.cli.views.tables import ListedRun
    from clusterctl.jobs.record import RunRecord
    from clusterctl.jobs.run_folder import RunDir
    from clusterctl.runs.overview import Overview
    from clusterctl.runs.state import RunState
    from clusterctl.transport.fanout import Connections


STARTED = "%Y-%m-%d %H:%M:%S"
NEWER = "a newer version of clusterctl started it"
# Seconds between two updates of `status --watch`.
EVERY = 2.0

Keep = Annotated[int | None, typer.Option("--keep", min=0, metavar="N", help="Keep the newest N runs.")]


def runs(context: typer.Context, *, as_json: options.Json = False) -> None:
    """List the runs of this project, newest first."""
    if context.invoked_subcommand is not None:
        return
    from clusterctl.cli.views import tables
    from clusterctl.client.submitted import refresh_all
    from clusterctl.jobs.run_folder import all_runs

    found = all_runs(options.runs_folder())
    refresh_all(found, lambda text: screen.log(text, "yellow"))
    rows = [_row(run) for run in found]
    if as_json:
        screen.show_json([asdict(row) for row in rows])
    elif rows:
        screen.show(tables.runs_table(rows), *[tables.causes_text(rows)] * any(row.cause for row in rows))
    else:
        screen.log("no runs yet; start one with `clusterctl launch JOB`, or `clusterctl demo`")


def prune(
    older_than: str | None = option(
        "Delete runs that started longer ago than this: 12h, 30d, 8w.", metavar="TIME"
    ),
    keep: Keep = None,
    *,
    here: bool = flag("Delete on this machine only; contact no node."),
    dry_run: options.DryRun = False,
    yes: options.Yes = False,
    as_json: options.Json = False,
) -> None:
    """Delete old runs here and on their nodes; never a run that is, or may be, still active."""
    from clusterctl.jobs.run_folder import all_runs
    from clusterctl.runs import prune as pruning

    choice = pruning.Choice(pruning.seconds_of(older_than) if older_than else None, keep)
    folder = options.runs_folder()
    runs = all_runs(folder)
    old = choice.of([(run, pruning.started(run)) for run in runs], time.time())
    if not dry_run and old and not screen.ask(f"delete {plural(len(old), 'run')} of {folder}?", yes=yes):
        raise UsageError(
            f"{plural(len(old), 'run')} would be deleted", "--yes deletes them, --dry-run lists them"
        )

    verb, kept = ("would delete", "would keep") if dry_run else ("deleted", "kept")

    def report(run: pruning.Pruned) -> None:
        nodes = f" and on {', '.join(run.nodes)}" if run.nodes else ""
        deleted = f"{verb} {run.run} ({size(run.size)} here){nodes}"
        line = f"{kept} {run.run}: {run.kept}" if run.kept else deleted
        if not as_json:
            screen.write(escape_controls(line) + "\n")

    stores: dict[str, pruning.Store] = {}
    results = pruning.prune(
        old, choices.connected, here_only=here, dry_run=dry_run, on_each=report, on_store=stores.__setitem__
    )
    deleted = [run for run in results if not run.kept]
    if as_json:
        unused = {node: asdict(store) for node, store in stores.items()}
        screen.show_json({"dry_run": dry_run, "runs": [asdict(run) for run in results], "stores": unused})
    for node, store in stores.items():
        if store.names and not as_json:
            action = f"{verb} from the store of {node} ({size(store.size)})"
            screen.write(f"{action}: {', '.join(store.names)}\n")
    total = f"{plural(len(deleted), 'run')}, {size(sum(run.size for run in deleted))} here"
    screen.log(f"{verb} {total}; {kept} {len(runs) - len(deleted)}")


def _row(run: RunDir) -> ListedRun:
    """Return one row of the list of runs; a damaged run is marked and does not hide the others."""
    from clusterctl.cli.views.tables import ListedRun
    from clusterctl.jobs.run_lines import Metric
    from clusterctl.runs.causes.cause import read_cause

    try:
        record = run.read_record()
    except UsageError:
        started = time.strftime(STARTED, time.localtime(run.record.stat().st_mtime))
        return ListedRun(run.run_id, "damaged", started, folder=str(run.root))
    phase, last = run.phase(), run.last_step() or Metric()
    cause = read_cause(run) if phase.is_final else None
    return ListedRun(
        run=run.run_id,
        phase=phase.value,
        started=time.strftime(STARTED, time.localtime(record.created)),
        ranks=record.world_size,
        nodes=len(record.ranks),
        step="" if last.step is None else last.step,
        loss="" if last.loss is None else f"{last.loss:.4f}",
        cause=cause.title if cause else _verdict(run) or NEWER * record.is_newer,
        folder=str(run.root),
    )


def _verdict(run: RunDir) -> str:
    """Return the state of a submitted run as its backend reports it; "" for any other run."""
    from clusterctl.runs.state import read_state

    if backends.of_run(run) is backends.SSH:
        return ""
    try:
        state = read_state(run)
    except UsageError:
        return ""
    return state.verdict if state else ""


def status(
    run: options.RunName = "last",
    *,
    watch: bool = flag("Keep updating until the run ends.", "--watch", "-w"),
    every: float = option("Seconds between two updates.", default=EVERY, min=0.2, metavar="SECONDS"),
    ranks: bool = flag("Show every rank, also of large runs."),
    as_json: options.Json = False,
) -> None:
    """Show the live state of a run: phase, step, speed, last activity, ranks and events."""
    from clusterctl.cli.views import run_status
    from clusterctl.client.run import Run
    from clusterctl.jobs.phase import Phase

    found = options.run_named(run)
    while found.phase() is Phase.PENDING or not backends.of_run(found).reaches_nodes:
        ended = _show_recorded(found, Run(found).state(), as_json=as_json)
        if ended or not watch:
            return
        time.sleep(every)
        found = options.run_named(run)
    with options.connected_to(found) as connections:
        if watch:
            _watch(found, connections, every, ranks=ranks, as_json=as_json)
            return
        state, overview = _observe(found, connections)
    from clusterctl.report.summary import summarise

    summary = summarise(found)
    if as_json:
        screen.show_json({**_status_json(found, state, overview), "summary": summary.as_json()})
        return
    screen.show(run_status.whole(overview, all_ranks=ranks))
    if state.is_final or summary.steps_done:
        from clusterctl.cli.views.run_end import end_block

        unicode = screen.has_unicode(screen.out_console())
        screen.show("", end_block(summary, unicode=unicode, commands=state.is_final))


def _show_recorded(run: RunDir, state: RunState, *, as_json: bool) -> bool:
    """Show a run as its backend reports it; return whether it has ended."""
    if as_json:
        screen.show_json({"run": run.run_id, "folder": str(run.root), **state.as_json()})
    else:
        nodes = ", ".join(f"{node} {phase}" for node, phase in state.nodes.items())
        text = "  ".join(part for part in (run.run_id, str(state.phase), nodes, state.verdict) if part)
        screen.write(escape_controls(text) + "\n")
    return state.is_final


def _observe(run: RunDir, connections: Connections) -> tuple[RunState, Overview]:
    """Ask the nodes; return the state of a run and its overview."""
    from clusterctl.client.run import Run
    from clusterctl.runs import overview

    state = Run(run).state(connections)
    return state, overview.summarise(run, state, time.time())


def _status_json(run: RunDir, state: RunState, overview: Overview) -> dict[str, object]:
    """Return the answers of the nodes, and under `overview` the values derived from them."""
    return {"run": run.run_id, "folder": str(run.root), **state.as_json(), "overview": overview.as_json()}


def _watch(run: RunDir, connections: Connections, every: float, *, ranks: bool, as_json: bool) -> None:
    """Show the state of a run until it has ended and will not be restarted."""
    from clusterctl.cli.views import run_status

    on_screen = screen.out_console().is_terminal and not screen.out_console().is_dumb_terminal and not as_json
    with _drawn(on_screen=on_screen) as live:
        before: Any = None
        while True:
            state, overview = _observe(run, connections)
            for name in state.unreachable:
                connections.drop(run.read_record().cluster.node(name))
            changed, before = run_status.changes(overview) != before, run_status.changes(overview)
            if live is not None:
                live.update(run_status.whole(overview, all_ranks=ranks), refresh=True)
            elif as_json:
                screen.show_json_line(_status_json(run, state, overview))
            elif changed:
                screen.write(escape_controls(run_status.line(overview)) + "\n")
            if state.is_final and state.controller is None:
                return
            time.sleep(every)


@contextmanager
def _drawn(*, on_screen: bool) -> Iterator[Live | None]:
    if not on_screen:
        yield None
        return
    from rich.live import Live

    with Live(console=screen.out_console(), auto_refresh=False, vertical_overflow="visible") as live:
        yield live


def stop(
    run: options.RunName,
    grace: float | None = option(
        "Time for a last checkpoint. Default: `grace` of the job.", min=0.0, metavar="SECONDS"
    ),
    *,
    dry_run: options.DryRun = False,
    as_json: options.Json = False,
) -> None:
    """Stop the processes of a run, and no others. A training saves a last checkpoint first."""
    from clusterctl.client.run import Run

    found = options.run_named(run)
    client = Run(found, choices.reach())
    ending = client.ending(grace)
    if ending is None:
        _tell_cost(found, found.read_record(), grace)
    if dry_run:
        ranks = {} if ending else found.read_record().ranks
        for node, numbers in ranks.items():
            screen.write(f"would stop ranks {', '.join(map(str, numbers))} of {found.run_id} on {node}\n")
        if ending:
            screen.write(f"would {ending.would}\n")
        return
    done = client.end(grace, lambda text: screen.log(text, "yellow"))
    if as_json:
        facts = {} if done.deleted is None else {"deleted": done.deleted}
        screen.show_json({"run": found.run_id, "left": done.left, "phase": done.phase, **facts})
    else:
        left = f"{plural(sum(done.left.values()), 'process', 'es')} left"
        screen.log(f"{found.run_id} is {done.phase}; {done.text or left}")
    done.require_none_left()


def _tell_cost(run: RunDir, record: RunRecord, grace: float | None) -> None:
    """Say how long a training has for a last checkpoint, and what is lost if that is too short."""
    from clusterctl.runs.overview import read_progress, stop_cost

    if record.job.train is None or run.phase().is_final:
        return
    grace = record.job.grace if grace is None else grace
    cost = stop_cost(read_progress(run.metric_lines()), grace)
    screen.log(cost or f"up to {grace:g} s for a last checkpoint", "yellow" if cost else "")
