"""Store the output of ranks unchanged in files, and divide it into complete lines for display.

A small index next to each file records when its bytes were written, for `--since`.
"""

from __future__ import annotations

import re
import time
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from clusterctl.errors import UsageError
from clusterctl.files import make_private_folder, open_private
from clusterctl.jobs.run_folder import RunDir
from clusterctl.logs.lines import (
    LONGEST_LINE,
    LineCutter,
    LogChunk,
    LogLine,
    shown,
)

# Bytes that are read of a file in one piece.
READ = 1 << 18
# Bytes at a file's end in which its last lines are searched first.
FIRST_LOOK = 1 << 16


def age_of(value: object) -> float | None:
    """Return how many seconds ago a chunk of a file was written, as a node reports it; None without a valid report."""
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    return float(value) if is_number and 0 <= value < 1e9 else None  # type: ignore[operator,arg-type]


class LogKeeper:
    """The local copies of a run's files; each is extended at its end, so that nothing is missing or repeated."""

    def __init__(self, run: RunDir, attempt: int = 1) -> None:
        self.run, self.attempt = run, attempt

    def path(self, node: str, rank: int, stream: str) -> Path:
        return self.run.log(node, rank, stream, self.attempt)

    @staticmethod
    def cursor(path: Path) -> int:
        """Return how many bytes were copied: where the next follow begins."""
        return path.stat().st_size if path.exists() else 0

    @staticmethod
    def keep(path: Path, offset: int, data: bytes) -> bytes:
        """Append the new part of a chunk that begins at `offset`; return that part."""
        have = LogKeeper.cursor(path)
        if offset > have:
            raise ValueError(f"{path}: bytes {have} to {offset} are missing")
        fresh = data[have - offset :]
        if fresh:
            make_private_folder(path.parent)
            with open_private(path, "ab") as file:
                file.write(fresh)
        return fresh


def parse_ranks(text: str) -> frozenset[int]:
    """Return the ranks of a text such as `0,8-15`."""
    ranks: set[int] = set()
    for part in text.split(","):
        match = re.fullmatch(r"\s*([0-9]{1,7})(?:-([0-9]{1,7}))?\s*", part)
        if (
            not match
            or int(match[2] or match[1]) < int(match[1])
            or int(match[2] or 0) - int(match[1]) > 1_000_000
        ):
            raise UsageError(f"--rank {text}: {part!r} is not a rank", "for example --rank 0,8-15")
        ranks.update(range(int(match[1]), int(match[2] or match[1]) + 1))
    return frozenset(ranks)


@dataclass(frozen=True)
class LogFilter:
    """The lines to show; by default all of rank 0, and the error lines of every rank."""

    ranks: frozenset[int] | None = None
    nodes: frozenset[str] | None = None
    grep: re.Pattern[str] | None = None
    errors_only: bool = False
    exclude: re.Pattern[str] | None = None
    everybody: bool = False
    """All lines of all ranks, if no ranks were chosen."""

    def wants(self, line: LogLine) -> bool:
        if not self._may_want(line.node, line.rank):
            return False
        if self.errors_only and not line.is_error:
            return False
        if self.grep is not None and not self.grep.search(line.text):
            return False
        if self.exclude is not None and self.exclude.search(line.text):
            return False
        return not self._only_errors_of(line.rank) or line.is_error

    def wants_all(self, chunk: LogChunk) -> bool:
        """Return True if all lines of a chunk are shown, so that none has to be examined."""
        searches = self.errors_only or self.grep is not None or self.exclude is not None
        return (
            self._may_want(chunk.node, chunk.rank) and not searches and not self._only_errors_of(chunk.rank)
        )

    def wants_none(self, chunk: LogChunk) -> bool:
        """Return True if no line of a chunk is shown, so that none has to be examined."""
        if not self._may_want(chunk.node, chunk.rank):
            return True
        errors = self.errors_only or self._only_errors_of(chunk.rank)
        return errors and not chunk.may_hold_errors()

    def _may_want(self, node: str, rank: int) -> bool:
        if self.nodes is not None and node not in self.nodes:
            return False
        return self.ranks is None or rank in self.ranks

    def _only_errors_of(self, rank: int) -> bool:
        chosen = self.ranks is not None or self.nodes is not None or self.grep is not None
        return rank != 0 and not chosen and not self.everybody


