"""`ranktable`: build, merge, convert, check, show, compare and slice rank tables."""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from clusterctl.cli import screen
from clusterctl.cli.choices import cluster_of, connected, has_inventory
from clusterctl.cli.declared import flag, option
from clusterctl.cli.option_values import HARDWARE, SORTS
from clusterctl.cli.options import (
    AcceptNew,
    ClusterFile,
    DryRun,
    Force,
    Json,
    NodeOptions,
    checked_by,
    one_of,
)
from clusterctl.cli.screen import out_console, safe, show_json
from clusterctl.errors import Collected, UsageError
from clusterctl.hostfile.node_lists import NAMES
from clusterctl.inventory.cluster import Cluster, named_devices
from clusterctl.text import escape_controls

if TYPE_CHECKING:
    from clusterctl.ranktable.api import RankTable
    from clusterctl.ranktable.check import Report
    from clusterctl.ranktable.finding import Finding
    from clusterctl.transport.fanout import Connections


def _require_devices(text: str) -> None:
    named_devices(text)


Output = Annotated[
    Path | None,
    typer.Option(
        "--output",
        "-o",
        metavar="FILE",
        help="Write to this file, '-' for stdout. Default: a name such as hccl_4s_32p.json.",
    ),
]
Table = Annotated[Path, typer.Argument(metavar="FILE", help="A rank table.")]
Tables = Annotated[list[Path], typer.Argument(metavar="FILE...", help="Rank tables.")]
For = Annotated[
    str | None,
    typer.Option(
        "--for",
        metavar="HARDWARE",
        callback=one_of(HARDWARE),
        help="Hardware of the table: 910a, a2, a3 or a5. Default: guessed from its version.",
    ),
]
Devices = Annotated[
    str | None,
    typer.Option(
        "--devices",
        metavar="SET",
        callback=checked_by(_require_devices),
        help="Devices of each node, in rank order: 8 (a number), '[0,8)' (8 is excluded) or 4,5,6,7.",
    ),
]


@dataclass(frozen=True)
class TableOutput:
    """The options for the file of a new table."""

    output: Output = None
    force: Force = False
    dry_run: DryRun = False
    json: Json = False

    def write(self, table: RankTable) -> None:
        """Write the table to its file and report this, or show it."""
        import hashlib

        from clusterctl.ranktable import api

        text = table.render()
        if str(self.output) == "-":
            screen.write(text)
            return
        path = self.output or Path(api.file_name(table))
        changed = api.save(table, path, self.force, self.dry_run)
        if self.json:
            digest = hashlib.sha256(text.encode()).hexdigest()
            counts = {"version": table.version, "servers": len(table.servers), "ranks": table.ranks}
            written = changed and not self.dry_run
            screen.show_json({"file": str(path), **counts, "sha256": digest, "written": written})
            return
        how = "already has this table" if not changed else "would be written" if self.dry_run else "written"
        screen.write(f"{path}: {how}: {_size(len(table.servers), table.ranks)}\n")
        if self.dry_run:
            screen.write(text)


@dataclass(frozen=True)
class DeviceQuery:
    """The options of a table that is built from the answers of nodes."""

    devices: Devices = None
    hardware: str | None = option(
        "Hardware: 910a or a2 (version 1.0), a3 (version 1.2). Default: the nodes are asked.",
        "--for",
        metavar="HARDWARE",
        callback=one_of(HARDWARE),
    )
    skip_incomplete: bool = flag("Leave out devices without an address, with a warning.")


def build(
    selection: NodeOptions,
    query: DeviceQuery,
    to: TableOutput,
    plan: Path | None = option("Build from a plan file; contact no node.", "--from", metavar="PLAN"),
    accept_new: AcceptNew = False,
) -> None:
    """Ask the nodes for the addresses of their devices and write one table for all nodes."""
    from clusterctl.ranktable import plan as ranktable_plan

    if plan is None:
        to.write(_from_nodes(selection, query, accept_new))
        return
    if selection != NodeOptions() or query != DeviceQuery():
        problem = "--from uses the plan alone: not -c, -n, -x, --devices, --for or --skip-incomplete"
        raise UsageError(problem, "write nodes, devices and `for:` into the plan")
    to.write(ranktable_plan.load_plan(plan))


def _from_nodes(selection: NodeOptions, query: DeviceQuery, accept_new: bool) -> RankTable:
    """Return the table from the nodes' answers; report devices that were left out."""
    from clusterctl.checks import kinds
    from clusterctl.ranktable import from_nodes

    devices = None if query.devices is None else named_devices(query.devices)
    chosen = selection.chosen()
    with connected(chosen, accept_new) as connections:
        if devices is None:
            chosen = kinds.completed(chosen, connections)
        if chosen.assumed and devices is None:
            chosen = _as_reported(chosen, connections)
        built = from_nodes.build_from_nodes(
            chosen, connections, devices, query.hardware, query.skip_incomplete
        )
    if built.detected:
        screen.log(f"{built.detected}; --for a2 writes 1.0")
    for line in built.other_sources:
        screen.log(line, style="yellow")
    for line in built.left_out:
        screen.log(f"left out: {line}", style="yellow")
    return built.table


