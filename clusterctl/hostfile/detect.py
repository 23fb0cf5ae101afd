"""Read any file that lists nodes: cluster.yaml, a hostfile, a node list or a rank table.

All of them become a Cluster, so that each can be used as an inventory.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from clusterctl.errors import Fault, InputFaults
from clusterctl.hostfile import formats, node_lists
from clusterctl.hostfile.formats import Entry
from clusterctl.hostfile.kinds import kind_of_file
from clusterctl.inventory import cluster as inventory_cluster
from clusterctl.inventory import nodeset
from clusterctl.inventory.cluster import MAX_DEVICES, Cluster, Node

if TYPE_CHECKING:
    from clusterctl.ranktable.api import Device, RankTable


@dataclass(frozen=True)
class Source:
    """The nodes in a file."""

    path: str
    dialect: str
    """cluster, ranktable, `node_lists.NODE_LISTS`, deepspeed, openmpi, mpich, or names for names alone."""
    entries: tuple[Entry, ...] = ()
    faults: tuple[Fault, ...] = ()
    cluster: Cluster | None = None
    """The cluster of a cluster.yaml or a rank table, which have more than names and slots."""
    scattered: bool = False
    """Whether the ranks of a table are not in the order of its nodes."""

    @property
    def keys(self) -> list[str]:
        """Return the name of each entry: the name of the node if it has one, else its address."""
        return self.cluster.names if self.cluster else [entry.address for entry in self.entries]


def read(path: Path) -> Source:
    """Read any of the files; the result contains the file's faults. Raise UsageError if there is no such file."""
    dialect = kind_of_file(path)
    if dialect == "cluster":
        return _from_cluster(path)
    if dialect == "ranktable":
        return _from_table(path)
    text, faults = formats.read_text(path)
    if faults:
        return Source(str(path), "names", faults=tuple(faults))
    if node_lists.looks_like(text):
        entries, faults = node_lists.inspect_text(text, str(path))
        return Source(str(path), node_lists.NODE_LISTS, tuple(entries), tuple(faults))
    entries, faults = formats.inspect_text(text, str(path))
    return Source(str(path), formats.dialect(entries), tuple(entries), tuple(faults))


def load(path: Path, kind: str = "cpu") -> Cluster:
    """Read any of the files as an inventory; `kind`: the kind of the devices behind a hostfile's slots."""
    if kind_of_file(path) == "cluster":
        return inventory_cluster.load(path)
    source = read(path)
    if source.faults:
        raise InputFaults(source.faults)
    return cluster_of(source, kind)


def cluster_of(source: Source, kind: str = "cpu") -> Cluster:
    """Return the cluster in a file without faults."""
    if source.cluster is not None:
        return source.cluster
    return from_entries(source.entries, source.path, kind)


def from_entries(entries: Iterable[Entry], source: str, kind: str = "cpu") -> Cluster:
    """Return nodes named by their addresses, with one device for each slot; one device without a count."""
    nodes: list[Node] = []
    faults: list[Fault] = []
    for entry in entries:
        devices = entry.devices if entry.devices is not None else tuple(range(entry.slots or 1))
        where = f"{source}:{entry.line}" if entry.line else source
        if len(devices) > MAX_DEVICES:
            problem = f"{entry.address}: {len(devices)} slots, and a node has at most {MAX_DEVICES} devices"
            faults.append(Fault(where, problem, "give fewer slots; a slot is a rank, not a thread"))
        nodes.append(_node(entry.address, entry.address, devices, kind, entry.user))
    if faults:
        raise InputFaults(faults)
    return Cluster(Path(source).stem or "nodes", tuple(nodes), source=source)


def _node(name: str, address: str, devices: tuple[int, ...], kind: str, user: str | None) -> Node:
    return Node(name, address, address, user=user, devices=devices, kind=kind, server_id=address)


def _from_cluster(path: Path) -> Source:
    try:
        cluster = inventory_cluster.load(path)
    except InputFaults as error:
        return Source(str(path), "cluster", faults=error.faults)
    return Source(str(path), "cluster", tuple(entries_of(cluster)), cluster=cluster)


