"""How a trainer's ranks get on, seen from their node: heartbeat files that are touched at each step.

Runs on nodes too: standard library only, Python 3.8 and newer.

Ranks that a signal has stopped: they take no step and no word, and the others wait for them.

By steps alone nobody can tell which rank of a group stands still, since all of them do; the kernel can. Runs on nodes
too: standard library only, Python 3.8 and newer.
"""

from __future__ import annotations

import os
from typing import Any, Dict, Iterable, List, Mapping, Optional

from clusterctl.agent.processes import text_of

# Seconds: a shorter silence is no hang, whatever the steps took.
LEAST = 30.0
# Times the 99th percentile of a rank's steps.
TIMES = 3.0
# Steps that must have been seen: the first ones compile, open connections and fill caches.
KNOWN = 3
# Steps that the percentile is taken of.
KEPT = 512
# Seconds that a checkpoint or an evaluation may take: the trainer's own limit for a collective.
PAUSE = 600.0
# Seconds at least between two words on how long each rank takes.
SPOKEN = 10.0
# Steps of each rank that such a word needs.
SEEN = 3
# Seconds between two looks after which this node itself stood still, and not its ranks.
ASLEEP = 5.0


class Pace:
    """One rank's steps."""

    def __init__(self, now: float) -> None:
        self.touched = 0
        self.text = ""
        # The step that the attempt began with.
        self.first = 0
        self.since = now
        self.times: List[float] = []
        # Since the last word: what the rank itself took, or else its steps.
        self.own: List[float] = []

    def note(self, touched: int, text: str, now: float) -> None:
        """What the heartbeat file says now; `touched` is its time in nanoseconds."""
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
        """Seconds after which silence is a hang; None while too little is known."""
        # Steps, not looks: many may pass between two of these.
        if number_of(self.text) - self.first < KNOWN:
            return None
        if "pause" in self.text:
            return max(PAUSE, given or 0.0)
        if given is not None:
            return given
        times = sorted(self.times) or [0.0]
        return max(LEAST, TIMES * times[int(0.99 * (len(times) - 1) + 0.5)])


def number_of(text: str) -> int:
    """The step that a heartbeat names."""
    word = text.split()[0] if text.split() else ""
    return int(word) if word.isdigit() else 0


def own_seconds(text: str) -> Optional[float]:
    """What the rank itself took for that step, without waiting for others; None where the heartbeat does not say."""
    words = text.split("\n", 1)[0].split()
    try:
        return float(words[1]) if len(words) > 1 else None
    except ValueError:
        return None


class Steps:
    """The heartbeats of an attempt's ranks on this node."""

    def __init__(self, folder: str, ranks: Iterable[int], hang_after: Optional[float], now: float) -> None:
        """`hang_after` is in seconds; None leaves it to the ranks' own pace, 0 is never."""
        self.folder, self.hang_after = folder, hang_after
        self.looked = self.spoke = now
        self.ranks: Dict[int, Pace] = {rank: Pace(now) for rank in ranks}
        # What the attempt before left.
        self.stale = {rank: self._read(rank) for rank in self.ranks}

    def look(self, now: float) -> Optional[Dict[str, object]]:
        """The rank that hangs, if one does: its step, and for how long; the one furthest behind."""
        asleep = now - self.looked if now - self.looked > ASLEEP else 0.0
        self.looked = now
        hung: List[Dict[str, object]] = []
        for rank, pace in self.ranks.items():
            pace.since += asleep
            found = self._read(rank)
            if found is not None and found != self.stale[rank]:
                pace.note(found[0], found[1], now)
            limit = pace.limit(self.hang_after) if self.hang_after != 0 else None
            if limit is not None and now - pace.since > limit:
                hung.append({"rank": rank, "step": number_of(pace.text), "hang": round(now - pace.since, 1)})
        return min(hung, key=lambda one: (one["step"], one["rank"])) if hung else None

    def pace(self, now: float) -> Optional[Dict[str, float]]:
        """By rank: the median seconds of its steps since this was answered last; None while too little was seen."""
        beating = self.beating()
        if (
            now - self.spoke < SPOKEN
            or not beating
            or any(len(self.ranks[rank].own) < SEEN for rank in beating)
        ):
            return None
        self.spoke = now
        said = {str(rank): _median(self.ranks[rank].own) for rank in beating}
        for pace in self.ranks.values():
            pace.own = []
        return said

    def beating(self) -> List[int]:
        """The ranks that are a trainer's: they write heartbeats, and answer SIGUSR1 with their stacks."""
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


# Seconds: longer than anybody stops a process to look at it by hand; debuggers stop it in another way.
LONG = 10.0


class Stopped:
    """Since when each rank has been stopped."""

    def __init__(self, hang_after: Optional[float]) -> None:
        """`hang_after` is the job's: 0 is never, and less than LONG counts here too."""
        self.limit = LONG if hang_after is None else min(LONG, hang_after)
        self.since: Dict[int, float] = {}

    def look(self, now: float, pids: Mapping[int, int]) -> Optional[Dict[str, Any]]:
        """By rank the pid of each that lives; gives the rank that has been stopped for too long, if one has."""
        stopped = [rank for rank, pid in pids.items() if is_stopped(pid)] if self.limit else []
        self.since = {rank: self.since.get(rank, now) for rank in stopped}
        first = min(self.since, key=lambda rank: (self.since[rank], rank), default=None)
        if first is None or now - self.since[first] < self.limit:
            return None
        return {"rank": first, "hang": round(now - self.since[first], 1), "stopped": True}


def is_stopped(pid: int) -> bool:
    """By SIGSTOP or a terminal's signals; `t` would be a debugger's."""
    return text_of(f"/proc/{pid}/stat").rpartition(")")[2].split()[:1] == ["T"]
