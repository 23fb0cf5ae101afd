"""The rules of versions 1.0 and 1.2: servers with their devices, and the super pods of A3."""

from __future__ import annotations

import re
from collections.abc import Hashable, Mapping

from clusterctl.ranktable.finding import invalid
from clusterctl.ranktable.rules.fields import MAX_NUMBER
from clusterctl.ranktable.rules.reader import IPV4, Values
from clusterctl.ranktable.rules.state import SeenDevice, SeenServer, TableState

# Most devices have only these keys.
PLAIN = {"device_id", "device_ip", "rank_id", "super_device_id"}
IDS = {str(number): number for number in range(64)}
_NUMBER = re.compile(r"[0-9]{1,9}")


def check_servers(state: TableState) -> None:
    """Check `server_list` and, for version 1.2, `super_pod_list`."""
    reader = state.reader
    values = reader.read("table", state.value, "")
    state.check_count(values, "server_count", state.value, "server_list")
    for at, server in reader.objects("table", "server_list", state.value, ""):
        texts = reader.read("server", server, at).texts
        before = len(state.devices)
        for here, device in reader.objects("server", "device", server, at):
            state.devices.append(_plain(state, device, here) or _device(state, device, here))
        count = len(state.devices) - before
        state.servers.append(SeenServer(at, texts.get("server_id"), count, texts.get("host_ip", "")))
    if state.version == "1.2" and state.servers:
        _check_super_pods(state)


def _plain(state: TableState, device: Mapping[str, object], at: str) -> SeenDevice | None:
    """Return a device that has only the usual keys, four times as fast; None if it needs a closer look."""
    if not device.keys() <= PLAIN:
        return None
    device_id, ip, rank = device.get("device_id"), device.get("device_ip"), device.get("rank_id")
    if not (isinstance(device_id, str) and isinstance(ip, str) and isinstance(rank, str)):
        return None
    number = IDS.get(device_id, state.hardware.devices)
    if number >= state.hardware.devices or not _NUMBER.fullmatch(rank) or not IPV4.fullmatch(ip):
        return None
    super_id = device.get("super_device_id", "") if state.version == "1.2" else "0"
    if not isinstance(super_id, str) or not _NUMBER.fullmatch(super_id):
        return None
    known = int(super_id) if state.version == "1.2" else None
    return SeenDevice(at, len(state.servers), number, int(rank), (ip,), (ip,), known)


def _device(state: TableState, device: Mapping[str, object], at: str) -> SeenDevice:
    """Read a device field by field."""
    values = state.reader.read("device", device, at)
    before = len(state.reader.findings)
    of_a3 = state.reader.read("1.2 device", device, at) if state.version == "1.2" else Values()
    if "super_device_id" not in device and "super_pod_list" not in state.value:
        # Without super pods HCCL does not need it.
        state.reader.downgrade(before, only=at, code="missing-key")
    state.check_device_id(values, at)
    written, ips = state.addresses(device, "device_ip", at)
    backups = state.addresses(device, "backup_device_ip", at)[1] if state.version == "1.2" else ()
    seen = SeenDevice(
        at, len(state.servers), values.numbers.get("device_id"), values.numbers.get("rank_id"), written, ips,
        of_a3.numbers.get("super_device_id"), backups=backups or (),
        host_nic=values.texts.get("net_position") == "host", has_key="device_ip" in device,
    )  # fmt: skip
    if seen.super_id == MAX_NUMBER:
        problem = f"'super_device_id' is {MAX_NUMBER}, which HCCL uses for a missing one"
        state.reader.add("super-device-id", f"{at}/super_device_id", problem, "the SDID that npu-smi shows")
    if set(seen.backups) & set(ips or ()):
        problem = "'backup_device_ip' is the device's own address"
        state.reader.add("host-ip", f"{at}/backup_device_ip", problem, "the address of its pair device")
    return seen


# -- super pods


def _check_super_pods(state: TableState) -> None:
    reader = state.reader
    if "super_pod_list" not in state.value:
        problem = "'super_pod_list' is missing: HCCL counts every server as outside of a super pod"
        reader.warn("missing-key", "", problem, 'add "super_pod_list": [...]')
        return
    pods: dict[Hashable, str] = {}
    named: dict[str, str] = {}
    pod_of: dict[str, int] = {}
    for number, (at, pod) in enumerate(reader.objects("table", "super_pod_list", state.value, "")):
        pod_id = reader.read("super pod", pod, at).texts.get("super_pod_id")
        if pod_id is not None:
            reader.once(pods, pod_id, f"{at}/super_pod_id", "super-pod", "super pod")
        for here, server in reader.objects("super pod", "server_list", pod, at):
            server_id = reader.read("super pod server", server, here).texts.get("server_id")
            if server_id is None:
                continue
            if server_id in named:
                problem = (
                    f"the server {server_id[:80]!r} is also at {named[server_id]}; HCCL uses the last one"
                )
                reader.warn("super-pod", f"{here}/server_id", problem, "keep one of the two")
            named.setdefault(server_id, f"{here}/server_id")
            pod_of[server_id] = number
    listed = state.value["super_pod_list"]
    if isinstance(listed, list) and listed:
        _check_pods_and_servers(state, named)
        _check_super_ids(state, pod_of)


def _check_pods_and_servers(state: TableState, named: Mapping[str, str]) -> None:
    """Check that the servers of the super pods are those of the table."""
    listed = {server.server_id: server.pointer for server in state.servers if server.server_id is not None}
    for server_id, pointer in listed.items():
        if server_id not in named:
            problem = f"no super pod names the server {server_id[:80]!r}"
            state.reader.add("super-pod", pointer, problem, "add it to a super pod's server_list")
    for name, pointer in named.items():
        if name not in listed:
            hccl = invalid(name, "server_id", "a server of server_list")
            problem = f"the server {name[:80]!r} is not in server_list"
            state.reader.add("super-pod", pointer, problem, "remove it, or add the server", hccl)


def _check_super_ids(state: TableState, pod_of: Mapping[str, int]) -> None:
    """Check that a super-device id is unique in its super pod; HCCL compares the numbers."""
    seen: dict[tuple[int, int], str] = {}
    for device in state.devices:
        pod = pod_of.get(state.servers[device.server].server_id or "")
        if device.super_id is None or pod is None:
            continue
        pointer, key = f"{device.pointer}/super_device_id", (pod, device.super_id)
        if key in seen:
            problem = f"the super-device id '{device.super_id}' is also at {seen[key]}"
            state.reader.add("super-device-id", pointer, problem, "keep one of the two")
        seen.setdefault(key, pointer)
