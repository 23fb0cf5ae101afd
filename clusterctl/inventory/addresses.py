"""What a text that should name a machine says: one spelling for the same place, and addresses that are none."""

from __future__ import annotations

import ipaddress
import re

# No name in DNS ends in a number after a dot.
_NUMBERS = re.compile(r"[0-9]+(\.[0-9]+)+\Z")


def same_place(host: str) -> str:
    """One spelling for all of a host: names count in lower case, `fe80::2` is `FE80:0::2`."""
    address = _address(host) if ":" in host else None
    return str(address) if address else host.lower().removesuffix(".")


def address_fault(host: str) -> str:
    """Why a text of numbers and dots, or with colons, is no address, or too long for a name; else nothing."""
    if _NUMBERS.match(host) and not _address(host):
        return f"{host[:80]!r} is no IPv4 address"
    if ":" in host and not _address(host):
        return f"{host[:80]!r} is no IPv6 address"
    if len(host) > 253 or any(len(part) > 63 for part in host.split(".")):
        return f"{host[:80]!r} is too long for a name: 253 characters, 63 between dots"
    return ""


def _address(host: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    try:
        return ipaddress.ip_address(host)
    except ValueError:
        return None
