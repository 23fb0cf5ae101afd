"""Random rank tables of every version: valid ones with up to three changes, for the check and an independent reader."""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator
from random import Random
from typing import Any

from clusterctl.ranktable.check import inspect
from clusterctl.ranktable.finding import Severity
from tests.support.hccl_reader import reads

VERSIONS = ("1.0", "1.2", "lab", "cloud", "2.0")
HARDWARE = {"1.0": ("a2", "910a"), "1.2": ("a3",), "lab": ("910a",), "cloud": ("910a",), "2.0": ("a5",)}


def good(random: Random, version: str) -> dict[str, object]:
    """Return a valid table, which HCCL reads."""
    if version == "2.0":
        return _good_ranks(random)
    return _good_groups(random, version) if version in ("lab", "cloud") else _good_servers(random, version)


def _good_servers(random: Random, version: str) -> dict[str, object]:
    count, devices, rank = random.randint(1, 3), random.randint(1, 3), 0
    several = random.random() < 0.2
    servers = []
    for number in range(count):
        listed = []
        for device in range(devices):
            address = f"192.{device}.{number}.1" + (f",193.{device}.{number}.1" if several else "")
            entry = {"device_id": str(device), "device_ip": address, "rank_id": str(rank)}
            if version == "1.2":
                entry["super_device_id"] = str(100 * number + device)
                if random.random() < 0.2:
                    entry |= {"backup_device_ip": f"194.{device}.{number}.1", "backup_device_port": "16700"}
            if random.random() < 0.2:
                entry |= {"device_port": "16666", "device_vnic_port": "16667", "host_port": "60000"}
            if random.random() < 0.1:
                entry |= {"net_position": "device", "net_protocol": "rdma"}
            if (count == 1 or version == "1.2") and random.random() < 0.2 and not several:
                del entry["device_ip"]
            listed.append(entry)
            rank += 1
        server: dict[str, object] = {
            "server_id": f"10.0.0.{number}",
            "device": listed,
            "host_nic_ip": "reserve",
        }
        if count > 1 and listed[0].get("device_ip") and random.random() < 0.3:
            server["host_ip"] = f"10.0.0.{number}"
        servers.append(server)
    table: dict[str, object] = {"version": version, "server_list": servers, "status": "completed"}
    if random.random() < 0.8:
        table["server_count"] = str(count)
    if version == "1.2":
        cut = random.randint(1, count)
        parts = [part for part in (servers[:cut], servers[cut:]) if part]
        table["super_pod_list"] = [
            {"super_pod_id": str(at), "server_list": [{"server_id": entry["server_id"]} for entry in part]}
            for at, part in enumerate(parts)
        ]
    return table


def _good_groups(random: Random, version: str) -> dict[str, object]:
    servers, devices = random.randint(1, 3), random.choice((1, 2, 4))
    instances: list[dict[str, object]] = []
    for number in range(servers):
        listed = [{"device_id": str(at), "device_ip": f"192.{at}.{number}.1"} for at in range(devices)]
        if version == "cloud":
            instances.append({"pod_name": f"job{number}", "server_id": f"10.0.0.{number}", "devices": listed})
            continue
        for device in listed:
            rank = {"rank_id": str(len(instances)), "server_id": f"10.0.0.{number}", "devices": [device]}
            instances.append(rank)
    group = {"group_name": "job", "instance_count": str(len(instances)), "instance_list": instances}
    table = {"group_count": "1", "group_list": [group], "status": "completed"}
    if version == "cloud":
        group["device_count"] = str(servers * devices)
        return table
    group |= {"device_num": str(servers * devices), "server_num": str(servers)}
    return {**table, "deploy_mode": "lab", "para_plane_nic_location": "device"}


def _good_ranks(random: Random) -> dict[str, object]:
    kinds = {
        "IPV4": ("10.0.{}.{}", "10.1.{}.{}"),
        "IPV6": ("fe80::{}:{}", "fe81::{}:{}"),
        "EID": ("{:016d}{:016d}", ""),
    }
    layers = sorted(random.sample(range(8), random.randint(1, 3)))
    sizes = {layer: random.randint(0, 2) for layer in layers}
    ranks = []
    for rank in range(random.randint(1, 5)):
        levels = []
        for layer in layers:
            addresses: list[dict[str, object]] = []
            for at in range(sizes[layer]):
                kind = random.choice(list(kinds))
                entry: dict[str, object] = {"addr_type": kind, "addr": kinds[kind][0].format(rank, at + 1)}
                entry["ports"] = [f"{at}/{port}" for port in range(random.randint(1, 3))]
                if random.random() < 0.2:
                    entry["plane_id"] = str(at)
                if kind != "EID" and random.random() < 0.2:
                    entry["backup_addr"] = [kinds[kind][1].format(rank, at + 1)]
                addresses.append(entry)
            level = {"net_layer": layer, "net_instance_id": f"net{layer}", "rank_addr_list": addresses}
            if random.random() < 0.7:
                level |= {"net_type": random.choice(("CLOS", "TOPO_FILE_DESC")), "net_attr": ""}
            levels.append(level)
        value: dict[str, object] = {
            "rank_id": rank,
            "local_id": rank,
            "device_id": rank,
            "level_list": levels,
        }
        if random.random() < 0.2:
            value |= {"device_port": 16666, "host_port": 16667}
        if random.random() < 0.2:
            value["control_plane"] = {"addr_type": "IPV4", "addr": "10.0.0.1", "listen_port": 60000}
        ranks.append(value)
    if random.random() < 0.2:
        ranks[-1] |= {"local_id": 64, "replaced_local_id": 63}
    table: dict[str, object] = {"version": "2.0", "rank_count": len(ranks), "rank_list": ranks}
    if random.random() < 0.5:
        table |= {"status": "completed", "detour": "false"}
    return table


