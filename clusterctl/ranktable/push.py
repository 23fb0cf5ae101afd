"""Rank tables on the nodes: the identical file everywhere, and whether it still tells the truth.

torch_npu takes a table only from a regular file that its owner can read, and negotiates in silence
otherwise; HCCL compares the table between ranks and fails late (EI0005). So a push confirms each node's file
by its hash; `ranktable_verify` asks the nodes whether what the table says is still so.
"""

from __future__ import annotations

import hashlib
import stat
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from clusterctl.errors import Fault, InputFaults, UsageError, WorkFailed, did_you_mean
from clusterctl.ranktable import api
from clusterctl.ranktable.check import check_file

if TYPE_CHECKING:
    from clusterctl.inventory.cluster import Cluster, Node
    from clusterctl.ranktable.api import Device, Server
    from clusterctl.transport.fanout import Connection

MODE = 0o644


@dataclass(frozen=True)
class LiveTable:
    """A table's exact bytes, and which devices (id to address) it expects on each server."""

    data: bytes
    version: str
    servers: Mapping[str, Mapping[int, str]]
    """Empty for version 2.0, which names no servers."""
    super_devices: Mapping[str, Mapping[int, str]] = field(default_factory=dict)
    """Version 1.2: the super-device id of each device of each server."""
    super_pods: Mapping[str, str] = field(default_factory=dict)
    """Version 1.2: the super pod of each server."""
    groups: tuple[Group, ...] = ()
    """Version 2.0: the ranks that are on one node, as far as the table shows it."""

    @property
    def sha256(self) -> str:
        return hashlib.sha256(self.data).hexdigest()


@dataclass(frozen=True)
class Group:
    """Ranks of a 2.0 table that share a node, and the IP addresses of each device."""

    ranks: range
    devices: Mapping[int, tuple[str, ...]] = field(hash=False)
    """Without addresses where they are EIDs, which are no IP addresses."""


@dataclass(frozen=True)
class Drift:
    """One thing that is not as the table says."""

    node: str
    device: int | None
    """None where the node's file, or the node itself, is meant."""
    kind: str
    """file-missing, file-kind, file-unreadable, file-differs, address, link, net_health, super_device,
    super_pod or server."""
    what: str
    remedy: str = ""

    def __str__(self) -> str:
        return self.node + (f" device {self.device}" if self.device is not None else "") + f": {self.what}"


@dataclass(frozen=True)
class NodeReport:
    """What one node said."""

    node: str
    path: str
    devices: int
    drifts: tuple[Drift, ...] = ()
    notes: tuple[str, ...] = field(default=())
    """What could not be asked there."""
    group: Group | None = None
    """Version 2.0: the ranks whose addresses the node's own are."""


@dataclass(frozen=True)
class Pushed:
    """What a push did on one node."""

    node: str
    path: str
    sha256: str
    change: str
    """new, replaced or unchanged."""


def read(path: Path) -> LiveTable:
    """A table that HCCL takes, as the bytes that travel; one that it would refuse goes nowhere."""
    report = check_file(path)
    # A link or a name without .json is this machine's matter; on the nodes the file has a place of its own.
    found = [one for one in report.findings if one.code not in ("file-symlink", "file-suffix")]
    if found:
        raise InputFaults([Fault(f"{path} {one.pointer}".rstrip(), one.what, one.remedy) for one in found])
    data = path.read_bytes()
    table = api.parse(data, str(path))
    if not table.names_servers:
        return LiveTable(data, table.version, {}, groups=tuple(map(_group, table.servers)))
    super_devices = {
        server.server_id: {
            one.device_id: one.super_device_id for one in server.devices if one.super_device_id
        }
        for server in table.servers
        if table.version == "1.2"
    }
    pods = {name: pod.super_pod_id for pod in table.super_pods for name in pod.server_ids}
    servers = {
        server.server_id: {device.device_id: device.device_ip for device in server.devices}
        for server in table.servers
    }
    return LiveTable(data, table.version, servers, super_devices, pods)


