"""The data of a live screen: the runs, and for the chosen one its ranks, curve and the log of one rank."""

from __future__ import annotations

import time
from dataclasses import dataclass, field

from clusterctl.errors import UsageError
from clusterctl.jobs.run_folder import RunDir
from clusterctl.jobs.run_lines import Metric
from clusterctl.logs.store import last_lines
from clusterctl.report.history import HistoryReader
from clusterctl.report.summary import RunSummary, read_sources, summary_of
from clusterctl.runs.state import RankState, RunState, read_state
from clusterctl.runs.watching.stall import slow
from clusterctl.runs.watching.usage import DeviceUsage

# Runs that are listed, the newest ones.
RUNS = 30


@dataclass(frozen=True)
class RunRow:
    """One run in the list."""

    run: str
    phase: str
    step: int | None
    loss: float | None


@dataclass
class Board:
    """The state of a live screen; each `refresh` reads the local files again and contacts no node."""

    runs: list[RunDir]
    chosen: int = 0
    rank: int = 0
    """The position of the cursor among the shown ranks."""
    text: str = ""
    """Only ranks whose node or state contains it are shown."""
    live: RunState | None = None
    """The last report of the nodes of the chosen run."""
    usage: dict[int, DeviceUsage] = field(default_factory=dict)
    """The last reported use of each rank's device."""
    summary: RunSummary | None = None
    problem: str = ""
    _readers: dict[str, HistoryReader] = field(default_factory=dict)
    _rows: dict[str, tuple[float, RunRow]] = field(default_factory=dict)
    _recorded: tuple[object, RunState | None] = (None, None)
    _shown: tuple[object, list[RankState]] = (None, [])
    _late: tuple[object, dict[int, float]] = (None, {})

    @property
    def run(self) -> RunDir:
        return self.runs[self.chosen]

    def choose(self, step: int) -> None:
        """Choose the next or previous run."""
        self.chosen = min(max(self.chosen + step, 0), len(self.runs) - 1)
        self.live, self.rank, self.usage = None, 0, {}

    def move(self, step: int) -> None:
        """Move the cursor among the ranks."""
        self.rank = min(max(self.rank + step, 0), max(len(self.ranks()) - 1, 0))

    def refresh(self) -> None:
        """Read the files of the chosen run."""
        reader = self._readers.setdefault(self.run.run_id, HistoryReader(self.run))
        try:
            self.summary = summary_of(self.run, read_sources(self.run, reader.update()))
            self.problem = ""
        except UsageError as error:
            self.summary, self.problem = None, error.message

    def rows(self) -> list[RunRow]:
        """Return the list of runs; each is read at most once a second."""
        return [self._row(run) for run in self.runs[:RUNS]]

    def _row(self, run: RunDir) -> RunRow:
        known = self._rows.get(run.run_id)
        now = time.monotonic()
        if known and now - known[0] < 1.0:
            return known[1]
        last = run.last_step() or Metric()
        row = RunRow(run.run_id, str(run.phase()), last.step, last.loss)
        self._rows[run.run_id] = (now, row)
        return row

    def state(self) -> RunState | None:
        """Return the newest state of the chosen run: the nodes' answer, else what was recorded."""
        if self.live is not None:
            return self.live
        try:
            status = self.run.state.stat()
        except OSError:
            return None
        # The file is parsed again only if it has been replaced.
        key = (self.run.state, status.st_ino, status.st_mtime_ns, status.st_size)
        if self._recorded[0] != key:
            try:
                self._recorded = (key, read_state(self.run))
            except UsageError:
                self._recorded = (key, None)
        return self._recorded[1]

    def ranks(self) -> list[RankState]:
        """Return the ranks that are shown, by their numbers."""
        state = self.state()
        key = (state, self.text)
        if self._shown[0] != key:
            ranks = sorted(state.ranks if state else (), key=lambda rank: rank.rank)
            shown = [rank for rank in ranks if self.text in f"{rank.node} {rank.state} rank{rank.rank}"]
            self._shown = (key, shown)
        return self._shown[1]

    def stragglers(self) -> dict[int, float]:
        """Return by straggler its own step time divided by that of the others."""
        ranks = self.ranks()
        if self._late[0] is not ranks:
            self._late = (ranks, slow({rank.rank: rank.step_seconds for rank in ranks if rank.step_seconds}))
        return self._late[1]

    def log(self, lines: int) -> tuple[str, list[str]]:
        """Return the name and the last lines of the log of the rank at the cursor."""
        ranks = self.ranks()
        if not ranks or self.summary is None:
            return "", []
        rank = ranks[min(self.rank, len(ranks) - 1)]
        attempt = max((attempt.number for attempt in self.summary.attempts), default=1)
        for stream in ("out", "err"):
            found = last_lines(self.run.log(rank.node, rank.rank, stream, attempt), lines)
            if found:
                return f"rank {rank.rank} on {rank.node}, std{stream}", list(found)
        return f"rank {rank.rank} on {rank.node}: no output", []
