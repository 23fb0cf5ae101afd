"""The class RankTable, and its text in the layout of the vendor's tools: strings in versions 1.x, numbers in 2.0."""

from __future__ import annotations

import gc
import json
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

from clusterctl.text import device_text

# The host_nic_ip that the vendor's tools write; HCCL does not read it.
UNREAD = "reserve"


@dataclass(frozen=True)
class Device:
    """One device, which is one rank."""

    device_id: int
    """The physical id on its server."""
    device_ip: str
    """Empty if the table has none, and in version 2.0, where the levels have the addresses."""
    rank_id: int
    super_device_id: str | None = None
    extras: Mapping[str, Any] = field(default_factory=dict, hash=False)
    """Other keys, unchanged."""
    local_id: int | None = None
    """Version 2.0: its number on its server."""
    levels: tuple[Mapping[str, Any], ...] = field(default=(), hash=False)
    """Version 2.0: its network addresses by layer, nearest first, as in level_list."""

    @property
    def addresses(self) -> tuple[str, ...]:
        """The addresses at which other devices reach it, in the order of the table."""
        if self.device_ip:
            return tuple(self.device_ip.split(","))
        found = (address["addr"] for level in self.levels for address in level["rank_addr_list"])
        return tuple(dict.fromkeys(address for address in found if address))


@dataclass(frozen=True)
class Server:
    """One node and its devices."""

    server_id: str
    devices: tuple[Device, ...]
    host_nic_ip: str | None = UNREAD
    extras: Mapping[str, Any] = field(default_factory=dict, hash=False)


@dataclass(frozen=True)
class SuperPod:
    """Servers (by id) that share the A3 network of a super pod."""

    super_pod_id: str
    server_ids: tuple[str, ...]
    extras: Mapping[str, Any] = field(default_factory=dict, hash=False)
    """Other keys, unchanged."""
    server_extras: Mapping[str, Mapping[str, Any]] = field(default_factory=dict, hash=False)
    """Other keys of the servers, by server_id; only for servers that have some."""


@dataclass(frozen=True)
class RankTable:
    """A rank table of version 1.0, 1.2 or 2.0."""

    servers: tuple[Server, ...]
    """Version 2.0 has no servers; `counted` derives them from the ranks."""
    version: str = "1.0"
    super_pods: tuple[SuperPod, ...] = ()
    status: str = "completed"
    extras: Mapping[str, Any] = field(default_factory=dict, hash=False)

    @property
    def ranks(self) -> int:
        return sum(len(server.devices) for server in self.servers)

    @property
    def names_servers(self) -> bool:
        """Whether the table itself has the server_ids; in version 2.0 they are made up."""
        return self.version != "2.0"

    def by_rank(self) -> list[tuple[Server, Device]]:
        """Return the server and the device of each rank, rank 0 first."""
        places = [(server, device) for server in self.servers for device in server.devices]
        return sorted(places, key=lambda place: place[1].rank_id)

    def rows(self) -> list[dict[str, object]]:
        """Return one row for each rank, rank 0 first; with super pods if the table has some."""
        pods = {name: pod.super_pod_id for pod in self.super_pods for name in pod.server_ids}
        rows: list[dict[str, object]] = []
        for server, device in self.by_rank():
            row = {"rank": device.rank_id, "server": server.server_id}
            row |= {"device": device.device_id, "address": ",".join(device.addresses)}
            if pods:
                pod = pods.get(server.server_id)
                row |= {"super_device": device.super_device_id, "super_pod": pod}
            if device.local_id is not None:
                row |= {"local": device.local_id}
            rows.append(row)
        return rows

    def server_rows(self) -> list[dict[str, str]]:
        """Return one row for each server, the one with rank 0 first."""
        pods = {name: pod.super_pod_id for pod in self.super_pods for name in pod.server_ids}
        rows = []
        for server in in_rank_order(self):
            addresses = [address for device in server.devices for address in device.addresses]
            shown = addresses if len(addresses) < 3 else [addresses[0], "...", addresses[-1]]
            row = {
                "ranks": device_text([device.rank_id for device in server.devices]),
                "server": server.server_id,
                "devices": device_text([device.device_id for device in server.devices]),
                "addresses": " ".join(shown),
            }
            rows.append(row | ({"super_pod": pods.get(server.server_id, "")} if pods else {}))
        return rows

    def as_json(self) -> dict[str, object]:
        """Return the table as the JSON value that HCCL reads."""
        if self.version == "2.0":
            ranks = [_rank_json(device) for _, device in self.by_rank()]
            count = {"version": self.version, "rank_count": len(ranks), "status": self.status}
            return {**count, "rank_list": ranks, **self.extras}
        value: dict[str, object] = {
            "version": self.version,
            "server_count": str(len(self.servers)),
            "server_list": [_server_json(server) for server in self.servers],
        }
        return {**value, **self._pods_json(), "status": self.status, **self.extras}

    def _pods_json(self) -> dict[str, object]:
        pods = [_pod_json(pod) for pod in self.super_pods]
        return {"super_pod_list": pods} if pods else {}

    def render(self) -> str:
        """Return the text of the table, with the key order, indent and types of the vendor's tools."""
        if self.version == "2.0":
            return json.dumps(self.as_json(), indent=4) + "\n"
        servers = ",\n".join(_server_text(server) for server in self.servers)
        head = f'{{\n    "version": {_text(self.version)},\n    "server_count": "{len(self.servers)}",\n'
        rest = {**self._pods_json(), "status": self.status, **self.extras}
        return f'{head}    "server_list": [\n{servers}\n    ]{_tail(rest, 0)}}}\n'


