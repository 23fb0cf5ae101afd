"""`ssh`, `version` and `help`."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from clusterctl.cli import choices, options, screen
from clusterctl.cli.declared import argument
from clusterctl.environment import environment
from clusterctl.errors import UsageError

if TYPE_CHECKING:
    from clusterctl.inventory.cluster import Cluster, Node


def version() -> None:
    """Print the version of clusterctl."""
    from clusterctl import __version__

    screen.write(f"clusterctl {__version__}\n")


def show_help(
    words: list[str] | None = argument("For example: launch.", metavar="COMMAND..."),
) -> None:
    """Print the help of a command, or of the program."""
    from clusterctl.cli.main import command

    found = command()
    for number, word in enumerate(words or ()):
        if not hasattr(found, "commands"):
            before = " ".join(["clusterctl", *(words or ())[:number]])
            raise UsageError(f"{word!r} is one argument too many: `{before}` has no commands", f"{before} -h")
        if word not in found.commands:
            break
        found = found.commands[word]
    command()(args=[*(words or ()), "--help"], prog_name="clusterctl", standalone_mode=False)


def ssh(
    node: Annotated[
        str,
        typer.Argument(
            metavar="NODE", help="One node of the inventory.", autocompletion=options.complete_nodes
        ),
    ],
    words: list[str] | None = argument("A command instead of a shell.", metavar="CMD..."),
    *,
    cluster: options.ClusterFile = None,
    dry_run: options.DryRun = False,
) -> None:
    """Open a terminal on a node with OpenSSH; the host key is checked as for every other command."""
    import shlex

    chosen = choices.cluster_of(cluster, node)
    if len(chosen.nodes) != 1:
        raise UsageError(f"{node} is {len(chosen.nodes)} nodes", "name one; `clusterctl exec` takes several")
    argv = ssh_argv(chosen, chosen.nodes[0], words or [])
    if dry_run:
        screen.write(shlex.join(argv) + "\n")
        return
    program = shutil.which(argv[0])
    if program is None:
        raise UsageError(f"the program `{argv[0]}` is not installed", "apt-get install openssh-client")
    os.execv(program, argv)


def ssh_argv(cluster: Cluster, node: Node, command: list[str]) -> list[str]:
    """Return the program that opens a terminal, or runs a command, on a node: OpenSSH's, or that of its allocation."""
    from clusterctl.backends.backend import of_node

    if node.host == "local":
        return ["sh", "-c", " ".join(command)] if command else [environment().get("SHELL", "/bin/sh")]
    if of_allocation := of_node(node).terminal(node, " ".join(command)):
        return of_allocation
    argv = ["ssh", "-p", str(node.port)]
    argv += ["-l", node.user] if node.user else []
    argv += ["-i", str(Path(node.key).expanduser())] if node.key else []
    argv += ["-J", node.gateway] if node.gateway else []
    if cluster.known_hosts:
        own = Path("~/.ssh/known_hosts").expanduser()
        argv += ["-o", f"UserKnownHostsFile={cluster.known_hosts} {own}", "-o", "StrictHostKeyChecking=yes"]
    # ssh joins the words of a command with spaces for the shell there.
    return [*argv, *(["-t"] if not command else []), node.host, *command]
