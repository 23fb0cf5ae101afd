"""Compare a rank table with the nodes: the file on each node, and the address, super-device id and link of each device.

A table of version 2.0 names no servers; there the ranks of a node are those with the addresses that its hccn_tool
shows. What no tool shows (networks, ports, EIDs) is reported as not compared.
"""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from clusterctl.inventory.cluster import Node
from clusterctl.ranktable import devices
from clusterctl.ranktable.live_table import Group, LiveTable, server_of
from clusterctl.ranktable.push import Drift, NodeReport, file_drifts
from clusterctl.transport.connection import Completed, Connection

AGAIN = "build the table again: clusterctl ranktable build, then push it"
GOOD = {"link": "UP", "net_health": "Success"}
_ANSWER = {
    "link": re.compile(r"^\s*link status\s*:\s*(\S.*?)\s*$", re.MULTILINE),
    "net_health": re.compile(r"^\s*net health status\s*:\s*(\S.*?)\s*$", re.MULTILINE),
}
_REMEDY = {
    "link": "look at the cable and the switch port: hccn_tool -i {device} -link_stat -g",
    "net_health": "look at the address, the gateway and the switch: hccn_tool -i {device} -netdetect -g",
}


def verify(connection: Connection, node: Node, table: LiveTable, path: str) -> NodeReport:
    """Return every difference between the table and one node; change nothing."""
    found = connection.fingerprint(path)
    drifts = tuple(file_drifts(node.name, found, table.sha256))
    inner = _by_addresses(connection, node, table) if table.groups else _by_server(connection, node, table)
    return replace(inner, path=found.path, drifts=drifts + inner.drifts)


def not_compared(table: LiveTable) -> list[str]:
    """Return what cannot be compared with the nodes, in words."""
    if not table.groups:
        return []
    parts = ["net_instance_id, net_type and ports of the levels: no tool on a node shows them"]
    without = sum(not addresses for group in table.groups for addresses in group.devices.values())
    if without:
        parts.append(f"the addresses of {without} ranks: they are not IP addresses, which hccn_tool shows")
    return parts


def unclaimed(table: LiveTable, reports: Sequence[NodeReport]) -> list[Drift]:
    """Return the ranks of a 2.0 table that no node has, if every node has found its own."""
    if not table.groups or not all(report.group for report in reports):
        return []
    claimed = [report.group for report in reports]
    return [
        Drift(_ranks(group), None, "server", "no node of the inventory has these addresses", "add the node")
        for group in table.groups
        if any(group.devices.values()) and group not in claimed
    ]


def _ranks(group: Group) -> str:
    return f"ranks [{group.ranks.start},{group.ranks.stop})"


# -- versions 1.0 and 1.2: the table names the node


def _by_server(connection: Connection, node: Node, table: LiveTable) -> NodeReport:
    server = server_of(node, table)
    expected = table.servers[server] if server else {}
    tool = _tool(connection, node, expected)
    notes: list[str] = []
    drifts: list[Drift] = []
    if expected and tool is None:
        notes.append("hccn_tool is missing: addresses and links were not compared")
    elif tool is not None:
        for device, address in expected.items():
            asker = _Asker(connection, node.name, tool, device)
            for wanted in filter(None, address.split(",")):
                drifts += _address_drifts(asker, wanted, table.version)
            drifts += _health_drifts(asker)
    super_ids = table.super_devices.get(server or "", {})
    smi = devices.find_smi(connection, node) if super_ids else None
    if smi is not None:
        drifts += _super_drifts(connection, node, smi, super_ids, table.super_pods.get(server or "", ""))
    elif super_ids:
        notes.append("npu-smi is missing: super-device ids were not compared")
    return NodeReport(node.name, "", len(expected), tuple(drifts), tuple(notes))


def _super_drifts(
    connection: Connection, node: Node, smi: devices.Smi, expected: Mapping[int, str], pod: str
) -> Iterator[Drift]:
    """Yield devices whose super-device id or super pod differs; a super pod from the inventory is not compared."""
    pods = set()
    for device, wanted in expected.items():
        super_id, found = devices.in_super_pod(connection, smi, device) or ("none", "")
        pods.add(found)
        if super_id != wanted:
            problem = f"the super-device id is {super_id}, and the table has {wanted}"
            yield Drift(node.name, device, "super_device", problem, AGAIN)
    others = sorted(pods - {"", pod})
    if others and pod.isdigit() and not node.super_pod:
        problem = f"the super pod is {' and '.join(others)}, and the table has {pod}"
        yield Drift(node.name, None, "super_pod", problem, AGAIN)


# -- version 2.0: the addresses show which ranks are on the node


