"""`clusterctl init`: a commented cluster.yaml to begin with."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from clusterctl.cli import options

if TYPE_CHECKING:
    from clusterctl.hostfile.detect import Source
    from clusterctl.inventory.cluster import Cluster


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
    from clusterctl.errors import UsageError
    from clusterctl.hostfile import detect
    from clusterctl.hostfile import init as hostfile_init

    if hosts is not None and hostfile is not None:
        raise UsageError("--hosts and --hostfile can't be given together", "one of them names the nodes")
    if hostfile is None:
        _write(hostfile_init.from_hosts(hosts, devices, kind, output.stem), "", output, force, dry_run)
        return
    source = detect.read(hostfile)
    cluster = hostfile_init.from_file(source, devices, kind, output.stem)
    _write(cluster, hostfile.name, output, force, dry_run)
    _say_what_is_not_the_files(source, devices)


def _write(cluster: Cluster, origin: str, output: Path, force: bool, dry_run: bool) -> None:
    from clusterctl.cli import screen
    from clusterctl.files import save_new
    from clusterctl.hostfile import init as hostfile_init
    from clusterctl.inventory import cluster as inventory_cluster

    text = hostfile_init.commented(cluster, origin)
    # What is written is understood.
    inventory_cluster.parse(text, output)
    if dry_run:
        screen.write(text)
    elif save_new(output, text, force):
        screen.log(f"wrote {output}; see what was understood: clusterctl nodes -c {output}")
    else:
        screen.log(f"{output}: holds this already")


def _say_what_is_not_the_files(source: Source, devices: str | None) -> None:
    from clusterctl.cli import screen
    from clusterctl.hostfile import convert
    from clusterctl.hostfile import init as hostfile_init
    from clusterctl.inventory import nodeset

    unsaid = hostfile_init.unsaid(source)
    if unsaid and not devices:
        count, names = hostfile_init.USUAL_DEVICES, nodeset.fold(unsaid)
        screen.log(
            f"{source.path} tells no devices of {names}: written as {count} each; --devices changes that"
        )
    for fault in convert.losses(source, "cluster"):
        screen.log(f"lost: {fault.where}: {fault.what}", style="yellow")