def _as_reported(cluster: Cluster, connections: Connections) -> Cluster:
    """Return the cluster with all NPUs that its nodes report, where a file without kinds counts no slots."""
    from clusterctl.checks.kinds import as_reported, ask_devices

    outcomes = {outcome.node.name: outcome for outcome in ask_devices(cluster.nodes, connections)}
    nodes = tuple(
        as_reported(node, outcomes[node.name].get(), keep_devices=node.devices != (0,))
        if outcomes[node.name].ok
        else node
        for node in cluster.nodes
    )
    return replace(cluster, nodes=nodes)


def merge(
    files: Tables,
    to: TableOutput,
    sort: str = option(
        "Order of the servers: given, address, name or inventory.",
        default="given",
        callback=one_of(SORTS),
        metavar="ORDER",
    ),
    cluster: ClusterFile = None,
    hardware: For = None,
) -> None:
    """Merge several tables into one; ranks follow the order of the files."""
    from clusterctl.ranktable import api

    tables = api.load_all(files, hardware)
    known = api.server_places(cluster_of(cluster)) if sort == "inventory" else None
    to.write(api.merge(api.in_order(tables, sort, known), hardware))


def convert(
    file: Annotated[
        Path, typer.Argument(metavar="FILE", help="A rank table in any form, a plan or a hostfile.")
    ],
    target: TableOutput,
    to: str | None = option(
        f"Format: 1.0, 1.2, plan, {NAMES}. Default: the version that HCCL reads.", metavar="FORMAT"
    ),
    facts: Path | None = option("A 1.2 table or a plan with the super-device ids.", metavar="FILE"),
    super_pod: str | None = option("Put all servers in this super pod.", metavar="ID"),
    lossy: bool = flag("Leave out what the format cannot hold."),
) -> None:
    """Convert a table to another version, a plan or a hostfile, and back. Refused if a required value is unknown; the
    message names it."""
    from clusterctl.files import save_new
    from clusterctl.hostfile import ranktable as hostfile_ranktable

    if to is None or to in hostfile_ranktable.VERSIONS:
        table = hostfile_ranktable.as_table(file, to, facts, super_pod)
        target.write(table)
        return
    text = hostfile_ranktable.as_text(file, to, lossy)
    output = None if str(target.output) == "-" else target.output
    changed = output is not None and save_new(output, text, force=target.force, dry_run=target.dry_run)
    written = changed and not target.dry_run
    if target.json:
        name = str(target.output) if target.output else None
        screen.show_json({"format": to, "file": name, "text": text, "written": written})
    elif output is None or target.dry_run:
        screen.write(text)
    else:
        screen.write(f"{output}: {'written' if written else 'already has this content'}\n")


def check(
    files: Tables,
    hardware: For = None,
    same: bool = flag("Also check that all files are the same table."),
    strict: bool = flag("Exit with 1 for warnings too."),
    json: Json = False,
) -> None:
    """List every rule of HCCL that a table breaks; exit with 1 if HCCL would refuse a table."""
    from clusterctl.ranktable.check import alike, check_file

    reports, errors = [], Collected()
    for file in files:
        with errors:
            reports.append((file, check_file(file, hardware)))
    if same:
        read = [file for file, _ in reports]
        reports = list(zip(read, alike([report for _, report in reports]), strict=True))
    if json:
        show_json([_report_json(file, report) for file, report in reports])
    else:
        for line, style in (line for file, report in reports for line in _report_lines(file, report)):
            out_console().print(safe(line), style=style, soft_wrap=True)
    errors.raise_all()
    if any(report.findings if strict else report.refused for _, report in reports):
        raise typer.Exit(1)


# A table of more ranks is shown by server.
MOST_RANKS = 256


def show(
    file: Table,
    by: str | None = option(
        "Show by rank or by server. Default: by server for more than 256 ranks.", metavar="WHAT"
    ),
    json: Json = False,
) -> None:
    """Show a table: one line for each rank, or for each server of a large table."""
    from clusterctl.cli.views import tables
    from clusterctl.ranktable import api

    if by not in (None, "rank", "server"):
        raise UsageError(f"--by {by}: a table is shown by rank or by server", "--by server")
    table = api.load(file)
    if json:
        counts = {"version": table.version, "servers": len(table.servers)}
        screen.show_json({**counts, "ranks": table.rows()})
        return
    by_server = by == "server" or (by is None and table.ranks > MOST_RANKS)
    rows = table.server_rows() if by_server else table.rows()
    columns = list(rows[0])
    cells = [[str(row[name]) for name in columns] for row in rows]
    if screen.on_terminal() and len(rows) <= MOST_RANKS:
        screen.show(tables.table(columns, cells, right=("rank", "device")))
    else:
        screen.write(_plain_table(columns, cells))
    hint = "; --by rank shows every rank" if by_server and by is None else ""
    screen.log(f"version {table.version}, {_size(len(table.servers), table.ranks)}{hint}")


