"""`nodes`: the inventory as it is understood.

`nodes trust`: host keys, shown and recorded on consent.

`clusterctl nodes expand` and `nodes fold`: node sets as ClusterShell's `nodeset -e` and `-f` answer.
"""

from __future__ import annotations

import sys
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from clusterctl.cli import choices, options, screen
from clusterctl.cli.choices import cluster_of, has_inventory
from clusterctl.cli.declared import argument
from clusterctl.cli.options import ClusterFile, Json
from clusterctl.errors import InputFaults, UsageError

if TYPE_CHECKING:
    from clusterctl.backends.pods.detect import Place
    from clusterctl.inventory.cluster import Cluster
    from clusterctl.ssh.choose import SshChoice
    from clusterctl.ssh.host_keys import SeenKey
    from clusterctl.transport.fanout import Outcome


Wide = Annotated[
    bool, typer.Option("--wide", "-w", help="Also show interface, Python, work folder and SSH client.")
]


Ask = Annotated[bool, typer.Option("--ask", help="Also ask the nodes which devices they have.")]


def nodes(
    context: typer.Context,
    cluster: options.ClusterFile = None,
    wide: Wide = False,
    ask: Ask = False,
    as_json: options.Json = False,
) -> None:
    """List the nodes of the inventory, their addresses and devices."""
    if context.invoked_subcommand is None:
        list_nodes(None, cluster, None, None, wide, ask, as_json)


def list_nodes(
    selection: str | None = argument(
        "Show only these nodes: node[1-4], @group.", metavar="SET", autocompletion=options.complete_nodes
    ),
    cluster: options.ClusterFile = None,
    nodes: options.Nodes = None,
    exclude: options.Exclude = None,
    wide: Wide = False,
    ask: Ask = False,
    as_json: options.Json = False,
) -> None:
    """List the nodes of the inventory, their addresses and devices."""
    from clusterctl.cli.views import tables

    found = choices.cluster_of(cluster, selection or nodes, exclude)
    place = _place()
    reported = _reported(found) if ask else None
    if as_json:
        screen.show_json(
            {
                "name": found.name,
                "source": found.source,
                "platform": place.as_json() if place else None,
                "nodes": [asdict(node) for node in found.nodes],
                **({"reported": reported} if reported else {}),
                "groups": {name: list(members) for name, members in found.groups.items()},
            }
        )
        return
    if place:
        screen.log(f"platform: {place.describe()}")
    screen.show(tables.nodes_table(found, _ways(found) if wide else None, reported))
    if reported is None and any(node.is_asked for node in found.nodes):
        screen.log("?: the inventory does not name it; a start asks the node, and so does `nodes --ask`")


def _place() -> Place | None:
    """Return the platform of this process; report and ignore a platform whose variables contradict each other."""
    from clusterctl.backends.pods.detect import detect, surroundings

    try:
        return detect(surroundings())
    except InputFaults as error:
        screen.log(f"platform: {error.message}", "yellow")
        return None


def _reported(cluster: Cluster) -> dict[str, str]:
    """Return the devices that each node reports; for an unreachable node, the reason."""
    from clusterctl.checks.kinds import ask_devices

    with choices.connected(cluster) as connections:
        outcomes = ask_devices(cluster.nodes, connections)
    return {
        outcome.node.name: outcome.get().text() if outcome.error is None else str(outcome.error.message)
        for outcome in outcomes
    }


def _ways(cluster: Cluster) -> dict[str, str]:
    """Which of the two transports `auto` takes for each node, and why where it is not paramiko."""
    from clusterctl.ssh.choose import choice_for

    choice = choice_for(cluster, choices.ssh())
    found = {node.name: choice.chosen(node) for node in cluster.nodes if node.host != "local"}
    return {name: f"{way} ({reason})" if reason else way for name, (way, reason) in found.items()}


STYLES = {"known": "green", "new": "yellow", "changed": "bold red"}


