"""Read and write plan.yaml, a rank table that people write before any node is up.

for: a2                                # 910a, a2: version 1.0; a3: version 1.2; a5: version 2.0
nodes:                                 # in the order of the ranks
  node[1-4]:                           # {n} is the number of a node; {n+139} and {2n+4} are computed from it
    server_id: "10.155.111.{n+139}"
    devices: "[0,8)"                   # in the order of the ranks
    device_ips: ["192.1.27.{2n+4}", ...]
    super_device_ids: [...]            # a3
    super_pod: "0"                     # a3
    levels: [[{net_layer: 0, ...}]]    # a5: a level_list for each device
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from clusterctl.document import Document, Section, load_document
from clusterctl.errors import Fault, InputFaults, UsageError
from clusterctl.inventory import nodeset
from clusterctl.inventory.cluster import Cluster, parse_devices
from clusterctl.ranktable.build import checked, loops_back
from clusterctl.ranktable.finding import GUESS, hardware_named
from clusterctl.ranktable.table import (
    UNREAD,
    Device,
    RankTable,
    Server,
    SuperPod,
    in_rank_order,
    many_objects,
    recounted,
)
from clusterctl.wire.fields import Key

MAX_SERVERS = 50_000
_SUM = re.compile(r"\{([0-9]{0,10})n([+-][0-9]{1,10})?\}")
_KEYS = {"device_id": "devices", "device_ip": "device_ips", "super_device_id": "super_device_ids"}


@dataclass(frozen=True)
class _Place:
    """A server of the table and its place in the plan."""

    key: Key
    devices: tuple[Device, ...]
    server_id: str
    super_pod: str


def load_plan(path: Path) -> RankTable:
    """Return the table that a plan describes; raise InputFaults with every fault and its line."""
    return plan_table(load_document(path))


@many_objects()
def plan_table(document: Document) -> RankTable:
    """Return the table in a parsed plan."""
    top = Section(document)
    hardware = top.take_text("for", "a2")
    try:
        version = hardware_named(hardware).versions[-1]
    except UsageError as error:
        top.fault("for", error.message, error.hint)
        version = "1.0"
    places = list(_places(document, top, version))
    top.done()
    if top.faults:
        # A line for many nodes has the same fault many times.
        raise InputFaults(list(dict.fromkeys(top.faults)), _FORM)
    servers = tuple(Server(server.server_id, server.devices) for server in places)
    pods: dict[str, list[str]] = {}
    for server in places if version == "1.2" else ():
        pods.setdefault(server.super_pod, []).append(server.server_id)
    table = RankTable(servers, version, tuple(SuperPod(name, tuple(ids)) for name, ids in pods.items()))
    try:
        return recounted(checked(table, (), hardware, lambda pointer: document.where(_key(places, pointer))))
    except InputFaults as error:
        raise InputFaults(list(dict.fromkeys(error.faults)), _FORM) from None


_FORM = "rank_tables/plan.yaml is a commented example"


def _places(document: Document, top: Section, version: str) -> Iterator[_Place]:
    nodes = top.section("nodes")
    if not nodes.value:
        top.fault("nodes", "lists no nodes", "nodes: {node1: {server_id: 10.0.0.1, device_ips: [...]}}")
    rank = count = 0
    seen: set[str] = set()
    for pattern in nodes.value:
        section = nodes.section(pattern)
        try:
            names = nodeset.expand(pattern)
        except UsageError as error:
            nodes.fault(pattern, error.message, error.hint)
            continue
        count += len(names)
        if count > MAX_SERVERS:
            nodes.fault(pattern, f"more than {MAX_SERVERS:,} nodes", "a shorter range")
            return
        twice = next((name for name in names if name in seen), None)
        if twice:
            nodes.fault(pattern, f"the node {twice} is listed twice", "keep one of them")
        seen.update(names)
        values = _read_pattern(section, version)
        for name in names:
            server = _place(section, name, values, rank)
            if len(nodes.value) * len(names) > 1 and loops_back(server.server_id):
                problem = f"{server.server_id} means every node itself"
                section.fault("server_id", problem, "an address that the other nodes can reach")
            yield server
            rank += len(values.devices)


@dataclass(frozen=True)
class _Pattern:
    """The values under one pattern of the plan, which are the same for all of its nodes."""

    devices: tuple[int, ...]
    server_id: str
    super_pod: str
    device_ips: list[object]
    super_device_ids: list[object] | None
    """None before version 1.2; the same for `levels` before 2.0."""
    levels: list[object] | None
    local_ids: list[object]


def _read_pattern(section: Section, version: str) -> _Pattern:
    """Return the values of one pattern; the section records what is wrong."""
    names = {"1.2": ("device_ips", "super_device_ids"), "2.0": ("levels", "local_ids")}
    lists = {key: section.take(key, list) or [] for key in names.get(version, ("device_ips",))}
    pattern = _Pattern(
        devices=_devices(section, len(next((value for value in lists.values() if value), ()))),
        server_id=section.take_text("server_id"),
        super_pod=section.take_text("super_pod"),
        device_ips=lists.get("device_ips", []),
        super_device_ids=lists.get("super_device_ids"),
        levels=lists.get("levels"),
        local_ids=lists.get("local_ids", []),
    )
    count = len(pattern.devices)
    for key, value in lists.items():
        if count and value and len(value) != count:
            section.fault(
                key, f"{len(value)} {key} for {count} devices", "one for each device, in the same order"
            )
    if version == "1.2" and not pattern.super_pod:
        section.fault("super_pod", "'super_pod' is missing, which a3 needs", "the id that npu-smi shows")
    for key in ("super_device_ids", "levels"):
        if key in lists and not lists[key]:
            section.fault(key, f"{key!r} is missing, which version {version} needs", "one for each device")
    section.done()
    return pattern


def _devices(section: Section, default: int) -> tuple[int, ...]:
    section.taken.append("devices")
    try:
        ids = parse_devices(section.value.get("devices", default))
    except UsageError as error:
        section.fault("devices", error.message, error.hint)
        return ()
    if not ids:
        section.fault("devices", "no devices", 'as in "[0,8)", or a list of device_ips')
    return ids


def _place(section: Section, name: str, pattern: _Pattern, rank: int) -> _Place:
    return _Place(
        section.path,
        tuple(_device(pattern, name, index, rank + index) for index in range(len(pattern.devices))),
        _fill(pattern.server_id or name, name),
        _fill(pattern.super_pod, name),
    )


def _device(pattern: _Pattern, name: str, index: int, rank: int) -> Device:
    """Return the device at an index of the pattern's lists, for one node."""
    super_ids, levels = pattern.super_device_ids, pattern.levels
    local_ids = pattern.local_ids or list(pattern.devices)
    return Device(
        pattern.devices[index],
        _fill(_at(pattern.device_ips, index), name),
        rank,
        _fill(_at(super_ids, index), name) if super_ids is not None else None,
        local_id=_local_id(local_ids, index) if levels is not None else None,
        levels=_filled(levels[index : index + 1], name) if levels is not None else (),
    )