def _rank_json(device: Device) -> dict[str, object]:
    value: dict[str, object] = {"rank_id": device.rank_id, "local_id": device.local_id}
    return {**value, "device_id": device.device_id, "level_list": list(device.levels), **device.extras}


def _pod_json(pod: SuperPod) -> dict[str, object]:
    servers = [{"server_id": name, **pod.server_extras.get(name, {})} for name in pod.server_ids]
    return {"super_pod_id": pod.super_pod_id, "server_list": servers, **pod.extras}


def _server_json(server: Server) -> dict[str, object]:
    value: dict[str, object] = {
        "server_id": server.server_id,
        "device": [_device_json(device) for device in server.devices],
    }
    if server.host_nic_ip is not None:
        value["host_nic_ip"] = server.host_nic_ip
    return {**value, **server.extras}


def _device_json(device: Device) -> dict[str, object]:
    value: dict[str, object] = {"device_id": str(device.device_id)}
    if device.device_ip:
        value["device_ip"] = device.device_ip
    if device.super_device_id is not None:
        value["super_device_id"] = device.super_device_id
    value["rank_id"] = str(device.rank_id)
    return {**value, **device.extras} if device.extras else value


@contextmanager
def many_objects() -> Iterator[None]:
    """Pause the garbage collector: a table has no reference cycles, and the search takes a third of the time."""
    was = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was:
            gc.enable()


# json.dumps with an indent is slow: 0.4 s for 10,000 servers. These functions write the same text.

_text = json.JSONEncoder().encode
_HEAD = " " * 16 + "{\n" + " " * 20 + '"device_id": "'
_IP, _SUPER, _RANK = ('",\n' + " " * 20 + f'"{key}": ' for key in ("device_ip", "super_device_id", "rank_id"))


def _server_text(server: Server) -> str:
    devices = ",\n".join([_device_text(device) for device in server.devices])
    rest = {} if server.host_nic_ip is None else {"host_nic_ip": server.host_nic_ip}
    head = f'        {{\n            "server_id": {_text(server.server_id)},\n            "device": [\n'
    return f"{head}{devices}\n            ]{_tail({**rest, **server.extras}, 8)}        }}"


def _device_text(device: Device) -> str:
    ip = f"{_IP}{_text(device.device_ip)[:-1]}" if device.device_ip else ""
    super_id = device.super_device_id
    more = f"{_SUPER}{_text(super_id)[:-1]}" if super_id is not None else ""
    end = _tail(device.extras, 16) if device.extras else "\n"
    return f'{_HEAD}{device.device_id}{ip}{more}{_RANK}"{device.rank_id}"{end}                }}'


