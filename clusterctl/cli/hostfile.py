"""`hostfile`: write, check and convert the host files of other launchers."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from clusterctl.cli.options import ClusterFile, DryRun, Exclude, Force, Json, Nodes, cluster_of
from clusterctl.hostfile.formats import MAX_SLOTS

if TYPE_CHECKING:
    from clusterctl.errors import Fault
    from clusterctl.hostfile.detect import Source


Output = Annotated[
    Path | None, typer.Option("--output", "-o", metavar="FILE", help="Write to this file. Default: stdout.")
]
AnyFile = Annotated[
    Path,
    typer.Argument(metavar="FILE", help="A hostfile, Slurm node list, cluster.yaml or rank table."),
]
FORMATS = "Format: deepspeed, openmpi, mpich, slurm, torchrun or cluster."
MASTER_PORT = 29500
MasterPort = Annotated[int, typer.Option(min=1, max=65535, metavar="PORT", help="Master port for torchrun.")]
Lossy = Annotated[
    bool, typer.Option("--lossy", help="Leave out what the format cannot hold, with a warning.")
]
SlotFilter = Annotated[
    str | None,
    typer.Option(
        "--include", "-i", metavar="FILTER", help="Use only these slots, in DeepSpeed's notation: w0@w1:0,2."
    ),
]
SlotExclude = Annotated[
    str | None,
    typer.Option(
        "--exclude", "-e", metavar="FILTER", help="Leave out these slots: w0 (all of w0), w1:0 (one slot)."
    ),
]


def build(
    cluster: ClusterFile = None,
    nodes: Nodes = None,
    exclude: Exclude = None,
    to: Annotated[str, typer.Option("--to", "--format", metavar="FORMAT", help=FORMATS)] = "deepspeed",
    slots: Annotated[
        int | None,
        typer.Option(
            min=1,
            max=MAX_SLOTS,
            metavar="N",
            help="Slots per node. Default: its number of devices, at least 1.",
        ),
    ] = None,
    master_port: MasterPort = MASTER_PORT,
    lossy: Lossy = False,
    output: Output = None,
    force: Force = False,
    dry_run: DryRun = False,
    json: Json = False,
) -> None:
    """Write the inventory as a hostfile for another launcher."""
    from clusterctl.hostfile import convert as hostfile_convert

    source = hostfile_convert.of_cluster(cluster_of(cluster, nodes, exclude), slots)
    lost = hostfile_convert.losses(source, to)
    if to == "torchrun" and output is None:
        _show_torchrun(source, master_port, lossy, json)
    else:
        text = hostfile_convert.render(source, to, lossy=lossy, reached=True, port=master_port)
        _write(text, output, force, dry_run, len(source.entries), to if json else None)
    _say_what_is_lost(source, to, lost)


def check(
    file: AnyFile,
    target: Annotated[
        str | None, typer.Option("--for", metavar="FORMAT", help="Also check that this launcher can use it.")
    ] = None,
    include: SlotFilter = None,
    exclude: SlotExclude = None,
    json: Json = False,
) -> None:
    """List every error in a hostfile; exit with 1 if there is one. With --include or --exclude, list the slots that are
    left."""
    from dataclasses import asdict

    from clusterctl import text as clusterctl_text
    from clusterctl.cli import screen
    from clusterctl.hostfile import convert as hostfile_convert
    from clusterctl.hostfile import detect

    source = detect.read(file)
    if not source.faults:
        source = hostfile_convert.narrowed(source, include, exclude)
    faults = [*source.faults, *(hostfile_convert.losses(source, target) if target else ())]
    ranks = sum(entry.slots or 1 for entry in source.entries)
    if json:
        found = [asdict(fault) for fault in faults]
        nodes = [asdict(entry) for entry in source.entries]
        screen.show_json({"file": str(file), "dialect": source.dialect, "nodes": nodes, "findings": found})
    elif not faults:
        size = (
            f"{clusterctl_text.plural(len(source.entries), 'node')}, {clusterctl_text.plural(ranks, 'slot')}"
        )
        screen.write(f"{file}: ok: {size} ({source.dialect})\n")
        for line in hostfile_convert.slots_left(source) if include or exclude else ():
            screen.write(f"  {line}\n")
    for fault in () if json else faults:
        screen.out_console().print(screen.safe(str(fault)), soft_wrap=True)
    if faults:
        raise typer.Exit(1)


def convert(
    file: AnyFile,
    to: Annotated[
        str,
        typer.Option("--to", metavar="FORMAT", help=FORMATS),
    ],
    include: SlotFilter = None,
    exclude: SlotExclude = None,
    slots: Annotated[
        int | None,
        typer.Option(min=1, metavar="N", help="Slots per node where the file gives none."),
    ] = None,
    kind: Annotated[
        str | None,
        typer.Option(metavar="KIND", help="Kind of the devices in a cluster.yaml: cpu, cuda or npu."),
    ] = None,
    master_port: MasterPort = MASTER_PORT,
    lossy: Lossy = False,
    output: Output = None,
    force: Force = False,
    dry_run: DryRun = False,
    json: Json = False,
) -> None:
    """Write the same nodes in another format. Refused if the format cannot hold everything, unless --lossy."""
    from clusterctl.errors import InputFaults
    from clusterctl.hostfile import convert as hostfile_convert
    from clusterctl.hostfile import detect

    source = detect.read(file)
    if source.faults:
        raise InputFaults(source.faults)
    source = hostfile_convert.narrowed(hostfile_convert.with_slots(source, slots), include, exclude)
    lost = hostfile_convert.losses(source, to)
    if to == "torchrun" and output is None:
        _show_torchrun(source, master_port, lossy, json)
    else:
        text = hostfile_convert.render(source, to, lossy=lossy, kind=_kind(kind), port=master_port)
        _write(text, output, force, dry_run, len(source.entries), to if json else None)
    _say_what_is_lost(source, to, lost)


def _say_what_is_lost(source: Source, to: str, lost: Sequence[Fault]) -> None:
    """Each thing once, however many nodes it is lost of."""
    from clusterctl.cli import screen
    from clusterctl.hostfile import convert as hostfile_convert

    if left_out := hostfile_convert.left_out(source, to):
        screen.log(f"{to} has no place for: {', '.join(left_out)}")
    first: dict[str, Fault] = {}
    for fault in lost:
        first.setdefault(fault.what, fault)
    times = Counter(fault.what for fault in lost)
    for problem, fault in first.items():
        more = f" and {times[problem] - 1} more" if times[problem] > 1 else ""
        screen.log(f"lost: {fault.where}{more}: {problem} ({fault.remedy})", style="yellow")


def _kind(given: str | None) -> str:
    from clusterctl.errors import UsageError
    from clusterctl.inventory.cluster import KINDS
    from clusterctl.settings import load_settings

    kind = given or load_settings().kind
    if kind not in KINDS:
        raise UsageError(f"unknown kind {kind!r}", "cpu, cuda (NVIDIA GPUs) or npu (Ascend)")
    return kind


def _show_torchrun(source: Source, port: int, lossy: bool, json: bool) -> None:
    from dataclasses import asdict

    from clusterctl.cli import screen, views
    from clusterctl.hostfile import convert as hostfile_convert

    rows = hostfile_convert.torchrun(source, lossy=lossy, port=port)
    master = {"nnodes": len(rows), "master_addr": rows[0].node, "master_port": port}
    if json:
        screen.show_json({**master, "nodes": [asdict(row) for row in rows]})
        return
    columns = ["NODE", "NNODES", "NPROC_PER_NODE", "NODE_RANK", "MASTER"]
    at = f"{rows[0].node}:{port}"
    cells = [[row.node, len(rows), row.nproc_per_node, row.node_rank, at] for row in rows]
    screen.show(views.table(columns, cells, right=columns[1:4]))
    width = max(len(row.node) for row in rows) + 1
    screen.write("\n" + "".join(f"{row.node + ':':<{width}} {row.command}\n" for row in rows))


def _write(
    text: str, output: Path | None, force: bool, dry_run: bool, nodes: int, as_json: str | None = None
) -> None:
    from clusterctl import text as clusterctl_text
    from clusterctl.cli import screen
    from clusterctl.files import save_new

    written = output is not None and save_new(output, text, force=force, dry_run=dry_run) and not dry_run
    if as_json:
        summary: dict[str, Any] = {"format": as_json, "nodes": nodes, "text": text}
        screen.show_json({**summary, "file": str(output) if output else None, "written": written})
    elif output is None or dry_run:
        screen.write(text)
    elif written:
        screen.write(f"{output}: written: {clusterctl_text.plural(nodes, 'node')}\n")
    else:
        screen.write(f"{output}: holds this already\n")
