"""The rules of a rank table that only show when all its servers and devices are compared."""

from __future__ import annotations

from collections.abc import Callable, Hashable

from clusterctl.ranktable.finding import invalid
from clusterctl.ranktable.rules.state import ASK_ADDRESS, SeenDevice, SeenServer, TableState


def check_across_servers(state: TableState) -> None:
    """Check what must be unique, contiguous or alike in the whole table."""
    _check_servers(state)
    _check_device_ids(state)
    _check_ranks(state)
    if state.version == "2.0":
        return
    _check_missing_addresses(state)
    _check_addresses(state)
    _check_backup_addresses(state)
    _check_host_addresses(state)
    _check_equal_counts(state)


def _rank_place(device: SeenDevice) -> str:
    return device.rank_pointer or f"{device.pointer}/rank_id"


def _unique(
    state: TableState,
    items: list[tuple[Hashable, SeenDevice]],
    where: Callable[[SeenDevice], str],
    code: str,
    noun: str,
) -> bool:
    """Return whether every key is unique; record each repetition."""
    # A table is good far more often than not, so the size of a set decides first.
    if len({key for key, _ in items}) == len(items):
        return True
    seen: dict[Hashable, str] = {}
    for key, device in items:
        state.reader.once(seen, key, where(device), code, noun)
    return False


def _check_servers(state: TableState) -> None:
    seen: dict[Hashable, str] = {}
    for server in state.servers:
        if server.server_id is not None:
            pointer = f"{server.pointer}/server_id"
            state.reader.once(seen, server.server_id, pointer, "server-id", "server")


def _check_device_ids(state: TableState) -> None:
    items: list[tuple[Hashable, SeenDevice]] = [
        ((device.server, device.device_id), device)
        for device in state.devices
        if device.device_id is not None
    ]
    _unique(state, items, lambda device: f"{device.pointer}/device_id", "device-id", "device")


def _check_ranks(state: TableState) -> None:
    """Check that the ranks are 0 to N-1: unique, and none above N-1."""
    count = len(state.devices)
    items: list[tuple[Hashable, SeenDevice]] = [
        (device.rank, device) for device in state.devices if device.rank is not None
    ]
    _unique(state, items, _rank_place, "rank-id", "rank")
    for device in state.devices:
        if device.rank is not None and device.rank >= count:
            problem = f"the rank is {device.rank}, but the table has {count} devices"
            remedy = f"the ranks 0 to {count - 1}, each once"
            hccl = invalid(device.rank, "rank_id", f"0 to {count - 1}")
            state.reader.add("rank-id", _rank_place(device), problem, remedy, hccl)


def _check_missing_addresses(state: TableState) -> None:
    """Check that devices on several servers have addresses, as far as this hardware needs them."""
    pods = state.value.get("super_pod_list")
    # Within one super pod of A3 the devices use a network of their own.
    one_pod = state.version == "1.2" and isinstance(pods, list) and len(pods) == 1
    if len(state.servers) < 2 or one_pod or state.version == "":
        return
    for device in state.devices:
        if device.ips is None or device.ips:
            continue
        host = _host_ip(state, device)
        problem = "'device_ip' is missing; ranks on several servers need it"
        if state.hardware.name == "a2" or (state.hardware.name == "910a" and not (device.has_key or host)):
            hccl = invalid("", "device_ip", "a valid IP address")
            state.reader.add("device-ip", device.pointer, problem, ASK_ADDRESS, hccl)
        elif not host:
            state.reader.warn("device-ip", device.pointer, problem, ASK_ADDRESS)


def _host_ip(state: TableState, device: SeenDevice) -> str:
    return state.servers[device.server].host_ip if device.server < len(state.servers) else ""


def _check_addresses(state: TableState) -> None:
    """Check that addresses are unique, as many on every device, and of one IP version."""
    where = _address_place
    written: list[tuple[Hashable, SeenDevice]] = []
    normal: list[tuple[str, SeenDevice]] = []
    families: dict[int, str] = {}
    counts: dict[int, str] = {}
    for device in state.devices:
        if device.ips is None:
            continue
        written += [(text, device) for text in device.written]
        for address in device.ips:
            normal.append((address, device))
            families.setdefault(6 if ":" in address else 4, where(device))
        # HCCL counts a device without an address as one with one.
        counts.setdefault(len(device.ips) or 1, where(device))
    if _unique(state, written, where, "device-ip", "address"):
        _check_spellings(state, normal)
    _check_alike(state, "device-ip", counts, "number of addresses", "as many addresses for every device", "")
    several = len(state.servers) > 1
    _check_alike(
        state,
        "ip-family",
        families,
        "IP version",
        "addresses of one IP version",
        "EI0001" if several else None,
    )


