"""`hostfile`: write, check and convert the host files of other launchers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from clusterctl import text as clusterctl_text
from clusterctl.cli import screen
from clusterctl.cli.choices import default_kind, require_kind
from clusterctl.cli.declared import flag, option
from clusterctl.cli.options import DryRun, Force, Json, NodeOptions, checked_by, with_devices
from clusterctl.errors import InputFaults, UsageError
from clusterctl.hostfile.formats import MAX_SLOTS
from clusterctl.hostfile.node_lists import FILES, NAMES
from clusterctl.text import plural

if TYPE_CHECKING:
    from clusterctl.hostfile.convert import Loss
    from clusterctl.hostfile.detect import Source


Output = Annotated[
    Path | None, typer.Option("--output", "-o", metavar="FILE", help="Write to this file. Default: stdout.")
]
AnyFile = Annotated[
    Path,
    typer.Argument(metavar="FILE", help=f"A {FILES}."),
]


def _require_format(target: str) -> None:
    from clusterctl.hostfile.convert import require_format

    require_format(target)


OfFormat, OfKind = checked_by(_require_format), checked_by(require_kind)
FORMATS = f"Format: {NAMES}."
MASTER_PORT = 29500


@dataclass(frozen=True)
class SlotOptions:
    """The options that choose slots of a hostfile."""

    include: str | None = option(
        "Use only these slots, in DeepSpeed's notation: w0@w1:0,2.", "--include", "-i", metavar="FILTER"
    )
    exclude: str | None = option(
        "Leave out these slots: w0 (all of w0), w1:0 (one slot).", "--exclude", "-e", metavar="FILTER"
    )

    def narrowed(self, source: Source) -> Source:
        from clusterctl.hostfile import convert as hostfile_convert

        return hostfile_convert.narrowed(source, self.include, self.exclude)


@dataclass(frozen=True)
class HostfileOutput:
    """The options for the format and the file of the output."""

    master_port: int = option(
        "Master port for torchrun.", default=MASTER_PORT, min=1, max=65535, metavar="PORT"
    )
    lossy: bool = flag("Leave out what the format cannot hold, with a warning.")
    output: Output = None
    force: Force = False
    dry_run: DryRun = False
    json: Json = False

    def write(self, source: Source, to: str, kind: str = "cpu", reached: bool = False) -> None:
        """Write the nodes in a format to the file, or show them; report what the format cannot hold."""
        from clusterctl.hostfile import convert as hostfile_convert

        lost = hostfile_convert.losses(source, to)
        if to == "torchrun" and self.output is None:
            _show_torchrun(source, self)
        else:
            text = hostfile_convert.render(
                source,
                to,
                lossy=self.lossy,
                kind=kind,
                reached=reached,
                port=self.master_port,
            )
            self._save(text, len(source.entries), to)
        _show_losses(source, to, lost)

    def _save(self, text: str, nodes: int, to: str) -> None:
        from clusterctl.files import save_new

        saved = self.output is not None and save_new(
            self.output, text, force=self.force, dry_run=self.dry_run
        )
        written = saved and not self.dry_run
        if self.json:
            name = str(self.output) if self.output else None
            screen.show_json({"format": to, "nodes": nodes, "text": text, "file": name, "written": written})
        elif self.output is None or self.dry_run:
            screen.write(text)
        elif written:
            screen.write(f"{self.output}: written: {plural(nodes, 'node')}\n")
        else:
            screen.write(f"{self.output}: already has this content\n")


def build(
    selection: NodeOptions,
    target: HostfileOutput,
    to: str = option(FORMATS, "--to", "--format", default="deepspeed", metavar="FORMAT", callback=OfFormat),
    slots: int | None = option(
        "Slots per node. Default: its number of devices, at least 1.", min=1, max=MAX_SLOTS, metavar="N"
    ),
) -> None:
    """Write the inventory as a hostfile for another launcher."""
    from clusterctl.hostfile import convert as hostfile_convert
    from clusterctl.inventory import nodeset

    chosen = with_devices(selection.chosen(), remote=False)
    unknown = [node.name for node in chosen.nodes if node.is_asked and not node.devices]
    if unknown and slots is None:
        problem = f"{chosen.source} does not name the devices of {nodeset.fold(unknown)}"
        raise UsageError(
            problem, "--slots N, or write `devices` into it: `clusterctl nodes --ask` shows them"
        )
    target.write(hostfile_convert.of_cluster(chosen, slots), to, reached=True)


def check(
    file: AnyFile,
    slots: SlotOptions,
    target: str | None = option(
        "Also check that this launcher can use it.", "--for", metavar="FORMAT", callback=OfFormat
    ),
    json: Json = False,
) -> None:
    """List every error in a hostfile; exit with 1 if there is one. With --include or --exclude, list the slots that are
    left."""
    from clusterctl.hostfile import convert as hostfile_convert
    from clusterctl.hostfile import detect

    source = detect.read(file)
    if not source.faults:
        source = slots.narrowed(source)
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
        for line in hostfile_convert.slots_left(source) if slots != SlotOptions() else ():
            screen.write(f"  {line}\n")
    for fault in () if json else faults:
        screen.out_console().print(screen.safe(str(fault)), soft_wrap=True)
    if faults:
        raise typer.Exit(1)


def convert(
    file: AnyFile,
    to: Annotated[
        str,
        typer.Option(metavar="FORMAT", callback=OfFormat, help=FORMATS),
    ],
    chosen: SlotOptions,
    target: HostfileOutput,
    slots: int | None = option(
        "Slots per node where the file gives none.", min=1, max=MAX_SLOTS, metavar="N"
    ),
    kind: str | None = option(
        "Kind of the devices in a cluster.yaml: cpu, cuda or npu.", metavar="KIND", callback=OfKind
    ),
) -> None:
    """Write the same nodes in another format. Refused if the format cannot hold everything, unless --lossy."""
    from clusterctl.hostfile import convert as hostfile_convert
    from clusterctl.hostfile import detect

    source = detect.read(file)
    if source.faults:
        raise InputFaults(source.faults)
    target.write(chosen.narrowed(hostfile_convert.with_slots(source, slots)), to, kind or default_kind())


def _show_losses(source: Source, to: str, lost: Sequence[Loss]) -> None:
    """Show what the format cannot hold: each kind of loss once, with the number of nodes."""
    from clusterctl.hostfile import convert as hostfile_convert

    if left_out := hostfile_convert.left_out(source, to):
        screen.log(f"{to} has no place for: {', '.join(left_out)}")
    groups: dict[str, list[Loss]] = {}
    for loss in lost:
        # Each node has a different port.
        groups.setdefault(loss.what.rpartition(" ")[0] if loss.reach else loss.what, []).append(loss)
    for kind, losses in groups.items():
        first, more = losses[0], f" and {len(losses) - 1} more" if len(losses) > 1 else ""
        problem = first.what if len({loss.what for loss in losses}) == 1 else kind
        screen.log(f"lost: {first.where}{more}: {problem} ({first.remedy})", style="yellow")


def _show_torchrun(source: Source, to: HostfileOutput) -> None:
    from clusterctl.cli.views import tables
    from clusterctl.hostfile import convert as hostfile_convert

    port = to.master_port
    rows = hostfile_convert.torchrun(source, lossy=to.lossy, port=port)
    master = {"nnodes": len(rows), "master_addr": rows[0].node, "master_port": port}
    if to.json:
        screen.show_json({**master, "nodes": [asdict(row) for row in rows]})
        return
    columns = ["NODE", "NNODES", "NPROC_PER_NODE", "NODE_RANK", "MASTER"]
    at = f"{rows[0].node}:{port}"
    cells = [[row.node, len(rows), row.nproc_per_node, row.node_rank, at] for row in rows]
    screen.show(tables.table(columns, cells, right=columns[1:4]))
    width = max(len(row.node) for row in rows) + 1
    screen.write("\n" + "".join(f"{row.node + ':':<{width}} {row.command}\n" for row in rows))
