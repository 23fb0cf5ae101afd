"""IP addresses and EIDs as HCCL reads them from a rank table."""

from __future__ import annotations

import ipaddress
import re

IPV4 = re.compile(r"(?:(?:25[0-5]|2[0-4][0-9]|1[0-9][0-9]|[1-9]?[0-9])(?:\.(?!\Z)|\Z)){4}")
_EID = re.compile(r"[0-9a-fA-F]{32}")


class BadAddress(ValueError):
    """A text that is not an address."""


def read_address(text: str) -> str:
    """Return the normal spelling of an IP address, without its `%interface`; raise BadAddress otherwise."""
    # A table may hold 80,000 addresses, and the pattern is faster than the ipaddress module.
    if IPV4.fullmatch(text):
        return text
    address, percent, interface = text.partition("%")
    if percent and not interface:
        raise BadAddress(text)
    try:
        return str(ipaddress.ip_address(address))
    except ValueError:
        raise BadAddress(text) from None


def is_address(text: str, kind: str) -> bool:
    """Return whether a text is an address of this kind (IPV4, IPV6 or EID), as version 2.0 writes it."""
    if kind == "EID":
        return bool(_EID.fullmatch(text))
    if kind == "IPV4":
        return bool(IPV4.fullmatch(text))
    try:
        address = ipaddress.ip_address(text)
    except ValueError:
        return False
    # HCCL's pattern lets "::" stand for two or more groups only; a dotted end counts as two groups.
    groups = sum(map(bool, text.split(":"))) + ("." in text)
    return "%" not in text and address.version == 6 and ("::" not in text or groups <= 6)