def _address_place(device: SeenDevice) -> str:
    return f"{device.pointer}/device_ip" if device.has_key else device.pointer


def _check_spellings(state: TableState, normal: list[tuple[str, SeenDevice]]) -> None:
    """Check that no address is repeated in another spelling, which HCCL does not notice."""
    if len({address for address, _ in normal}) == len(normal):
        return
    seen: dict[str, str] = {}
    for address, device in normal:
        pointer = _address_place(device)
        if address in seen:
            problem = f"the address '{address}' is also at {seen[address]}, in another spelling"
            state.reader.warn("device-ip", pointer, problem, "keep one of the two")
        seen.setdefault(address, pointer)


def _check_alike(
    state: TableState, code: str, seen: dict[int, str], subject: str, expected: str, hccl: str | None
) -> None:
    """Check that all devices agree; `hccl` is HCCL's code, "" if it reports none, None if HCCL does not object."""
    if len(seen) < 2:
        return
    places = ", ".join(f"{value} at {pointer}" for value, pointer in seen.items())
    last = list(seen.values())[-1]
    problem = f"devices differ in the {subject}: {places}"
    if hccl is None:
        state.reader.warn(code, last, problem, expected)
    else:
        message = f"{hccl}: Value {list(seen)[-1]} for RankIpFamily is invalid." if hccl else ""
        state.reader.add(code, last, problem, expected, message)


def _check_backup_addresses(state: TableState) -> None:
    items: list[tuple[Hashable, SeenDevice]] = [
        (address, device) for device in state.devices for address in device.backups
    ]
    where = "{}/backup_device_ip".format
    _unique(state, items, lambda device: where(device.pointer), "host-ip", "backup address")


def _check_host_addresses(state: TableState) -> None:
    """Check that host_ip is of one IP version, and given by every server when the table uses host networks."""
    servers = [server for server in state.servers if server.devices]
    families: dict[int, str] = {}
    for server in servers:
        if server.host_ip:
            families.setdefault(6 if ":" in server.host_ip else 4, f"{server.pointer}/host_ip")
    if len(families) > 1 and len(state.servers) > 1:
        places = ", ".join(f"{family} at {pointer}" for family, pointer in families.items())
        hccl = invalid(list(families)[-1], "host_ip", "one IP version")
        problem = f"servers differ in the IP version: {places}"
        state.reader.add(
            "ip-family", list(families.values())[-1], problem, "addresses of one IP version", hccl
        )
    reason = _why_host_networks(state)
    for server in servers if reason else ():
        if not server.host_ip and state.version != "":
            problem = f"'host_ip' is missing, and {reason}"
            state.reader.add("host-ip", server.pointer, problem, "give every server its host_ip")


def _why_host_networks(state: TableState) -> str:
    """Return why HCCL connects all ranks through their hosts, or "" if it does not."""
    for device in state.devices:
        if device.host_nic:
            return f"{device.pointer}/net_position is 'host'"
        if device.rank == 0 and device.ips == () and _host_ip(state, device):
            return f"rank 0 ({device.pointer}) has a host_ip and no device_ip"
    return ""


def _check_equal_counts(state: TableState) -> None:
    """Check that every server has as many devices as the first, which only 910A demands."""
    if not state.hardware.equal_counts or not state.servers:
        return
    first = state.servers[0]
    for server in state.servers:
        if server.devices != first.devices:
            problem = f"{server.devices} devices, and {first.pointer} has {first.devices}"
            remedy = "leave devices out until they are equal"
            hccl = invalid(server.devices, "device", str(first.devices))
            pointer = _device_list(server)
            problem = f"{problem}: {state.hardware.name} needs as many on every server"
            state.reader.add("device-count", pointer, problem, remedy, hccl)


def _device_list(server: SeenServer) -> str:
    return f"{server.pointer}/device" if "/server_list/" in server.pointer else server.pointer
