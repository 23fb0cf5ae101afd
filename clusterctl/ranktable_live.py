"""Rank tables on the nodes: the identical file everywhere, and whether it still tells the truth.

torch_npu takes a table only from a regular file that its owner can read, and negotiates in silence
otherwise; HCCL compares the table between ranks and fails late (EI0005). So a push confirms each node's file
by its hash, and a verify asks for the file, every device's address, and its link where the tool tells it.
"""

from __future__ import annotations

import hashlib
import ipaddress
import re
import stat
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from clusterctl import devices, ranktable
from clusterctl.errors import Fault, InputFaults, UsageError, WorkFailed, did_you_mean
from clusterctl.ranktable_check import check_file

if TYPE_CHECKING:
    from clusterctl.inventory import Cluster, Node
    from clusterctl.transport import Completed, Connection

MODE = 0o644
GOOD = {"link": "UP", "net_health": "Success"}
_ANSWER = {
    "link": re.compile(r"^\s*link status\s*:\s*(\S.*?)\s*$", re.MULTILINE),
    "net_health": re.compile(r"^\s*net health status\s*:\s*(\S.*?)\s*$", re.MULTILINE),
}
_REMEDY = {
    "link": "look at the cable and the switch port: hccn_tool -i {device} -link_stat -g",
    "net_health": "look at the address, the gateway and the switch: hccn_tool -i {device} -netdetect -g",
}


@dataclass(frozen=True)
class LiveTable:
    """A table's exact bytes, and which devices (id to address) it expects on each server."""

    data: bytes
    version: str
    servers: Mapping[str, Mapping[int, str]]
    """Empty for version 2.0, which names no servers."""

    @property
    def sha256(self) -> str:
        return hashlib.sha256(self.data).hexdigest()


@dataclass(frozen=True)
class Drift:
    """One thing that is not as the table says."""

    node: str
    device: int | None
    """None where the node's file, or the node itself, is meant."""
    kind: str
    """file-missing, file-kind, file-unreadable, file-differs, address, link, net_health or server."""
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
    if report.version == "2.0":
        return LiveTable(data, "2.0", {})
    table = ranktable.parse(data, str(path))
    servers = {
        server.server_id: {device.device_id: device.device_ip for device in server.devices}
        for server in table.servers
    }
    return LiveTable(data, table.version, servers)


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
    same = not list(_file_drifts(connection.node, before, table.sha256))
    if before["kind"] == "d":
        raise WorkFailed(f"{connection.node}: {before['path']} is a folder", "name a file with --to")
    if not same:
        connection.put(path, table.data, MODE)
    after = connection.call("fingerprint", {"path": path})
    for drift in _file_drifts(connection.node, after, table.sha256):
        raise WorkFailed(f"{drift}, right after it was written", "does something else write there?")
    change = "unchanged" if same else "replaced" if before["kind"] else "new"
    return Pushed(connection.node, str(after["path"]), str(after["sha256"]), change)


def _file_drifts(node: str, found: Mapping[str, Any], sha256: str) -> Iterator[Drift]:
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


# -- verify


def verify(connection: Connection, node: Node, table: LiveTable, path: str) -> NodeReport:
    """Everything on one node that is not as the table says; changes nothing."""
    found = connection.call("fingerprint", {"path": path})
    drifts = list(_file_drifts(node.name, found, table.sha256))
    server = server_of(node, table)
    expected = table.servers[server] if server else {}
    tool = _tool(connection, node, expected)
    notes: list[str] = []
    if expected and tool is None:
        notes.append("no hccn_tool there: addresses and links were not asked")
    elif tool is not None:
        for device, address in expected.items():
            drifts += _device_drifts(_Asker(connection, node.name, tool, device), address, table.version)
    return NodeReport(node.name, str(found["path"]), len(expected), tuple(drifts), tuple(notes))


def _tool(connection: Connection, node: Node, expected: Iterable[int]) -> str | None:
    """The hccn_tool that the node has; None where it has none, or nothing is to be asked."""
    first = next(iter(expected), None)
    if first is None:
        return None
    for tool in [node.hccn_tool] if node.hccn_tool else ["hccn_tool", devices.VENDOR_TOOL]:
        done = connection.run([tool, "-i", str(first), "-ip", "-g"], timeout=devices.TIMEOUT)
        if done.exit_code not in devices.NOT_FOUND:
            return tool
    return None


@dataclass(frozen=True)
class _Asker:
    """hccn_tool about one device."""

    connection: Connection
    node: str
    tool: str
    device: int

    def ask(self, *words: str) -> Completed:
        argv = [self.tool, "-i", str(self.device), *words, "-g"]
        return self.connection.run(argv, timeout=devices.TIMEOUT)

    def drift(self, kind: str, what: str, remedy: str) -> Drift:
        return Drift(self.node, self.device, kind, what, remedy)


def _device_drifts(asker: _Asker, address: str, version: str) -> Iterator[Drift]:
    for wanted in filter(None, address.split(",")):
        yield from _address_drifts(asker, wanted, version)
    for kind, good in GOOD.items():
        done = asker.ask(f"-{kind}")
        if done.timed_out:
            what = f"hccn_tool -{kind} -g did not end within {devices.TIMEOUT:.0f} s"
            yield asker.drift(kind, what, "the driver hangs: npu-smi info, dmesg")
        answer = _ANSWER[kind].search(done.text)
        if done.ok and answer and answer[1] != good:
            what = f"{kind.replace('_', ' ')} is {answer[1]}, not {good}"
            yield asker.drift(kind, what, _REMEDY[kind].format(device=asker.device))


def _address_drifts(asker: _Asker, wanted: str, version: str) -> Iterator[Drift]:
    """One address of the table against what the tool says now; on A3 that may be the virtual one."""
    ways: list[tuple[str, ...]] = [("-ip", "-inet6")] if ":" in wanted else [("-ip",)]
    if version == "1.2" and ":" not in wanted:
        ways.append(("-vnic",))
    told: list[str] = []
    for way in ways:
        done = asker.ask(*way)
        if done.timed_out or not done.ok:
            complaint = (done.error_text or done.text).strip().splitlines()
            words = "did not end in time" if done.timed_out else f"ended with {done.code}"
            told.append(f"{' '.join(way)} {words}" + (f": {complaint[-1][:200]}" if complaint else ""))
            continue
        address = devices.parse_address(done.text)
        if address is not None and _same(address, wanted):
            return
        if address is not None:
            told.append(address)
    what = (
        f"the table says {wanted}, and hccn_tool says {' and '.join(told) or 'nothing: it is not configured'}"
    )
    yield asker.drift("address", what, "build the table anew: clusterctl ranktable build, then push it")


def _same(left: str, right: str) -> bool:
    try:
        return ipaddress.ip_address(left) == ipaddress.ip_address(right)
    except ValueError:
        return left == right
