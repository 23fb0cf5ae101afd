"""Build a table of version 2.0 from the file in which each A5 node describes its devices' networks.

HCCL reads the same file when it starts without a table: the entry of a device, with its rank id, is the entry of the
table.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

from clusterctl.errors import InputFaults, WorkFailed
from clusterctl.inventory.cluster import Node
from clusterctl.ranktable.build import checked
from clusterctl.ranktable.devices import TIMEOUT
from clusterctl.ranktable.strict_json import read_json
from clusterctl.ranktable.table import Device, RankTable, counted
from clusterctl.transport.connection import Connection

ROOT_INFO = "/etc/hccl_rootinfo.json"
_KEYS = {"rank_id", "device_id", "local_id", "level_list"}


def read_root_info(
    connection: Connection, node: Node, devices: Sequence[int], skip_incomplete: bool
) -> tuple[Device, ...]:
    """Return the devices as the node's file describes them, all with rank 0; raise WorkFailed for a missing one."""
    done = connection.run(["cat", ROOT_INFO], timeout=TIMEOUT)
    remedy = "the driver's tools write it; or write a plan: clusterctl ranktable build --from plan.yaml"
    remedy += "\na job with `rank_table: never` starts without a table: HCCL then asks the driver"
    if done.exit_code:
        problem = f"{node.name}: no {ROOT_INFO}, from which a table for a5 takes the networks of each device"
        raise WorkFailed(problem, remedy)
    value, faults = read_json(done.stdout)
    entries = value.get("rank_list") if isinstance(value, dict) else None
    if faults or not isinstance(entries, list) or str(value.get("version")) != "2.0":
        problem = faults[0].what if faults else 'not of version "2.0" with a rank_list'
        raise WorkFailed(f"{node.name}: {ROOT_INFO}: {problem}", remedy)
    named = [
        entry for entry in entries if isinstance(entry, dict) and isinstance(entry.get("device_id"), int)
    ]
    known = {entry["device_id"]: entry for entry in named}
    absent = [device for device in devices if device not in known]
    if absent and not skip_incomplete:
        which = f"device{'s' * (len(absent) > 1)} {', '.join(map(str, absent))}"
        raise WorkFailed(f"{node.name}: {ROOT_INFO} has no entry for {which}", remedy)
    return tuple(_device(device, known[device]) for device in devices if device in known)


def _device(device: int, entry: Mapping[str, object]) -> Device:
    extras = {key: value for key, value in entry.items() if key not in _KEYS}
    levels, local = entry.get("level_list"), entry.get("local_id")
    networks = tuple(levels) if isinstance(levels, list) else ()
    return Device(device, "", 0, None, extras, local if isinstance(local, int) else None, networks)


def table_of(entries: Sequence[tuple[Node, Sequence[Device]]], hardware: str | None) -> RankTable:
    """Return one table for nodes and their devices, in the order of the ranks; raise InputFaults with all faults."""
    places = [(node, device) for node, devices in entries for device in devices]
    ranks = [
        Device(device.device_id, "", rank, None, device.extras, device.local_id, device.levels)
        for rank, (_, device) in enumerate(places)
    ]

    def where(pointer: str) -> str:
        found = re.match(r"/rank_list/([0-9]+)(.*)", pointer)
        if found is None or int(found[1]) >= len(places):
            return pointer or "rank table"
        node, device = places[int(found[1])]
        return f"{node.name} device {device.device_id} {found[2]}".strip()

    if not ranks:
        raise InputFaults([])
    return checked(RankTable(counted(ranks), "2.0"), (), hardware, where)
