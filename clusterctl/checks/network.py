"""Checks between two nodes: the master's port from every node, and device addresses from the next node.

Also compare the answers of all nodes: different versions, an interface that some nodes lack.
"""

from __future__ import annotations

import contextlib
import re
import secrets
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING

from clusterctl.checks.answers import CommandResult, Commands, Knock, NodeAnswers, OpenedPort
from clusterctl.checks.node import MAX_SKEW, address_remedy, versions
from clusterctl.checks.query import Question, tool_paths
from clusterctl.errors import ClusterctlError
from clusterctl.finding import Finding
from clusterctl.inventory import nodeset
from clusterctl.ranktable.devices import VENDOR_TOOL, parse_conf
from clusterctl.text import device_text, plural
from clusterctl.transport.connection import read_answer

if TYPE_CHECKING:
    from clusterctl.inventory.cluster import Node
    from clusterctl.transport.connection import Connection
    from clusterctl.transport.fanout import Connections, Outcome
    from clusterctl.transport.link import PendingRequest


# Seconds for a connection between two nodes: lost first packets are sent again after 1 and 3.
PATIENCE = 5.0
# Seconds for the second attempt of nodes that had no answer where others had one: they or the network may be busy.
MORE_PATIENCE = 10.0


def master_port(nodes: Sequence[Node], connections: Connections, port: int = 0) -> list[Finding]:
    """Check that every node reaches a port on which the first node's agent listens as a run's master would.

    Port 0 is any free one, as a launch takes it. Nothing stays open.
    """
    master, token = nodes[0], secrets.token_hex(16)
    request = connections.of(master).open("listen", {"port": port, "token": token})
    try:
        opened = _opened(request, master.name)
        if opened.port is None:
            return [_taken(master, port, opened)]
        arguments = {"address": master.address, "port": opened.port, "token": token}
        outcomes = _knock(nodes, connections, {**arguments, "timeout": PATIENCE})
        missed = [entry.node for entry in outcomes if entry.value is not None and not entry.value.reached]
        if 0 < len(missed) < len(nodes):
            again = _knock(missed, connections, {**arguments, "timeout": MORE_PATIENCE})
            second = {entry.node.name: entry for entry in again}
            outcomes = [second.get(entry.node.name, entry) for entry in outcomes]
    finally:
        if request.result is None:
            with contextlib.suppress(ClusterctlError):
                request.cancel()
    reply = {entry.node.name: entry.value for entry in outcomes if entry.value is not None}
    failed = [
        Finding("bad", entry.node.name, entry.error.message, entry.error.hint, "master-port")
        for entry in outcomes
        if entry.error is not None
    ]
    return [*failed, *_reached(master, opened.port, reply)]


def _knock(
    nodes: Sequence[Node], connections: Connections, arguments: Mapping[str, object]
) -> list[Outcome[Knock]]:
    return connections.on_each(nodes, lambda node, link: link.ask(Knock, "knock", arguments))


def _opened(request: PendingRequest, node: str) -> OpenedPort:
    for frame in request:
        return OpenedPort(int(frame.fields["port"]))
    return read_answer(OpenedPort, request.result, node, "listen")


def _taken(master: Node, port: int, opened: OpenedPort) -> Finding:
    by = f" by {opened.holders[0]}" if opened.holders else ""
    text = f"the master port {port} can't be had there: {opened.reason}{by}"
    remedy = "stop the program that uses it, or leave out `master_port`: a free port is then chosen"
    return Finding("bad", master.name, text, remedy, "master-port", f"ss -tlnp 'sport = :{port}'")


def _reached(master: Node, port: int, reply: Mapping[str, Knock]) -> Iterator[Finding]:
    """Yield one finding for each reason, with all the nodes that it applies to."""
    groups: dict[str, list[str]] = {}
    for name, entry in reply.items():
        if not entry.reached:
            groups.setdefault(entry.reason, []).append(name)
    where = f"{master.name} at {master.address}, port {port}"
    firewalls = (
        "open all ports between the nodes in their firewalls; `address` must be reachable from the others"
    )
    for reason, names in groups.items():
        remedy = address_remedy(master) if master.name in names else firewalls
        fix = f"python3 -c \"import socket; socket.create_connection(('{master.address}', {port}), 3)\""
        yield Finding(
            "bad", nodeset.fold(names), f"can't reach {where}: {reason}", remedy, "master-port", fix
        )
    if reply and not groups:
        slowest = max(entry.seconds for entry in reply.values())
        text = f"the master {master.name} is reached at {master.address} by {plural(len(reply), 'node')}"
        text += f", in {slowest * 1000:.1f} ms at most"
        yield Finding("ok", "all nodes", text, check="master-port")


