"""Convert rank tables in the forms of operators and services to the form that HCCL reads.

`global-ranktable` wraps several lists of servers into `server_group_list`; a prefill/decode table lists devices
flat in `prefill_device_list` and `decode_device_list`. HCCL reads neither. (A third operator only adds keys,
`container_ip`, `host_ip` and `hardware_type`, which HCCL ignores; such a table is not changed.)
A part of another shape than expected is not changed either, so that the rules report it.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from clusterctl.json_types import JsonObject

FLAT = ("prefill_device_list", "decode_device_list")


@dataclass(frozen=True)
class Dialect:
    """A table in the form of HCCL, and the place of each part in the file."""

    name: str
    value: JsonObject
    places: dict[str, str] = field(default_factory=dict)

    def pointer(self, pointer: str) -> str:
        """Return the pointer into the file for a pointer into the value."""
        head, tail = pointer, ""
        while head:
            if head in self.places:
                return self.places[head] + tail
            head, _, step = head.rpartition("/")
            tail = f"/{step}{tail}"
        return pointer


def recognized(value: JsonObject) -> Dialect | None:
    """Return the converted table of a dialect; None if the table is in a form of HCCL."""
    if "server_list" in value:
        return None
    if isinstance(value.get("server_group_list"), list):
        return _grouped(value)
    if any(isinstance(value.get(key), list) for key in FLAT):
        return _flat(value)
    return None


def _grouped(value: JsonObject) -> Dialect:
    """Return the servers of all groups; groups without devices (a coordinator, a controller) have no ranks."""
    servers: list[Any] = []
    places: dict[str, str] = {"/server_list": "/server_group_list"}
    sizes = []
    for number, group in enumerate(value["server_group_list"]):
        listed = group.get("server_list") if isinstance(group, dict) else None
        before = len(servers)
        for index, server in enumerate(listed if isinstance(listed, list) else ()):
            if isinstance(server, dict) and "device" not in server:
                continue
            places[f"/server_list/{len(servers)}"] = f"/server_group_list/{number}/server_list/{index}"
            servers.append(server)
        sizes.append(servers[before:])
    if len([group for group in sizes if group]) > 1 and all(_begins_anew(group) for group in sizes):
        servers = _numbered(servers)
    rest = {key: inner for key, inner in value.items() if key not in ("server_group_list", "server_count")}
    return Dialect("global-ranktable", {**rest, "server_list": servers}, places)


def _begins_anew(servers: list[Any]) -> bool:
    """Return whether the ranks of a group are 0 to N-1, so that each group is a job of its own."""
    if not all(isinstance(server, dict) and isinstance(server["device"], list) for server in servers):
        return False
    devices = [device for server in servers for device in server["device"]]
    ranks = [device.get("rank_id") if isinstance(device, dict) else None for device in devices]
    texts = {rank for rank in ranks if isinstance(rank, str)}
    return len(texts) == len(ranks) and texts == {str(rank) for rank in range(len(ranks))}


def _numbered(servers: list[Any]) -> list[Any]:
    """Return the same servers with ranks from 0 in their order, since each group counts from 0."""
    result, rank = [], 0
    for server in servers:
        devices = []
        for device in server["device"]:
            devices.append({**device, "rank_id": str(rank)})
            rank += 1
        result.append({**server, "device": devices})
    return result


def _flat(value: JsonObject) -> Dialect:
    """Return the servers of the flat lists, prefill before decode; devices without a rank get one in this order."""
    servers: dict[str, JsonObject] = {}
    numbers: dict[str, int] = {}
    places: dict[str, str] = {"/server_list": ""}
    rank = 0
    for key in FLAT:
        listed = value.get(key)
        for index, device in enumerate(listed if isinstance(listed, list) else ()):
            entry = device if isinstance(device, dict) else {"device_id": device}
            name = entry.get("server_id")
            known = name if isinstance(name, str) else f"{key} {index}"
            number = numbers.setdefault(known, len(numbers))
            head = {} if name is None else {"server_id": name}
            server = servers.setdefault(known, {**head, "device": []})
            places.setdefault(f"/server_list/{number}", f"/{key}/{index}")
            places[f"/server_list/{number}/device/{len(server['device'])}"] = f"/{key}/{index}"
            own = {inner: detail for inner, detail in entry.items() if inner != "server_id"}
            server["device"].append({"rank_id": str(rank), **own})
            rank += 1
    dropped = {*FLAT, "server_count"}
    rest = {key: inner for key, inner in value.items() if key not in dropped}
    return Dialect("prefill/decode", {**rest, "server_list": list(servers.values())}, places)
