"""Put the same rank table on every node, and describe how it differs from the nodes later.

torch_npu reads a table only from a regular file that its owner can read; otherwise it negotiates without a message.
HCCL compares the tables of the ranks and fails late (EI0005). So a push confirms the file on each node by its hash;
`verify` compares the content of the table with the nodes.
"""

from __future__ import annotations

import stat
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from clusterctl.errors import UsageError, WorkFailed
from clusterctl.ranktable.live_table import Group, LiveTable
from clusterctl.ranktable.table import hccl_opens, why_not_opened
from clusterctl.transport.answers import Fingerprint
from clusterctl.transport.connection import Connection

MODE = 0o644


@dataclass(frozen=True)
class Drift:
    """One difference between the table and a node."""

    node: str
    device: int | None
    """None for the file on the node, or the node itself."""
    kind: str
    """file-missing, file-kind, file-unreadable, file-differs, address, link, net_health, super_device,
    super_pod or server."""
    what: str
    remedy: str = ""

    def __str__(self) -> str:
        return self.node + (f" device {self.device}" if self.device is not None else "") + f": {self.what}"


@dataclass(frozen=True)
class NodeReport:
    """The comparison with one node."""

    node: str
    path: str
    devices: int
    drifts: tuple[Drift, ...] = ()
    notes: tuple[str, ...] = field(default=())
    """What could not be compared on this node."""
    group: Group | None = None
    """Version 2.0: the ranks with the addresses of this node."""


@dataclass(frozen=True)
class Pushed:
    """The result of a push to one node."""

    node: str
    path: str
    sha256: str
    change: str
    """new, replaced or unchanged."""


def default_path(file: Path) -> str:
    """Return the default path of a table on the nodes: in the home folder of the login."""
    return f"~/{file.name}"


def checked_path(path: str) -> str:
    """Return the path if HCCL opens a table there; raise UsageError otherwise."""
    if not hccl_opens(path):
        raise UsageError(f"{path}: HCCL opens no rank table there: {why_not_opened(path)}", "~/table.json")
    return path


# -- which node is which server


# -- push


def push(connection: Connection, table: LiveTable, path: str) -> Pushed:
    """Write the table to one node atomically and confirm it by its hash; a symbolic link at the path is replaced."""
    before = connection.fingerprint(path)
    same = not list(file_drifts(connection.node, before, table.sha256))
    if before.kind == "d":
        raise WorkFailed(f"{connection.node}: {before.path} is a folder", "name a file with --to")
    if not same:
        connection.put(path, table.data, MODE)
    after = connection.fingerprint(path)
    for drift in file_drifts(connection.node, after, table.sha256):
        raise WorkFailed(f"{drift}, right after it was written", "does another program write this file?")
    change = "unchanged" if same else "replaced" if before.kind else "new"
    return Pushed(connection.node, after.path, after.sha256, change)


def file_drifts(node: str, found: Fingerprint, sha256: str) -> Iterator[Drift]:
    """Yield what is wrong with the file at the path of the table."""
    path, again = found.path, "clusterctl ranktable push"
    if found.kind == "":
        yield Drift(node, None, "file-missing", f"{path}: no such file", again)
    elif found.kind != "f":
        kind = {"l": "a symbolic link", "d": "a folder"}.get(found.kind, "not a regular file")
        problem = f"{path} is {kind}; torch_npu would negotiate without it"
        yield Drift(node, None, "file-kind", problem, again)
    elif not found.mode & stat.S_IRUSR or not found.sha256:
        problem = (
            f"{path} can't be read by its owner (mode {found.mode:o}); torch_npu would negotiate without it"
        )
        yield Drift(node, None, "file-unreadable", problem, f"chmod u+r {path}")
    elif found.sha256 != sha256:
        problem = f"{path} has other content: sha256 {found.sha256[:12]}, and the table has {sha256[:12]}"
        yield Drift(node, None, "file-differs", problem, again)