def trust(
    selection: str | None = argument("Fetch keys only of these nodes.", metavar="SET"),
    cluster: options.ClusterFile = None,
    exclude: options.Exclude = None,
    yes: options.Yes = False,
    dry_run: options.DryRun = False,
    as_json: options.Json = False,
) -> None:
    """Fetch the host keys of nodes without logging in, show their fingerprints, and record new keys if you agree."""
    from clusterctl.ssh.choose import choice_for
    from clusterctl.transport.fanout import on_each, raise_failures

    chosen = choices.cluster_of(cluster, selection, exclude)
    transport = choice_for(chosen, choices.ssh())
    outcomes = on_each(chosen.nodes, transport.seen)
    _show(outcomes, as_json)
    new = [outcome for outcome in outcomes if outcome.value is not None and outcome.value.state == "new"]
    if new and not dry_run:
        _record(chosen, transport, new, yes)
    for outcome in outcomes:
        if outcome.value is not None and outcome.value.state == "changed":
            raise outcome.value.refusal()
    raise_failures(outcomes)


def _record(chosen: Cluster, transport: SshChoice, new: list[Outcome[SeenKey]], yes: bool) -> None:
    names = ", ".join(outcome.node.name for outcome in new)
    if not screen.ask(f"record the new keys of {names}?", yes=yes):
        if not screen.on_terminal():
            raise UsageError(
                f"the keys of {names} were not recorded: there is no terminal to ask on",
                "compare the fingerprints, then use --yes",
            )
        return
    paths = {str(transport.record(outcome.node, outcome.get().key)) for outcome in new}
    screen.log(f"recorded {len(new)} keys in {', '.join(sorted(paths))}")


def _show(outcomes: list[Outcome[SeenKey]], as_json: bool) -> None:
    from rich.text import Text

    from clusterctl.cli.views import tables

    found = [outcome.value for outcome in outcomes if outcome.value is not None]
    if as_json:
        return screen.show_json([seen.as_json() for seen in found])
    rows = [
        [seen.node, seen.name, seen.key.kind, seen.fingerprint, Text(seen.state, style=STYLES[seen.state])]
        for seen in found
    ]
    if rows:
        screen.show(tables.table(["NODE", "HOST", "TYPE", "FINGERPRINT", "STATE"], rows))


Sets = Annotated[
    list[str], typer.Argument(metavar="SET...", help="Node sets: node[1-4], @group, names; '-' reads stdin.")
]
Separator = Annotated[
    str,
    typer.Option(
        "--separator",
        "-S",
        metavar="TEXT",
        help="Write this between the names. Default: a space.",
        show_default=False,
    ),
]


def expand(sets: Sets, cluster: ClusterFile = None, separator: Separator = " ", json: Json = False) -> None:
    """Print the names of the nodes in a node set."""
    names = _names(sets, cluster)
    if json:
        screen.show_json(names)
    else:
        screen.write(separator.replace("\\n", "\n").join(names) + "\n")


def fold(sets: Sets, cluster: ClusterFile = None, json: Json = False) -> None:
    """Print names as one short node set."""
    from clusterctl.inventory import nodeset

    folded = nodeset.fold(_names(sets, cluster))
    if json:
        screen.show_json(folded)
    else:
        screen.write(folded + "\n")


def _names(sets: list[str], file: Path | None) -> list[str]:
    """Return the union of all sets; an inventory is read only if it is named, or a group or wildcard needs it."""
    from clusterctl.inventory import nodeset

    names = [
        word
        for expression in sets
        for word in (sys.stdin.read().split() if expression == "-" else [expression])
    ]
    inventory = _inventory(file, any(char in word for word in names for char in "@*?"))
    groups, known = (inventory.groups, inventory.names) if inventory else ({}, [])
    return nodeset.expand_all(names, groups, known)


def _inventory(file: Path | None, wanted: bool) -> Cluster | None:
    return cluster_of(file) if file is not None or (wanted and has_inventory()) else None
