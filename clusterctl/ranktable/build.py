"""Build rank tables from the addresses of devices or from other tables; every result is checked by HCCL's rules."""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace

from clusterctl.errors import Fault, InputFaults, UsageError, did_you_mean
from clusterctl.inventory.cluster import Cluster, Node
from clusterctl.ranktable.finding import version_for
from clusterctl.ranktable.rules.apply import apply_rules
from clusterctl.ranktable.rules.reader import read_address
from clusterctl.ranktable.table import (
    Device,
    DeviceAddress,
    RankTable,
    Server,
    SuperPod,
    in_rank_order,
    many_objects,
    recounted,
    renumbered,
    super_pods_of,
)

_POINTER = re.compile(r"\A/server_list/([0-9]+)(?:/device/([0-9]+))?")
_OTHER = re.compile(r"(?:(?<= at )|(?<= and ))/(?:server_list|rank_list)/[0-9]{1,9}(?:/[a-z_0-9]+)*")
SORTS = ("given", "address", "name", "inventory")


@many_objects()
def checked(
    table: RankTable,
    names: Sequence[str] = (),
    hardware: str | None = None,
    where: Callable[[str], str] | None = None,
) -> RankTable:
    """Return the table if it breaks no rule of HCCL; raise InputFaults otherwise.

    Faults name the node of a server from `names`, or the place that `where` returns for a JSON pointer.
    """
    findings = apply_rules(table.as_json(), hardware).reader.findings
    if findings:
        place_of = where or (lambda pointer: _named(pointer, names))
        raise InputFaults(
            [Fault(place_of(each.pointer), _translate(each.what, place_of), each.remedy) for each in findings]
        )
    return table


def _translate(text: str, place_of: Callable[[str], str]) -> str:
    """Return the text of a finding with the JSON pointers in it replaced by their places."""

    def place(found: re.Match[str]) -> str:
        try:
            return place_of(found[0])
        except (IndexError, ValueError):
            # The table has a text that looks like a pointer.
            return found[0]

    return _OTHER.sub(place, text)


def _named(pointer: str, names: Sequence[str]) -> str:
    server = _steps(pointer)[0]
    return f"{names[server]} {pointer}" if 0 <= server < len(names) else pointer or "rank table"


def _steps(pointer: str) -> tuple[int, int]:
    """Return the numbers in /server_list/N/device/M; -1 for a missing one."""
    match = _POINTER.match(pointer)
    return (int(match[1]), int(match[2] or -1)) if match else (-1, -1)


# -- from the addresses of devices


def complete(
    entries: Sequence[tuple[Node, Sequence[DeviceAddress]]], which: Sequence[int] | None
) -> tuple[list[tuple[Node, list[DeviceAddress]]], list[str]]:
    """Return the nodes with their devices that have an address, and a sentence for each one left out."""
    complete_entries, notes = [], []
    for node, found in entries:
        present = {address.device_id for address in found}
        absent = [device for device in (node.devices if which is None else which) if device not in present]
        if not found:
            notes.append(f"{node.name}: no device has an address")
        elif absent:
            notes.append(f"{node.name}: no address: device {', '.join(map(str, absent))}")
        if found:
            complete_entries.append((node, list(found)))
    if not complete_entries:
        raise InputFaults([Fault(node.name, "no device has an address") for node, _ in entries])
    return complete_entries, notes


@many_objects()
def build(entries: Sequence[tuple[Node, Sequence[DeviceAddress]]], hardware: str | None = None) -> RankTable:
    """Return one table for nodes and their devices, in the order of the ranks; raise InputFaults with all faults.

    The version is 1.2 for a3, with the super pods of the inventory or of the nodes' answers; 1.0 otherwise.
    """
    version = version_for(hardware)
    if version == "2.0":
        raise UsageError("a table for a5 has levels, not addresses", "build it from the nodes or from a plan")
    faults: list[Fault] = []
    servers: list[Server] = []
    pods: dict[str, list[str]] = {}
    rank = 0
    for node, addresses in entries:
        faults += _node_faults(node, addresses, version)
        devices = []
        for address in addresses:
            super_id = address.super_device_id if version == "1.2" else None
            devices.append(Device(address.device_id, address.ip, rank, super_id))
            rank += 1
        servers.append(Server(node.server_id or node.address, tuple(devices)))
        if version == "1.2" and addresses:
            pods.setdefault(_pod(node, addresses), []).append(servers[-1].server_id)
    if not entries:
        faults.append(Fault("rank table", "no nodes", "choose at least one"))
    if faults:
        raise InputFaults(faults)
    table = RankTable(
        tuple(servers), version, tuple(SuperPod(name, tuple(ids)) for name, ids in pods.items())
    )
    return checked(table, [node.name for node, _ in entries], hardware)


