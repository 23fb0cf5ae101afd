"""What is asked of a node about an attempt that failed there: when by its steady clock, and what the kernel said.

Wall clocks of nodes differ by minutes where nobody looks after them. A steady clock never jumps; how far it is
from ours is measured by asking the node for it: half the round trip is the largest error.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from clusterctl.errors import ClusterctlError

if TYPE_CHECKING:
    from clusterctl.transport.fanout import Connection

# Askings for the clock; the quickest is believed.
TRIES = 3


def with_aftermath(link: Connection, answer: dict[str, Any]) -> dict[str, Any]:
    """A node's answer on its attempt; where a rank failed, with our clock's offset and the kernel's words.

    So too where ranks ended by themselves on a node that was stopped: before or after what failed elsewhere?
    """
    node = answer["node"] or {}
    by_itself = any(one.get("exit_code") is not None for one in answer["ranks"])
    if not node.get("first_failure") and not (node.get("state") == "stopped" and by_itself):
        return answer
    ended = [
        {"pid": one.get("pid"), "monotonic": one["monotonic"], "signal": one.get("signal")}
        for one in answer["ranks"]
        if one.get("monotonic") is not None and (one.get("signal") or one.get("exit_code"))
    ]
    return {**answer, "clock": clock_offset(link), "kernel": _kernel(link, ended)}


def clock_offset(link: Connection) -> float:
    """What to take away from a node's steady clock to have our wall clock's time."""
    best, offset = float("inf"), 0.0
    for _ in range(TRIES):
        asked, wall = time.monotonic(), time.time()
        there = float(link.call("hello")["monotonic"])
        trip = time.monotonic() - asked
        if trip < best:
            best, offset = trip, there - (wall + trip / 2)
    return offset


def _kernel(link: Connection, ended: list[dict[str, Any]]) -> dict[str, Any]:
    try:
        return link.call("evidence", {"ended": ended}) if ended else {}
    except ClusterctlError:
        # The node is going away; what it said of its ranks is worth more.
        return {}


def placed(rank: dict[str, Any], answer: Mapping[str, Any]) -> dict[str, Any]:
    """A rank's record with the time of its end by our clock, and the kernel's words on it."""
    found = dict(rank)
    if answer.get("clock") is not None and rank.get("monotonic") is not None:
        found["at"] = float(rank["monotonic"]) - float(answer["clock"])
    said = (answer.get("kernel") or {}).get(str(rank.get("pid"))) or {}
    return {**found, **{key: said[key] for key in ("oom", "kernel") if said.get(key)}}


def when(rank: Mapping[str, Any]) -> float:
    """The time of a rank's end: by its node's steady clock, set against ours, where that was measured."""
    at = rank.get("at")
    return float(rank.get("ended") or 0.0) if at is None else float(at)
