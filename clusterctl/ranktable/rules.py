"""Every rule that HCCL has for the content of a rank table, and what HCCL would have said instead.

HCCL calls a number where it wants a string "missing" and waits half an hour for a table that is not
"completed". Each Finding names the place, the reason and the remedy, and quotes the message that a user
would otherwise have to search for. The rules are those of HCCL's own readers: none for the old laboratory
form without a version (910A), `1.0` (910A and 910B), `1.2` (A3 super pods); version `2.0` (A5) is read by
another library, which wants numbers where these want strings.
"""

from __future__ import annotations

import re
from collections.abc import Hashable, Iterator
from dataclasses import dataclass, field
from typing import Any

from clusterctl.ranktable.finding import (
    GUESS,
    HARDWARE,
    Finding,
    Hardware,
    invalid,
    kind,
    missing,
)
from clusterctl.ranktable.rules_across_servers import (
    IPV4,
    SeenDevice,
    SeenServer,
    Together,
    note,
    read_address,
)

# Bytes of a server_id: HCCL counts those, so an id of 30 Chinese characters is too long.
MAX_ID = 64
MAX_POD_ID = 127
MAX_DIGITS = 10
# Devices a server in the old form.
LAB_SIZES = (1, 2, 4, 8, 16)
# Most devices have these keys alone.
PLAIN = {"device_id", "device_ip", "rank_id", "super_device_id"}
IDS = {str(number): number for number in range(64)}

_NUMBER = re.compile(rf"[0-9]{{1,{MAX_DIGITS}}}")


def _size(text: str) -> int:
    return len(text.encode("utf-8", "surrogatepass"))


