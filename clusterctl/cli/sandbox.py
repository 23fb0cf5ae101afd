"""`clusterctl sandbox`: a cluster of real SSH nodes on this machine."""

from __future__ import annotations

import sys
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from clusterctl.cli.options import DryRun, Json

if TYPE_CHECKING:
    from clusterctl.sandbox.cluster import NodeStatus, Sandbox


Directory = Annotated[
    Path, typer.Option("--dir", metavar="FOLDER", help="Where the sandbox lies; all of it is in there.")
]
NodeName = Annotated[str, typer.Argument(metavar="NODE", help="A node's name, as in `sandbox status`.")]
HERE = Path(".clusterctl-sandbox")


def up(
    nodes: Annotated[int, typer.Option("--nodes", "-n", metavar="N", help="How many nodes.")] = 2,
    devices: Annotated[int, typer.Option("--devices", metavar="N", help="Make-believe devices of each.")] = 2,
    mode: Annotated[
        str,
        typer.Option(
            "--mode",
            metavar="MODE",
            help="loopback (sshd on loopback addresses), embedded (no sshd needed), namespaces "
            "(whole machines, needs root), or auto: loopback where sshd is installed, else embedded.",
        ),
    ] = "auto",
    directory: Directory = HERE,
    python: Annotated[
        str | None, typer.Option("--python", metavar="FILE", help="The nodes' Python; by default this one.")
    ] = None,
    dry_run: DryRun = False,
    as_json: Json = False,
) -> None:
    """Bring up nodes, and write the cluster.yaml that names them."""
    from clusterctl.cli import screen
    from clusterctl.sandbox import cluster

    if dry_run:
        screen.show_json(cluster.foresee(directory, nodes, devices, mode))
        return
    made = cluster.up(directory, nodes, devices, mode, python or sys.executable)
    try:
        found = made.status()
        if as_json:
            screen.show_json(_as_json(made, found))
        else:
            screen.show(_table(found))
            _say_what_next(made)
    except BaseException:
        # Ctrl-C while the result is shown: nothing is left then either.
        made.down()
        raise


def status(directory: Directory = HERE, as_json: Json = False) -> None:
    """How each node is; exit code 1 where one is not up."""
    from clusterctl.cli import screen
    from clusterctl.sandbox import cluster

    found = cluster.load(directory)
    states = found.status()
    if as_json:
        screen.show_json(_as_json(found, states))
    else:
        screen.show(_table(states))
    raise typer.Exit(0 if all(one.state == "up" for one in states) else 1)


def down(directory: Directory = HERE, dry_run: DryRun = False, as_json: Json = False) -> None:
    """End all nodes with everything that runs on them, and remove the folder; twice is fine."""
    from clusterctl.cli import screen
    from clusterctl.sandbox import cluster

    folder = str(directory.absolute())
    if dry_run:
        running = cluster.running(directory)
        if as_json:
            screen.show_json({"would_end": running, "would_remove": folder if directory.exists() else None})
        else:
            screen.log(f"would end {_processes(running)} and remove {folder}")
        return
    there = directory.exists()
    ended = cluster.down(directory)
    if as_json:
        screen.show_json({"ended": ended, "directory": folder})
    elif there or ended:
        what = "still there" if directory.exists() else "gone"
        screen.log(f"ended {_processes(ended)}; {folder} is {what}")
    else:
        screen.log(f"no sandbox in {folder}: nothing to do")


def kill(name: NodeName, directory: Directory = HERE, dry_run: DryRun = False) -> None:
    """End a node whole, with all that runs on it; in mode namespaces as a power loss."""
    from clusterctl.cli import screen
    from clusterctl.sandbox import cluster

    found = cluster.load(directory)
    node = found.node(name)
    if dry_run:
        screen.log(f"would end {node.name} and all its processes")
        return
    ended = found.kill(name)
    screen.log(f"{name} is down: ended {_processes(ended)}" if ended else f"{name} was down already")


def cut(name: NodeName, directory: Directory = HERE, dry_run: DryRun = False) -> None:
    """Take a node's link down; it lives on and hears nothing (mode namespaces)."""
    _link(directory, name, "cut", dry_run)


def heal(name: NodeName, directory: Directory = HERE, dry_run: DryRun = False) -> None:
    """Take a cut link up again (mode namespaces)."""
    _link(directory, name, "heal", dry_run)


def _link(directory: Path, name: str, verb: str, dry_run: bool) -> None:
    from clusterctl.cli import screen
    from clusterctl.sandbox import cluster

    found = cluster.load(directory)
    if not dry_run:
        found.cut(name) if verb == "cut" else found.heal(name)
    link, end = f"{found.node(name).name}'s link", "down" if verb == "cut" else "up"
    screen.log(f"would take {link} {end}" if dry_run else f"{link} is {end}")


def _processes(number: int) -> str:
    return "1 process" if number == 1 else f"{number} processes"


def _table(states: list[NodeStatus]) -> Any:
    from clusterctl.cli import views

    rows = [[one.name, one.state, one.ssh, one.address, one.devices] for one in states]
    return views.table(["NODE", "STATE", "SSH", "ADDRESS", "DEVICES"], rows)


def _as_json(found: Sandbox, states: list[NodeStatus]) -> dict[str, Any]:
    return {
        "directory": str(found.directory),
        "mode": found.mode,
        "cluster_file": str(found.cluster_file),
        "nodes": [asdict(one) for one in states],
    }


def _say_what_next(made: Sandbox) -> None:
    import shlex

    from clusterctl.cli import screen

    file = made.cluster_file
    with_file = shlex.quote(str(file.relative_to(Path.cwd()) if file.is_relative_to(Path.cwd()) else file))
    where = "" if made.directory == (Path.cwd() / HERE) else f" --dir {shlex.quote(str(made.directory))}"
    screen.log(f"mode {made.mode}; next:")
    for line in (
        f"clusterctl nodes -c {with_file}",
        f"clusterctl exec -c {with_file} all -- hccn_tool -i 0 -ip -g",
        f"clusterctl ranktable build -c {with_file}",
        f"clusterctl sandbox down{where}",
    ):
        screen.log(f"  {line}")
