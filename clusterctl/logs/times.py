"""Record when the bytes of a log were written, in a small index next to it, and read times that users give."""

from __future__ import annotations

import os
import re
import time
from dataclasses import dataclass
from pathlib import Path

from clusterctl.errors import UsageError
from clusterctl.files import open_private, replace_file


def age_of(value: object) -> float | None:
    """Return how many seconds ago a chunk of a file was written, as a node reports it; None without a valid report."""
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    return float(value) if is_number and 0 <= value < 1e9 else None  # type: ignore[operator,arg-type]


# Seconds between two entries of one file: the lines of one look of a node have one time.
EVERY = 0.1
# Seconds that a chunk waits on this machine at most, until it is written to its log.
LATE = 60.0
# Bytes from which the older half of an index is thinned to an entry in this many seconds: a week of output takes 3 MB.
LARGEST_INDEX, THINNED = 4 << 20, 10.0
# Bytes of one index that are read; an older version wrote longer ones.
LARGEST_READ = 64 << 20
UNITS = {"s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}
CLOCKS = ("%H:%M", "%H:%M:%S")
DATES = ("%Y-%m-%d", "%Y-%m-%d %H:%M", "%Y-%m-%d %H:%M:%S", "%Y-%m-%dT%H:%M", "%Y-%m-%dT%H:%M:%S")


def index_of(log: Path) -> Path:
    """Return the index of a log, `rank-0.out.times`: lines of a time here and how many bytes had been written."""
    return log.with_name(log.name + ".times")


class LogTimes:
    """Writes the indexes.

    The age of output is measured on the node and subtracted from the time here, so that no node's clock matters.
    """

    def __init__(self) -> None:
        self._noted: dict[Path, float] = {}
        self._passed: dict[Path, str] = {}
        # The time of the last bytes of each log: time does not go back in it, unless somebody sets the clock.
        self._latest: dict[Path, float] = {}

    def note(self, log: Path, end: int, age: object) -> None:
        """Record that the bytes up to `end` were written `age` seconds ago.

        A chunk from the middle of a file has no age.
        """
        seconds = age_of(age)
        if seconds is None:
            return
        written, before = time.time() - seconds, self._latest.get(log, 0.0)
        if 0 < before - written < LATE:
            # The one before waited here for longer than this one.
            written = before
        self._latest[log] = written
        entry = f"{written:.3f} {end}\n"
        if 0 <= written - self._noted.get(log, 0.0) < EVERY:
            self._passed[log] = entry
            return
        self._noted[log] = written
        with open_private(index_of(log), "a") as file:
            # Include the last entry before a silence, which ends here.
            file.write(self._passed.pop(log, "") + entry)
            size = os.fstat(file.fileno()).st_size
        if size > LARGEST_INDEX:
            _thin(log)


def _thin(log: Path) -> None:
    """Keep, of the older half of an index, an entry in every THINNED seconds."""
    entries = entries_of(log)
    older, newer = entries[: len(entries) // 2], entries[len(entries) // 2 :]
    kept: list[tuple[float, int]] = []
    for entry in older:
        # The later of two close entries: no line gets a time before it was written.
        if len(kept) > 1 and entry[0] - kept[-2][0] < THINNED:
            kept.pop()
        kept.append(entry)
    replace_file(index_of(log), "".join(f"{written:.3f} {end}\n" for written, end in [*kept, *newer]), 0o600)


@dataclass(frozen=True)
class Span:
    """The times from which and up to which lines are shown; None for no limit."""

    since: float | None = None
    until: float | None = None

    def bytes_of(self, log: Path) -> tuple[int, int | None]:
        """Return where the bytes of this time begin in a log, and where they end; None for the end of the file."""
        start = 0 if self.since is None else offset_since(log, self.since)
        if self.until is None:
            return start, None
        later = (end for written, end in reversed(entries_of(log)) if written <= self.until)
        size = log.stat().st_size
        end = size if log.stat().st_mtime <= self.until else min(next(later, 0), size)
        return min(start, end), None if end == size else end


def offset_since(log: Path, when: float) -> int:
    """Return where the bytes begin that were written at or after a time; the end of the file if all are older.

    Earlier bytes may be among them, up to those of one entry.
    """
    present = log.stat()
    if present.st_mtime < when:
        return present.st_size
    start = 0
    for written, end in entries_of(log):
        if written >= when:
            break
        start = end
    return min(start, present.st_size)


def entries_of(log: Path) -> list[tuple[float, int]]:
    try:
        with index_of(log).open(encoding="ascii", errors="replace") as file:
            text = file.read(LARGEST_READ)
    except FileNotFoundError:
        return []
    result = re.findall(r"^(\d{1,15}\.\d{1,9}) (\d{1,18})$", text, re.MULTILINE | re.ASCII)
    return [(float(written), int(end)) for written, end in result]


def moment(text: str, now: float | None = None, option: str = "--since") -> float:
    """Return `10m` (ago), `14:30` (today) or `2026-01-31 14:30` as seconds since the epoch."""
    now = time.time() if now is None else now
    if match := re.fullmatch(r"\s*(\d{1,9}(?:\.\d{1,3})?)\s*([smhd])\s*", text):
        return now - float(match[1]) * UNITS[match[2]]
    today = time.strftime("%Y-%m-%d ", time.localtime(now))
    for form, prefix in [
        *((f"%Y-%m-%d {clock}", today) for clock in CLOCKS),
        *((date, "") for date in DATES),
    ]:
        try:
            return time.mktime(time.strptime(prefix + text.strip(), form))
        except (ValueError, OverflowError):
            continue
    raise UsageError(
        f"{option} {text}: not a time", f"for example {option} 10m, 2h, 14:30 or '2026-01-31 14:30'"
    )


def shown_time(at: float) -> str:
    """Return a time in the zone of this machine, to the millisecond; dashes for an unknown one."""
    if not at:
        return "-" * 23
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(at)) + f".{int(at % 1 * 1000):03d}"