def _plain_table(columns: list[str], rows: list[list[str]]) -> str:
    """Return a table as text in columns: for 80,000 rows a hundred times as fast as the library for terminals."""
    safe = [columns, *([escape_controls(cell) for cell in row] for row in rows)]
    widths = [max(map(len, column)) for column in zip(*safe, strict=True)]
    return "".join(
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() + "\n"
        for row in safe
    )


def diff(
    left: Table,
    right: Table,
    by: str = option("Compare by rank, or by node (one line per server).", default="rank", metavar="WHAT"),
    json: Json = False,
) -> None:
    """Compare two tables rank by rank; exit with 1 if they differ. Key order and white space are ignored."""
    from clusterctl.ranktable import api, edit

    compare = {"rank": edit.diff, "node": edit.diff_servers}.get(by)
    if compare is None:
        raise UsageError(f"--by {by}: tables are compared by rank or by node", "--by node")
    errors = Collected()
    with errors:
        first = api.load(left)
    with errors:
        second = api.load(right)
    errors.raise_all()
    found = compare(first, second)
    if json:
        screen.show_json([asdict(difference) for difference in found])
    for difference in () if json else found:
        head = difference.server or ("table" if difference.rank is None else f"rank {difference.rank}")
        screen.out_console().print(
            screen.safe(f"{head}: {difference.left or 'absent'} -> {difference.right or 'absent'}")
        )
    if found:
        raise typer.Exit(1)


def cut(
    file: Table,
    to: TableOutput,
    nodes: str | None = option("Keep these servers.", "--nodes", "-n", metavar="SET"),
    ranks: str | None = option("Keep these ranks: '[0,16)' (16 is excluded).", metavar="RANGE"),
    drop: str | None = option("Leave out these servers.", metavar="SET"),
    cluster: ClusterFile = None,
) -> None:
    """Write a part of a table, with ranks numbered from 0. Name servers by server_id or by the inventory's names."""
    from clusterctl.ranktable import api, edit

    table = api.load(file)
    part = edit.slice_table(
        table,
        servers=None if nodes is None else _servers(nodes, table, cluster),
        ranks=None if ranks is None else edit.parse_ranks(ranks),
        drop=_servers(drop, table, cluster) if drop else (),
    )
    to.write(part)


def _servers(chosen: str, table: RankTable, file: Path | None) -> list[str]:
    """Return the server_ids that a node set selects: by server_id, else by their names in the inventory."""
    from clusterctl.inventory import nodeset
    from clusterctl.ranktable import api

    known = [server.server_id for server in table.servers]
    try:
        return list(nodeset.select(chosen, known))
    except UsageError:
        if not table.names_servers or not (file or has_inventory()):
            raise
        found = cluster_of(file)
        names = api.named_by(found, known)
        if len(names) < len(known):
            raise
    return [names[name] for name in nodeset.select(chosen, list(names), found.groups)]


def _size(servers: int, ranks: int) -> str:
    return f"{_number(servers, 'server')}, {_number(ranks, 'rank')}"


def _number(count: int, noun: str) -> str:
    return f"{count} {noun}{'' if count == 1 else 's'}"


def _report_json(file: Path, report: Report) -> dict[str, object]:
    findings = [{**asdict(finding), "hccl_code": finding.hccl_code} for finding in report.findings]
    facts = {"version": report.version, "hardware": report.hardware, "guessed": report.guessed}
    counts = {"servers": report.servers, "ranks": report.ranks}
    return {"file": str(file), "ok": not report.refused, **facts, **counts, "findings": findings}


# Findings shown for one file; --json has them all.
MOST = 50


def _report_lines(file: Path, report: Report) -> list[tuple[str, str]]:
    """Return the lines that describe a check, each with its style."""
    how = f"checked as {report.hardware}"
    if report.guessed:
        how += "; use --for to choose"
    how = f" ({how})" if report.version is not None else ""
    if not report.findings:
        return [(f"{file}: valid: {_size(report.servers, report.ranks)}{how}", "green")]
    count = len(report.findings)
    lines = [(f"{file}: {_number(count, 'finding')}{how}", "bold red")]
    if not report.refused:
        size = _size(report.servers, report.ranks)
        lines = [(f"{file}: valid, with {_number(count, 'warning')}: {size}{how}", "yellow")]
    for finding in report.findings[:MOST]:
        lines.append((f"  {finding.pointer or '(file)'}: {finding.what} [{finding.code}]", ""))
        lines.append((f"    try: {finding.remedy}", ""))
        lines.append((f"    {_effect(finding)}", "dim"))
    if count > MOST:
        lines.append((f"  and {count - MOST} more; --json lists them all", ""))
    return lines


def _effect(finding: Finding) -> str:
    """Return in words what HCCL does with a table that has this finding."""
    from clusterctl.ranktable.finding import Severity

    if finding.severity is Severity.WRONG:
        return "HCCL reads the table all the same"
    if finding.hccl_code:
        return f"HCCL would fail with {finding.hccl_message}"
    return (
        f"HCCL reports {finding.hccl_message}" if finding.hccl_message else "HCCL refuses it without a code"
    )