TEXTS = (
    "", "0", "1", "2", "7", "8", "15", "16", "64", "65", "65535", "65536", "70000", "4294967294", "4294967295",
    "4294967296", "-1", "-0", "+3", " 4", "5x", "0x10", "01", "x", "10.0.0.1", "10.0.0.01", "10.0.0.256", "::1",
    "fe80::1", "FE80::0001", "1::2:3:4:5:6:7", "::1:2:3:4:5:6:7", "::ffff:1.2.3.4", "1.2.3.4%eth0", "fe80::1%",
    "1.2.3.4,", "1.2.3.4,1.2.3.5", ",", "1.2.3.4,,1.2.3.5", "completed", "initializing", "host", "device", "true",
    "EID", "IPV4", "IPV6", "FOO", "CLOS", "0" * 32, "g" * 32, "a" * 64, "a" * 65, "ä" * 33, "a" * 127, "a" * 128,
    "a" * 1024, "a" * 1025, "0/0",
)  # fmt: skip
OTHERS = (
    None,
    True,
    False,
    0,
    1,
    2,
    7,
    8,
    63,
    64,
    65,
    -1,
    1.0,
    1.7,
    65535,
    65536,
    2**32 - 1,
    2**32,
    [],
    {},
    [1],
    ["a"],
)
ADDED = (
    "host_ip", "host_port", "device_port", "device_vnic_port", "backup_device_ip", "backup_device_port",
    "net_position", "net_protocol", "server_count", "super_pod_list", "status", "detour", "plane_id", "net_attr",
    "net_type", "backup_addr", "replaced_local_id", "control_plane", "pcie_fallback", "device_ip", "deploy_mode",
)  # fmt: skip


def places(value: Any) -> Iterator[tuple[Any, Any]]:
    """Yield every (container, key or index) in a JSON value."""
    keys: Any = (
        list(value) if isinstance(value, dict) else range(len(value)) if isinstance(value, list) else ()
    )
    for key in keys:
        yield value, key
        yield from places(value[key])


def change(random: Random, table: dict[str, object]) -> None:
    """Change a random place of a table."""
    container, key = random.choice(list(places(table)))
    kind = random.random()
    if kind < 0.15 and isinstance(container, dict):
        del container[key]
    elif kind < 0.3 and isinstance(container, list):
        container.append(copy.deepcopy(container[key]))
    elif kind < 0.4 and isinstance(container, list):
        del container[key]
    elif kind < 0.55 and isinstance(container, dict):
        container[random.choice(ADDED)] = random.choice((*TEXTS, *OTHERS))
    elif kind < 0.7:
        # Take the value from another place: a duplicate, or a number that belongs to another key.
        other, spot = random.choice(list(places(table)))
        if not isinstance(other[spot], (dict, list)):
            container[key] = other[spot]
    else:
        container[key] = copy.deepcopy(random.choice(OTHERS if random.random() < 0.4 else TEXTS))


def mutant(random: Random, version: str) -> dict[str, object]:
    """Return a random table: a valid one with up to three changes."""
    table = good(random, version)
    for _ in range(random.choice((0, 1, 1, 1, 2, 3))):
        if table:
            change(random, table)
    return table


def hardware_for(table: dict[str, object], version: str, number: int) -> str:
    """Return hardware that reads tables of this version; "" if the changes made it one of another version."""
    if "version" in table and table["version"] not in ("1.0", "1.2", "2.0"):
        return "a2"
    if version in ("1.0", "1.2", "2.0") and table.get("version") != version:
        return ""
    return HARDWARE[version][number % len(HARDWARE[version])]


def compare(table: dict[str, object], hardware: str) -> str:
    """Return the difference between the check and the independent reader for a table; "" if they agree."""
    reason = reads(table, hardware)
    findings = inspect(json.dumps(table), hardware).findings
    refused = [finding for finding in findings if finding.severity is Severity.REFUSED]
    if reason and not refused:
        return f"accepted, but HCCL refuses it: {reason}"
    if refused and not reason:
        return f"refused, but HCCL reads it: {refused[0].code} at {refused[0].pointer}: {refused[0].what}"
    return ""