def _tail(rest: Mapping[str, Any], indent: int) -> str:
    """Return the text of further keys of an object with this indent."""
    if not rest:
        return "\n"
    # Without the braces.
    text = json.dumps(dict(rest), indent=4)[1:-2]
    return "," + text.replace("\n", "\n" + " " * indent) + "\n"


# -- file names


def hccl_opens(path: str) -> bool:
    """Return whether HCCL opens a table at this path: it ends in its first ".json"."""
    return path.find(".json") == len(path) - len(".json") and not path.endswith("/.json") and path != ".json"


def why_not_opened(path: str) -> str:
    """Return the reason why HCCL does not open a table at this path."""
    if path.endswith("/.json") or path == ".json":
        return "the file has no name before .json"
    if not path.endswith(".json"):
        return f"the name {path.rpartition('/')[2]!r} does not end in .json"
    return f"{path!r} has more than one .json; HCCL takes the first for the end of the name"


# -- servers


def in_rank_order(table: RankTable) -> list[Server]:
    """Return the servers sorted by their lowest rank, each with its devices sorted by rank."""
    servers = []
    for server in table.servers:
        ranks = [device.rank_id for device in server.devices]
        if ranks != sorted(ranks):
            server = replace(server, devices=tuple(sorted(server.devices, key=lambda device: device.rank_id)))
        servers.append(server)
    return sorted(servers, key=lambda server: server.devices[0].rank_id)


def renumbered(servers: Iterable[Server]) -> tuple[Server, ...]:
    """Return the same servers and devices with ranks from 0, in their order."""
    result, rank = [], 0
    for server in servers:
        devices = []
        for device in server.devices:
            devices.append(device if device.rank_id == rank else with_rank(device, rank))
            rank += 1
        result.append(Server(server.server_id, tuple(devices), server.host_nic_ip, server.extras))
    return tuple(result)


def with_rank(device: Device, rank: int) -> Device:
    """Return the device with another rank; three times as fast as `dataclasses.replace`, for merges."""
    return Device(
        device.device_id, device.device_ip, rank,
        device.super_device_id, device.extras, device.local_id, device.levels,
    )  # fmt: skip


def counted(devices: Iterable[Device]) -> tuple[Server, ...]:
    """Return the servers of a 2.0 table: one ends where local_id does not rise or the nearest network changes."""
    groups: list[list[Device]] = []
    before: tuple[int, Any] | None = None
    for device in devices:
        local, network = (
            device.local_id or 0,
            device.levels[0].get("net_instance_id") if device.levels else None,
        )
        if before is None or local <= before[0] or network != before[1]:
            groups.append([])
        groups[-1].append(device)
        before = local, network
    return tuple(Server(f"node{number}", tuple(group), None) for number, group in enumerate(groups))


def recounted(table: RankTable) -> RankTable:
    """Return the table; in version 2.0 its servers are derived again, after ranks were removed or added."""
    if table.names_servers:
        return table
    return replace(table, servers=counted(device for _, device in table.by_rank()))


def super_pods_of(tables: Iterable[RankTable], kept: Iterable[str] | None = None) -> tuple[SuperPod, ...]:
    """Return the super pods of several tables, joined by id; only with the servers in `kept`, if given."""
    pods: dict[str, SuperPod] = {}
    names = None if kept is None else set(kept)
    for table in tables:
        for pod in table.super_pods:
            ids = tuple(name for name in pod.server_ids if names is None or name in names)
            if ids:
                more = {name: pod.server_extras[name] for name in ids if name in pod.server_extras}
                other = pods.get(pod.super_pod_id, SuperPod(pod.super_pod_id, ()))
                pods[pod.super_pod_id] = SuperPod(
                    pod.super_pod_id, other.server_ids + ids,
                    {**pod.extras, **other.extras}, {**other.server_extras, **more},
                )  # fmt: skip
    return tuple(pods.values())


@dataclass(frozen=True)
class DeviceAddress:
    """A device and the address at which the other devices reach it."""

    device_id: int
    ip: str
    super_device_id: str = ""
    """A3: the number of the device in its super pod."""
    super_pod_id: str = ""
    source: str = field(default="", compare=False)
    """The source of the address if it is not hccn_tool: hccn.conf or the inventory."""