@dataclass(frozen=True)
class KeptFile:
    """One rank's stream, as far as it was copied here."""

    node: str
    rank: int
    stream: str
    path: Path

    def chunks(self, start: int = 0, end: int | None = None) -> Iterator[LogChunk]:
        """Yield the whole lines from the one on that contains the byte at `start`.

        The last one may lack its line break; it is left out if the file is known to continue after `end`.
        """
        cutter = LineCutter(half_line(self.path, start))
        left = self.path.stat().st_size if end is None else end
        left -= start
        with self.path.open("rb") as file:
            file.seek(start)
            while data := file.read(min(READ, left)):
                left -= len(data)
                if block := cutter.feed(data):
                    yield LogChunk(self.node, self.rank, self.stream, block)
        if end is None and (block := cutter.end()):
            yield LogChunk(self.node, self.rank, self.stream, block)

    def lines(self, wanted: LogFilter, start: int = 0, end: int | None = None) -> Iterator[LogLine]:
        for chunk in self.chunks(start, end):
            if not wanted.wants_none(chunk):
                yield from (line for line in chunk.lines() if wanted.wants(line))

    def start_of_last(self, count: int, start: int = 0, end: int | None = None) -> int:
        """Return where the last `count` lines begin.

        A line without a line break counts only if nothing more comes (no `end`).
        """
        end_of_block = self.path.stat().st_size if end is None else end
        wanted = count + 1
        with self.path.open("rb") as file:
            if end is None and end_of_block:
                file.seek(end_of_block - 1)
                wanted = count + (file.read(1) == b"\n")
            while end_of_block > start:
                begin = max(start, end_of_block - READ)
                file.seek(begin)
                data = file.read(end_of_block - begin)
                ends = data.count(b"\n")
                if ends >= wanted:
                    ends = len(data)
                    for _ in range(wanted):
                        ends = data.rfind(b"\n", 0, ends)
                    return begin + ends + 1
                wanted, end_of_block = wanted - ends, begin
        return start

    def last(self, count: int, wanted: LogFilter, start: int = 0, end: int | None = None) -> list[LogLine]:
        """Return the last lines that pass the filter; read more and more of the file until they are found."""
        size, window = self.path.stat().st_size if end is None else end, FIRST_LOOK
        while count > 0:
            begin = max(start, size - window)
            result = deque(self.lines(wanted, begin, end), maxlen=count)
            if len(result) == count or begin <= start:
                return list(result)
            window *= 8
        return []


def kept_files(run: RunDir, attempt: int = 1) -> list[KeptFile]:
    """Return the log files that are here, in rank order."""
    result = []
    for path in run.logs(attempt).glob("*/rank-*.*"):
        match = re.fullmatch(r"rank-(\d+)\.(out|err)", path.name)
        if match:
            result.append(KeptFile(path.parent.name, int(match[1]), match[2], path))
    return sorted(result, key=lambda entry: (entry.rank, entry.stream == "err"))


def kept_chunks(
    run: RunDir, wanted: LogFilter, attempt: int = 1, since: float | None = None
) -> Iterator[LogChunk]:
    """Yield the local output of the chosen ranks, rank by rank, stream by stream."""
    for file in kept_files(run, attempt):
        start = 0 if since is None else offset_since(file.path, since)
        if start < file.path.stat().st_size:
            yield from (chunk for chunk in file.chunks(start) if not wanted.wants_none(chunk))


def half_line(path: Path, end: int | None = None) -> bytes:
    """Return what follows the last line break before the end of a file, or before `end`.

    At most as much as is shown of a line.
    """
    if not path.exists():
        return b""
    end = path.stat().st_size if end is None else end
    with path.open("rb") as file:
        file.seek(max(0, end - LONGEST_LINE))
        return file.read(min(end, LONGEST_LINE)).rpartition(b"\n")[2]


def last_lines(path: Path, count: int) -> Sequence[str]:
    """Return the end of a log for a report; reads at most 4 kB for each line."""
    if not path.exists():
        return []
    with path.open("rb") as file:
        file.seek(max(0, path.stat().st_size - count * 4096))
        cutter = LineCutter()
        return shown(cutter.feed(file.read(count * 4096)) + cutter.end())[-count:]


# Seconds between two entries of one file: a week of output takes 2 MB.
EVERY = 10.0
# Bytes of one index that are read.
LARGEST_INDEX = 64 << 20
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

    def note(self, log: Path, end: int, age: object) -> None:
        """Record that the bytes up to `end` were written `age` seconds ago.

        A chunk from the middle of a file has no age.
        """
        seconds = age_of(age)
        if seconds is None:
            return
        written = time.time() - seconds
        entry = f"{written:.3f} {end}\n"
        if written - self._noted.get(log, 0.0) < EVERY:
            self._passed[log] = entry
            return
        self._noted[log] = written
        with open_private(index_of(log), "a") as file:
            # Include the last entry before a silence, which ends here.
            file.write(self._passed.pop(log, "") + entry)


def offset_since(log: Path, when: float) -> int:
    """Return where the bytes begin that were written at or after a time; the end of the file if all are older.

    Earlier bytes may be among them, up to those of one entry.
    """
    present = log.stat()
    if present.st_mtime < when:
        return present.st_size
    start = 0
    for written, end in _entries(log):
        if written >= when:
            break
        start = end
    return min(start, present.st_size)


def _entries(log: Path) -> list[tuple[float, int]]:
    try:
        with index_of(log).open(encoding="ascii", errors="replace") as file:
            text = file.read(LARGEST_INDEX)
    except FileNotFoundError:
        return []
    result = re.findall(r"^(\d{1,15}\.\d{1,9}) (\d{1,18})$", text, re.MULTILINE | re.ASCII)
    return [(float(written), int(end)) for written, end in result]


def moment(text: str, now: float | None = None) -> float:
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
        f"--since {text}: not a time", "for example --since 10m, 2h, 14:30 or '2026-01-31 14:30'"
    )
