"""Read node sets as pdsh and clush write them: USER@NODES, ^FILE, and groups of ClusterShell's files and of genders."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from clusterctl.errors import UsageError

if TYPE_CHECKING:
    from clusterctl.inventory.cluster import Cluster, Node

# An operand that names a file; `^` between two operands is the operator of node sets.
FILE = re.compile(r"(?:^|(?<=,))\^(?P<file>[^,!&^]+)")
LOGIN = re.compile(
    r"(?:^|(?<=[,!&^]))(?P<user>[A-Za-z_][A-Za-z0-9._-]*)@(?P<nodes>(?:\[[^\]]*\]|[^,!&^\[])+)"
)
GROUP = re.compile(r"(?:^|(?<=[,!&^@]))@(?P<name>[^,!&^\[]+)")
# Limit of a file with node names.
MAX_FILE = 16 << 20


@dataclass(frozen=True)
class NodeWords:
    """A node set as typed, in our notation, and the logins that it names."""

    expression: str
    logins: tuple[tuple[str, str], ...] = ()
    """User, and the node set that it is for."""


def read(text: str, known: frozenset[str] = frozenset()) -> NodeWords:
    """Return the node set in a word of the command line; a node of the inventory may be called USER@NODE itself."""
    logins = list[tuple[str, str]]()

    def without_login(found: re.Match[str]) -> str:
        if found[0] in known:
            return found[0]
        logins.append((found["user"], found["nodes"]))
        return found["nodes"]

    return NodeWords(LOGIN.sub(without_login, FILE.sub(_names_in, text)), tuple(logins))


def _names_in(found: re.Match[str]) -> str:
    """Return the node sets in a file, which are separated by spaces or line ends, with commas between them."""
    path = Path(found["file"]).expanduser()
    try:
        with path.open("rb") as file:
            text = file.read(MAX_FILE).decode("utf-8", "replace")
    except OSError as error:
        raise UsageError(f"^{found['file']}: {error.strerror}", "name a file with node names") from None
    names = [word for line in text.splitlines() for word in line.partition("#")[0].split()]
    if not names:
        raise UsageError(f"^{found['file']}: names no nodes", "write one node set per line")
    return ",".join(names)


def select(cluster: Cluster, nodes: str | None, exclude: str | None) -> Cluster:
    """Return the chosen nodes of an inventory, with the logins that the command line names."""
    known = frozenset(cluster.names)
    wanted = read(nodes, known) if nodes else None
    dropped = read(exclude, known).expression if exclude else None
    cluster = _with_foreign_groups(cluster, [wanted.expression if wanted else "", dropped or ""])
    try:
        chosen = cluster.select(wanted.expression if wanted else None, dropped)
    except UsageError as error:
        if ours := _ours(cluster, wanted.expression if wanted else ""):
            error.hint = ours
        raise
    for user, its in wanted.logins if wanted else ():
        names = set(cluster.select(its).names)
        chosen = replace(chosen, nodes=tuple(_as_user(node, user, names) for node in chosen.nodes))
    return chosen


def _ours(cluster: Cluster, expression: str) -> str:
    """Return what to write instead of a number of nodes, or of the nodes' addresses; "" for other sets."""
    from clusterctl.inventory import nodeset

    if expression.isdigit() and 0 < int(expression) <= len(cluster.nodes):
        return f"-n takes names; the first {expression} nodes: -n {nodeset.fold(cluster.names[: int(expression)])}"
    places = {place: node.name for node in reversed(cluster.nodes) for place in (node.address, node.host)}
    words = expression.split(",")
    if any(word in places for word in words):
        names = dict.fromkeys(places.get(word, word) for word in words)
        return f"nodes are chosen by their names in the inventory: -n {','.join(names)}"
    return ""


def _as_user(node: Node, user: str, names: set[str]) -> Node:
    return replace(node, user=user) if node.name in names else node


def _with_foreign_groups(cluster: Cluster, expressions: list[str]) -> Cluster:
    """Return the cluster with the groups that expressions name and other programs define; its own come first."""
    named = {found["name"] for text in expressions for found in GROUP.finditer(text)}
    if named <= set(cluster.groups):
        return cluster
    from clusterctl.inventory import nodeset
    from clusterctl.inventory.group_files import foreign_groups

    found = foreign_groups()
    groups = {name: tuple(nodeset.expand(found[name], found)) for name in named if name in found}
    return replace(cluster, groups={**groups, **cluster.groups})
