"""Any file that names nodes, read as what it is: cluster.yaml, a hostfile, a Slurm list, a rank table.

All of them become a Cluster, so that each serves as an inventory; a Slurm allocation does so without a file.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from clusterctl.errors import Fault, InputFaults
from clusterctl.hostfile import formats, slurm
from clusterctl.hostfile.formats import Entry
from clusterctl.inventory import cluster as inventory_cluster
from clusterctl.inventory import nodeset
from clusterctl.inventory.cluster import MAX_DEVICES, Cluster, Node

if TYPE_CHECKING:
    from clusterctl.ranktable.api import Device, RankTable

# Bytes that tell what a file is.
HEAD = 64 << 10

_YAML_KEY = re.compile(r"^(nodes|defaults|name|groups|known_hosts)\s*:(\s|$)", re.MULTILINE)
_TABLE_KEY = re.compile(r'"(server_list|group_list|rank_list|server_count|rank_count|server_group_list)"')


@dataclass(frozen=True)
class Source:
    """What a file names."""

    path: str
    dialect: str
    """cluster, ranktable, slurm, deepspeed, openmpi, mpich, or names where only names stand."""
    entries: tuple[Entry, ...] = ()
    faults: tuple[Fault, ...] = ()
    cluster: Cluster | None = None
    """Where the file says more than lines can: cluster.yaml and rank tables."""
    scattered: bool = False
    """The ranks of a table that don't run node by node."""

    @property
    def keys(self) -> list[str]:
        """How a person names each entry: the node's name where there is one, its address otherwise."""
        return self.cluster.names if self.cluster else [entry.address for entry in self.entries]


def read(path: Path) -> Source:
    """Read any of the files; its faults are in the result, and no such file is the command line's fault."""
    dialect = _nature(path)
    if dialect == "cluster":
        return _from_cluster(path)
    if dialect == "ranktable":
        return _from_table(path)
    text, faults = formats.read_text(path)
    if faults:
        return Source(str(path), "names", faults=tuple(faults))
    if slurm.looks_like(text):
        entries, faults = slurm.inspect_text(text, str(path))
        return Source(str(path), "slurm", tuple(entries), tuple(faults))
    entries, faults = formats.inspect_text(text, str(path))
    return Source(str(path), formats.dialect(entries), tuple(entries), tuple(faults))


def load(path: Path, kind: str = "cpu") -> Cluster:
    """Read any of the files as an inventory; `kind` is what the slots of a hostfile are."""
    if _nature(path) == "cluster":
        return inventory_cluster.load(path)
    source = read(path)
    if source.faults:
        raise InputFaults(source.faults)
    return cluster_of(source, kind)


def cluster_of(source: Source, kind: str = "cpu") -> Cluster:
    """The cluster that a file without faults names."""
    if source.cluster is not None:
        return source.cluster
    return from_entries(source.entries, source.path, kind)


def from_slurm(variables: Mapping[str, str], kind: str = "cpu") -> Cluster:
    """The nodes of the Slurm allocation that this process runs in."""
    entries, faults = slurm.from_variables(variables)
    if faults:
        raise InputFaults(faults)
    return from_entries(entries, "the Slurm allocation", kind)


def from_entries(entries: Iterable[Entry], source: str, kind: str = "cpu") -> Cluster:
    """Nodes named by their addresses, as many devices each as it has slots; one where nothing is said."""
    nodes: list[Node] = []
    faults: list[Fault] = []
    for entry in entries:
        devices = entry.devices if entry.devices is not None else tuple(range(entry.slots or 1))
        where = f"{source}:{entry.line}" if entry.line else source
        if len(devices) > MAX_DEVICES:
            what = f"{entry.address}: {len(devices)} slots, and a node has at most {MAX_DEVICES} devices"
            faults.append(Fault(where, what, "fewer slots; threads are not ranks"))
        nodes.append(_node(entry.address, entry.address, devices, kind, entry.user))
    if faults:
        raise InputFaults(faults)
    return Cluster(Path(source).stem or "nodes", tuple(nodes), source=source)