def entries_of(cluster: Cluster) -> Iterator[Entry]:
    """Yield the lines of a hostfile of these nodes."""
    for node in cluster.nodes:
        devices = node.devices or (0,)
        first = devices == tuple(range(len(devices)))
        yield Entry(node.address, len(devices), node.user, devices=None if first else devices)


def _from_table(path: Path) -> Source:
    # This import takes 9 ms and is not needed for a cluster.yaml.
    from clusterctl.ranktable import api

    try:
        table = api.load(path)
        if not table.names_servers:
            table = _with_servers(table, str(path))
        cluster = from_table(table, str(path))
    except InputFaults as error:
        return Source(str(path), "ranktable", faults=error.faults)
    order = [device.rank_id for server in api.in_rank_order(table) for device in server.devices]
    scattered = order != sorted(order)
    return Source(str(path), "ranktable", tuple(entries_of(cluster)), cluster=cluster, scattered=scattered)


def _with_servers(table: RankTable, source: str) -> RankTable:
    """Return a 2.0 table whose ranks have a `server_id` or `host_ip`, with these as its servers.

    Most 2.0 tables have neither: the addresses in their levels belong to devices, and no SSH server listens there.
    """
    from clusterctl.ranktable.api import Server

    servers: dict[str, list[Device]] = {}
    hosts: dict[str, dict[str, str]] = {}
    faults: list[Fault] = []
    for _, device in table.by_rank():
        at = f"{source} rank {device.rank_id}"
        name, host = (device.extras.get(key) for key in ("server_id", "host_ip"))
        known = name or host
        if not isinstance(known, str):
            problem = "this rank has neither `host_ip` nor `server_id`, so its node is unknown"
            faults.append(Fault(at, problem, "give the nodes in a cluster.yaml or a hostfile"))
            continue
        present = servers.setdefault(known, [])
        if any(other.device_id == device.device_id for other in present):
            problem = f"the device {device.device_id} of {known[:80]!r} has another rank too"
            faults.append(Fault(at, problem, "give each device one rank"))
        elif device.device_id >= MAX_DEVICES:
            problem = f"its device_id is {device.device_id}, and a node has at most {MAX_DEVICES} devices"
            faults.append(Fault(at, problem, "give the physical id, as npu-smi shows it"))
        present.append(replace(device, levels=(), device_ip=""))
        hosts.setdefault(known, {"host_ip": host} if isinstance(host, str) else {})
    if len(faults) == table.ranks and not servers:
        problem = "a table of version 2.0 whose ranks have neither `host_ip` nor `server_id` names no nodes"
        faults = [Fault(source, problem, "give the nodes in a cluster.yaml or a hostfile")]
    if faults:
        raise InputFaults(faults)
    named = (Server(name, tuple(devices), None, hosts[name]) for name, devices in servers.items())
    return replace(table, servers=tuple(named))


def from_table(table: RankTable, source: str) -> Cluster:
    """Return the servers of a table as nodes in the order of their ranks, with their devices."""
    from clusterctl.ranktable import api

    nodes: list[Node] = []
    faults: list[Fault] = []
    for number, server in enumerate(api.in_rank_order(table)):
        name = server.server_id
        address = str(server.extras.get("host_ip") or name)
        if nodeset.name_fault(name) or not inventory_cluster.HOST.match(address):
            problem = f"the server_id {name[:80]!r} is not a name or address that SSH can reach"
            first = f"rank {server.devices[0].rank_id}"
            at = f"/server_list/{number}/server_id" if table.names_servers else first
            faults.append(Fault(f"{source} {at}", problem, "give an address or a name"))
        ips = tuple(device.device_ip for device in server.devices)
        devices = tuple(device.device_id for device in server.devices)
        node = Node(name, address, address, devices=devices, kind="npu", server_id=name)
        nodes.append(node if not all(ips) else _with_ips(node, ips))
    if faults:
        raise InputFaults(faults)
    return Cluster(Path(source).stem, tuple(nodes), source=source)


def _with_ips(node: Node, ips: tuple[str, ...]) -> Node:
    return replace(node, device_ips=ips)