# ---- device addresses


def device_pings(answers: Sequence[NodeAnswers], connections: Connections) -> list[Finding]:
    """Check that each node's devices reach those of the same number on the next node, in a ring.

    Every device sends and receives once. Addresses come from the node's hccn.conf or the inventory.
    """
    known = {entry.node.name: _addresses(entry) for entry in answers}
    nodes = [entry.node for entry in answers if known[entry.node.name]]
    if len(nodes) < 2:
        return []
    targets = {}
    for node, peer in zip(nodes, [*nodes[1:], nodes[0]], strict=True):
        shared = [
            device for device in node.devices if device in known[node.name] and device in known[peer.name]
        ]
        targets[node.name] = peer, {device: known[peer.name][device] for device in shared}

    def ping(node: Node, link: Connection) -> list[Finding]:
        peer, addresses = targets[node.name]
        return list(_pings(node, link, peer, addresses))

    outcomes = connections.on_each(nodes, ping)
    result = [finding for entry in outcomes if entry.value for finding in entry.value]
    tried = sum(len(addresses) for _, addresses in targets.values())
    if not result and tried and all(entry.ok for entry in outcomes):
        text = f"devices ping those of the next node ({tried} addresses)"
        return [Finding("ok", "all nodes", text, check="device-ping")]
    return result


def _addresses(reply: NodeAnswers) -> dict[int, str]:
    node = reply.node
    if node.kind != "npu":
        return {}
    reported = dict(zip(node.devices, node.device_ips, strict=False))
    conf = parse_conf(reply.found.files.get("hccn.conf") or "")
    return {
        device: (conf | reported)[device] for device in node.devices if device in conf or device in reported
    }


def _pings(node: Node, link: Connection, peer: Node, addresses: dict[int, str]) -> Iterator[Finding]:
    tools = [node.hccn_tool] if node.hccn_tool else tool_paths(node, "hccn_tool", VENDOR_TOOL)
    commands = {}
    for device, address in addresses.items():
        argv = [[tool, "-i", str(device), "-ping", "-g", "address", address] for tool in tools]
        commands[str(device)] = asdict(Question(argv))
    reply = link.ask(Commands, "examine", {"commands": commands}).commands
    for device, address in addresses.items():
        done = reply.get(str(device))
        reason = "" if done is None else ping_failed(done)
        if reason:
            text = f"device {device} can't reach device {device} of {peer.name} ({address}): {reason}"
            remedy = "check both links, netmasks and the switch between them"
            fix = f"hccn_tool -i {device} -ping -g address {address}"
            yield Finding("bad", node.name, text, remedy, "device-ping", fix)


def ping_failed(done: CommandResult) -> str:
    """Return why a ping by hccn_tool failed; empty if it succeeded, or if the tool cannot ping."""
    if done.timed_out:
        return "hccn_tool does not answer"
    text = done.out + done.err
    loss = re.search(r"([0-9.]+) ?% packet loss", text)
    if loss:
        return f"{loss[1]} % of the packets are lost" if float(loss[1]) > 0 else ""
    lines = text.strip().splitlines()
    return (lines[-1][:200] if lines else f"it ended with {done.exit_code}") if done.exit_code else ""


EVERYWHERE = "all nodes"


def findings(answers: Sequence[NodeAnswers], quick: bool = False) -> Iterator[Finding]:
    """Yield findings from comparing the answers of all nodes; none for a single node."""
    if answers:
        yield from same_clock(answers, quick)
    if len(answers) > 1:
        yield from same_machine(answers)
        yield from same_versions(answers, quick)
        yield from same_interface(answers, quick)
    if not quick and sum(entry.node.kind == "npu" for entry in answers) > 1:
        yield from without_address(answers)


def same_machine(answers: Sequence[NodeAnswers]) -> Iterator[Finding]:
    """Yield names of the inventory that are one machine with one work folder, and that share devices."""
    groups: dict[tuple[object, ...], list[Node]] = {}
    for entry in answers:
        if entry.hello.boot_id:
            # Pods and containers of one machine have addresses or work folders of their own.
            own = tuple(sorted((name, *card.addresses) for name, card in entry.found.interfaces.items()))
            groups.setdefault((entry.hello.boot_id, entry.found.workdir, own), []).append(entry.node)
    for nodes in groups.values():
        devices = [device for node in nodes for device in node.devices]
        if len(set(devices)) < len(devices):
            names = nodeset.fold(node.name for node in nodes)
            text = f"{names} are one machine: each of its devices would get {len(nodes)} ranks"
            remedy = "keep one of the names in the inventory, or give each its own `devices`"
            yield Finding("warning", names, text, remedy, "machine", "hostname -f")


