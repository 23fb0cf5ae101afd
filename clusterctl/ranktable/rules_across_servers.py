"""The rules of a rank table that only show when all its servers are seen together."""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import NamedTuple

from clusterctl.ranktable.finding import (
    Finding,
    Hardware,
    invalid,
    missing,
)

IPV4 = re.compile(r"(?:(?:25[0-5]|2[0-4][0-9]|1[0-9][0-9]|[1-9]?[0-9])(?:\.(?!\Z)|\Z)){4}")


def read_address(text: str) -> str:
    """An IP address in its one spelling, or ValueError; for IPv4 faster than `ipaddress`: there may be 80,000."""
    return text if IPV4.fullmatch(text) else str(ipaddress.ip_address(text))


class SeenServer(NamedTuple):
    """What was read of a server."""

    pointer: str
    server_id: str | None
    devices: int


class SeenDevice(NamedTuple):
    """What was read of a device; None where it can't be read."""

    pointer: str
    server: int
    device_id: int | None
    rank: int | None
    ips: tuple[str, ...] | None
    super_id: str | None = None
    rank_pointer: str | None = None
    """Where the rank stands, if not at the device itself."""


def rank_place(device: SeenDevice) -> str:
    return device.rank_pointer or f"{device.pointer}/rank_id"


NAMES = {
    "server": "server_id", "device": "device_id", "rank": "rank_id", "address": "device_ip",
    "super pod": "super_pod_id", "super-device id": "super_device_id",
}  # fmt: skip


def note(
    findings: list[Finding], seen: dict[Hashable, str], key: Hashable, place: str, code: str, noun: str
) -> None:
    """Note where a key stands; a second place is a finding."""
    if key in seen:
        value, name = key[-1] if isinstance(key, tuple) else key, NAMES[noun]
        what = f"the {noun} {str(value)[:80]!r} stands at {seen[key]} too"
        hccl = invalid(value, name, f"a unique {name}")
        findings.append(Finding(code, place, what, "keep one of the two", hccl))
    else:
        seen[key] = place


@dataclass
class Together:
    """Adds to `findings` what is wrong between the servers and devices that were read."""

    findings: list[Finding]
    hardware: Hardware
    servers: list[SeenServer]
    devices: list[SeenDevice]

    def run(self, addresses_required: bool) -> None:
        self._servers()
        self._device_ids()
        self._ranks()
        self._addresses(addresses_required)
        self._equal_counts()

    def add(self, code: str, place: str, what: str, remedy: str, hccl: str = "") -> None:
        self.findings.append(Finding(code, place, what, remedy, hccl))

    def _unique(
        self,
        items: list[tuple[Hashable, SeenDevice]],
        where: Callable[[SeenDevice], str],
        code: str,
        noun: str,
    ) -> None:
        """Each key once; a table is good far more often than not, so a set tells that first."""
        if len({key for key, _ in items}) < len(items):
            seen: dict[Hashable, str] = {}
            for key, device in items:
                note(self.findings, seen, key, where(device), code, noun)

    def _servers(self) -> None:
        seen: dict[Hashable, str] = {}
        for server in self.servers:
            if server.server_id is not None:
                place = f"{server.pointer}/server_id"
                note(self.findings, seen, server.server_id, place, "server-id", "server")

    def _device_ids(self) -> None:
        items: list[tuple[Hashable, SeenDevice]] = [
            ((one.server, one.device_id), one) for one in self.devices if one.device_id is not None
        ]
        self._unique(items, lambda one: f"{one.pointer}/device_id", "device-id", "device")

    def _ranks(self) -> None:
        """The ranks are 0 to N-1, each once; with no repetition and none above, none is left out."""
        count = len(self.devices)
        items: list[tuple[Hashable, SeenDevice]] = [
            (one.rank, one) for one in self.devices if one.rank is not None
        ]
        self._unique(items, rank_place, "rank-id", "rank")
        for device in self.devices:
            if device.rank is not None and device.rank >= count:
                hccl = invalid(device.rank, "rank_id", f"0 to {count - 1}")
                what = f"the rank is {device.rank}, with {count} devices in all"
                remedy = f"the ranks 0 to {count - 1}, each once"
                self.add("rank-id", rank_place(device), what, remedy, hccl)

    def _addresses(self, required: bool) -> None:
        counts: dict[int, str] = {}
        families: dict[int, str] = {}
        items: list[tuple[Hashable, SeenDevice]] = []
        for device in self.devices:
            if not device.ips:
                if device.ips == () and required:
                    what = "'device_ip' is missing; ranks on several servers need it"
                    remedy = "`hccn_tool -i N -ip -g` on that node tells it"
                    self.add("device-ip", device.pointer, what, remedy, missing("device_ip"))
                continue
            for address in device.ips:
                items.append((address, device))
                family = 6 if ":" in address else 4
                if family not in families:
                    families[family] = f"{device.pointer}/device_ip"
            if len(device.ips) not in counts:
                counts[len(device.ips)] = f"{device.pointer}/device_ip"
        self._unique(items, lambda one: f"{one.pointer}/device_ip", "device-ip", "address")
        self._alike("device-ip", counts, "{} addresses", "as many addresses for every device")
        self._alike("ip-family", families, "IPv{}", "addresses of one IP version")

    def _alike(self, code: str, seen: dict[int, str], words: str, expected: str) -> None:
        if len(seen) > 1:
            places = ", ".join(f"{words.format(value)} at {place}" for value, place in seen.items())
            hccl = invalid(words.format(list(seen)[-1]), "device_ip", expected)
            self.add(code, list(seen.values())[-1], f"devices differ: {places}", expected, hccl)

    def _equal_counts(self) -> None:
        if not self.hardware.equal_counts or not self.servers:
            return
        first = self.servers[0]
        for server in self.servers:
            if server.devices != first.devices:
                what = (
                    f"{server.devices} devices, and {first.pointer} has {first.devices}: {self.hardware.name}"
                )
                hccl = invalid(server.devices, "device", str(first.devices))
                remedy = "leave devices out until they are equal"
                place = f"{server.pointer}/device" if "/server_list/" in server.pointer else server.pointer
                self.add("device-count", place, f"{what} wants as many on every server", remedy, hccl)