def _pod(node: Node, addresses: Sequence[DeviceAddress]) -> str:
    return node.super_pod or next((address.super_pod_id for address in addresses if address.super_pod_id), "")


def _node_faults(node: Node, addresses: Sequence[DeviceAddress], version: str) -> Iterator[Fault]:
    if not addresses:
        yield Fault(node.name, "has no devices for a rank table", "give it `devices` in the inventory")
    server_id = node.server_id or node.address
    if loops_back(server_id):
        problem = f"its server_id would be {server_id}, which on every other node means that node itself"
        yield Fault(node.name, problem, "set the node's `address` or `server_id` in the inventory")
    for address in addresses:
        if not address.ip:
            problem = f"the device {address.device_id} has no address"
            yield Fault(node.name, problem, "set it with hccn_tool, or as `device_ips` in the inventory")
    if version != "1.2":
        return
    for address in addresses:
        if not address.super_device_id:
            problem = f"the device {address.device_id} has no super-device id, which version 1.2 needs"
            yield Fault(
                node.name, problem, "`npu-smi info -t spod-info -i CARD -c CHIP` on that node shows it"
            )
    if addresses and not _pod(node, addresses):
        yield Fault(node.name, "is in no super pod", "set `super_pod` in the inventory")
    found = {address.super_pod_id for address in addresses if address.super_pod_id}
    if len(found) > 1 and not node.super_pod:
        problem = f"its devices are in the super pods {sorted(found)}"
        yield Fault(node.name, problem, "a node is in one super pod: set `super_pod` in the inventory")


def loops_back(server_id: str) -> bool:
    """Return whether a server_id is a loopback address or name."""
    try:
        return ipaddress.ip_address(server_id).is_loopback
    except ValueError:
        return server_id in ("localhost", "localhost.localdomain")


# -- from several tables


@many_objects()
def merge(tables: Sequence[tuple[str, RankTable]], hardware: str | None = None) -> RankTable:
    """Return one table from several, given with their file names; ranks follow the order of the tables."""
    if not tables:
        raise UsageError("no tables to merge", "clusterctl ranktable merge FILE...")
    faults = [] if _all_different([table for _, table in tables]) else list(_merge_faults(tables))
    if faults:
        raise InputFaults(faults)
    first = tables[0][1]
    servers = renumbered(server for _, table in tables for server in in_rank_order(table))
    pods = super_pods_of(table for _, table in tables)
    merged = recounted(replace(first, servers=servers, super_pods=pods))
    return checked(merged, (), hardware, lambda pointer: _origin(tables, pointer))


def _origin(tables: Sequence[tuple[str, RankTable]], pointer: str) -> str:
    """Return the file, and the pointer in it, for a pointer into the merged table."""
    number, index = _steps(pointer)
    for name, table in tables:
        if 0 <= number < len(table.servers):
            server = in_rank_order(table)[number]
            ids = [each.server_id for each in table.servers]
            own = ids.index(server.server_id)
            was = f"/server_list/{own}"
            if index >= 0:
                was += f"/device/{table.servers[own].devices.index(server.devices[index])}"
            return f"{name} {was}{_POINTER.sub('', pointer)}"
        number -= len(table.servers)
    return f"the merged table {pointer}"


def in_order(
    tables: Sequence[tuple[str, RankTable]], how: str, inventory: Mapping[str, int] | None = None
) -> list[tuple[str, RankTable]]:
    """Return tables in the given order, or sorted by the server_id of their first server.

    `how` is given, address, name, or inventory (the position of the server_id in an inventory).
    """
    if how not in SORTS:
        raise UsageError(f"unknown order {how!r}", did_you_mean(how, SORTS) or f"one of {', '.join(SORTS)}")
    if how == "given":
        return list(tables)
    if not all(table.names_servers for _, table in tables):
        raise UsageError(f"version 2.0 names no servers to sort by {how}", "give the files in their order")
    if how == "inventory":
        return _as_inventory(tables, inventory or {})
    key = _address_order if how == "address" else _name_order
    return sorted(tables, key=lambda item: key(in_rank_order(item[1])[0].server_id))


