"""Log bytes from many ranks: kept as they are in files, cut into whole lines for people."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from clusterctl.errors import UsageError
from clusterctl.rundir import RunDir

LONGEST_LINE = 1 << 16  # what is shown of a line; the file keeps all of it
ERROR_LINE = re.compile(
    r"\w*(error|exception)\b|\b(traceback|fatal|critical|killed|segmentation fault)\b|^E[0-9A-Z]{4,6}\b",
    re.IGNORECASE,
)


@dataclass(frozen=True)
class LogLine:
    """One whole line of one rank's stream, without its end."""

    node: str
    rank: int
    stream: str
    text: str

    @property
    def is_error(self) -> bool:
        """Whether a person who looks for trouble wants this line."""
        return bool(ERROR_LINE.search(self.text))


class LineCutter:
    """Chunks in, whole lines out; memory stays bounded whatever comes."""

    def __init__(self, rest: bytes = b"") -> None:
        """`rest` is the half line that the first chunk goes on with."""
        self.rest = rest
        self.cut = False

    def feed(self, data: bytes) -> list[str]:
        """The lines that this chunk completes."""
        *whole, last = (self.rest + data).split(b"\n")
        lines = [self._shown(line) for line in whole]
        if self.cut and lines:  # the first one was shown in part already
            lines, self.cut = lines[1:], False
        if len(last) > LONGEST_LINE:
            if not self.cut:
                lines.append(self._shown(last))
            self.cut, last = True, b""
        self.rest = last
        return lines

    def end(self) -> list[str]:
        """What stood after the last line end, when nothing more will come."""
        last, self.rest = self.rest, b""
        return [self._shown(last)] if last and not self.cut else []

    @staticmethod
    def _shown(line: bytes) -> str:
        """A progress bar's line as a terminal would leave it: what follows the last carriage return."""
        visible = line.rstrip(b"\r").rpartition(b"\r")[2]
        return visible[:LONGEST_LINE].decode("utf-8", "replace")


class LogKeeper:
    """The local copies of a run's files, each appended to at the byte where it ends: nothing missing, nothing twice."""

    def __init__(self, run: RunDir, attempt: int = 1) -> None:
        self.run, self.attempt = run, attempt

    def path(self, node: str, rank: int, stream: str) -> Path:
        return self.run.log(node, rank, stream, self.attempt)

    @staticmethod
    def cursor(path: Path) -> int:
        """How many bytes have come home: where the next follow begins."""
        return path.stat().st_size if path.exists() else 0

    @staticmethod
    def keep(path: Path, offset: int, data: bytes) -> bytes:
        """Append what is new of a chunk that begins at `offset`; gives the new part."""
        have = LogKeeper.cursor(path)
        if offset > have:
            raise ValueError(f"{path}: bytes {have} to {offset} never came")
        fresh = data[have - offset :]
        if fresh:
            path.parent.mkdir(parents=True, exist_ok=True)
            with path.open("ab") as file:
                file.write(fresh)
        return fresh


def parse_ranks(text: str) -> frozenset[int]:
    """`0,8-15` as ranks."""
    ranks: set[int] = set()
    for part in text.split(","):
        match = re.fullmatch(r"\s*(\d{1,7})(?:-(\d{1,7}))?\s*", part)
        if (
            not match
            or int(match[2] or match[1]) < int(match[1])
            or int(match[2] or 0) - int(match[1]) > 1_000_000
        ):
            raise UsageError(f"--rank {text}: {part!r} is no rank", "as in --rank 0,8-15")
        ranks.update(range(int(match[1]), int(match[2] or match[1]) + 1))
    return frozenset(ranks)


@dataclass(frozen=True)
class LogFilter:
    """Which lines a person asked for; by default rank 0 whole, and every rank's error lines."""

    ranks: frozenset[int] | None = None
    nodes: frozenset[str] | None = None
    grep: re.Pattern[str] | None = None
    errors_only: bool = False

    def wants(self, line: LogLine) -> bool:
        if self.nodes is not None and line.node not in self.nodes:
            return False
        if self.errors_only and not line.is_error:
            return False
        if self.grep is not None and not self.grep.search(line.text):
            return False
        if self.ranks is not None:
            return line.rank in self.ranks
        narrowed = self.errors_only or self.grep is not None or self.nodes is not None
        return narrowed or line.rank == 0 or line.is_error


def kept_files(run: RunDir, attempt: int = 1) -> list[tuple[str, int, str, Path]]:
    """The log files that are here: node, rank, stream, path; in rank order."""
    found = []
    for path in run.logs(attempt).glob("*/rank-*.*"):
        match = re.fullmatch(r"rank-(\d+)\.(out|err)", path.name)
        if match:
            found.append((path.parent.name, int(match[1]), match[2], path))
    return sorted(found, key=lambda one: (one[1], one[2]))


def kept_lines(run: RunDir, wanted: LogFilter, attempt: int = 1) -> Iterator[LogLine]:
    """The lines that are here, rank by rank, stream by stream."""
    for node, rank, stream, path in kept_files(run, attempt):
        cutter = LineCutter()
        with path.open("rb") as file:
            while chunk := file.read(1 << 18):
                yield from _wanted(node, rank, stream, cutter.feed(chunk), wanted)
        yield from _wanted(node, rank, stream, cutter.end(), wanted)


def _wanted(node: str, rank: int, stream: str, texts: Iterable[str], wanted: LogFilter) -> Iterator[LogLine]:
    for text in texts:
        line = LogLine(node, rank, stream, text)
        if wanted.wants(line):
            yield line


def half_line(path: Path) -> bytes:
    """What stands after a file's last line end; at most what is shown of a line."""
    if not path.exists():
        return b""
    with path.open("rb") as file:
        file.seek(max(0, path.stat().st_size - LONGEST_LINE))
        return file.read().rpartition(b"\n")[2]


def last_lines(path: Path, count: int) -> Sequence[str]:
    """The end of a log, for a report; reads no more than a line's bound each."""
    if not path.exists():
        return []
    with path.open("rb") as file:
        file.seek(max(0, path.stat().st_size - count * 4096))
        cutter = LineCutter()
        return [*cutter.feed(file.read()), *cutter.end()][-count:]
