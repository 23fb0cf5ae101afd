"""Rank tables cut, compared and turned from one version into another; pure."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

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
    """A part of a table, renumbered from 0: these servers, these ranks, without those servers."""
    known = [server.server_id for server in table.servers]
    for name in [*(servers or ()), *drop]:
        if name not in known:
            raise UsageError(
                f"no server {name!r} in the table", did_you_mean(name, known) or f"known: {known[:8]}"
            )
    if ranks is not None and (ranks.stop > table.ranks or not len(ranks)):
        raise UsageError(
            f"the ranks [{ranks.start},{ranks.stop}) of a table with [0,{table.ranks})", "a part of them"
        )
    kept = []
    for server in in_rank_order(table):
        if (servers is not None and server.server_id not in servers) or server.server_id in drop:
            continue
        devices = tuple(one for one in server.devices if ranks is None or one.rank_id in ranks)
        if devices:
            kept.append(replace(server, devices=devices))
    if not kept:
        raise UsageError("nothing of the table is left", "choose at least one rank")
    pods = super_pods_of([table], [server.server_id for server in kept])
    return checked(recounted(replace(table, servers=renumbered(kept), super_pods=pods)))


def parse_ranks(text: str) -> range:
    """`[0,16)`, half-open; `[0,16]` is refused, since tools differ on it."""
    match = re.fullmatch(r"\s*\[\s*([0-9]{1,7})\s*,\s*([0-9]{1,7})\s*([\])])\s*", text)
    if not match:
        raise UsageError(f"{text!r} is no range of ranks", "'[0,16)', which leaves 16 out")
    first, end = int(match[1]), int(match[2])
    if match[3] == "]":
        hint = f"'[{first},{end})' leaves {end} out, '[{first},{end + 1})' takes it in"
        raise UsageError(f"{text} is read differently by different tools", hint)
    if first >= end:
        raise UsageError(f"{text} is empty", f"'[{first},{first + 1})' is the one rank {first}")
    return range(first, end)


@dataclass(frozen=True)
class Difference:
    """What two tables say of one rank; a side is empty where it has no such rank."""

    rank: int | None
    """None for the table itself, and where whole servers are compared."""
    left: str
    right: str
    server: str | None = None


def diff(left: RankTable, right: RankTable) -> list[Difference]:
    """Where two tables differ, rank by rank; key order and space don't count, as for HCCL."""
    sides = (_places(left), _places(right))
    differences = [
        Difference(rank, *_words(sides[0].get(rank), sides[1].get(rank)))
        for rank in sorted(sides[0].keys() | sides[1].keys())
        if sides[0].get(rank) != sides[1].get(rank)
    ]
    tables = [{"version": one.version, **one.extras} for one in (left, right)]
    if tables[0] != tables[1]:
        differences.insert(0, Difference(None, *_words(*tables)))
    return differences


def diff_servers(left: RankTable, right: RankTable) -> list[Difference]:
    """Where two tables differ, server by server: those of one only, and those whose ranks or facts are others."""
    sides = (_by_server(left), _by_server(right))
    differences = [found for found in diff(left, right) if found.rank is None]
    for name in dict.fromkeys([*sides[0], *sides[1]]):
        ranks = [side.get(name, {}) for side in sides]
        if ranks[0] != ranks[1]:
            one, other = ranks
            differences.append(Difference(None, _server_words(one, other), _server_words(other, one), name))
    return differences


def _by_server(table: RankTable) -> dict[str, dict[int, dict[str, Any]]]:
    servers: dict[str, dict[int, dict[str, Any]]] = {}
    for rank, facts in _places(table).items():
        servers.setdefault(facts["server"], {})[rank] = facts
    return servers


def _server_words(here: dict[int, dict[str, Any]], other: dict[int, dict[str, Any]]) -> str:
    """`ranks 8-15, devices 0-7`, and how many of its devices say something else than on the other side."""
    if not here:
        return ""
    theirs = {facts["device"]: facts for facts in other.values()}
    changed = [facts["device"] for facts in here.values() if theirs.get(facts["device"]) != facts]
    words = [
        f"ranks {_folded(list(here))}",
        f"devices {_folded([facts['device'] for facts in here.values()])}",
    ]
    if other and changed:
        words.append(f"device {_folded(changed)} differs")
    return ", ".join(words)