def server_places(cluster: Cluster) -> dict[str, int]:
    """Return the position of each server_id, address and name in an inventory."""
    places: dict[str, int] = {}
    for number, node in enumerate(cluster.nodes):
        for known in (node.server_id, node.address, node.host, node.name):
            places.setdefault(known, number)
    return places


def named_by(cluster: Cluster, servers: Sequence[str]) -> dict[str, str]:
    """Return the servers by their names in an inventory, without those that it does not have."""
    places = server_places(cluster)
    return {cluster.nodes[places[server]].name: server for server in servers if server in places}


def _as_inventory(
    tables: Sequence[tuple[str, RankTable]], inventory: Mapping[str, int]
) -> list[tuple[str, RankTable]]:
    unknown = [
        Fault(f"{name} /server_list/{number}/server_id", f"{server.server_id} is not in the inventory")
        for name, table in tables
        for number, server in enumerate(table.servers)
        if server.server_id not in inventory
    ]
    if unknown:
        raise InputFaults(unknown, "give a node that `server_id` or `address` in the inventory")
    return sorted(tables, key=lambda item: inventory[in_rank_order(item[1])[0].server_id])


def _name_order(server_id: str) -> list[tuple[int, str]]:
    """Return a sort key that puts node2 before node10."""
    return [(len(part), part) if part.isdigit() else (0, part) for part in re.split(r"([0-9]+)", server_id)]


def _address_order(server_id: str) -> tuple[int, int, list[tuple[int, str]]]:
    try:
        address = ipaddress.ip_address(server_id)
    except ValueError:
        # Names after addresses.
        return 9, 0, _name_order(server_id)
    return address.version, int(address), []


def _all_different(tables: Sequence[RankTable]) -> bool:
    """Return whether all ids and addresses are different, as nearly always; other spellings are compared later."""
    servers = [server for table in tables for server in table.servers]
    texts = [device.device_ip for server in servers for device in server.devices if device.device_ip]
    return (
        {table.version for table in tables} == {"1.0"}
        and len({server.server_id for server in servers}) == len(servers)
        and len(set(texts)) == len(texts)
        and not any("," in text for text in texts)
    )


def _merge_faults(tables: Sequence[tuple[str, RankTable]]) -> Iterator[Fault]:
    first_name, first = tables[0]
    seen: dict[tuple[str, str], tuple[str, str]] = {}
    for name, table in tables:
        if table.version != first.version:
            problem = f"version {table.version}, and {first_name} has {first.version}"
            yield Fault(
                f"{name} /version", problem, "`clusterctl ranktable convert` them to one version first"
            )
        pod_of = {server: pod.super_pod_id for pod in table.super_pods for server in pod.server_ids}
        for number, server in enumerate(table.servers):
            at = f"/server_list/{number}"
            if table.names_servers:
                twice = list(_once(seen, "server", server.server_id, name, f"{at}/server_id"))
                yield from twice
                if twice:
                    # Its devices would repeat the same fault.
                    continue
            for index, device in enumerate(server.devices):
                here = f"{at}/device/{index}" if table.names_servers else f"rank {device.rank_id}"
                yield from _device_faults(seen, device, name, here, pod_of.get(server.server_id))


def _device_faults(
    seen: dict[tuple[str, str], tuple[str, str]], device: Device, name: str, here: str, pod: str | None
) -> Iterator[Fault]:
    key = "device_ip" if device.device_ip else "level_list"
    for address in device.addresses:
        text = read_address(address) if device.device_ip else address
        yield from _once(seen, "address", text, name, f"{here}/{key}")
    if device.super_device_id is not None:
        super_id = f"{device.super_device_id} of super pod {pod}"
        yield from _once(seen, "super-device id", super_id, name, f"{here}/super_device_id")


def _once(
    seen: dict[tuple[str, str], tuple[str, str]], noun: str, value: str, name: str, pointer: str
) -> Iterator[Fault]:
    if (noun, value) in seen:
        problem = f"the {noun} {value} is also at {' '.join(seen[noun, value])}"
        yield Fault(f"{name} {pointer}", problem, f"each {noun} may be in one table only")
    else:
        seen[noun, value] = (name, pointer)