def _local_id(values: Sequence[Any], index: int) -> Any:
    """Return the local id as the plan gives it; the check of the table reports a wrong type."""
    return values[index] if index < len(values) else None


def _at(values: Sequence[object], index: int) -> str:
    return str(values[index]) if index < len(values) else ""


def _filled(value: Any, name: str) -> tuple[Any, ...]:
    """Return the level_list in a list of one, with its texts filled."""
    return tuple(_deep(value[0], name)) if value and isinstance(value[0], list) else ()


def _deep(value: Any, name: str) -> Any:
    if isinstance(value, str):
        return _fill(value, name)
    if isinstance(value, list):
        return [_deep(item, name) for item in value]
    return {key: _deep(item, name) for key, item in value.items()} if isinstance(value, dict) else value


def _fill(text: str, name: str) -> str:
    """Replace `{n}`, `{n+139}` and `{2n+4}` by the number at the end of the node's name, and `{node}` by the name."""
    if "{" not in text:
        return text
    digits = re.search(r"([0-9]{1,15})[^0-9]*\Z", name)
    if digits is None:
        return text.replace("{node}", name)
    number = int(digits[1])
    filled = _SUM.sub(lambda found: str(int(found[1] or 1) * number + int(found[2] or 0)), text)
    return filled.replace("{node}", name)


