"""What the rules know of a table while they walk it: its version, hardware, servers, devices and findings."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from clusterctl.ranktable.finding import HARDWARE, Hardware, invalid
from clusterctl.ranktable.rules.reader import BadAddress, Reader, Values, read_address

ASK_ADDRESS = "`hccn_tool -i N -ip -g` on that node shows it"


class SeenServer(NamedTuple):
    """A server as it was read."""

    pointer: str
    server_id: str | None
    devices: int
    host_ip: str = ""


class SeenDevice(NamedTuple):
    """A device as it was read; None stands for a value that cannot be read."""

    pointer: str
    server: int
    device_id: int | None
    rank: int | None
    written: tuple[str, ...] = ()
    """Its addresses as the table writes them."""
    ips: tuple[str, ...] | None = ()
    """Its addresses in normal spelling; empty when it has none."""
    super_id: int | None = None
    rank_pointer: str | None = None
    """The pointer to the rank, if the device itself does not hold it."""
    backups: tuple[str, ...] = ()
    host_nic: bool = False
    """Whether the table puts its network card at the host."""
    has_key: bool = True
    """Whether the table has a device_ip for it, be it empty."""


@dataclass
class TableState:
    """One table while it is checked."""

    value: Mapping[str, object]
    reader: Reader = field(default_factory=Reader)
    version: str | None = None
    """Empty for the old form; None when it is not known."""
    hardware: Hardware = HARDWARE["a2"]
    servers: list[SeenServer] = field(default_factory=list)
    devices: list[SeenDevice] = field(default_factory=list)

    def check_count(self, values: Values, key: str, holder: Mapping[str, object], listed: str) -> None:
        """Check that the count in `key` is the length of the list in `listed`."""
        count, items = values.numbers.get(key), holder.get(listed)
        if count is not None and isinstance(items, list) and count != len(items):
            problem = f"{key!r} is {count}, but the length of {listed!r} is {len(items)}"
            with_code = key in ("server_count", "rank_count")
            hccl = invalid(count, key, str(len(items))) if with_code else ""
            self.reader.add("server-count", f"/{key}", problem, f"write {len(items)}", hccl)

    def check_device_id(self, values: Values, at: str) -> None:
        """Check that a device id exists on this hardware."""
        device_id = values.numbers.get("device_id", 0)
        if device_id >= self.hardware.devices:
            problem = f"'device_id' is {device_id}; {self.hardware.name} has 0 to {self.hardware.devices - 1}"
            self.reader.add("device-id", f"{at}/device_id", problem, "the physical id, as npu-smi shows it")

    def addresses(
        self, device: Mapping[str, object], key: str, at: str
    ) -> tuple[tuple[str, ...], tuple[str, ...] | None]:
        """Return the addresses in `key` as written and in normal spelling; None for the latter if unreadable."""
        text = device.get(key, "")
        # The field table reports another type than a string.
        if not isinstance(text, str):
            return (), None
        if not text:
            return (), ()
        parts = text.split(",")
        code = "device-ip" if key == "device_ip" else "host-ip"
        if len(parts) > 1 and not parts[-1]:
            parts.pop()
            problem = f"{key!r} ends in a comma, which HCCL ignores"
            self.reader.warn(code, f"{at}/{key}", problem, "remove the comma")
        try:
            return tuple(parts), tuple(read_address(part) for part in parts)
        except BadAddress:
            problem = f"{key!r} is {text[:80]!r}, not an address"
            hccl = invalid(text, key, "a valid IP address")
            self.reader.add(code, f"{at}/{key}", problem, ASK_ADDRESS, hccl)
            return (), None
