"""`clusterctl nodes expand` and `nodes fold`: node sets as ClusterShell's `nodeset -e` and `-f` answer."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from clusterctl.cli.options import ClusterFile, Json, cluster_of, inventory_there

if TYPE_CHECKING:
    from clusterctl.inventory import Cluster

Sets = Annotated[
    list[str], typer.Argument(metavar="SET...", help="node[1-4], @group, names; '-' reads stdin.")
]
Separator = Annotated[str, typer.Option("--separator", "-S", help="Between names.")]


def expand(sets: Sets, cluster: ClusterFile = None, separator: Separator = " ", json: Json = False) -> None:
    """Write a node set's names."""
    from clusterctl.cli import screen

    names = _names(sets, cluster)
    if json:
        screen.show_json(names)
    else:
        screen.write(separator.replace("\\n", "\n").join(names) + "\n")


def fold(sets: Sets, cluster: ClusterFile = None, json: Json = False) -> None:
    """Write names as one short node set."""
    from clusterctl import nodeset
    from clusterctl.cli import screen

    folded = nodeset.fold(_names(sets, cluster))
    if json:
        screen.show_json(folded)
    else:
        screen.write(folded + "\n")


def _names(sets: list[str], file: Path | None) -> list[str]:
    """The union of all sets; an inventory is read only when it is named, or a group or wildcard needs it."""
    from clusterctl import nodeset

    words = [word for one in sets for word in (sys.stdin.read().split() if one == "-" else [one])]
    inventory = _inventory(file, any(char in word for word in words for char in "@*?"))
    groups, known = (inventory.groups, inventory.names) if inventory else ({}, [])
    return nodeset.expand_all(words, groups, known)


def _inventory(file: Path | None, wanted: bool) -> Cluster | None:
    return cluster_of(file) if file is not None or (wanted and inventory_there()) else None