def _group(server: Server) -> Group:
    first = server.devices[0].rank_id
    addresses = {device.device_id: tuple(_ip_addresses(device)) for device in server.devices}
    return Group(range(first, first + len(server.devices)), addresses)


def _ip_addresses(device: Device) -> Iterator[str]:
    for level in device.levels:
        for one in level["rank_addr_list"]:
            if one["addr_type"] in ("IPV4", "IPV6") and one.get("addr"):
                yield one["addr"]


def default_path(file: Path) -> str:
    """Where a table goes when nothing else is said: the login's home on every node."""
    return f"~/{file.name}"


def checked_path(path: str) -> str:
    """A path that HCCL reads: its name ends in .json."""
    if not path.endswith(".json") or path.endswith("/.json"):
        raise UsageError(
            f"{path}: HCCL takes a rank table only from a name that ends in .json", f"{path}.json"
        )
    return path


# -- which node is which server


def server_of(node: Node, table: LiveTable) -> str | None:
    """The server of the table that a node is, by its server_id, address or name."""
    return next(
        (one for one in (node.server_id, node.address, node.host, node.name) if one in table.servers), None
    )


def nodes_of(cluster: Cluster, table: LiveTable, chosen: bool) -> tuple[Node, ...]:
    """The nodes that a table is for: of `chosen` nodes all must be in it, of a whole inventory those that are."""
    if not table.servers:
        return cluster.nodes
    inside = tuple(node for node in cluster.nodes if server_of(node, table))
    outside = [node for node in cluster.nodes if node not in inside]
    if outside and (chosen or not inside):
        known = list(table.servers)
        faults = [
            Fault(node.name, f"the table has no server {node.server_id or node.address}", _near(node, known))
            for node in outside
        ]
        raise InputFaults(faults)
    return inside


def _near(node: Node, known: Sequence[str]) -> str:
    near = did_you_mean(node.server_id or node.address, known)
    return near or f"the node's `server_id` in the inventory must be one of the table's, as {known[0]}"


def missing_servers(cluster: Cluster, table: LiveTable) -> list[str]:
    """The servers of a table that no node of the inventory is."""
    there = {server_of(node, table) for node in cluster.nodes}
    return [server for server in table.servers if server not in there]


# -- push


def push(connection: Connection, table: LiveTable, path: str) -> Pushed:
    """The table to one node, whole or not at all, then asked for again; a link in its place is replaced."""
    before = connection.call("fingerprint", {"path": path})
    same = not list(file_drifts(connection.node, before, table.sha256))
    if before["kind"] == "d":
        raise WorkFailed(f"{connection.node}: {before['path']} is a folder", "name a file with --to")
    if not same:
        connection.put(path, table.data, MODE)
    after = connection.call("fingerprint", {"path": path})
    for drift in file_drifts(connection.node, after, table.sha256):
        raise WorkFailed(f"{drift}, right after it was written", "does something else write there?")
    change = "unchanged" if same else "replaced" if before["kind"] else "new"
    return Pushed(connection.node, str(after["path"]), str(after["sha256"]), change)


def file_drifts(node: str, found: Mapping[str, Any], sha256: str) -> Iterator[Drift]:
    """What is wrong with the file that stands at the table's path."""
    path, again = found["path"], "clusterctl ranktable push"
    if found["kind"] == "":
        yield Drift(node, None, "file-missing", f"{path}: no such file", again)
    elif found["kind"] != "f":
        kind = {"l": "a symbolic link", "d": "a folder"}.get(found["kind"], "no regular file")
        what = f"{path} is {kind}; torch_npu would negotiate in silence"
        yield Drift(node, None, "file-kind", what, again)
    elif not found["mode"] & stat.S_IRUSR or "sha256" not in found:
        what = f"{path} can't be read by its owner (mode {found['mode']:o}); torch_npu would negotiate in silence"
        yield Drift(node, None, "file-unreadable", what, f"chmod u+r {path}")
    elif found["sha256"] != sha256:
        what = f"{path} is another file: sha256 {found['sha256'][:12]}, and the table's is {sha256[:12]}"
        yield Drift(node, None, "file-differs", what, again)
