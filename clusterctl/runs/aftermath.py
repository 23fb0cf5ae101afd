"""Collect evidence about a failed attempt from a node: when its ranks ended, and what the kernel reported.

The wall clocks of nodes may differ by minutes. The monotonic clock of a node never jumps; its distance from our clock
is measured with a request to the node, to within half of the round trip.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from clusterctl.errors import ClusterctlError
from clusterctl.jobs.phase import Phase
from clusterctl.runs.state import KernelReport, NodeAnswer, RankState
from clusterctl.typed_json import BadValue, decode

if TYPE_CHECKING:
    from clusterctl.transport.fanout import Connection

# Requests for the node's clock; the one with the shortest round trip counts.
TRIES = 3


def with_aftermath(link: Connection, answer: NodeAnswer) -> NodeAnswer:
    """Add the distance of the clocks and the kernel's reports to a node's answer, if a rank failed there.

    The same where ranks exited on a node that was stopped: it matters whether they did before the failure elsewhere.
    """
    node = answer.node
    exited = any(rank.exit_code is not None for rank in answer.ranks)
    if node is None or not (node.first_failure or (node.state is Phase.STOPPED and exited)):
        return answer
    ended = [rank for rank in answer.ranks if rank.monotonic is not None and (rank.signal or rank.exit_code)]
    return replace(answer, clock=clock_distance(link), kernel=_kernel_reports(link, ended))


def clock_distance(link: Connection) -> float:
    """Return a node's monotonic clock minus our wall clock, in seconds."""
    shortest, distance = float("inf"), 0.0
    for _ in range(TRIES):
        began, wall = time.monotonic(), time.time()
        theirs = float(link.call("hello")["monotonic"])
        trip = time.monotonic() - began
        if trip < shortest:
            shortest, distance = trip, theirs - (wall + trip / 2)
    return distance


def _kernel_reports(link: Connection, ended: Sequence[RankState]) -> dict[int, KernelReport]:
    """Return the kernel's reports by pid; none if the node cannot give them, since its own answer is worth more."""
    if not ended:
        return {}
    request: list[dict[str, Any]] = [
        {"pid": rank.pid, "monotonic": rank.monotonic, "signal": rank.signal} for rank in ended
    ]
    try:
        answer = link.call("evidence", {"ended": request})
        return {int(pid): decode(KernelReport, report) for pid, report in answer.items() if pid.isdecimal()}
    except (ClusterctlError, BadValue):
        return {}


def with_clock(rank: RankState, answer: NodeAnswer) -> RankState:
    """Add the time of a rank's end by our clock, and the kernel's reports about it."""
    at = None if answer.clock is None or rank.monotonic is None else rank.monotonic - answer.clock
    report = answer.kernel.get(rank.pid or 0, KernelReport())
    return replace(rank, at=at, oom=rank.oom or report.oom, kernel=report.kernel or rank.kernel)