@dataclass
class Rules:
    """Walks one table: shape and types first, then what shows only when all servers are seen together."""

    value: dict[str, Any]
    asked: str | None
    findings: list[Finding] = field(default_factory=list)
    version: str | None = None
    """Empty for the old form; None when nothing can be told."""
    hardware: Hardware = HARDWARE["a2"]
    servers: list[SeenServer] = field(default_factory=list)
    devices: list[SeenDevice] = field(default_factory=list)

    def run(self) -> None:
        self.version = self._version()
        self.hardware = HARDWARE[self.asked or GUESS["1.0" if self.version is None else self.version]]
        self._binding()
        if self.version == "2.0":
            self._ranks_v2()
        elif self.version == "":
            self._lab()
        elif self.version is not None:
            self._concise()
        self._status()
        Together(self.findings, self.hardware, self.servers, self.devices).run(self._addresses_required())

    def _addresses_required(self) -> bool:
        """Between servers the address is needed; within one super pod of A3 its own network serves."""
        pods = self.value.get("super_pod_list")
        one_pod = self.version == "1.2" and isinstance(pods, list) and len(pods) == 1
        return len(self.servers) > 1 and not one_pod

    # -- words for what is found

    def add(self, code: str, place: str, what: str, remedy: str, hccl: str = "") -> None:
        self.findings.append(Finding(code, place, what, remedy, hccl))

    def once(self, seen: dict[Hashable, str], key: Hashable, place: str, code: str, noun: str) -> None:
        """Note where a key stands; a second place is a finding."""
        note(self.findings, seen, key, place, code, noun)

    def text(self, holder: dict[str, Any], key: str, at: str, required: bool = True) -> str | None:
        """A value that must be a string; HCCL calls any other type missing."""
        value = holder.get(key)
        if isinstance(value, str):
            return value
        if key not in holder:
            if required:
                self.add("missing-key", at, f"{key!r} is missing", f'add "{key}"', missing(key))
            return None
        what = f"{key!r} is {kind(value)}; every value must be a string"
        shown = str(value) if type(value) in (int, float) else "..."
        self.add("scalar-type", f"{at}/{key}", what, f'write "{key}": "{shown}"', missing(key))
        return None

    def number(self, holder: dict[str, Any], key: str, at: str, required: bool = True) -> int | None:
        """A whole number written as a string; in version 2.0, as a number."""
        value = holder.get(key)
        if self.version == "2.0":
            if type(value) is int and 0 <= value < 2**31:
                return value
            remedy = f'write "{key}": 0'
            if key not in holder:
                self.add("missing-key", at, f"{key!r} is missing", remedy)
            elif type(value) in (int, float):
                self.add(
                    "not-a-number", f"{at}/{key}", f"{key!r} is {value}, not a whole number from 0", remedy
                )
            else:
                what = f"{key!r} is {kind(value)}; version 2.0 wants a number"
                self.add("scalar-type", f"{at}/{key}", what, remedy)
            return None
        if isinstance(value, str) and len(value) <= MAX_DIGITS and value.isascii() and value.isdigit():
            return int(value)
        text = self.text(holder, key, at, required)
        if text is None:
            return None
        what = f"{key!r} is {text[:80]!r}, not a decimal number"
        self.add(
            "not-a-number",
            f"{at}/{key}",
            what,
            'digits only, as in "0"',
            invalid(text, key, "a decimal number"),
        )
        return None

    def objects(self, holder: dict[str, Any], key: str, at: str) -> Iterator[tuple[str, dict[str, Any]]]:
        """The objects of a list that must not be empty, each with its pointer."""
        value = holder.get(key)
        if key not in holder:
            self.add("missing-key", at, f"{key!r} is missing", f'add "{key}": [...]', missing(key))
        elif not isinstance(value, list):
            self.add(
                "scalar-type", f"{at}/{key}", f"{key!r} is {kind(value)}, not a list", "[...]", missing(key)
            )
        elif not value:
            hccl = invalid("[]", key, "a list that is not empty")
            self.add("empty-list", f"{at}/{key}", f"{key!r} is empty", "leave out what has none", hccl)
        for place, item in enumerate(value if isinstance(value, list) else ()):
            here = f"{at}/{key}/{place}"
            if isinstance(item, dict):
                yield here, item
            else:
                self.add("scalar-type", here, f"{kind(item)} where an object belongs", "{...}", missing(key))

    # -- the top of the table

    def _version(self) -> str | None:
        if "version" not in self.value:
            if "group_list" in self.value:
                return ""
            remedy = 'add "version": "1.0" (910A, 910B), "1.2" (A3) or "2.0" (A5)'
            self.add("version", "", "'version' is missing", remedy, missing("group_count"))
            return "1.0"
        version = self.text(self.value, "version", "")
        if version is None and str(self.value["version"]) in ("1.0", "1.2"):
            # Said already; the rest of the table is worth a look.
            return str(self.value["version"])
        if version in ("1.0", "1.2", "2.0"):
            return version
        if version == "1.1":
            what = "version 1.1 (mixed hardware) has rules that are not known here"
            self.add("version", "/version", what, '"1.0", "1.2" or "2.0"')
        elif version is not None:
            hccl = invalid(version, "version", "a valid version number")
            self.add(
                "version", "/version", f"unknown version {version[:80]!r}", '"1.0", "1.2" or "2.0"', hccl
            )
        return None

    def _binding(self) -> None:
        if self.version is None or self.version in self.hardware.versions:
            return
        wanted = self.hardware.versions[-1]
        what = f"{self.hardware.name} wants version {wanted}, not {self.version or 'a table without one'}"
        hccl = invalid(self.version, "version", wanted)
        self.add(
            "hardware", "/version" if self.version else "", what, "build the table for this hardware", hccl
        )

    def _status(self) -> None:
        status = self.text(self.value, "status", "")
        if status is not None and status != "completed":
            what = f"'status' is {status[:80]!r}: HCCL would read the file again every second for 30 minutes"
            remedy = 'wait for its writer to finish; it then says "completed"'
            self.add("status", "/status", what, remedy, "nothing for 30 minutes, then a time-out")

    def _count(self, key: str, listed: str, required: bool = False) -> None:
        if key not in self.value and not required:
            return
        count = self.number(self.value, key, "", required)
        there = self.value.get(listed)
        if count is not None and isinstance(there, list) and count != len(there):
            what = f"{key!r} is {count} and {listed!r} holds {len(there)}"
            self.add(
                "server-count", f"/{key}", what, f"write {len(there)}", invalid(count, key, str(len(there)))
            )

    # -- one reader a version

    def _concise(self) -> None:
        """Versions 1.0 and 1.2."""
        self._count("server_count", "server_list")
        for at, server in self.objects(self.value, "server_list", ""):
            server_id = self._server_id(server, at)
            self._host_address(server, "host_ip", at)
            self._port(server, "host_port", at)
            before = len(self.devices)
            for here, device in self.objects(server, "device", at):
                seen = self._plain(device, here, len(self.servers))
                if seen is None:
                    rank = self.number(device, "rank_id", here)
                    seen = self._device(device, here, len(self.servers), rank)
                self.devices.append(seen)
            self.servers.append(SeenServer(at, server_id, len(self.devices) - before))
        if self.version == "1.2" and self.servers:
            self._super_pods()

    def _lab(self) -> None:
        """The old form: one entry a rank, grouped by the server that each names."""
        self._count("group_count", "group_list", required=True)
        self.text(self.value, "para_plane_nic_location", "")
        places: dict[str, list[str]] = {}
        numbers: dict[str, int] = {}
        for at, group in self.objects(self.value, "group_list", ""):
            for here, entry in self.objects(group, "instance_list", at):
                server_id = self._server_id(entry, here) or ""
                places.setdefault(server_id, []).append(here)
                number = numbers.setdefault(server_id, len(numbers))
                rank = self.number(entry, "rank_id", here)
                for place, device in self.objects(entry, "devices", here):
                    seen = self._device(device, place, number, rank)
                    self.devices.append(seen._replace(rank_pointer=f"{here}/rank_id"))
        self.servers = [SeenServer(found[0], server_id, len(found)) for server_id, found in places.items()]
        for server in self.servers:
            if server.devices not in LAB_SIZES:
                what = f"the server {server.server_id!r} holds {server.devices} devices"
                hccl = invalid(server.devices, "device_num", "1, 2, 4, 8 or 16")
                self.add("device-count", server.pointer, what, "1, 2, 4, 8 or 16 of them", hccl)

    def _ranks_v2(self) -> None:
        """Version 2.0: a flat list of ranks, each with its ways into the network."""
        self._count("rank_count", "rank_list", required=True)
        for at, entry in self.objects(self.value, "rank_list", ""):
            rank = self.number(entry, "rank_id", at)
            self.number(entry, "local_id", at)
            self.number(entry, "device_id", at)
            for here, level in self.objects(entry, "level_list", at):
                self.number(level, "net_layer", here)
                self.text(level, "net_instance_id", here)
                self.text(level, "net_type", here)
                for place, address in self.objects(level, "rank_addr_list", here):
                    self.text(address, "addr_type", place)
                    if address.get("addr_type") in ("IPV4", "IPV6"):
                        self._host_address(address, "addr", place)
            self.devices.append(SeenDevice(at, 0, None, rank, ()))

    # -- parts of a server

    def _server_id(self, server: dict[str, Any], at: str) -> str | None:
        server_id = self.text(server, "server_id", at)
        if server_id is not None and not 0 < (size := _size(server_id)) <= MAX_ID:
            what = f"'server_id' has {size} bytes"
            hccl = invalid(server_id, "server_id", f"1 to {MAX_ID} characters")
            self.add("server-id", f"{at}/server_id", what, f"1 to {MAX_ID}, such as the node's address", hccl)
        return server_id

    def _plain(self, device: dict[str, Any], at: str, server: int) -> SeenDevice | None:
        """A device as nearly all are, read in a quarter of the time; None where a closer look is needed."""
        if not device.keys() <= PLAIN:
            return None
        device_id, ip, rank = device.get("device_id"), device.get("device_ip"), device.get("rank_id")
        if not (isinstance(device_id, str) and isinstance(ip, str) and isinstance(rank, str)):
            return None
        number = IDS.get(device_id, self.hardware.devices)
        if number >= self.hardware.devices or not _NUMBER.fullmatch(rank) or not IPV4.fullmatch(ip):
            return None
        super_id = device.get("super_device_id") if self.version == "1.2" else None
        if self.version == "1.2" and not (isinstance(super_id, str) and _NUMBER.fullmatch(super_id)):
            return None
        return SeenDevice(at, server, number, int(rank), (ip,), super_id)

    def _device(self, device: dict[str, Any], at: str, server: int, rank: int | None) -> SeenDevice:
        device_id = self.number(device, "device_id", at)
        if device_id is not None and device_id >= self.hardware.devices:
            allowed = f"0 to {self.hardware.devices - 1}"
            what = f"'device_id' is {device_id}; {self.hardware.name} has {allowed}"
            hccl = invalid(device_id, "device_id", allowed)
            self.add("device-id", f"{at}/device_id", what, "the physical id, as npu-smi shows it", hccl)
        if not device.keys() <= PLAIN:
            self._port(device, "device_port", at)
            self._port(device, "backup_device_port", at)
            self._host_address(device, "backup_device_ip", at)
        ips = self._device_ips(device, at)
        return SeenDevice(at, server, device_id, rank, ips, self._super_id(device, at))

    def _super_id(self, device: dict[str, Any], at: str) -> str | None:
        if self.version != "1.2":
            return None
        super_id = self.text(device, "super_device_id", at)
        if super_id is not None and not _NUMBER.fullmatch(super_id):
            hccl = invalid(super_id, "super_device_id", "a decimal number")
            what = f"{super_id[:80]!r} is no super-device id"
            remedy = "the SDID of `npu-smi info -t spod-info`"
            self.add("super-device-id", f"{at}/super_device_id", what, remedy, hccl)
        return super_id

    def _device_ips(self, device: dict[str, Any], at: str) -> tuple[str, ...] | None:
        text = self.text(device, "device_ip", at, required=False)
        if text is None:
            return None if "device_ip" in device else ()
        try:
            if "," not in text:
                return (read_address(text),)
            return tuple(read_address(part) for part in text.split(","))
        except ValueError:
            what = f"'device_ip' is {text[:80]!r}, not an address"
            hccl = invalid(text, "device_ip", "a valid IP address")
            self.add(
                "device-ip", f"{at}/device_ip", what, "`hccn_tool -i N -ip -g` on that node tells it", hccl
            )
            return None

    def _host_address(self, holder: dict[str, Any], key: str, at: str) -> None:
        text = self.text(holder, key, at, required=False) if key in holder else None
        try:
            read_address("0.0.0.0" if text is None else text)
        except ValueError:
            hccl = invalid(text, key, "a valid IP address")
            self.add(
                "host-ip", f"{at}/{key}", f"{key!r} is {text!r:.80}, not an address", "as in 10.0.0.1", hccl
            )

    def _port(self, holder: dict[str, Any], key: str, at: str) -> None:
        port = self.number(holder, key, at, required=False) if key in holder else None
        if port is not None and not 0 < port < 65536:
            hccl = invalid(port, key, "1 to 65535")
            self.add(
                "port", f"{at}/{key}", f"{key!r} is {port}", "1 to 65535; 16666 where nothing is said", hccl
            )

    def _super_pods(self) -> None:
        named: dict[Hashable, str] = {}
        pods: dict[Hashable, str] = {}
        pod_of: dict[str, int] = {}
        for number, (at, pod) in enumerate(self.objects(self.value, "super_pod_list", "")):
            pod_id = self.text(pod, "super_pod_id", at)
            if pod_id is not None:
                self.once(pods, pod_id, f"{at}/super_pod_id", "super-pod", "super pod")
                if not 0 < (size := _size(pod_id)) <= MAX_POD_ID:
                    what = f"'super_pod_id' has {size} bytes"
                    hccl = invalid(pod_id, "super_pod_id", f"1 to {MAX_POD_ID} characters")
                    self.add("super-pod", f"{at}/super_pod_id", what, f"1 to {MAX_POD_ID}", hccl)
            for here, server in self.objects(pod, "server_list", at):
                server_id = self.text(server, "server_id", here)
                if server_id is not None:
                    self.once(named, server_id, f"{here}/server_id", "super-pod", "server")
                    pod_of.setdefault(server_id, number)
        listed = self.value.get("super_pod_list")
        if isinstance(listed, list) and listed:
            self._pods_and_servers(named)
            self._unique_super_ids(pod_of)

    def _pods_and_servers(self, named: dict[Hashable, str]) -> None:
        """The servers of the super pods are those of the table."""
        listed = {server.server_id: server.pointer for server in self.servers if server.server_id is not None}
        for server_id, place in listed.items():
            if server_id not in named:
                hccl = invalid(server_id, "super_pod_list", "every server of server_list")
                what = f"no super pod names the server {server_id[:80]!r}"
                self.add("super-pod", place, what, "add it to a super pod's server_list", hccl)
        for name, place in named.items():
            if name not in listed:
                hccl = invalid(name, "super_pod_list", "a server of server_list")
                what = f"the server {str(name)[:80]!r} is not in server_list"
                self.add("super-pod", place, what, "take it out, or add the server", hccl)

    def _unique_super_ids(self, pod_of: dict[str, int]) -> None:
        seen: dict[Hashable, str] = {}
        for device in self.devices:
            pod = pod_of.get(self.servers[device.server].server_id or "")
            if device.super_id is not None and pod is not None:
                place = f"{device.pointer}/super_device_id"
                key = (pod, device.super_id)
                self.once(seen, key, place, "super-device-id", "super-device id")