def _key(places: Sequence[_Place], pointer: str) -> Key:
    """Return the place in the plan for a JSON pointer into its table."""
    steps = pointer.split("/")[1:]
    if steps[:1] == ["server_list"] and len(steps) > 1:
        key: Key = places[int(steps[1])].key
        if len(steps) > 4 and steps[4] in _KEYS:
            return (*key, _KEYS[steps[4]], int(steps[3]))
        return (*key, *steps[2:3])
    if steps[:1] == ["rank_list"] and len(steps) > 1:
        rank = int(steps[1])
        for server in places:
            if rank < len(server.devices):
                inner = tuple(int(step) if step.isdigit() else step for step in steps[3:])
                return (*server.key, "levels", rank, *inner)
            rank -= len(server.devices)
    return ("nodes",)


# -- from a table to a plan


def losses(table: RankTable) -> list[str]:
    """Return what a plan cannot hold of this table, in words."""
    extras = set(table.extras)
    for server in table.servers:
        extras |= server.extras.keys()
        extras |= {key for device in server.devices for key in device.extras}
    for pod in table.super_pods:
        extras |= pod.extras.keys()
        extras |= {key for more in pod.server_extras.values() for key in more}
    if table.version == "1.0" and table.super_pods:
        extras.add("super_pod_list")
    lost = [f"the keys {', '.join(sorted(extras))}"] if extras else []
    if any(server.host_nic_ip not in (None, UNREAD) for server in table.servers):
        lost.append("host_nic_ip")
    if any("{" in server.server_id for server in table.servers):
        lost.append("a brace in a server_id, which begins a placeholder in a plan")
    ranks = [device.rank_id for server in in_rank_order(table) for device in server.devices]
    if ranks != sorted(ranks):
        lost.append("the order of ranks that alternate between servers")
    return lost


def render_plan(table: RankTable, source: str = "a rank table", lossy: bool = False) -> str:
    """Return a table as the text of a plan; raise InputFaults for what a plan cannot hold, unless `lossy`."""
    lost = losses(table)
    if lost and not lossy:
        faults = [Fault(source, f"a plan cannot hold {each}") for each in lost]
        raise InputFaults(faults, "--lossy leaves it out")
    lines = ["# A plan of a rank table, in the order of its ranks: clusterctl ranktable build --from FILE"]
    lines += [f"for: {GUESS[table.version]}", "nodes:"]
    pods = {name: pod.super_pod_id for pod in table.super_pods for name in pod.server_ids}
    for number, server in enumerate(in_rank_order(table)):
        lines += [f"  node{number}:", *(f"    {line}" for line in _lines_of(server, table, pods))]
    return "\n".join(lines) + "\n"


def _lines_of(server: Server, table: RankTable, pods: dict[str, str]) -> Iterator[str]:
    devices = server.devices
    if table.names_servers:
        yield f"server_id: {json.dumps(server.server_id)}"
    yield f"devices: {[device.device_id for device in devices]}"
    if any(device.device_ip for device in devices):
        yield f"device_ips: {json.dumps([device.device_ip for device in devices])}"
    if table.version == "1.2":
        yield f"super_device_ids: {json.dumps([device.super_device_id for device in devices])}"
        yield f"super_pod: {json.dumps(pods[server.server_id])}"
    if table.version == "2.0":
        yield f"local_ids: {[device.local_id for device in devices]}"
        yield "levels:"
        yield from (f"  - {json.dumps(list(device.levels))}" for device in devices)


def skeleton(cluster: Cluster) -> str:
    """Return a plan for the nodes of a hostfile, with empty addresses to fill in."""
    lines = [
        "# Fill in device_ips, one for each device: `hccn_tool -i N -ip -g` on the node shows them",
        "for: a2",
    ]
    lines.append("nodes:")
    for number, node in enumerate(cluster.nodes):
        ips = list(node.device_ips) or [""] * len(node.devices)
        lines += [f"  node{number}:", f"    server_id: {json.dumps(node.server_id or node.address)}"]
        lines += [f"    devices: {list(node.devices)}", f"    device_ips: {json.dumps(ips)}"]
    return "\n".join(lines) + "\n"
