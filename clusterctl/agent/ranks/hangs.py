"""Detect ranks that hang, from the age of their heartbeat files, and ranks that a signal has stopped.

A trainer touches its heartbeat file at each step. When one rank of a group stops, all of them take no more steps: which
one it is, only a roll call of all nodes can show (`roll_call.py`).

Runs on nodes: standard library only, Python 3.8 and newer.
"""

from __future__ import annotations

import os
from typing import Any, Dict, Iterable, List, Mapping, Optional

from clusterctl.agent.processes import stat_of

# Shortest time in seconds without a step that counts as a hang.
LEAST = 30.0
# A rank hangs after this many times the 99th percentile of its step times.
TIMES = 3.0
# Number of first steps that compile, open connections and fill caches.
KNOWN = 3
# Number of last steps for the percentile.
KEPT = 512
# Seconds that a checkpoint, an evaluation or one of the first steps may take: the trainer's own limit for a collective.
PAUSE = 600.0
# Seconds at least between two reports of the ranks' pace.
REPORTED = 10.0
# Steps of each rank that such a report needs.
SEEN = 3
# Seconds between two checks which show that this node was suspended, and not its ranks.
ASLEEP = 5.0


class Pace:
    """The steps of one rank."""

    def __init__(self, now: float) -> None:
        self.touched = 0
        self.text = ""
        # The step that the attempt began with.
        self.first = 0
        self.since = now
        self.times: List[float] = []
        # The times since the last report: the rank's own, or else those of its steps.
        self.own: List[float] = []

    def note(self, touched: int, text: str, now: float) -> None:
        """Record the content of the heartbeat file; `touched` is its modification time in nanoseconds."""
        if touched == self.touched:
            return
        steps = number_of(text) - number_of(self.text)
        own = own_seconds(text)
        if self.text and steps > 0 and "pause" not in self.text:
            seconds = (touched - self.touched) / 1e9 / steps
            self.times = [*self.times[1 - KEPT :], seconds]
            own = own or seconds
        if self.text and steps > 0 and own:
            self.own = [*self.own[1 - KEPT :], own]
        if not self.touched:
            self.first = number_of(text)
        self.touched, self.text, self.since = touched, text, now

    def limit(self, given: Optional[float]) -> Optional[float]:
        """Return the seconds after which silence is a hang; None before the first heartbeat."""
        if not self.touched:
            return None
        # Count steps and not checks: many steps may pass between two checks.
        if "pause" in self.text or number_of(self.text) - self.first < KNOWN:
            return max(PAUSE, given or 0.0)
        if given is not None:
            return given
        times = sorted(self.times) or [0.0]
        return max(LEAST, TIMES * times[int(0.99 * (len(times) - 1) + 0.5)])


def number_of(text: str) -> int:
    """Return the step that a heartbeat names."""
    word = text.split()[0] if text.split() else ""
    return int(word) if word.isdigit() else 0


def own_seconds(text: str) -> Optional[float]:
    """Return the rank's own time for that step, without waiting for others; None if the heartbeat lacks it."""
    fields = text.split("\n", 1)[0].split()
    try:
        return float(fields[1]) if len(fields) > 1 else None
    except ValueError:
        return None


class Steps:
    """The heartbeats of an attempt's ranks on this node."""

    def __init__(self, folder: str, ranks: Iterable[int], hang_after: Optional[float], now: float) -> None:
        """`hang_after` is in seconds; None derives it from the ranks' own pace, 0 disables it."""
        self.folder, self.hang_after = folder, hang_after
        self.checked = self.reported = now
        self.ranks: Dict[int, Pace] = {rank: Pace(now) for rank in ranks}
        # The heartbeats that the previous attempt left.
        self.stale = {rank: self._read(rank) for rank in self.ranks}

    def find_hung(self, now: float) -> Optional[Dict[str, object]]:
        """Return a rank that takes no more steps, with its step and for how long, or None.

        Of several, the one furthest behind; a roll call may find another one to blame.
        """
        asleep = now - self.checked if now - self.checked > ASLEEP else 0.0
        self.checked = now
        hung: List[Dict[str, object]] = []
        for rank, pace in self.ranks.items():
            pace.since += asleep
            result = self._read(rank)
            if result is not None and result != self.stale[rank]:
                pace.note(result[0], result[1], now)
            limit = pace.limit(self.hang_after) if self.hang_after != 0 else None
            if limit is not None and now - pace.since > limit:
                hung.append({"rank": rank, "step": number_of(pace.text), "hang": round(now - pace.since, 1)})
        return min(hung, key=lambda entry: (entry["step"], entry["rank"])) if hung else None

    def pace(self, now: float) -> Optional[Dict[str, float]]:
        """Return by rank the median seconds of its steps since the last report; None while too few were seen."""
        beating = self.beating()
        if (
            now - self.reported < REPORTED
            or not beating
            or any(len(self.ranks[rank].own) < SEEN for rank in beating)
        ):
            return None
        self.reported = now
        output = {str(rank): _median(self.ranks[rank].own) for rank in beating}
        for pace in self.ranks.values():
            pace.own = []
        return output

    def beating(self) -> List[int]:
        """Return the ranks that write heartbeats."""
        return [rank for rank, pace in self.ranks.items() if pace.touched]

    def _read(self, rank: int) -> "Optional[tuple[int, str]]":
        path = os.path.join(self.folder, f"rank-{rank}")
        try:
            with open(path, encoding="utf-8", errors="replace") as file:
                return os.fstat(file.fileno()).st_mtime_ns, file.read(100)
        except OSError:
            return None


def _median(values: List[float]) -> float:
    return round(sorted(values)[len(values) // 2], 6)


# Seconds after which a stopped rank counts as failed: people who examine a process stop it for less, or with a
# debugger.
LONG = 10.0


class Stopped:
    """Since when each rank has been stopped by a signal."""

    def __init__(self, hang_after: Optional[float]) -> None:
        """`hang_after` is the job's: 0 disables this, and fewer seconds than LONG apply here too."""
        self.limit = LONG if hang_after is None else min(LONG, hang_after)
        self.since: Dict[int, float] = {}

    def find(self, now: float, pids: Mapping[int, int]) -> Optional[Dict[str, Any]]:
        """Return the rank that was stopped for too long, or None; `pids` has the pid of each living rank."""
        stopped = [rank for rank, pid in pids.items() if is_stopped(pid)] if self.limit else []
        self.since = {rank: self.since.get(rank, now) for rank in stopped}
        first = min(self.since, key=lambda rank: (self.since[rank], rank), default=None)
        if first is None or now - self.since[first] < self.limit:
            return None
        return {"rank": first, "hang": round(now - self.since[first], 1), "stopped": True}


def is_stopped(pid: int) -> bool:
    """Return True if SIGSTOP or a terminal's signal stopped a process; a debugger's state would be `t`."""
    return stat_of(pid)[:1] == ["T"]
