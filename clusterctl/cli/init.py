"""`clusterctl init`: a commented cluster.yaml to begin with."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from clusterctl.cli import options

if TYPE_CHECKING:
    from clusterctl.hostfile_any import Source
    from clusterctl.inventory import Cluster


def init(
    hosts: Annotated[
        str | None,
        typer.Option(
            "--hosts", metavar="SET", help="The nodes' names or addresses: node[1-4], 10.0.0.[1-8]."
        ),
    ] = None,
    hostfile: Annotated[
        Path | None,
        typer.Option(
            "--hostfile",
            metavar="FILE",
            help="The nodes of a hostfile, Slurm node list, rank table or cluster.yaml; slots become devices.",
        ),
    ] = None,
    devices: Annotated[
        str | None,
        typer.Option(
            metavar="RANGE", help='Of a node of which no file says it: 4, "[0,4)", 0,3; 8 by default.'
        ),
    ] = None,
    kind: Annotated[str | None, typer.Option(help="What they are: cpu, cuda or npu; npu by default.")] = None,
    output: Annotated[Path, typer.Option("--output", "-o", metavar="FILE", help="Where to write.")] = Path(
        "cluster.yaml"
    ),
    force: options.Force = False,
    dry_run: options.DryRun = False,
) -> None:
    """Write a commented cluster.yaml to begin with; never overwrites without --force."""
    from clusterctl import hostfile_any, inventory_start
    from clusterctl.errors import UsageError

    if hosts is not None and hostfile is not None:
        raise UsageError("--hosts and --hostfile can't be given together", "one of them names the nodes")
    if hostfile is None:
        _write(inventory_start.from_hosts(hosts, devices, kind, output.stem), "", output, force, dry_run)
        return
    source = hostfile_any.read(hostfile)
    cluster = inventory_start.from_file(source, devices, kind, output.stem)
    _write(cluster, hostfile.name, output, force, dry_run)
    _say_what_is_not_the_files(source, devices)


def _write(cluster: Cluster, origin: str, output: Path, force: bool, dry_run: bool) -> None:
    from clusterctl import inventory, inventory_text
    from clusterctl.cli import screen
    from clusterctl.rundir import save_new

    text = inventory_text.commented(cluster, origin)
    inventory.parse(text, output)  # what is written is understood
    if dry_run:
        screen.write(text)
    elif save_new(output, text, force):
        screen.say(f"wrote {output}; see what was understood: clusterctl nodes -c {output}")
    else:
        screen.say(f"{output}: holds this already")


def _say_what_is_not_the_files(source: Source, devices: str | None) -> None:
    from clusterctl import hostfile_convert, inventory_start, nodeset
    from clusterctl.cli import screen

    unsaid = inventory_start.unsaid(source)
    if unsaid and not devices:
        count, names = inventory_start.USUAL_DEVICES, nodeset.fold(unsaid)
        screen.say(
            f"{source.path} tells no devices of {names}: written as {count} each; --devices changes that"
        )
    for fault in hostfile_convert.losses(source, "cluster"):
        screen.say(f"lost: {fault.where}: {fault.what}", style="yellow")
