"""`runs`, `status` and `stop`."""

from __future__ import annotations

import time
from dataclasses import asdict
from typing import Annotated, Any

import typer

from clusterctl.cli import options, screen
from clusterctl.errors import WorkFailed


def runs(as_json: options.Json = False) -> None:
    """The runs that were started from here, newest first."""
    from clusterctl import views
    from clusterctl.rundir import all_runs

    rows = [_row(run) for run in all_runs(options.runs_folder())]
    if as_json:
        screen.show_json(rows)
    elif rows:
        screen.show(views.runs_table(rows))
    else:
        screen.say("no runs yet; start one with `clusterctl launch JOB`, or `clusterctl demo`")


def _row(run: Any) -> dict[str, Any]:
    from clusterctl.progress import read_progress

    record, state = run.read_record(), run.read_state()
    last = read_progress(run.metric_lines()).last or {}
    return {
        "run": run.run_id,
        "phase": state.get("phase", "running"),
        "ranks": sum(map(len, record["ranks"].values())),
        "nodes": len(record["ranks"]),
        "step": last.get("step", ""),
        "loss": f"{last['loss']:.4f}" if "loss" in last else "",
        "started": time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(record["created"])),
        "folder": str(run.root),
    }


def status(run: options.RunName = "last", as_json: options.Json = False) -> None:
    """A run as its nodes see it now: phase, step, loss, every rank."""
    from clusterctl import run as runs_
    from clusterctl import views

    found = options.run_named(run)
    with options.connected_to(found) as connections:
        state = runs_.status(found, connections)
    if as_json:
        screen.show_json({"run": found.run_id, "folder": str(found.root), **asdict(state)})
    else:
        screen.show(*views.status_view(found.run_id, state))


def stop(
    run: options.RunName,
    grace: Annotated[
        float | None, typer.Option(help="Seconds for a last checkpoint; the job's own by default.")
    ] = None,
    dry_run: options.DryRun = False,
    as_json: options.Json = False,
) -> None:
    """End a run's processes, and only those; a trainer saves a last checkpoint first."""
    from clusterctl import run as runs_

    found = options.run_named(run)
    ranks = found.read_record()["ranks"]
    if dry_run:
        for node, numbers in ranks.items():
            screen.write(f"would stop ranks {', '.join(map(str, numbers))} of {found.run_id} on {node}\n")
        return
    with options.connected_to(found) as connections:
        left = runs_.stop(found, connections, grace)
        state = runs_.status(found, connections)
    if as_json:
        screen.show_json({"run": found.run_id, "left": left, "phase": state.phase})
    else:
        screen.say(f"{found.run_id} is {state.phase}; {sum(left.values())} processes left")
    if any(left.values()):
        names = ", ".join(f"{node} ({count})" for node, count in left.items() if count)
        raise WorkFailed(
            f"processes that the kernel will not end are left on {names}",
            "a device driver may hold them: reset the device",
        )
