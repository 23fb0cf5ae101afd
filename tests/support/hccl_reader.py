"""Decide whether HCCL reads a rank table: a second opinion, written from the behaviour of HCCL's public readers.

It shares no code with clusterctl. It reads as HCCL does, one value after another, and stops at the first
refusal. The hardware is that of the version: A2 for 1.0, A3 in super pods for 1.2, 910A for the old form. What
depends on the process (its own rank and device) is left out.
"""

from __future__ import annotations

import itertools
import re
import socket
from typing import Any

MAX = 0xFFFFFFFF


class Refused(Exception):
    """HCCL refuses the table."""


def refuse_if(condition: bool, why: str) -> None:
    if condition:
        raise Refused(why)


def reads(table: Any, hardware: str = "") -> str:
    """Return "" when HCCL reads the table, else the reason why not."""
    try:
        refuse_if(not isinstance(table, dict), "no object")
        if table.get("version") == "2.0":
            read_ranks(table)
        else:
            status = text(table, "status")
            refuse_if(status != "completed", "status: waits for half an hour")
            if "version" not in table:
                read_groups(table)
            else:
                version = text(table, "version")
                refuse_if(version not in ("1.0", "1.2"), "version")
                read_servers(table, version, hardware or {"1.0": "a2", "1.2": "a3"}[version])
    except Refused as error:
        return str(error)
    return ""


# -- values of versions 1.x


def text(holder: Any, key: str, default: str | None = None) -> str:
    refuse_if(not isinstance(holder, dict), "no object")
    if key not in holder:
        refuse_if(default is None, f"{key} missing")
        return default or ""
    refuse_if(not isinstance(holder[key], str), f"{key} is no string")
    return str(holder[key])


def array(holder: Any, key: str) -> list[Any]:
    refuse_if(not isinstance(holder, dict) or key not in holder, f"{key} missing")
    value = holder[key]
    refuse_if(value is None or value in ([], {}), f"{key} empty")
    refuse_if(not isinstance(value, list), f"{key} is no list")
    for item in value:
        refuse_if(not isinstance(item, dict), f"an entry of {key} is no object")
    return list(value)


def unsigned(digits: str) -> int:
    """Read a number as C's strtoull does, and refuse what does not fit into 32 bits."""
    match = re.match(r"[ \t\n\v\f\r]*([+-]?)([0-9]+)", digits)
    if match is None:
        raise Refused(f"{digits!r} is no number")
    number = int(match[2])
    refuse_if(number >= 2**64, "out of range")
    if match[1] == "-":
        number = -number % 2**64
    refuse_if(number > MAX, f"{number} is out of range")
    return number


def family_of(address: str) -> int:
    refuse_if(not address or address.startswith("%") or address.endswith("%"), "address")
    plain = address.split("%")[0]
    family = socket.AF_INET6 if plain.count(":") >= 2 else socket.AF_INET
    try:
        socket.inet_pton(family, plain)
    except (OSError, ValueError):
        raise Refused(f"address {address!r}") from None
    return family


def split(listed: str) -> list[str]:
    parts = listed.split(",")
    return parts[:-1] if parts[-1] == "" else parts


def port(holder: Any, key: str) -> int | None:
    if key not in holder:
        return None
    number = unsigned(text(holder, key))
    refuse_if(number == 0 or number > 65535, key)
    return number


# -- versions 1.0 and 1.2