def _by_addresses(connection: Connection, node: Node, table: LiveTable) -> NodeReport:
    known = {device for group in table.groups for device in group.devices}
    queried = [device for device in node.devices or sorted(known) if device in known]
    tool = _tool(connection, node, queried)
    if tool is None:
        return NodeReport(
            node.name, "", 0, notes=("hccn_tool is missing: addresses and links were not compared",)
        )
    askers = {device: _Asker(connection, node.name, tool, device) for device in queried}
    found = {device: address for device in queried if (address := askers[device].address())}
    if not found or not any(any(group.devices.values()) for group in table.groups):
        notes = ["hccn_tool shows no address: none was compared"] if not found else []
        drifts = [drift for asker in askers.values() for drift in _health_drifts(asker)]
        return NodeReport(node.name, "", 0, tuple(drifts), tuple(notes))
    group = max(table.groups, key=lambda group: _shared(group, found))
    if not _shared(group, found):
        problem = f"none of its addresses is in the table: {', '.join(list(found.values())[:4])}"
        return NodeReport(node.name, "", 0, (Drift(node.name, None, "server", problem, AGAIN),))
    drifts = list(_group_drifts(askers, group, found))
    notes = [
        f"device {device}: hccn_tool shows no address"
        for device in group.devices
        if device in askers and device not in found
    ]
    return NodeReport(node.name, "", len(group.devices), tuple(drifts), tuple(notes), group)


def _shared(group: Group, found: Mapping[int, str]) -> int:
    """Return how many devices of a node have the address that the group has for them."""
    return sum(_among(address, group.devices.get(device, ())) for device, address in found.items())


def _group_drifts(askers: Mapping[int, _Asker], group: Group, found: Mapping[int, str]) -> Iterator[Drift]:
    for device, wanted in group.devices.items():
        asker = askers.get(device)
        if asker is None:
            continue
        if device in found and wanted and not _among(found[device], wanted):
            problem = f"the address is {found[device]}, and the table has {' or '.join(wanted)}"
            yield asker.drift("address", problem, AGAIN)
        yield from _health_drifts(asker)


def _among(address: str, wanted: Iterable[str]) -> bool:
    return any(_same(address, other) for other in wanted)


# -- one device


def _tool(connection: Connection, node: Node, expected: Iterable[int]) -> str | None:
    """Return the hccn_tool of the node; None if it has none, or if no device is to be compared."""
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
    """Runs hccn_tool for one device."""

    connection: Connection
    node: str
    tool: str
    device: int

    def ask(self, *arguments: str) -> Completed:
        argv = [self.tool, "-i", str(self.device), *arguments, "-g"]
        return self.connection.run(argv, timeout=devices.TIMEOUT)

    def address(self) -> str | None:
        """Return the address that the tool shows, of either IP version, or None."""
        for way in (("-ip",), ("-ip", "-inet6")):
            address = devices.parse_address(self.ask(*way).text)
            if address is not None:
                return address
        return None

    def drift(self, kind: str, problem: str, remedy: str) -> Drift:
        return Drift(self.node, self.device, kind, problem, remedy)


def _health_drifts(asker: _Asker) -> Iterator[Drift]:
    for kind, good in GOOD.items():
        done = asker.ask(f"-{kind}")
        if done.timed_out:
            problem = f"hccn_tool -{kind} -g did not end within {devices.TIMEOUT:.0f} s"
            yield asker.drift(kind, problem, "the driver hangs: npu-smi info, dmesg")
        answer = _ANSWER[kind].search(done.text)
        if done.ok and answer and answer[1] != good:
            problem = f"{kind.replace('_', ' ')} is {answer[1]}, not {good}"
            yield asker.drift(kind, problem, _REMEDY[kind].format(device=asker.device))


def _address_drifts(asker: _Asker, wanted: str, version: str) -> Iterator[Drift]:
    """Yield a drift if the tool does not show this address now; on A3 the virtual address counts too."""
    ways: list[tuple[str, ...]] = [("-ip", "-inet6")] if ":" in wanted else [("-ip",)]
    if version == "1.2" and ":" not in wanted:
        ways.append(("-vnic",))
    answers: list[str] = []
    for way in ways:
        done = asker.ask(*way)
        if done.timed_out or not done.ok:
            complaint = (done.error_text or done.text).strip().splitlines()
            ended = "did not end in time" if done.timed_out else f"ended with {done.code}"
            answers.append(f"{' '.join(way)} {ended}" + (f": {complaint[-1][:200]}" if complaint else ""))
            continue
        address = devices.parse_address(done.text)
        if address is not None and _same(address, wanted):
            return
        if address is not None:
            answers.append(address)
    shown = " and ".join(answers) or "no address: it is not configured"
    problem = f"the table has {wanted}, and hccn_tool shows {shown}"
    yield asker.drift("address", problem, AGAIN)


def _same(left: str, right: str) -> bool:
    try:
        return ipaddress.ip_address(left) == ipaddress.ip_address(right)
    except ValueError:
        return left == right
