"""Collect evidence about a failed attempt from a node: when its ranks ended, and what the kernel reported.

The wall clocks of nodes may differ by minutes. The monotonic clock of a node never jumps; its distance from our clock
is measured with a request to the node, to within half of the round trip.
"""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from clusterctl.errors import ClusterctlError
from clusterctl.jobs.phase import Phase
from clusterctl.jobs.run_folder import NodeFiles
from clusterctl.runs.state import KernelReport, NodeAnswer, RankState
from clusterctl.transport.answers import Hello

if TYPE_CHECKING:
    from clusterctl.transport.connection import Connection

# Number of requests for the node's clock; the one with the shortest round trip counts.
TRIES = 3
# Limit of bytes of an error file, and of error files of a node.
MAX_ERROR_FILE = 256 << 10
MOST_ERROR_FILES = 16


def with_aftermath(link: Connection, answer: NodeAnswer) -> NodeAnswer:
    """Add the clock difference and the kernel's reports to a node's answer if a rank failed there. Do the same if
    ranks exited on a node that was stopped: it matters whether they exited before another node failed.
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
        theirs = link.ask(Hello, "hello").monotonic
        trip = time.monotonic() - began
        if trip < shortest:
            shortest, distance = trip, theirs - (wall + trip / 2)
    return distance


def _kernel_reports(link: Connection, ended: Sequence[RankState]) -> dict[int, KernelReport]:
    """Return the kernel's reports by pid; {} if the node cannot report them: the rest of its answer is still useful."""
    if not ended:
        return {}
    request: list[dict[str, object]] = [
        {"pid": rank.pid, "monotonic": rank.monotonic, "signal": rank.signal} for rank in ended
    ]
    try:
        return link.ask(dict[int, KernelReport], "evidence", {"ended": request})
    except ClusterctlError:
        return {}


def with_clock(rank: RankState, answer: NodeAnswer) -> RankState:
    """Add the time of a rank's end by our clock, and the kernel's reports about it."""
    at = None if answer.clock is None or rank.monotonic is None else rank.monotonic - answer.clock
    report = answer.kernel.get(rank.pid or 0, KernelReport())
    return replace(rank, at=at, oom=rank.oom or report.oom, kernel=report.kernel or rank.kernel)


def with_error_files(link: Connection, answer: NodeAnswer, files: NodeFiles) -> NodeAnswer:
    """Add to each rank that exited with an error the exception in its TORCHELASTIC_ERROR_FILE, if it wrote one."""
    failed = [rank.rank for rank in answer.ranks if rank.exit_code][:MOST_ERROR_FILES]
    if not failed:
        return answer
    errors = {rank: _recorded_exception(link, files.error_file(rank)) for rank in failed}
    ranks = tuple(replace(rank, error=errors.get(rank.rank, "")) for rank in answer.ranks)
    return replace(answer, ranks=ranks)


def _recorded_exception(link: Connection, path: str) -> str:
    try:
        return exception_in(link.get(path, limit=MAX_ERROR_FILE))
    except ClusterctlError:
        # Most programs write no error file.
        return ""


def exception_in(data: bytes) -> str:
    """Return the traceback, or else the message, in an error file of torch; "" if it has none."""
    try:
        value: Any = json.loads(data)
    except (ValueError, RecursionError):
        return ""
    message = value.get("message") if isinstance(value, dict) else None
    if isinstance(message, dict):
        extra = message.get("extraInfo")
        stack = extra.get("py_callstack") if isinstance(extra, dict) else None
        message = stack if isinstance(stack, str) and stack else message.get("message")
    return message if isinstance(message, str) else ""