def read_servers(table: dict[str, Any], version: str, hardware: str) -> None:
    servers = array(table, "server_list")
    if "server_count" in table:
        count = unsigned(text(table, "server_count"))
        refuse_if(count != len(servers), "server_count")
    pool: dict[str, set[str]] = {"server": set(), "address": set(), "backup": set(), "pod": set()}
    ranks: list[dict[str, Any]] = []
    for server in servers:
        server_id = text(server, "server_id")
        refuse_if(not 1 <= len(server_id.encode("utf-8", "surrogatepass")) <= 64, "server_id")
        insert(pool["server"], server_id)
        host = 0
        if "host_ip" in server:
            host = family_of(text(server, "host_ip"))
        for device in array(server, "device"):
            rank = read_device(device, len(servers), host, version, hardware, pool)
            ranks.append({**rank, "server": server_id, "host": host})
        sizes = {len(rank["families"]) for rank in ranks}
        refuse_if(len(sizes) > 1, "devices have different numbers of addresses")
    if version == "1.2" and "super_pod_list" in table:
        read_pods(table, pool, ranks, len(servers))
    check_ranks(ranks, len(servers), hardware)
    first = min(ranks, key=lambda rank: rank["rank"])
    on_host = any(rank["position"] == "host" for rank in ranks)
    on_host = on_host or bool(first["host"] and not any(first["families"]))
    refuse_if(on_host and not all(rank["host"] for rank in ranks), "host_ip missing")


def insert(pool: set[str], value: str) -> None:
    refuse_if(value in pool, f"{value} is repeated")
    pool.add(value)


def read_device(
    device: Any, servers: int, host: int, version: str, hardware: str, pool: dict[str, set[str]]
) -> dict[str, Any]:
    rank_text = text(device, "rank_id")
    number = unsigned(text(device, "device_id"))
    refuse_if(number > (7 if hardware == "910a" else 15), "device_id")
    port(device, "host_port")
    families = []
    address = text(device, "device_ip", "")
    if servers > 1:
        if hardware == "a2":
            refuse_if(address == "", "device_ip missing")
        if hardware == "910a":
            refuse_if("device_ip" not in device and not host, "device_ip missing")
    for part in split(address) if address else ():
        family = family_of(part)
        insert(pool["address"], part)
        families.append(family)
    if port(device, "device_port") is not None:
        port(device, "device_vnic_port")
    if hardware == "a3" and version == "1.2":
        backup = text(device, "backup_device_ip", "")
        for part in split(backup) if backup else ():
            family_of(part)
            insert(pool["backup"], part)
            refuse_if(part in split(address), "own address as backup")
        if backup:
            port(device, "backup_device_port")
    position = text(device, "net_position", "")
    text(device, "net_protocol", "")
    rank = unsigned(rank_text)
    super_id = MAX
    if version == "1.2" and "super_device_id" in device:
        super_id = unsigned(text(device, "super_device_id"))
    return {
        "rank": rank, "device": number, "families": families or [0], "super": super_id, "position": position,
    }  # fmt: skip


def read_pods(
    table: dict[str, Any], pool: dict[str, set[str]], ranks: list[dict[str, Any]], servers: int
) -> None:
    pod_of: dict[str, str] = {}
    for pod in array(table, "super_pod_list"):
        name = text(pod, "super_pod_id")
        refuse_if(not 1 <= len(name.encode("utf-8", "surrogatepass")) <= 127, "super_pod_id")
        insert(pool["pod"], name)
        for server in array(pod, "server_list"):
            server_id = text(server, "server_id")
            refuse_if(server_id not in pool["server"], "a server of a super pod is not in server_list")
            pod_of[server_id] = name
    seen = set()
    for rank in ranks:
        refuse_if(rank["server"] not in pod_of or rank["super"] == MAX, "rank without a super pod")
        key = (pod_of[rank["server"]], rank["super"])
        refuse_if(key in seen, "super_device_id is repeated")
        seen.add(key)
    refuse_if(len(pod_of) != servers, "servers of the super pods")


def check_ranks(ranks: list[dict[str, Any]], servers: int, hardware: str) -> None:
    refuse_if(sorted(rank["rank"] for rank in ranks) != list(range(len(ranks))), "rank ids")
    by_server: dict[str, list[int]] = {}
    for rank in ranks:
        by_server.setdefault(rank["server"], []).append(rank["device"])
    for devices in by_server.values():
        refuse_if(len(set(devices)) < len(devices), "device_id is repeated")
    if servers > 1:
        for kind in (
            {family for rank in ranks for family in rank["families"] if family},
            {rank["host"] for rank in ranks if rank["host"]},
        ):
            refuse_if(len(kind) > 1, "addresses of two families")
    if hardware == "910a":
        refuse_if(len({len(devices) for devices in by_server.values()}) > 1, "servers of unequal size")


