"""`ranktable push` and `ranktable verify`: copy a table to nodes, and compare it with them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from clusterctl.cli import choices, options, screen
from clusterctl.cli.declared import option

if TYPE_CHECKING:
    from clusterctl.inventory.cluster import Cluster
    from clusterctl.ranktable.live_table import LiveTable
    from clusterctl.ranktable.push import Drift, NodeReport, Pushed
    from clusterctl.transport.fanout import Outcome

Table = Annotated[Path, typer.Argument(metavar="FILE", help="A rank table.")]


def push(
    file: Table,
    selection: options.NodeOptions,
    to: str | None = option(
        "Path on the nodes. Default: ~/NAME.", metavar="PATH", callback=options.OfNodePath
    ),
    accept_new: options.AcceptNew = False,
    dry_run: options.DryRun = False,
    as_json: options.Json = False,
) -> None:
    """Copy a table to every node that it names, and verify each copy by its hash."""
    from clusterctl.ranktable import live_table, push
    from clusterctl.transport.fanout import raise_failures

    table = live_table.read(file)
    path = push.checked_path(to or push.default_path(file))
    found = selection.chosen()
    chosen = live_table.nodes_of(found, table, chosen=selection.narrows)
    if not selection.narrows:
        _warn_of_missing(live_table.missing_servers(found, table))
    if dry_run:
        return _show_dry_run(file, table, path, [node.name for node in chosen], as_json)
    with choices.connected(found, accept_new) as connections:
        outcomes = connections.on_each(chosen, lambda node, link: push.push(link, table, path))
    _show_pushed(outcomes, table, as_json)
    raise_failures(outcomes)


def verify(
    file: Table,
    selection: options.NodeOptions,
    at: str | None = option("Path on the nodes. Default: ~/NAME.", metavar="PATH"),
    accept_new: options.AcceptNew = False,
    as_json: options.Json = False,
) -> None:
    """Compare a table with the nodes: the file on each node, and the address, position and link of each device.
    Exits with 1 if something differs."""
    from clusterctl.ranktable import live_table, push
    from clusterctl.ranktable import verify as truth
    from clusterctl.transport.fanout import raise_failures

    table = live_table.read(file)
    path = push.checked_path(at or push.default_path(file))
    found = selection.chosen()
    chosen = live_table.nodes_of(found, table, chosen=selection.narrows)
    drifts = _absent(found, table) if not selection.narrows else []
    with choices.connected(found, accept_new) as connections:
        outcomes = connections.on_each(chosen, lambda node, link: truth.verify(link, node, table, path))
    reports = [outcome.value for outcome in outcomes if outcome.value is not None]
    drifts += [drift for report in reports for drift in report.drifts]
    if not selection.narrows and len(reports) == len(outcomes):
        drifts += truth.unclaimed(table, reports)
    if as_json:
        screen.show_json(_verified_json(file, table, outcomes, drifts))
    else:
        _show_verified(outcomes, drifts)
        for part in truth.not_compared(table):
            screen.log(f"not compared: {part}", style="yellow")
    raise_failures(outcomes)
    if drifts:
        raise typer.Exit(1)


def _absent(cluster: Cluster, table: LiveTable) -> list[Drift]:
    from clusterctl.ranktable.live_table import missing_servers
    from clusterctl.ranktable.push import Drift

    problem, remedy = "no node of the inventory is this server", "add the node, or set its `server_id`"
    return [Drift(name, None, "server", problem, remedy) for name in missing_servers(cluster, table)]


def _warn_of_missing(servers: Sequence[str]) -> None:
    shown = ", ".join(servers[:5]) + (f" and {len(servers) - 5} more" if len(servers) > 5 else "")
    if servers:
        screen.log(f"warning: no node of the inventory is {shown}; the table is not pushed there", "yellow")


def _show_dry_run(file: Path, table: LiveTable, path: str, names: Sequence[str], as_json: bool) -> None:
    from clusterctl.inventory import nodeset

    if as_json:
        value = {"file": str(file), "nodes": list(names), "to": path, "sha256": table.sha256}
        return screen.show_json({**value, "size": len(table.data)})
    size = f"{len(table.data):,} bytes, sha256 {table.sha256[:12]}"
    screen.write(f"would put {file} ({size}) at {path} on {nodeset.fold(names)}\n")


def _show_pushed(outcomes: Sequence[Outcome[Pushed]], table: LiveTable, as_json: bool) -> None:
    from clusterctl.cli.views import tables

    done = [outcome.value for outcome in outcomes if outcome.value is not None]
    if as_json:
        return screen.show_json([asdict(pushed) for pushed in done])
    rows = [[pushed.node, pushed.path, pushed.change, pushed.sha256[:12]] for pushed in done]
    if rows:
        screen.show(tables.table(["NODE", "PATH", "FILE", "SHA256"], rows))


def _show_verified(outcomes: Sequence[Outcome[NodeReport]], drifts: Sequence[Drift]) -> None:
    from clusterctl import text

    drifted = {drift.node for drift in drifts}
    for drift in drifts:
        screen.out_console().print(screen.safe(str(drift)), style="bold red", soft_wrap=True)
        screen.out_console().print(screen.safe(f"  try: {screen.pasteable(drift.remedy)}"), soft_wrap=True)
    for outcome in outcomes:
        if outcome.value is None:
            continue
        if outcome.value.node not in drifted:
            screen.write(
                f"{outcome.value.node}: ok: the same file, {text.plural(outcome.value.devices, 'device')}\n"
            )
        for note in outcome.value.notes:
            screen.log(f"{outcome.value.node}: {note}", style="yellow")


def _verified_json(
    file: Path, table: LiveTable, outcomes: Sequence[Outcome[NodeReport]], drifts: Sequence[Drift]
) -> dict[str, object]:
    from clusterctl.ranktable.verify import not_compared

    reports = [outcome.value for outcome in outcomes if outcome.value is not None]
    nodes = [
        {"node": report.node, "path": report.path, "devices": report.devices, "notes": list(report.notes)}
        for report in reports
    ]
    failed = [
        {"node": outcome.node.name, "error": outcome.error.message}
        for outcome in outcomes
        if outcome.error is not None
    ]
    found = [asdict(drift) for drift in drifts]
    head = {"file": str(file), "sha256": table.sha256, "ok": not found and not failed}
    head["not_compared"] = not_compared(table)
    return {**head, "nodes": nodes, "findings": found, "failed": failed}
