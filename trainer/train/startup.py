"""The seconds of each part of a rank's start. Does not import torch: it measures that import too."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping


class Startup:
    """The seconds of each part of a rank's start, from the beginning of the process."""

    def __init__(self, age: float | None = None) -> None:
        """`age` is the process's age in seconds; by default the kernel's figure."""
        self.parts: dict[str, float] = {}
        self._last = time.monotonic() - (process_age() if age is None else age)

    def done(self, part: str) -> None:
        """Record the time since the last call, or since the beginning of the process, under `part`."""
        now = time.monotonic()
        self.parts[part] = round(now - self._last, 3)
        self._last = now


def process_age() -> float:
    """Return the seconds since this process began, to a hundredth; 0 if the system does not report it."""
    try:
        with open("/proc/self/stat", "rb") as file:
            ticks = int(file.read().rpartition(b")")[2].split()[19])
        return max(0.0, time.clock_gettime(time.CLOCK_BOOTTIME) - ticks / os.sysconf("SC_CLK_TCK"))
    except (OSError, ValueError, IndexError, AttributeError):
        return 0.0


def startup_line(parts: Mapping[str, float]) -> str:
    """Return a line such as `started in 3.1 s: python 0.1, libraries 2.0`, without parts under 0.05 s."""
    named = [f"{name} {seconds:.1f}" for name, seconds in parts.items() if seconds >= 0.05]
    return f"started in {sum(parts.values()):.1f} s" + (f": {', '.join(named)}" if named else "")
