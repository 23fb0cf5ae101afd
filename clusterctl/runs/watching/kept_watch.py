"""Follow a run from the local files that its controller, another process, writes."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from clusterctl.agent.holes import read
from clusterctl.errors import WorkFailed
from clusterctl.jobs.run_folder import RunDir
from clusterctl.logs.lines import LineCutter, dropped
from clusterctl.logs.store import READ, half_line
from clusterctl.runs.watching.updates import Source, Stream, Update, from_lines

if TYPE_CHECKING:
    from clusterctl.jobs.record import RunRecord

# Seconds without a living controller after which a reader gives up: a new controller takes one second to start.
UNWATCHED = 3.0
# Free bytes below which a disk counts as full.
NO_ROOM = 64 << 10


class ControllerGone(WorkFailed):
    """The run has no controller any more; its ranks continue."""

    def __init__(self, run: RunDir) -> None:
        hint = f"clusterctl attach --take-over {run.run_id} puts a new one in charge"
        free = os.statvfs(run.root)
        # A controller ends if it cannot write.
        full = free.f_bavail * free.f_frsize < NO_ROOM
        if full:
            hint = f"free some space, then: {hint}"
        why = f": no space is left for {run.root}" if full else ""
        super().__init__(f"the controller of {run.run_id} is gone{why}; its ranks continue", hint)


class KeptWatch:
    """Iterate over the updates of a run, attempt after attempt, as another process writes its files here."""

    def __init__(
        self,
        run: RunDir,
        first: int | None = None,
        known: Mapping[Path, int] | None = None,
        new_controller: Callable[[], bool] = lambda: False,
    ) -> None:
        """Begin with attempt `first`, or with the present one, and with the byte `known` of each file.

        `new_controller` starts a controller for a run without one, and returns whether that worked.
        """
        self.run, self.first, self.attempt, self.read = run, first, 0, 0
        self.new_controller = new_controller
        self.sources = {
            run.metrics: Source("", -1, Stream.METRICS),
            run.log_steps: Source("", -1, Stream.METRICS),
            run.events: Source("", -1, Stream.EVENTS),
        }
        self.offsets = {run.events: run.events.stat().st_size if run.events.exists() else 0}
        """How many bytes of each file have been read."""
        self.offsets.update(known or {})
        self.cutters: dict[Path, LineCutter] = {}
        self._record_seen = (0, 0)

    def __iter__(self) -> Iterator[Update]:
        """Yield updates until the run's end is recorded; raise ControllerGone if no process is left that records it."""
        unwatched = 0.0
        while True:
            self._find()
            # Read before the last look at the files, so that nothing is missed.
            final = self.run.phase().is_final
            before = self.read
            yield from self._grown()
            # Bytes and not lines: a line may be longer than what is read at a time.
            grew = self.read > before
            if final and not grew:
                # Include an incomplete line that was read before and never grew.
                for path, source in self.sources.items():
                    yield from from_lines(source, self._cutter(path).end(), time.time())
                return
            if not grew:
                # Checking a thousand files costs 10 ms.
                pause = max(0.1, 2e-4 * len(self.sources))
                time.sleep(pause)
                unwatched = 0.0 if self.run.is_watched() else unwatched + pause
                if unwatched > UNWATCHED and not self.run.phase().is_final:
                    if not self.new_controller():
                        raise ControllerGone(self.run)
                    unwatched = 0.0

    def present(self) -> Iterator[Update]:
        """Yield the updates of all lines that exist now: the next controller copies only what follows.

        An incomplete line at the end of the present attempt's files is left to that controller.
        """
        self._find()
        before = -1
        while self.read > before:
            before = self.read
            yield from self._grown()
        for path, source in self.sources.items():
            if source.rank >= 0 and path != self.run.log(
                source.node, source.rank, source.stream.value, self.attempt
            ):
                yield from from_lines(source, self._cutter(path).end(), time.time())

    def _find(self) -> None:
        """Add the files of an attempt that has begun."""
        result = self.run.record.stat()
        if self._record_seen == (result.st_mtime_ns, result.st_ino):
            return
        record = self.run.read_record()
        self._record_seen = (result.st_mtime_ns, result.st_ino)
        if record.attempt != self.attempt:
            self._add(record)

    def _add(self, record: RunRecord) -> None:
        since = self.attempt + 1 if self.attempt else self.first or record.attempt
        # Attempts that ended before we looked may have run on other nodes.
        for passed in range(since, record.attempt):
            for path in sorted(self.run.logs(passed).glob("*/rank-*.*")):
                number, _, name = path.name.removeprefix("rank-").partition(".")
                if number.isdecimal() and name in ("out", "err"):
                    self.sources.setdefault(path, Source(path.parent.name, int(number), Stream(name)))
        self.attempt = record.attempt
        for node, ranks in record.ranks.items():
            for rank in ranks:
                for stream in (Stream.OUT, Stream.ERR):
                    path = self.run.log(node, rank, stream.value, self.attempt)
                    self.sources[path] = Source(node, rank, stream)

    def _cutter(self, path: Path) -> LineCutter:
        """Return the line cutter of a file; it begins with the half line that was read before, if any."""
        if path not in self.cutters:
            self.cutters[path] = LineCutter(half_line(path, self.offsets.get(path, 0)))
        return self.cutters[path]

    def _grown(self) -> Iterator[Update]:
        for path, source in self.sources.items():
            offset = self.offsets.get(path, 0)
            start, data = _read_from(path, offset)
            if data:
                cutter = self._cutter(path)
                if start > offset and source.rank >= 0:
                    yield from from_lines(source, cutter.end() + dropped(start - offset), time.time())
                self.offsets[path] = start + len(data)
                self.read += len(data)
                yield from from_lines(source, cutter.feed(data), time.time())


def _read_from(path: Path, offset: int) -> tuple[int, bytes]:
    try:
        if path.stat().st_size <= offset:
            return offset, b""
    except FileNotFoundError:
        return offset, b""
    with path.open("rb") as file:
        return read(file.fileno(), offset, READ)
