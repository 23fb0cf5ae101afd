"""Find the processes that ranks leave behind when they detach: the kernel makes them children of the supervisor.

A program that forks twice, with a session and an environment of its own, carries no marker and belongs to no process
group of the run. A subreaper becomes the parent of such orphans, whatever they change about themselves.

Runs on nodes: standard library only, Python 3.8 and newer.
"""

from __future__ import annotations

import os
from typing import Collection, Dict, Iterable, List

from clusterctl.agent.processes import all_pids, stat_of, text_of

PR_SET_CHILD_SUBREAPER = 36


def become_subreaper() -> bool:
    """Make this process the parent of its orphaned descendants; return False if the system cannot do that."""
    try:
        # A Python without libffi lacks this module.
        import ctypes

        return bool(ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0) == 0)
    except (ImportError, OSError, AttributeError):
        return False


def adopted(own: Collection[int]) -> List[int]:
    """Return the orphans that became children of this process, and their descendants. `own` are its other children."""
    children: Dict[int, List[int]] = {}
    for pid in all_pids():
        fields = stat_of(pid)
        if len(fields) > 1 and fields[0] not in "ZX":
            children.setdefault(int(fields[1]), []).append(pid)
    result = [pid for pid in children.get(os.getpid(), []) if pid not in own]
    for pid in result:
        # The list grows while it is walked: this visits every generation.
        result.extend(children.get(pid, []))
    return result


def reap_adopted(own: Collection[int]) -> int:
    """Take the exit statuses of orphans that have ended; return how many. Those of `own` children are left alone."""
    count = 0
    while True:
        try:
            ended = os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        except ChildProcessError:
            return count
        if ended is None or ended.si_pid in own:
            return count
        os.waitpid(ended.si_pid, os.WNOHANG)
        count += 1


def names_of(pids: Iterable[int]) -> List[str]:
    """Return the name and pid of each process, for a person who has to look for them."""
    return [f"{text_of(f'/proc/{pid}/comm').strip() or '?'} ({pid})" for pid in sorted(pids)]
