"""What a rank's start takes, part by part: a restart costs this much again, on every rank."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping


class Startup:
    """Seconds of each part of a start, one after the other, from the process's first moment."""

    def __init__(self, age: float | None = None) -> None:
        """`age` is how long the process has run; by default the kernel is asked."""
        self.parts: dict[str, float] = {}
        self._last = time.monotonic() - (process_age() if age is None else age)

    def done(self, part: str) -> None:
        """What was done since the last call, or since the process began, was this part."""
        now = time.monotonic()
        self.parts[part] = round(now - self._last, 3)
        self._last = now


def process_age() -> float:
    """Seconds since this process began, to a hundredth; 0 where the system does not say."""
    try:
        with open("/proc/self/stat", "rb") as file:
            ticks = int(file.read().rpartition(b")")[2].split()[19])
        return max(0.0, time.clock_gettime(time.CLOCK_BOOTTIME) - ticks / os.sysconf("SC_CLK_TCK"))
    except (OSError, ValueError, IndexError, AttributeError):
        return 0.0


def in_words(parts: Mapping[str, float]) -> str:
    """`started in 3.1 s: python 0.1, libraries 2.0, ...`, without the parts that took no time."""
    told = [f"{name} {seconds:.1f}" for name, seconds in parts.items() if seconds >= 0.05]
    return f"started in {sum(parts.values()):.1f} s" + (f": {', '.join(told)}" if told else "")