def without_address(answers: Sequence[NodeAnswers]) -> Iterator[Finding]:
    """Yield NPUs that have no address in the network of the NPUs; HCCL needs them between nodes."""
    for entry in answers:
        known = _addresses(entry)
        for device in entry.node.devices:
            done = entry.command(f"ip {device}")
            if done is not None and "addr" in done.out:
                known[device] = done.out
        absent = [device for device in entry.node.devices if device not in known]
        if absent and entry.node.kind == "npu":
            text = f"device {device_text(absent)} has no address in hccn_tool, hccn.conf and the inventory"
            remedy = "give each an address, or write `device_ips` in the inventory: HCCL needs them"
            fix = f"hccn_tool -i {absent[0]} -ip -s address A.B.C.D netmask 255.255.255.0"
            yield Finding("warning", entry.node.name, text, remedy, "device-address", fix)


def same_versions(answers: Sequence[NodeAnswers], quick: bool = False) -> Iterator[Finding]:
    """Yield versions of Python, libraries, toolkit and driver that differ, or are missing on some nodes."""
    result = {entry.node.name: versions(entry) for entry in answers}
    names = dict.fromkeys(name for entry in result.values() for name in entry)
    differ = False
    for name in names:
        groups: dict[str, list[str]] = {}
        for node, entry in result.items():
            # A Python that does not run has been reported already.
            if entry:
                groups.setdefault(entry.get(name, "none"), []).append(node)
        if len(groups) > 1:
            differ = True
            reply = "; ".join(f"{nodeset.fold(those)}: {version}" for version, those in groups.items())
            text = f"{name} is not the same everywhere: {reply}"
            yield Finding("warning", EVERYWHERE, text, "install the same version on every node", "versions")
    if names and not differ and not quick:
        first = next(entry for entry in result.values() if entry)
        reply = ", ".join(f"{name} {version}" for name, version in first.items())
        yield Finding("ok", EVERYWHERE, f"the same everywhere: {reply}", check="versions")


def same_clock(answers: Sequence[NodeAnswers], quick: bool = False) -> Iterator[Finding]:
    """Yield nodes whose clocks differ from each other, although none differs much from this machine's."""
    early, late = min(answers, key=lambda entry: entry.offset), max(answers, key=lambda entry: entry.offset)
    error = (early.delay + late.delay) / 2
    near = all(abs(entry.offset) <= MAX_SKEW + entry.delay / 2 for entry in (early, late))
    if near and late.offset - early.offset > MAX_SKEW + error:
        text = f"{early.node.name} and {late.node.name} are {late.offset - early.offset:.1f} s apart"
        yield Finding("warning", EVERYWHERE, text, "run an NTP client on all nodes", "clock")
    elif near and not quick:
        furthest, slowest = max(abs(early.offset), abs(late.offset)), max(entry.delay for entry in answers)
        text = f"clocks within {furthest:.2f} s of this machine's (round trips of {slowest * 1000:.0f} ms at most)"
        yield Finding("ok", EVERYWHERE, text, check="clock")


def same_interface(answers: Sequence[NodeAnswers], quick: bool = False) -> Iterator[Finding]:
    """Yield findings about the interface for gloo, NCCL and HCCL: from the inventory, or with one name everywhere."""
    groups: dict[str, list[str]] = {}
    for entry in answers:
        name = entry.node.interface or entry.found.place.interface
        if name:
            groups.setdefault(name, []).append(entry.node.name)
    reported = all(entry.node.interface for entry in answers)
    if len(groups) > 1 and not reported:
        reply = "; ".join(f"{nodeset.fold(those)}: {name}" for name, those in groups.items())
        text = f"the interface with the nodes' addresses has several names: {reply}"
        remedy = "write each node's own as `interface` in the inventory"
        yield Finding("warning", EVERYWHERE, text, remedy, "interface")
    elif groups and not quick:
        alike = len(groups) == 1
        reply = "; ".join(
            name if alike else f"{nodeset.fold(those)}: {name}" for name, those in groups.items()
        )
        yield Finding("ok", EVERYWHERE, f"meet on interface {reply}", check="interface")
