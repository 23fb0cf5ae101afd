"""Check whether a push would change a node, before an agent is started there.

The agent records the state of a tree that it found unchanged (agent/files/tree_state.py). If /bin/sh, `find` and
`sha256sum` find the same state again, the tree is unchanged; for 2,000 files this takes a third of the
agent's time. Otherwise the agent replaces the shell on the same connection.
"""

from __future__ import annotations

import contextlib
import os
import re
import shlex
import time
from collections.abc import Callable

from clusterctl.agent.files.tree_state import FORMAT, name_of
from clusterctl.errors import LinkLost
from clusterctl.inventory.cluster import Node
from clusterctl.transfer.push import PushResult, Source
from clusterctl.transport.agent_code import agent_argv
from clusterctl.transport.connection import LinkConnection
from clusterctl.transport.fanout import Connections, Stream
from clusterctl.transport.link import Link, shell_command
from clusterctl.transport.pipe import MAX_NOISE, START_LIMIT, StreamPipe
from clusterctl.transport.shell import LINE, MARK

PIECE = 64 << 10
# Seconds that a node may take to compare a tree. After that the agent, which reports progress, takes over.
CHECK_LIMIT = 120.0
SAME, OTHER = "same", "other"

# The braces make the shell read the whole script first: later input is for the agent.
SCRIPT = r"""{
printf '%s\n' '@mark'
y=other t= h= p=
read -r t h p <@record
[ "$t" = @tree ]&&[ "$h  -" = "$(LC_ALL=C find -H @path -printf '@format'|sha256sum)" ]&&y=same
printf '%s\n' "@mark $y $p"
[ $y = same ]&&exit
exec 2>&3 3>&-
exec @agent
} 3>&2 2>/dev/null
"""


def script(node: Node, mark: str, tree: str, dest: str) -> bytes:
    """Return the script for a node's /bin/sh."""
    values = {
        "mark": mark,
        "record": at_home(f"{node.workdir}/trees/{name_of(dest)}"),
        "tree": tree,
        "path": at_home(dest),
        "format": FORMAT,
        "agent": shell_command(agent_argv(node.python)),
    }
    text = re.sub(r"@([a-z]+)", lambda found: values[found[1]], SCRIPT)
    return text.encode("utf-8", "surrogateescape")


def at_home(path: str) -> str:
    """Return a path for /bin/sh: `~/` and relative paths are below the home folder of the login."""
    below = path[1:].lstrip("/") if path == "~" or path.startswith("~/") else path
    if below.startswith("/"):
        return shlex.quote(below)
    return '"$HOME"/' + shlex.quote(below)


class UnchangedCheck:
    """Checks the nodes of one push; used if no agents are running."""

    def __init__(self, connections: Connections, pushed: Callable[[], tuple[Source, str]]) -> None:
        """`pushed` returns the tree and its destination after the tree has been read."""
        self._connections = connections
        self._pushed = pushed

    def at(self, node: Node) -> PushResult | None:
        """Return the result of a push that changes nothing, else None.

        If the state differs, the node's agent has been started and added to `connections`.
        """
        stream = self._connections.transport.start(node, LINE)
        began = time.monotonic()
        try:
            answer = self._answer(node, stream)
            if answer.startswith(f"{OTHER} "):
                link = LinkConnection(Link(node.name, StreamPipe(stream), node.workdir))
                self._connections.adopt(node, link)
                return None
        except BaseException:
            stream.close()
            raise
        stream.close()
        if answer.startswith(f"{SAME} "):
            return PushResult(answer[len(SAME) + 1 :], 0, 0, time.monotonic() - began, unchanged=True)
        # An unusual login: the normal way reports what is wrong with it.
        return None

    def _answer(self, node: Node, stream: Stream) -> str:
        """Return the shell's answer, a word and a path; "" if the shell does not answer in time."""
        source, dest = self._pushed()
        mark = f"{MARK} {os.urandom(16).hex()}"
        began, answered = f"{mark}\n".encode(), f"{mark} ".encode()
        output, size, deadline = b"", 0, time.monotonic() + START_LIMIT
        # A login that ends early raises LinkLost; the normal way then reports the reason.
        with contextlib.suppress(LinkLost):
            stream.send(script(node, mark, source.manifest.id, dest))
            while time.monotonic() < deadline and size < MAX_NOISE:
                try:
                    name, data = stream.read(PIECE, 1.0)
                except TimeoutError:
                    continue
                if not name:
                    break
                size += len(data)
                output += data if name == "stdout" else b""
                if began in output:
                    deadline = time.monotonic() + CHECK_LIMIT
                    output = output[output.index(began) + len(began) :]
                _, marked, answer = output.partition(answered)
                if marked and b"\n" in answer:
                    return answer.partition(b"\n")[0].decode("utf-8", "surrogateescape")
        return ""