# -- the old form


def read_groups(table: dict[str, Any]) -> None:
    laboratory = "deploy_mode" in table
    if laboratory:
        refuse_if(text(table, "para_plane_nic_location") != "device", "para_plane_nic_location")
    count = unsigned(text(table, "group_count"))
    groups = array(table, "group_list")
    refuse_if(count != len(groups), "group_count")
    pool: dict[str, set[str]] = {"group": set(), "pod": set(), "address": set()}
    ranks: list[dict[str, Any]] = []
    declared = 0
    for group in groups:
        name = text(group, "group_name")
        refuse_if(len(name.encode("utf-8", "surrogatepass")) > 127, "group_name")
        insert(pool["group"], name)
        instances = unsigned(text(group, "instance_count"))
        refuse_if(instances == 0, "instance_count")
        devices = unsigned(text(group, "device_num" if laboratory else "device_count"))
        refuse_if(devices == 0, "device_num")
        if laboratory:
            servers = unsigned(text(group, "server_num"))
            refuse_if(servers == 0 or devices % servers > 0, "server_num")
            refuse_if(devices // servers not in (1, 2, 4, 8, 16), "devices of a server")
            refuse_if(instances != devices, "instance_count")
            declared += servers
        listed = array(group, "instance_list")
        before = len(ranks)
        for instance in listed:
            ranks += read_instance(instance, laboratory, len(listed), len(ranks), pool)
        refuse_if(instances != len(listed) or devices != len(ranks) - before, "counts of the group")
    check_ranks(ranks, declared if laboratory else len({rank["server"] for rank in ranks}), "910a")


def read_instance(
    instance: Any, laboratory: bool, instances: int, before: int, pool: dict[str, set[str]]
) -> list[dict[str, Any]]:
    server_id = text(instance, "server_id")
    refuse_if(not 1 <= len(server_id.encode("utf-8", "surrogatepass")) <= 64, "server_id")
    devices = array(instance, "devices")
    if laboratory:
        rank_text = text(instance, "rank_id")
    else:
        pod = text(instance, "pod_name")
        refuse_if(len(pod.encode("utf-8", "surrogatepass")) > 127, "pod_name")
        insert(pool["pod"], pod)
    ranks = []
    for place, device in enumerate(devices):
        number = unsigned(text(device, "device_id"))
        refuse_if(number > 7, "device_id")
        family = 0
        if laboratory or instances > 1:
            address = text(device, "device_ip")
            if address:
                family = family_of(address)
                insert(pool["address"], address)
        if laboratory:
            rank = unsigned(rank_text)
            # HCCL empties the text after the first device.
            rank_text = ""
        else:
            rank = before + place
        ranks.append({"rank": rank, "device": number, "server": server_id, "families": [family], "host": 0})
    return ranks


# -- version 2.0


def whole(holder: Any, key: str, default: int | None = None) -> int:
    """Read a number as the JSON library of version 2.0 does: it cuts off a fraction."""
    refuse_if(not isinstance(holder, dict), "no object")
    if key not in holder:
        if default is None:
            raise Refused(f"{key} missing")
        return default
    value = holder[key]
    if default is not None and isinstance(value, bool):
        return int(value)
    refuse_if(isinstance(value, bool) or not isinstance(value, (int, float)), f"{key} is no number")
    refuse_if(not 0 <= int(value) <= MAX, key)
    return int(value)


def listed(holder: Any, key: str) -> list[Any]:
    refuse_if(not isinstance(holder, dict) or not isinstance(holder.get(key), list), key)
    return list(holder[key])


def length(value: str) -> int:
    return len(value.encode("utf-8", "surrogatepass"))


def read_ranks(table: dict[str, Any]) -> None:
    refuse_if(text(table, "detour", "") not in ("true", "false", ""), "detour")
    count = whole(table, "rank_count")
    entries = listed(table, "rank_list")
    ids: set[int] = set()
    local_ids: set[int] = set()
    replaced: list[int] = []
    sizes: dict[tuple[int, str], int] = {}
    for entry in entries:
        ids.add(whole(entry, "rank_id"))
        local = whole(entry, "local_id")
        refuse_if(local > 64, "local_id")
        if local == 64:
            replaced.append(whole(entry, "replaced_local_id"))
            refuse_if(replaced[-1] > 63, "replaced_local_id")
        else:
            local_ids.add(local)
        refuse_if(whole(entry, "device_id") > 64, "device_id")
        for key in ("device_port", "host_port"):
            refuse_if(not 1 <= whole(entry, key, 16666) <= 65535, key)
        levels = listed(entry, "level_list")
        refuse_if(len(levels) > 8, "level_list")
        layers = [read_level(level, sizes) for level in levels]
        refuse_if(any(b <= a for a, b in itertools.pairwise(layers)), "net_layer order")
        if "control_plane" in entry:
            plane = entry["control_plane"]
            read_address(plane)
            refuse_if(not 1 <= whole(plane, "listen_port") <= 65536, "listen_port")
    refuse_if(not 1 <= count <= 65536 or count != len(entries), "rank_count")
    refuse_if(ids != set(range(count)), "rank ids")
    refuse_if(len(replaced) > 1 or bool(set(replaced) & local_ids), "backup ranks")


def read_level(level: Any, sizes: dict[tuple[int, str], int]) -> int:
    layer = whole(level, "net_layer")
    network = text(level, "net_instance_id")
    refuse_if(layer > 7 or not 1 <= length(network) <= 1024, "net_layer or net_instance_id")
    text(level, "net_attr", "")
    refuse_if(not isinstance(level.get("pcie_fallback", False), bool), "pcie_fallback")
    if "net_type" in level:
        known = ("1DMESH", "2DMESH", "A3_SERVER", "A2_AX_SERVER", "TOPO_FILE_DESC", "CLOS")
        refuse_if(text(level, "net_type") not in known, "net_type")
    addresses = listed(level, "rank_addr_list")
    for address in addresses:
        kind = read_address(address)
        refuse_if(length(text(address, "plane_id", "0")) > 1024, "plane_id")
        ports = listed(address, "ports")
        for name in ports:
            refuse_if(not isinstance(name, str) or not 1 <= length(name) <= 32, "ports")
        refuse_if(not 1 <= len(set(ports)) <= 16, "ports")
        backups = listed(address, "backup_addr") if "backup_addr" in address else []
        refuse_if(len(backups) > 16, "backup_addr")
        for backup in backups:
            refuse_if(kind == "EID" or not isinstance(backup, str), "backup_addr")
            refuse_if(not is_kind(backup, kind), "backup_addr")
    refuse_if(len(addresses) > 24, "rank_addr_list")
    refuse_if(sizes.setdefault((layer, network), len(addresses)) != len(addresses), "addresses of a network")
    return layer


def read_address(holder: Any) -> str:
    kind = text(holder, "addr_type")
    refuse_if(kind not in ("EID", "IPV4", "IPV6"), "addr_type")
    address = text(holder, "addr")
    refuse_if(not 1 <= length(address) <= 256 or not is_kind(address, kind), "addr")
    return kind


def is_kind(address: str, kind: str) -> bool:
    if kind == "EID":
        return re.fullmatch("[0-9a-fA-F]{32}", address) is not None
    if kind == "IPV4":
        parts = address.split(".")
        return len(parts) == 4 and all(re.fullmatch("0|[1-9][0-9]{0,2}", p) and int(p) < 256 for p in parts)
    # The reader's pattern: at most six groups next to "::"; a dotted end counts as two.
    head, double, tail = address.partition("::")
    groups = [g for g in (head + ":" + tail).split(":") if g]
    if double and len(groups) + ("." in address) > 6:
        return False
    try:
        socket.inet_pton(socket.AF_INET6, address)
    except (OSError, ValueError):
        return False
    return "%" not in address
