"""The rules of the old form without a version: groups of instances, as laboratories and clouds write them.

HCCL takes a table with `deploy_mode` for a laboratory's, with rank ids, and one without for a cloud's
(`jobstart_hccl.json`), where it finds the rank of a process by the name of its pod.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from dataclasses import dataclass, field

from clusterctl.ranktable.finding import invalid, missing
from clusterctl.ranktable.rules.state import ASK_ADDRESS, SeenDevice, SeenServer, TableState

# HCCL takes these numbers of devices on a server.
SIZES = (1, 2, 4, 8, 16)


def is_laboratory(value: Mapping[str, object]) -> bool:
    """Return whether a table in the old form is meant as a laboratory's, which has rank ids."""
    groups = value.get("group_list")
    return "deploy_mode" in value or any(
        "device_num" in group or "server_num" in group
        for group in (groups if isinstance(groups, list) else ())
        if isinstance(group, dict)
    )


@dataclass
class _Groups:
    """What is compared between the groups of one table."""

    mode: str
    """lab or cloud."""
    servers: dict[str, list[str]] = field(default_factory=dict)
    """Pointers to the instances on each server."""
    names: dict[Hashable, str] = field(default_factory=dict)
    pods: dict[Hashable, str] = field(default_factory=dict)


def check_groups(state: TableState) -> None:
    """Check `group_list` in the form that a laboratory or a cloud writes."""
    reader = state.reader
    groups = _Groups("lab" if is_laboratory(state.value) else "cloud")
    values = reader.read("old table", state.value, "")
    state.check_count(values, "group_count", state.value, "group_list")
    if groups.mode == "lab":
        _check_laboratory(state)
    for at, group in reader.objects("old table", "group_list", state.value, ""):
        _check_group(state, groups, group, at)
    state.servers += [SeenServer(at[0], server_id, len(at)) for server_id, at in groups.servers.items()]
    if groups.mode == "cloud":
        problem = "a cloud's table without rank ids: HCCL finds the rank of a process by the name of its pod"
        remedy = "clusterctl ranktable convert FILE -o OUT.json writes rank ids in the order of the file"
        reader.warn("dialect", "", problem, remedy)


def _check_laboratory(state: TableState) -> None:
    if "deploy_mode" not in state.value:
        problem = "'deploy_mode' is missing, so HCCL takes this for a cloud's table without rank ids"
        state.reader.add("missing-key", "", problem, 'add "deploy_mode": "lab"', missing("device_count"))
    texts = state.reader.read("lab table", state.value, "").texts
    location = texts.get("para_plane_nic_location", "device")
    if location != "device":
        problem = f"'para_plane_nic_location' is {location[:80]!r}; HCCL takes only 'device'"
        state.reader.add("choice", "/para_plane_nic_location", problem, 'write "device"')


def _check_group(state: TableState, groups: _Groups, group: Mapping[str, object], at: str) -> None:
    reader = state.reader
    values = reader.read("group", group, at)
    counts = {**values.numbers, **reader.read(f"{groups.mode} group", group, at).numbers}
    if "group_name" in values.texts:
        reader.once(groups.names, values.texts["group_name"], f"{at}/group_name", "group-name", "group")
    before, instances = len(state.devices), 0
    listed = group.get("instance_list")
    several = isinstance(listed, list) and len(listed) > 1
    for here, instance in reader.objects("group", "instance_list", group, at):
        instances += 1
        _check_instance(state, groups, instance, here, address_read=several or groups.mode == "lab")
    devices = len(state.devices) - before
    real = {"instance_count": instances, "device_num": devices, "device_count": devices}
    for key, number in real.items():
        if counts.get(key, number) != number:
            problem = f"{key!r} is {counts[key]}, but the group has {number}"
            reader.add("server-count", f"{at}/{key}", problem, f'write "{key}": "{number}"')
    if groups.mode == "lab":
        _check_share(state, groups, counts, at)


def _check_share(state: TableState, groups: _Groups, counts: Mapping[str, int], at: str) -> None:
    """Check how many devices a server has on average; HCCL compares the declared numbers only."""
    if "server_num" not in counts or "device_num" not in counts:
        return
    share, rest = divmod(counts["device_num"], counts["server_num"])
    if rest or share not in SIZES:
        problem = f"'device_num' is {counts['device_num']} and 'server_num' is {counts['server_num']}"
        state.reader.add(
            "device-count", f"{at}/server_num", problem, "1, 2, 4, 8 or 16 devices on every server"
        )


def _check_instance(
    state: TableState, groups: _Groups, instance: Mapping[str, object], at: str, *, address_read: bool
) -> None:
    """Check one instance: a device of a laboratory's server, or a pod of a cloud with its devices."""
    reader = state.reader
    server_id = reader.read("instance", instance, at).texts.get("server_id", "")
    values = reader.read(f"{groups.mode} instance", instance, at)
    if "pod_name" in values.texts:
        reader.once(groups.pods, values.texts["pod_name"], f"{at}/pod_name", "pod-name", "pod")
    devices = list(reader.objects("instance", "devices", instance, at))
    if groups.mode == "lab" and len(devices) > 1:
        problem = f"an instance of a laboratory's table has one device, not {len(devices)}"
        hccl = invalid("", "rank_id", "a valid integer")
        reader.add("device-count", f"{at}/devices", problem, "write one instance for each device", hccl)
    for pointer, device in devices:
        groups.servers.setdefault(server_id, []).append(at)
        rank = values.numbers.get("rank_id") if groups.mode == "lab" else len(state.devices)
        seen = _device(state, device, pointer, address_read)
        number = list(groups.servers).index(server_id)
        state.devices.append(seen._replace(server=number, rank=rank, rank_pointer=f"{at}/rank_id"))


def _device(state: TableState, device: Mapping[str, object], at: str, address_read: bool) -> SeenDevice:
    reader = state.reader
    before = len(reader.findings)
    values = reader.read("old device", device, at)
    state.check_device_id(values, at)
    device_id = values.numbers.get("device_id")
    if address_read and "device_ip" not in device:
        reader.add("missing-key", at, "'device_ip' is missing", ASK_ADDRESS, missing("device_ip"))
    written, ips = state.addresses(device, "device_ip", at)
    if "," in str(device.get("device_ip")) and ips is not None:
        problem = "'device_ip' has several addresses; the old form takes one"
        hccl = invalid(device["device_ip"], "device_ip", "a valid IP address")
        reader.add("device-ip", f"{at}/device_ip", problem, "keep one", hccl)
    if not address_read:
        # HCCL reads no addresses of a cloud's single instance.
        reader.downgrade(before, only=f"{at}/device_ip")
        written, ips = (), ()
    return SeenDevice(at, 0, device_id, None, written, ips, has_key="device_ip" in device)
