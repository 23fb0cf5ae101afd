"""Raise this process's limit of open files, and check it before work starts."""

from __future__ import annotations

import errno
import resource
from collections.abc import Sequence
from typing import TYPE_CHECKING

from clusterctl.errors import Unreachable, UsageError

if TYPE_CHECKING:
    from clusterctl.inventory.cluster import Node

# Limit that is requested at most: four files for each of 16,000 nodes.
MOST = 65_536
# Files that the process uses besides connections: its streams, logs and modules.
OWN = 48
# Files of one node's connection: a socket and a socket pair or proxy; for a child process, pipes and a log.
PER_NODE, PER_CHILD = 2, 4


def raise_limit() -> int:
    """Raise the limit of open files to the hard limit (at most MOST); return the new limit."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = MOST if hard == resource.RLIM_INFINITY else min(MOST, hard)
    if soft == resource.RLIM_INFINITY or soft >= wanted:
        return MOST if soft == resource.RLIM_INFINITY else soft
    resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
    return wanted


def require(nodes: Sequence[Node], at_once: int, children: bool) -> None:
    """Raise a UsageError if connections to `at_once` of these nodes need more files than allowed.

    `children`: each connection is a child process (OpenSSH's program).
    """
    allowed, count = raise_limit(), min(at_once, len(nodes))
    is_child = children or any(node.host == "local" for node in nodes)
    needed = OWN + count * (PER_CHILD if is_child else PER_NODE)
    if needed > allowed:
        problem = (
            f"connections to {count} nodes need {needed} open files; this shell allows {allowed} (ulimit -Hn)"
        )
        raise UsageError(problem, f"allow more: `ulimit -n {needed}` as root, or `nofile` in limits.conf")


def too_many(node: str, problem: OSError) -> Unreachable | None:
    """Return an error if the node's connection failed for lack of open files; None for another problem."""
    if problem.errno not in (errno.EMFILE, errno.ENFILE):
        return None
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    message = f"too many open files here: {limit} are allowed (ulimit -n)"
    return Unreachable(node, message, "allow more: `ulimit -n`, or `nofile` in limits.conf")
