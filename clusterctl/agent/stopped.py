"""Ranks that a signal has stopped: they take no step and no word, and the others wait for them.

By steps alone nobody can tell which rank of a group stands still, since all of them do; the kernel can. Runs on nodes
too: standard library only, Python 3.8 and newer.
"""

from __future__ import annotations

from typing import Any, Dict, Mapping, Optional

from clusterctl.agent.processes import text_of

LONG = 10.0  # seconds: longer than anybody stops a process to look at it by hand; debuggers stop it in another way


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
