"""`sandbox`: a cluster of real SSH nodes on this machine."""

from __future__ import annotations

import shlex
import sys
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from clusterctl.backends.backend import IN_SANDBOX, KNOWN
from clusterctl.cli import screen
from clusterctl.cli.declared import flag, option
from clusterctl.cli.options import DryRun, Json
from clusterctl.settings import SANDBOX
from clusterctl.text import plural

if TYPE_CHECKING:
    from clusterctl.sandbox.cluster import NodeStatus, Sandbox


Directory = Annotated[Path, typer.Option("--dir", metavar="FOLDER", help="The folder of the sandbox.")]
NodeName = Annotated[str, typer.Argument(metavar="NODE", help="A node, as `sandbox status` lists it.")]


def up(
    nodes: int = option("Start N nodes.", "--nodes", "-n", default=2, metavar="N"),
    devices: int = option("Simulated devices per node.", default=2, metavar="N"),
    mode: str = option(
        "Kind of nodes. loopback: sshd on loopback addresses. embedded: a built-in server. namespaces: with "
        "their own network and processes; needs root. auto: loopback if sshd is installed, else embedded.",
        default="auto",
        metavar="MODE",
    ),
    directory: Directory = SANDBOX,
    python: str | None = option("Python of the nodes. Default: the current one.", metavar="FILE"),
    *,
    with_queue: bool = flag(
        f"Also start a {KNOWN[IN_SANDBOX].title} that manages the nodes. It must be installed here.",
        f"--with-{IN_SANDBOX}",
    ),
    isolated: bool = flag(
        "In mode namespaces: give the home folders a path that this machine does not have."
    ),
    dry_run: DryRun = False,
    as_json: Json = False,
) -> None:
    """Start SSH nodes on this machine and write a cluster.yaml that lists them. Each node has its own home folder and
    simulated Ascend devices."""
    from clusterctl.sandbox import cluster

    if dry_run:
        screen.show_json(cluster.foresee(directory, nodes, devices, mode, with_queue, isolated))
        return
    made = cluster.up(directory, nodes, devices, mode, python or sys.executable, with_queue, isolated)
    try:
        found = made.status()
        if as_json:
            screen.show_json(_as_json(made, found))
        else:
            screen.show(_table(found))
            _log_next_commands(made)
    except BaseException:
        # Ctrl-C while the result is shown must leave nothing behind either.
        made.down()
        raise


def status(directory: Directory = SANDBOX, *, as_json: Json = False) -> None:
    """Show the state of each node; exit with 1 unless all are up."""
    from clusterctl.sandbox import cluster

    found = cluster.load(directory)
    states = found.status()
    if as_json:
        screen.show_json(_as_json(found, states))
    else:
        screen.show(_table(states))
    raise typer.Exit(0 if all(node.state == "up" for node in states) else 1)


def down(directory: Directory = SANDBOX, *, dry_run: DryRun = False, as_json: Json = False) -> None:
    """Stop all nodes with all their processes, and delete the folder. Running it again is harmless."""
    from clusterctl.sandbox import cluster

    folder = str(directory.absolute())
    if dry_run:
        running = cluster.running(directory)
        if as_json:
            screen.show_json({"would_end": running, "would_remove": folder if directory.exists() else None})
        else:
            screen.log(f"would end {plural(running, 'process', 'es')} and delete {folder}")
        return
    existed = directory.exists()
    ended = cluster.down(directory)
    if as_json:
        screen.show_json({"ended": ended, "directory": folder})
    elif existed or ended:
        state = "not empty and was kept" if directory.exists() else "deleted"
        screen.log(f"ended {plural(ended, 'process', 'es')}; {folder} is {state}")
    else:
        screen.log(f"no sandbox in {folder}: nothing to do")


def kill(name: NodeName, directory: Directory = SANDBOX, *, dry_run: DryRun = False) -> None:
    """Kill a node with all its processes. In mode namespaces this is like a power loss: no connection is closed."""
    from clusterctl.sandbox import cluster

    found = cluster.load(directory)
    node = found.node(name)
    if dry_run:
        screen.log(f"would kill {node.name} with all its processes")
        return
    ended = found.kill(name)
    processes = plural(ended, "process", "es")
    screen.log(f"{name} is down: ended {processes}" if ended else f"{name} is down already")


def cut(name: NodeName, directory: Directory = SANDBOX, *, dry_run: DryRun = False) -> None:
    """Cut the network link of a node; its processes continue (mode namespaces)."""
    _link(directory, name, "cut", dry_run=dry_run)


def heal(name: NodeName, directory: Directory = SANDBOX, *, dry_run: DryRun = False) -> None:
    """Restore a network link that was cut (mode namespaces)."""
    _link(directory, name, "heal", dry_run=dry_run)


def _link(directory: Path, name: str, verb: str, *, dry_run: bool) -> None:
    from clusterctl.sandbox import cluster

    found = cluster.load(directory)
    if not dry_run:
        found.cut(name) if verb == "cut" else found.heal(name)
    state = "down" if verb == "cut" else "up"
    screen.log(f"the link of {found.node(name).name} {'would be' if dry_run else 'is'} {state}")


def _table(states: list[NodeStatus]) -> Any:
    from clusterctl.cli.views import tables

    rows = [[node.name, node.state, node.ssh, node.address, node.devices] for node in states]
    return tables.table(["NODE", "STATE", "SSH", "ADDRESS", "DEVICES"], rows)


def _as_json(found: Sandbox, states: list[NodeStatus]) -> dict[str, object]:
    from clusterctl.sandbox import queue

    return {
        "directory": str(found.directory),
        "mode": found.mode,
        "cluster_file": str(found.cluster_file),
        f"{IN_SANDBOX}_login": str(queue.login_script(found.layout)) if found.state.queue else None,
        "nodes": [asdict(node) for node in states],
    }


def _log_next_commands(made: Sandbox) -> None:
    file = made.cluster_file
    with_file = shlex.quote(str(file.relative_to(Path.cwd()) if file.is_relative_to(Path.cwd()) else file))
    option = "" if made.directory == (Path.cwd() / SANDBOX) else f" --dir {shlex.quote(str(made.directory))}"
    login = f"{shlex.quote(str(made.directory / 'login'))} clusterctl submit {IN_SANDBOX} job.yaml"
    screen.log(f"mode {made.mode}; next:")
    for line in (
        *[login] * made.state.queue,
        f"clusterctl nodes -c {with_file}",
        f"clusterctl exec -c {with_file} all -- hccn_tool -i 0 -ip -g",
        f"clusterctl ranktable build -c {with_file}",
        f"clusterctl sandbox down{option}",
    ):
        screen.log(f"  {line}")
