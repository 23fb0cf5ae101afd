"""Cut, compare and convert rank tables, without contacting a node."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from clusterctl.errors import Fault, InputFaults, UsageError, did_you_mean
from clusterctl.ranktable.build import checked
from clusterctl.ranktable.table import (
    RankTable,
    Server,
    SuperPod,
    in_rank_order,
    recounted,
    renumbered,
    super_pods_of,
)


def slice_table(
    table: RankTable,
    servers: Sequence[str] | None = None,
    ranks: range | None = None,
    drop: Sequence[str] = (),
) -> RankTable:
    """Return a part of a table with ranks from 0: these servers, these ranks, without the servers in `drop`."""
    known = [server.server_id for server in table.servers]
    for name in [*(servers or ()), *drop]:
        if name not in known:
            raise UsageError(
                f"no server {name!r} in the table", did_you_mean(name, known) or f"known: {known[:8]}"
            )
    if ranks is not None and (ranks.stop > table.ranks or not len(ranks)):
        raise UsageError(
            f"the ranks [{ranks.start},{ranks.stop}) of a table with [0,{table.ranks})",
            "choose a part of them",
        )
    chosen = []
    for server in in_rank_order(table):
        if (servers is not None and server.server_id not in servers) or server.server_id in drop:
            continue
        devices = tuple(device for device in server.devices if ranks is None or device.rank_id in ranks)
        if devices:
            chosen.append(replace(server, devices=devices))
    if not chosen:
        raise UsageError("nothing of the table is left", "choose at least one rank")
    pods = super_pods_of([table], [server.server_id for server in chosen])
    return checked(recounted(replace(table, servers=renumbered(chosen), super_pods=pods)))


def parse_ranks(text: str) -> range:
    """Return the ranks in `[0,16)`, which excludes 16; `[0,16]` is refused, because tools read it differently."""
    match = re.fullmatch(r"\s*\[\s*([0-9]{1,7})\s*,\s*([0-9]{1,7})\s*([\])])\s*", text)
    if not match:
        raise UsageError(f"{text!r} is not a range of ranks", "'[0,16)', which excludes 16")
    first, end = int(match[1]), int(match[2])
    if match[3] == "]":
        hint = f"'[{first},{end})' excludes {end}, '[{first},{end + 1})' includes it"
        raise UsageError(f"{text} is read differently by different tools", hint)
    if first >= end:
        raise UsageError(f"{text} is empty", f"'[{first},{first + 1})' is rank {first} alone")
    return range(first, end)


@dataclass(frozen=True)
class Difference:
    """The entries of two tables for one rank; a side without this rank is empty."""

    rank: int | None
    """None for the table itself and for a comparison by server."""
    left: str
    right: str
    server: str | None = None


@dataclass(frozen=True)
class _RankEntry:
    """What the tables say about one rank: where it is, and all else that the ranks compare."""

    server: str
    device: int
    address: str
    details: Mapping[str, object]

    def __str__(self) -> str:
        return f"{self.server}, device {self.device}, {self.address or 'no address'}"


def diff(left: RankTable, right: RankTable) -> list[Difference]:
    """Return the differences of two tables by rank; like HCCL, ignore the order of keys and white space."""
    sides = (_entries(left), _entries(right))
    differences = [
        Difference(rank, *_describe_entries(sides[0].get(rank), sides[1].get(rank)))
        for rank in sorted(sides[0].keys() | sides[1].keys())
        if sides[0].get(rank) != sides[1].get(rank)
    ]
    tables = [{"version": table.version, **table.extras} for table in (left, right)]
    if tables[0] != tables[1]:
        keys = _changed_keys(*tables)
        texts = [", ".join(_details(table, keys)) for table in tables]
        differences.insert(0, Difference(None, texts[0], texts[1]))
    return differences


def diff_servers(left: RankTable, right: RankTable) -> list[Difference]:
    """Return the differences of two tables by server: servers of one table only, and those that changed."""
    sides = (_by_server(left), _by_server(right))
    differences = [found for found in diff(left, right) if found.rank is None]
    for name in dict.fromkeys([*sides[0], *sides[1]]):
        before, after = (side.get(name, {}) for side in sides)
        if before != after:
            texts = (_describe_server(before, after), _describe_server(after, before))
            differences.append(Difference(None, *texts, name))
    return differences


def _by_server(table: RankTable) -> dict[str, dict[int, _RankEntry]]:
    servers: dict[str, dict[int, _RankEntry]] = {}
    for rank, entry in _entries(table).items():
        servers.setdefault(entry.server, {})[rank] = entry
    return servers


def _describe_server(here: dict[int, _RankEntry], other: dict[int, _RankEntry]) -> str:
    """Return a text such as `ranks 8-15, devices 0-7`, with the devices that differ from the other side."""
    if not here:
        return ""
    theirs = {entry.device: entry for entry in other.values()}
    changed = [entry.device for entry in here.values() if theirs.get(entry.device) != entry]
    texts = [f"ranks {_folded(list(here))}", f"devices {_folded([entry.device for entry in here.values()])}"]
    if other and changed:
        texts.append(f"device {_folded(changed)} differs")
    return ", ".join(texts)


def _folded(numbers: list[int]) -> str:
    """Return numbers as `0-3,6`, in the given order."""
    runs: list[list[int]] = []
    for number in numbers:
        if runs and runs[-1][-1] + 1 == number:
            runs[-1].append(number)
        else:
            runs.append([number])
    return ",".join(f"{run[0]}-{run[-1]}" if len(run) > 1 else str(run[0]) for run in runs)


def _entries(table: RankTable) -> dict[int, _RankEntry]:
    """Return the entry of each rank."""
    pods = {name: pod.super_pod_id for pod in table.super_pods for name in pod.server_ids}
    entries = {}
    for server, device in table.by_rank():
        details = {
            **({"super device": device.super_device_id} if device.super_device_id else {}),
            **({"super pod": pods[server.server_id]} if server.server_id in pods else {}),
            **{f"server's {key}": inner for key, inner in server.extras.items()},
            **device.extras,
            **({"level_list": list(device.levels)} if device.levels else {}),
        }
        addresses = ",".join(device.addresses)
        entries[device.rank_id] = _RankEntry(server.server_id, device.device_id, addresses, details)
    return entries


_MISSING = object()


def _changed_keys(left: Mapping[str, object], right: Mapping[str, object]) -> list[str]:
    return [
        key for key in dict.fromkeys([*left, *right]) if left.get(key, _MISSING) != right.get(key, _MISSING)
    ]


def _describe_entries(left: _RankEntry | None, right: _RankEntry | None) -> tuple[str, str]:
    """Return both sides as texts: where the rank is, and what differs."""
    keys = _changed_keys(left.details if left else {}, right.details if right else {})
    sides = [
        "" if side is None else ", ".join([str(side), *_details(side.details, keys)])
        for side in (left, right)
    ]
    return sides[0], sides[1]


def _details(values: Mapping[str, object], keys: Sequence[str]) -> Iterator[str]:
    for key in keys:
        value = values.get(key, "")
        text = value if isinstance(value, str) else json.dumps(value)
        yield f"{key} {text}" if text else f"no {key}"


def to_version(
    table: RankTable, version: str, facts: RankTable | None = None, super_pod: str | None = None
) -> RankTable:
    """Return a table in another version; raise an error if values that it needs are unknown.

    1.2 needs super-device ids and pods: of the table itself, of a 1.2 table as `facts` (by server and device),
    or one super pod by name for all servers. A table cannot be converted to or from 2.0, which has other
    networks.
    """
    if version not in ("1.0", "1.2", "2.0"):
        raise UsageError(f"unknown version {version!r}", "1.0, 1.2 or 2.0")
    if version == table.version:
        return table
    if "2.0" in (version, table.version):
        problem = f"version {table.version} lacks values that {version} needs: A5 has other networks"
        raise UsageError(problem, "write a plan with `levels`: clusterctl ranktable build --from plan.yaml")
    if version == "1.2":
        return _with_super_pods(table, facts or table, super_pod)
    bare = [
        replace(server, devices=tuple(replace(device, super_device_id=None) for device in server.devices))
        for server in table.servers
    ]
    return checked(replace(table, version="1.0", servers=tuple(bare), super_pods=()))


def _with_super_pods(table: RankTable, facts: RankTable, super_pod: str | None) -> RankTable:
    ids = {
        (server.server_id, device.device_id): device.super_device_id
        for source in (table, facts)
        for server in source.servers
        for device in server.devices
        if device.super_device_id
    }
    known = {pod.super_pod_id: pod for pod in (*table.super_pods, *facts.super_pods)}
    pod_of = {name: pod.super_pod_id for pod in known.values() for name in pod.server_ids}
    faults: list[Fault] = []
    servers: list[Server] = []
    pods: dict[str, list[str]] = {}
    for number, server in enumerate(table.servers):
        at, pod = f"/server_list/{number}", super_pod or pod_of.get(server.server_id)
        if pod is None:
            problem = f"version 1.2 needs the super pod of {server.server_id}, which is unknown"
            faults.append(Fault(at, problem, "--super-pod ID, or --facts with a 1.2 table or a plan"))
        pods.setdefault(pod or "", []).append(server.server_id)
        devices = []
        for index, device in enumerate(server.devices):
            super_id = ids.get((server.server_id, device.device_id))
            if super_id is None:
                problem = f"version 1.2 needs the super-device id of device {device.device_id} of {server.server_id}"
                remedy = "--facts with a 1.2 table or a plan, or ask the nodes: clusterctl ranktable build --for a3"
                faults.append(Fault(f"{at}/device/{index}", problem, remedy))
            devices.append(replace(device, super_device_id=super_id))
        servers.append(replace(server, devices=tuple(devices)))
    if faults:
        raise InputFaults(faults)
    named = tuple(
        replace(known.get(name, SuperPod(name, ())), server_ids=tuple(members))
        for name, members in pods.items()
    )
    unread = {key: inner for key, inner in table.extras.items() if key != "super_pod_list"}
    return checked(replace(table, version="1.2", servers=tuple(servers), super_pods=named, extras=unread))