def _folded(numbers: list[int]) -> str:
    """`0-3,6` in the order given."""
    runs: list[list[int]] = []
    for number in numbers:
        if runs and runs[-1][-1] + 1 == number:
            runs[-1].append(number)
        else:
            runs.append([number])
    return ",".join(f"{run[0]}-{run[-1]}" if len(run) > 1 else str(run[0]) for run in runs)


_SHOWN = ("server", "device", "address")
_UNSAID = object()


def _places(table: RankTable) -> dict[int, dict[str, Any]]:
    """What a table says of each rank: what a person asks first, then all the rest that the ranks compare."""
    pods = {name: pod.super_pod_id for pod in table.super_pods for name in pod.server_ids}
    return {
        device.rank_id: {
            **{"server": server.server_id, "device": device.device_id, "address": ",".join(device.addresses)},
            **({"super device": device.super_device_id} if device.super_device_id else {}),
            **({"super pod": pods[server.server_id]} if server.server_id in pods else {}),
            **{f"server's {key}": inner for key, inner in server.extras.items()},
            **device.extras,
            **({"level_list": list(device.levels)} if device.levels else {}),
        }
        for server, device in table.by_rank()
    }


def _words(left: dict[str, Any] | None, right: dict[str, Any] | None) -> tuple[str, str]:
    """Both sides in words: where the rank is, and what they do not agree on."""
    sides = (left or {}, right or {})
    other = [
        key
        for key in dict.fromkeys([*sides[0], *sides[1]])
        if key not in _SHOWN and sides[0].get(key, _UNSAID) != sides[1].get(key, _UNSAID)
    ]
    return _side(left, other), _side(right, other)


def _side(facts: dict[str, Any] | None, other: Sequence[str]) -> str:
    if facts is None:
        return ""
    words = []
    if "server" in facts:
        words = [facts["server"], f"device {facts['device']}", facts["address"] or "no address"]
    for key in other:
        value = facts.get(key, "")
        text = value if isinstance(value, str) else json.dumps(value)
        words.append(f"{key} {text}" if text else f"no {key}")
    return ", ".join(words)


def to_version(
    table: RankTable, version: str, facts: RankTable | None = None, super_pod: str | None = None
) -> RankTable:
    """A table in another version, where the facts that it needs are there.

    1.2 needs super-device ids and pods: of the table itself, of a 1.2 table as `facts` (by server and device),
    or one super pod by name for all servers. Between these and 2.0 nothing can be turned: its networks are
    other ones.
    """
    if version not in ("1.0", "1.2", "2.0"):
        raise UsageError(f"unknown version {version!r}", "1.0, 1.2 or 2.0")
    if version == table.version:
        return table
    if "2.0" in (version, table.version):
        what = (
            f"version {table.version} does not hold what {version} needs: the networks of A5 are other ones"
        )
        raise UsageError(what, "write a plan with `levels`: clusterctl ranktable build --from plan.yaml")
    if version == "1.2":
        return _with_super_pods(table, facts or table, super_pod)
    bare = [
        replace(server, devices=tuple(replace(one, super_device_id=None) for one in server.devices))
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
            what = f"the super pod of {server.server_id} is not known, which version 1.2 needs"
            faults.append(Fault(at, what, "--super-pod ID, or --facts with a 1.2 table or a plan"))
        pods.setdefault(pod or "", []).append(server.server_id)
        devices = []
        for place, device in enumerate(server.devices):
            super_id = ids.get((server.server_id, device.device_id))
            if super_id is None:
                what = f"no super-device id of {server.server_id}, device {device.device_id}"
                remedy = "--facts with a 1.2 table or a plan, or ask: clusterctl ranktable build --for a3"
                faults.append(Fault(f"{at}/device/{place}", what, remedy))
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