def _node(name: str, address: str, devices: tuple[int, ...], kind: str, user: str | None) -> Node:
    return Node(name, address, address, user=user, devices=devices, kind=kind, server_id=address)


def _nature(path: Path) -> str:
    """cluster, ranktable or hostfile, told by the name's ending and the first bytes."""
    if path.suffix in (".yaml", ".yml"):
        return "cluster"
    try:
        with path.open("rb") as file:
            head = file.read(HEAD).decode("utf-8", "replace").removeprefix("\ufeff")
    except OSError:
        # whoever reads the whole of it words why it can't be read
        return "hostfile" if path.exists() else "cluster"
    if head.lstrip()[:1] == "{":
        return "ranktable" if _TABLE_KEY.search(head) else "cluster"
    return "cluster" if _YAML_KEY.search(head) else "hostfile"


def _from_cluster(path: Path) -> Source:
    try:
        cluster = inventory_cluster.load(path)
    except InputFaults as error:
        return Source(str(path), "cluster", faults=error.faults)
    return Source(str(path), "cluster", tuple(entries_of(cluster)), cluster=cluster)


def entries_of(cluster: Cluster) -> Iterator[Entry]:
    """The lines that a hostfile of these nodes would have."""
    for node in cluster.nodes:
        devices = node.devices or (0,)
        first = devices == tuple(range(len(devices)))
        yield Entry(node.address, len(devices), node.user, devices=None if first else devices)


def _from_table(path: Path) -> Source:
    # 9 ms, which a cluster.yaml need not wait for.
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
    """A 2.0 table whose ranks say which node each is on (`server_id` or `host_ip`), with these as its servers.

    Most 2.0 tables say it nowhere: the addresses of their levels are the devices', which no SSH answers.
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
            what = "this rank says neither `host_ip` nor `server_id`, so it names no node"
            faults.append(Fault(at, what, "give the nodes in a cluster.yaml or a hostfile"))
            continue
        there = servers.setdefault(known, [])
        if any(one.device_id == device.device_id for one in there):
            what = f"the device {device.device_id} of {known[:80]!r} is another rank too"
            faults.append(Fault(at, what, "each device of a node once"))
        elif device.device_id >= MAX_DEVICES:
            what = f"its device_id is {device.device_id}, and a node has at most {MAX_DEVICES} devices"
            faults.append(Fault(at, what, "the physical id, as npu-smi shows it"))
        there.append(replace(device, levels=(), device_ip=""))
        hosts.setdefault(known, {"host_ip": host} if isinstance(host, str) else {})
    if len(faults) == table.ranks and not servers:
        what = "a table of version 2.0 whose ranks say neither `host_ip` nor `server_id` names no nodes"
        faults = [Fault(source, what, "give the nodes in a cluster.yaml or a hostfile")]
    if faults:
        raise InputFaults(faults)
    named = (Server(name, tuple(devices), None, hosts[name]) for name, devices in servers.items())
    return replace(table, servers=tuple(named))


def from_table(table: RankTable, source: str) -> Cluster:
    """A table's servers as nodes, in the order of their ranks, with what it says of their devices."""
    from clusterctl.ranktable import api

    nodes: list[Node] = []
    faults: list[Fault] = []
    for number, server in enumerate(api.in_rank_order(table)):
        name = server.server_id
        address = str(server.extras.get("host_ip") or name)
        if nodeset.name_fault(name) or not inventory_cluster.HOST.match(address):
            what = f"the server_id {name[:80]!r} names no node that SSH could reach"
            first = f"rank {server.devices[0].rank_id}"
            at = f"/server_list/{number}/server_id" if table.names_servers else first
            faults.append(Fault(f"{source} {at}", what, "an address or a name"))
        ips = tuple(device.device_ip for device in server.devices)
        devices = tuple(device.device_id for device in server.devices)
        node = Node(name, address, address, devices=devices, kind="npu", server_id=name)
        nodes.append(node if not all(ips) else _with_ips(node, ips))
    if faults:
        raise InputFaults(faults)
    return Cluster(Path(source).stem, tuple(nodes), source=source)


def _with_ips(node: Node, ips: tuple[str, ...]) -> Node:
    return replace(node, device_ips=ips)
