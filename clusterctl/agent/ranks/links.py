"""Read the TCP connections of a process, and which of them get no acknowledgements any more: a link that is dead.

Runs on nodes: standard library only, Python 3.8 and newer.
"""

from __future__ import annotations

import contextlib
import os

from clusterctl.agent.processes import text_of

ESTABLISHED = "01"
# The timer of a connection that waits to send again, and after how many times in vain the link counts as dead: 1.4 s.
AGAIN, DEAD = "01", 3
# An IPv4 address as one of IPv6, in the form of proc_net_tcp(5).
MAPPED = "0000000000000000FFFF0000"
# Limit of connections of a process.
MOST = 256


def links_of(pid: int) -> dict[str, list[str]]:
    """Return a process's own ends of its connections, and the other ends that acknowledge nothing.

    An end is an address and a port in the form of proc_net_tcp(5), which all nodes of one byte order share.
    """
    own = _sockets(pid)
    ends: list[str] = []
    unheard: list[str] = []
    for name in ("tcp", "tcp6"):
        for line in text_of(f"/proc/{pid}/net/{name}").splitlines()[1:]:
            fields = line.split()
            if len(fields) < 10 or fields[3] != ESTABLISHED or fields[9] not in own:
                continue
            ends.append(fields[1].replace(MAPPED, ""))
            if fields[5].partition(":")[0] == AGAIN and int(fields[6], 16) >= DEAD:
                unheard.append(fields[2].replace(MAPPED, ""))
    return {"ends": sorted(ends)[:MOST], "unheard": sorted(unheard)[:MOST]}


def _sockets(pid: int) -> set[str]:
    """Return the inodes of a process's sockets."""
    folder, found = f"/proc/{pid}/fd", []
    with contextlib.suppress(OSError):
        for name in os.listdir(folder):
            # It may be closed by now.
            with contextlib.suppress(OSError):
                found.append(os.readlink(os.path.join(folder, name)))
    return {target[len("socket:[") : -1] for target in found if target.startswith("socket:[")}
