"""Figures and counts in words."""

from __future__ import annotations

import math
from collections.abc import Sequence


def count(number: float) -> str:
    """1234567 as `1.23M`."""
    for size, letter in ((1e12, "T"), (1e9, "B"), (1e6, "M"), (1e3, "k")):
        if abs(number) >= size:
            return f"{number / size:.3g}{letter}"
    return f"{number:g}"


def size(number: float) -> str:
    """Bytes as `1.4 GB`."""
    for unit, letter in ((1e9, "GB"), (1e6, "MB"), (1e3, "kB")):
        if number >= unit:
            return f"{number / unit:.3g} {letter}"
    return f"{number:.0f} B"


def duration(seconds: float) -> str:
    """Seconds as `42s`, `3m05s`, `2h10m`, `159d14h`."""
    if seconds < 0 or math.isinf(seconds) or math.isnan(seconds):
        return "?"
    whole = round(seconds)
    if whole < 60:
        return f"{whole}s"
    if whole < 3600:
        return f"{whole // 60}m{whole % 60:02d}s"
    if whole < 3 * 86400:
        return f"{whole // 3600}h{whole % 3600 // 60:02d}m"
    return f"{whole // 86400}d{whole % 86400 // 3600:02d}h"


def some(number: int, noun: str) -> str:
    """`1 node`, `2 nodes`."""
    return f"{number} {noun}" + ("" if number == 1 else "s")


def device_text(devices: Sequence[int]) -> str:
    """Device ids as a person writes them: `[0,8)`, or `0,2,5`."""
    ids = list(devices)
    if ids and ids == list(range(ids[0], ids[0] + len(ids))):
        return f"[{ids[0]},{ids[-1] + 1})"
    return ",".join(map(str, ids)) or "none"
