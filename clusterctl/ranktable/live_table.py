"""A table as it is put on nodes: its exact bytes, and the devices that it expects on each node."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from clusterctl.errors import Fault, InputFaults, did_you_mean
from clusterctl.inventory.cluster import Cluster, Node
from clusterctl.ranktable.check import check_file, parse
from clusterctl.ranktable.table import Device, Server


@dataclass(frozen=True)
class LiveTable:
    """The exact bytes of a table, and the devices (id to address) that it expects on each server."""

    data: bytes
    version: str
    servers: Mapping[str, Mapping[int, str]]
    """Empty for version 2.0, which names no servers."""
    super_devices: Mapping[str, Mapping[int, str]] = field(default_factory=dict)
    """Version 1.2: the super-device id of each device of each server."""
    super_pods: Mapping[str, str] = field(default_factory=dict)
    """Version 1.2: the super pod of each server."""
    groups: tuple[Group, ...] = ()
    """Version 2.0: the ranks that appear to be on one node."""

    @property
    def sha256(self) -> str:
        return hashlib.sha256(self.data).hexdigest()


@dataclass(frozen=True)
class Group:
    """Ranks of a 2.0 table that share a node, and the IP addresses of each device."""

    ranks: range
    devices: Mapping[int, tuple[str, ...]] = field(hash=False)
    """Without addresses that are EIDs."""


def read(path: Path) -> LiveTable:
    """Return a table as the bytes to push; raise InputFaults if HCCL would refuse it."""
    report = check_file(path)
    # A link or a name without .json does not matter on this machine: the file has another path on the nodes.
    found = [item for item in report.findings if item.code not in ("file-symlink", "file-suffix")]
    if found:
        raise InputFaults(
            [Fault(f"{path} {item.pointer}".rstrip(), item.what, item.remedy) for item in found]
        )
    data = path.read_bytes()
    table = parse(data, str(path))
    if not table.names_servers:
        return LiveTable(data, table.version, {}, groups=tuple(map(_group, table.servers)))
    super_devices = {
        server.server_id: {
            device.device_id: device.super_device_id for device in server.devices if device.super_device_id
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
        for address in level["rank_addr_list"]:
            if address["addr_type"] in ("IPV4", "IPV6") and address.get("addr"):
                yield address["addr"]


def server_of(node: Node, table: LiveTable) -> str | None:
    """Return the server_id of a node in the table, found by its server_id, address or name; None if it has none."""
    return next(
        (name for name in (node.server_id, node.address, node.host, node.name) if name in table.servers), None
    )


def nodes_of(cluster: Cluster, table: LiveTable, chosen: bool) -> tuple[Node, ...]:
    """Return the nodes that a table has; raise InputFaults if the user chose (`chosen`) others too."""
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
    return near or f"set the node's `server_id` in the inventory to one of the table, such as {known[0]}"


def missing_servers(cluster: Cluster, table: LiveTable) -> list[str]:
    """Return the servers of a table that are no nodes of the inventory."""
    known = {server_of(node, table) for node in cluster.nodes}
    return [server for server in table.servers if server not in known]
