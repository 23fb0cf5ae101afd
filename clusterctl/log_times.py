"""When a log's bytes were written: a small index beside each file that came home, for `--since`."""

from __future__ import annotations

import re
import time
from pathlib import Path

from clusterctl.errors import UsageError

EVERY = 10.0  # seconds between two entries of one file: a week of a talkative rank makes 2 MB
UNITS = {"s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}
CLOCKS = ("%H:%M", "%H:%M:%S")
DATES = ("%Y-%m-%d", "%Y-%m-%d %H:%M", "%Y-%m-%d %H:%M:%S", "%Y-%m-%dT%H:%M", "%Y-%m-%dT%H:%M:%S")


def index_of(log: Path) -> Path:
    """`rank-0.out.times`: lines of a time (seconds here) and how many bytes had been written by then."""
    return log.with_name(log.name + ".times")


class LogTimes:
    """Writes the indexes. Ages are measured on the node and counted back from now, so that no node's clock
    matters."""

    def __init__(self) -> None:
        self._noted: dict[Path, float] = {}
        self._passed: dict[Path, str] = {}

    def note(self, log: Path, end: int, age: object) -> None:
        """The bytes up to `end` were written `age` seconds ago; a chunk in the middle of a file has no age."""
        if not isinstance(age, (int, float)) or isinstance(age, bool) or not 0 <= age < 1e9:
            return
        written = time.time() - age
        entry = f"{written:.3f} {end}\n"
        if written - self._noted.get(log, 0.0) < EVERY:
            self._passed[log] = entry
            return
        self._noted[log] = written
        with index_of(log).open("a", encoding="ascii") as file:
            file.write(self._passed.pop(log, "") + entry)  # the last before a silence too, whose end this is


def offset_since(log: Path, when: float) -> int:
    """Where the bytes begin that were written at or after a time; earlier ones may be among them, up to one
    entry's worth. Its end where all of it is older."""
    there = log.stat()
    if there.st_mtime < when:
        return there.st_size
    start = 0
    for written, end in _entries(log):
        if written >= when:
            break
        start = end
    return min(start, there.st_size)


def _entries(log: Path) -> list[tuple[float, int]]:
    index = index_of(log)
    if not index.exists():
        return []
    found = re.findall(r"^(\d+\.\d+) (\d+)$", index.read_text(encoding="ascii", errors="replace"), re.MULTILINE)
    return [(float(written), int(end)) for written, end in found]


def moment(text: str, now: float | None = None) -> float:
    """`10m` ago, `14:30` today, or `2026-01-31 14:30`, as seconds since the epoch."""
    now = time.time() if now is None else now
    if match := re.fullmatch(r"\s*(\d{1,9}(?:\.\d{1,3})?)\s*([smhd])\s*", text):
        return now - float(match[1]) * UNITS[match[2]]
    today = time.strftime("%Y-%m-%d ", time.localtime(now))
    for form, prefix in [*((f"%Y-%m-%d {clock}", today) for clock in CLOCKS), *((date, "") for date in DATES)]:
        try:
            return time.mktime(time.strptime(prefix + text.strip(), form))
        except (ValueError, OverflowError):
            continue
    raise UsageError(f"--since {text}: no time", "as in --since 10m, 2h, 14:30 or '2026-01-31 14:30'")
