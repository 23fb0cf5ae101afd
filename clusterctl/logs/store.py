"""Store the output of ranks unchanged in files, and divide it into complete lines for display, in the order of time."""

from __future__ import annotations

import heapq
import re
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path

from clusterctl.agent.holes import read, trim
from clusterctl.files import make_private_folder, open_private
from clusterctl.jobs.run_folder import RunDir
from clusterctl.logs.lines import (
    LONGEST_LINE,
    LineCutter,
    LogChunk,
    LogLine,
    dropped,
    shown,
)
from clusterctl.logs.select import LogFilter, Selection
from clusterctl.logs.times import Span, entries_of

# Bytes that are read of a file in one piece.
READ = 1 << 18
ALWAYS = Span()
RANK_LOG = re.compile(r"rank-(\d{1,9})\.(out|err)")
# Bytes that a copy grows between two checks of its size.
TRIMMED = 1 << 24
# Bytes that are held of all files together, and at least of each.
MOST_BUFFERED, SMALLEST = 64 << 20, 1 << 12
# Bytes at a file's end in which its last lines are searched first.
FIRST_LOOK = 1 << 16


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
    def keep(path: Path, offset: int, data: bytes, hole: int = 0, limit: int = 0) -> bytes:
        """Append the new part of a chunk that begins at `offset`; return that part.

        The node has dropped the `hole` bytes before it. A copy that takes more than `limit` bytes is trimmed.
        """
        have = LogKeeper.cursor(path)
        if offset - hole > have:
            raise ValueError(f"{path}: bytes {have} to {offset - hole} are missing")
        fresh = data[max(0, have - offset) :]
        if fresh:
            make_private_folder(path.parent)
            with open_private(path, "ab") as file:
                if offset > have:
                    file.truncate(offset)
                if any(fresh[:1]) or any(fresh):
                    file.write(fresh)
                else:
                    # A hole that was read as zeros.
                    file.truncate(max(have, offset) + len(fresh))
            end = max(have, offset) + len(fresh)
            if limit and end // TRIMMED != have // TRIMMED:
                trim(str(path), limit)
        return fresh


@dataclass(frozen=True)
class KeptFile:
    """One rank's stream, as far as it was copied here."""

    node: str
    rank: int
    stream: str
    path: Path

    def chunks(self, start: int = 0, end: int | None = None, piece: int = READ) -> Iterator[LogChunk]:
        """Yield the whole lines from the one on that contains the byte at `start`, those of one time together.

        The last one may lack its line break; it is left out if the file is known to continue after `end`. The file is
        read in pieces, and closed between them.
        """
        cutter = LineCutter(half_line(self.path, start))
        size = self.path.stat().st_size if end is None else end
        data, begin, at = b"", start, start
        for written, stop in _segments(self.path, start, size):
            while at < stop:
                if at >= begin + len(data):
                    begin, data = self._read(at, min(piece, size - at))
                    if not data or begin >= size:
                        return
                    if begin > at:
                        block = cutter.end() + dropped(begin - at)
                        yield LogChunk(self.node, self.rank, self.stream, block, written)
                        at = begin
                        continue
                part = data[at - begin : stop - begin]
                at += len(part)
                if block := cutter.feed(part):
                    yield LogChunk(self.node, self.rank, self.stream, block, written)
        if end is None and (block := cutter.end()):
            yield LogChunk(self.node, self.rank, self.stream, block, written)

    def _read(self, start: int, count: int) -> tuple[int, bytes]:
        with self.path.open("rb") as file:
            return read(file.fileno(), start, count)

    def lines(self, wanted: LogFilter, start: int = 0, end: int | None = None) -> Iterator[LogLine]:
        selection = Selection(wanted)
        for chunk in self.chunks(start, end):
            if not wanted.wants_none(chunk):
                yield from selection.of(chunk.lines())

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
        match = RANK_LOG.fullmatch(path.name)
        if match:
            result.append(KeptFile(path.parent.name, int(match[1]), match[2], path))
    return sorted(result, key=lambda entry: (entry.rank, entry.stream == "err"))


def kept_chunks(
    run: RunDir, wanted: LogFilter, attempt: int = 1, span: Span = ALWAYS, *, by_time: bool = True
) -> Iterator[LogChunk]:
    """Yield the local output of the chosen ranks in the order of time; or else rank by rank, stream by stream."""
    chosen = [file for file in kept_files(run, attempt) if wanted.may_want(file.node, file.rank)]
    piece = max(SMALLEST, min(READ, MOST_BUFFERED // max(1, len(chosen))))
    streams = []
    for file in chosen:
        start, end = span.bytes_of(file.path)
        if start < (file.path.stat().st_size if end is None else end):
            streams.append(file.chunks(start, end, piece))
    in_order = heapq.merge(*streams, key=lambda chunk: chunk.at) if by_time else chain.from_iterable(streams)
    return (chunk for chunk in in_order if not wanted.wants_none(chunk))


def _segments(log: Path, start: int, size: int) -> Iterator[tuple[float, int]]:
    """Yield the times at which the bytes of a log from `start` to `size` were written, with where those of each end."""
    for written, end in entries_of(log):
        if end > start:
            yield written, min(end, size)
            start = end
        if start >= size:
            return
    yield log.stat().st_mtime, size


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
