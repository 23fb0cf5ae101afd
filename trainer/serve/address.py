"""Which addresses only this machine reaches."""

from __future__ import annotations

import ipaddress


def is_loopback(host: str) -> bool:
    """Return whether a name or address leads to this machine on every machine."""
    try:
        return host.lower() == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def host_of(header: str) -> str:
    """Return the name or address in a Host header."""
    if header.startswith("["):
        return header[1:].partition("]")[0]
    return header.partition(":")[0]
