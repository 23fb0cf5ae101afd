"""Normalize host names and addresses, and find invalid ones."""

from __future__ import annotations

import ipaddress
import re

# No DNS name ends in a number after a dot.
_NUMBERS = re.compile(r"[0-9]+(\.[0-9]+)+\Z")


def same_place(host: str) -> str:
    """Return the canonical form of a host: names in lower case, `FE80:0::2` as `fe80::2`."""
    address = _address(host) if ":" in host else None
    return str(address) if address else host.lower().removesuffix(".")


def host_and_port(text: str) -> tuple[str, int | None]:
    """Split `host`, `host:22`, `[::1]:22` or a bare IPv6 address into host and port (None if absent)."""
    if text.startswith("["):
        host, _, rest = text[1:].partition("]")
        return host, int(rest[1:]) if rest[1:].isdigit() else None
    host, colon, port = text.rpartition(":")
    if colon and port.isdigit() and ":" not in host:
        return host, int(port)
    return text, None


def address_fault(host: str) -> str:
    """Return why a text is neither a valid address nor a valid name; "" if it is one."""
    if _NUMBERS.match(host) and not _address(host):
        return f"{host[:80]!r} is not an IPv4 address"
    if ":" in host and not _address(host):
        return f"{host[:80]!r} is not an IPv6 address"
    if len(host) > 253 or any(len(part) > 63 for part in host.split(".")):
        return f"{host[:80]!r} is too long for a name (253 characters, 63 between dots)"
    return ""


def is_ip(text: str) -> bool:
    """Return whether a text is an IP address."""
    return _address(text) is not None


def _address(host: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    try:
        return ipaddress.ip_address(host)
    except ValueError:
        return None
