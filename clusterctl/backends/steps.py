"""Reach the nodes of an allocation through its batch system, without SSH.

One step starts a task on each node at once where that is possible; each task connects back to this process and becomes
the node's agent. A node that cannot connect to this machine gets a separate step, whose standard streams carry those of
the agent.
"""

from __future__ import annotations

import contextlib
import os
import random
import select
import socket
import subprocess
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import ClassVar

from clusterctl.backends.backend import job_of
from clusterctl.errors import LinkLost, Unreachable
from clusterctl.inventory.cluster import Node
from clusterctl.transport import dial
from clusterctl.transport.agent_code import agent_argv, first_length
from clusterctl.transport.connection import Connection, LinkConnection
from clusterctl.transport.link import Link
from clusterctl.transport.local import ChildStream
from clusterctl.transport.pipe import LAST_WORDS, START_LIMIT, StreamPipe, last_line

# Seconds for a task that has connected to introduce itself.
INTRODUCTION = 5.0
# Ports of the cluster's range that are tried.
MOST_PORTS = 50
# Seconds that a step has to end after the agents have ended.
END_LIMIT = 10.0


class Starter(ABC):
    """How a batch system starts tasks on the nodes of a job."""

    title: str
    variables: ClassVar[Mapping[str, str | Sequence[str]]]
    """The batch system's variables of a task, as `dial` needs them."""
    together = False
    """Whether one step starts tasks on several nodes."""
    hint = ""
    feed: tuple[str, ...] = ()
    """Options with which all tasks get the standard input of the step."""

    @abstractmethod
    def argv(self, job: str, nodes: Sequence[str], *own: str) -> list[str]:
        """Return the command of a step with a task on each of these nodes."""

    @abstractmethod
    def environment(self) -> dict[str, str]:
        """Return the environment of the step, which the tasks may inherit."""

    def ports(self) -> tuple[int, int]:
        """Return the range of ports that firewalls leave open; (0, 0) if any port will do."""
        return 0, 0


class StepTransport:
    """Reaches the nodes of one or more allocations."""

    def __init__(self, starter: Starter, nodes: Sequence[Node]) -> None:
        """`nodes` are those that one step may reach at once."""
        self._starter = starter
        self._together = tuple(nodes) if starter.together else ()
        self._steps: dict[str, _Step] = {}
        self._change = threading.Lock()
        # Nodes that could not connect back.
        self._by_streams: set[str] = set()

    def begin(self) -> None:
        """Start the step of all nodes now, so that their agents start before the first connection is asked for."""
        for node in self._together[:1]:
            step = self._step_for(node)
            with self._change:
                self._steps[node.name] = step

    def connect(self, node: Node) -> Connection:
        pipe: _SocketPipe | StreamPipe | None = None
        if node.name not in self._by_streams:
            pipe = self._connected(node)
        if pipe is None:
            self._by_streams.add(node.name)
            argv = agent_argv(os.path.expanduser(node.python))
            pipe = StreamPipe(self._child(node, *argv))
        return LinkConnection(Link(node.name, pipe, node.workdir))

    def start(self, node: Node, command: str) -> ChildStream:
        return self._child(node, "/bin/sh", "-c", command)

    def _child(self, node: Node, *own: str) -> ChildStream:
        argv = self._starter.argv(job_of(node), [node.host], *own)
        return ChildStream(node.name, argv, self._starter.environment(), "/")

    def _connected(self, node: Node) -> _SocketPipe | None:
        """Return the connection of a node's task, or None if it cannot connect to this machine."""
        step = self._step_for(node)
        found = step.take(node)
        if isinstance(found, str) and len(step.nodes) > 1 and dial.NO_WAY not in found:
            # If one node is down, the batch system refuses the step for all nodes.
            step = self._own_step(node)
            found = step.take(node)
        if isinstance(found, _SocketPipe):
            return found
        if dial.NO_WAY in found:
            return None
        raise Unreachable(node.name, f"{self._starter.title} started no agent: {found}", self._starter.hint)

    def _step_for(self, node: Node) -> _Step:
        """Return the step whose connection to a node is unused; start one if there is none."""
        with self._change:
            step = self._steps.pop(node.name, None)
            if step is not None:
                return step
            alike = [
                other
                for other in self._together
                if (other.allocation, other.python) == (node.allocation, node.python)
            ]
            if node.name not in [other.name for other in alike] or len(alike) < 2:
                return _Step(self._starter, [node])
            # The next connection to one of them gets a separate step.
            self._together = tuple(other for other in self._together if other not in alike)
            step = _Step(self._starter, alike)
            self._steps.update({other.name: step for other in alike if other.name != node.name})
            return step

    def _own_step(self, node: Node) -> _Step:
        return _Step(self._starter, [node])


class _Step:
    """One step of a batch system with a task on each of its nodes."""

    def __init__(self, starter: Starter, nodes: Sequence[Node]) -> None:
        self._starter = starter
        self.nodes = tuple(nodes)
        self._secret = os.urandom(32)
        self._arrived: dict[str, socket.socket] = {}
        # By node, why its task cannot connect; and how many bytes of their output were read.
        self._blocked: dict[str, str] = {}
        self._read = 0
        self._change = threading.Condition()
        self._problem = ""
        self._left = len(nodes)
        errors = os.memfd_create("step")
        self._errors: int | None = errors
        self._last_words = ""
        text, size = Path(dial.__file__).read_bytes(), len(self._last_line(0))
        first = [os.path.expanduser(nodes[0].python), "-I", "-S", "-X", "utf8", "-c"]
        read = f"import sys;exec(sys.stdin.buffer.read({len(text) + size}))"
        argv = starter.argv(job_of(nodes[0]), [node.host for node in nodes], *starter.feed, *first, read)
        self.process = _started(argv, starter.environment(), errors)
        # The port is found while srun starts the tasks.
        self._listener = _listener(len(nodes) + 8, *starter.ports())
        program = text + self._last_line(self._listener.getsockname()[1])
        threading.Thread(target=self._feed, args=(program,), daemon=True, name="step input").start()
        threading.Thread(target=self._accept, daemon=True, name="step").start()

    def _last_line(self, port: int) -> bytes:
        """Return the call that ends the program; as long for every port."""
        own, words = socket.gethostname(), dict(self._starter.variables)
        call = f"dial({self._secret.hex()!r}, {[own]!r}, {port:>5}, {first_length()}, **{words!r})"
        return f"\n{call}\n".encode()

    def _feed(self, program: bytes) -> None:
        assert self.process.stdin is not None
        # `take` finds out how srun ended.
        with contextlib.suppress(OSError), self.process.stdin as stdin:
            stdin.write(program)

    def _accept(self) -> None:
        """Welcome the tasks until all have connected, or srun has ended."""
        waiting = select.poll()
        waiting.register(self._listener, select.POLLIN)
        deadline = time.monotonic() + START_LIMIT
        count = 0
        with self._listener:
            while count < len(self.nodes) and time.monotonic() < deadline and self.process.poll() is None:
                if waiting.poll(50):
                    count += self._welcome()
                count += self._note_blocked()
        self._note_blocked()
        problem = self.last_words() or f"no answer within {START_LIMIT:.0f} s"
        with self._change:
            self._problem = problem
            self._change.notify_all()

    def _welcome(self) -> int:
        """Return 1 if the task that has connected is one of ours."""
        connection, _ = self._listener.accept()
        try:
            connection.settimeout(INTRODUCTION)
            name = dial.welcome(connection, self._secret)
            connection.settimeout(None)
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        except OSError:
            connection.close()
            return 0
        with self._change:
            self._arrived[name] = connection
            self._change.notify_all()
        return 1

    def _note_blocked(self) -> int:
        """Record the nodes whose tasks reported that they cannot connect; return how many are new."""
        with self._change:
            if self._errors is None or os.fstat(self._errors).st_size == self._read:
                return 0
            self._read = os.fstat(self._errors).st_size
            text = os.pread(self._errors, self._read, 0).decode("utf-8", "replace")
            before = len(self._blocked)
            for line in text.splitlines():
                _, found, rest = line.partition(f"{dial.NO_WAY} from ")
                name = rest.partition(":")[0]
                if found and name not in self._arrived:
                    self._blocked.setdefault(name, line)
            self._change.notify_all()
            return len(self._blocked) - before

    def take(self, node: Node) -> _SocketPipe | str:
        """Wait for the connection of a node; return the connection, or why there is none."""
        with self._change:
            self._change.wait_for(
                lambda: node.host in self._arrived or node.host in self._blocked or self._problem
            )
            connection = self._arrived.pop(node.host, None)
        if connection is None:
            self.release()
            return self._blocked.get(node.host) or self._problem
        return _SocketPipe(node.name, connection, self)

    def release(self) -> None:
        """Record that a node no longer needs the step; after the last node, srun ends."""
        with self._change:
            self._left -= 1
            if self._left:
                return
        threading.Thread(target=self._reap, daemon=True, name="step end").start()

    def _reap(self) -> None:
        try:
            self.process.wait(END_LIMIT)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        self._last_words = self.last_words()
        with self._change:
            errors, self._errors = self._errors, None
        if errors is not None:
            os.close(errors)

    def last_words(self) -> str:
        """Return the last line that srun or a task wrote to standard error."""
        with self._change:
            if self._errors is None:
                return self._last_words
            size = os.fstat(self._errors).st_size
            return last_line(os.pread(self._errors, LAST_WORDS, max(0, size - LAST_WORDS)))


def _listener(backlog: int, first: int, last: int) -> socket.socket:
    """Return a listening socket, at a port of the range if there is one: firewalls leave those open."""
    for port in random.sample(range(first, last + 1), min(MOST_PORTS, last - first + 1)) if first else ():
        with contextlib.suppress(OSError):
            return socket.create_server(("", port), backlog=backlog)
    return socket.create_server(("", 0), backlog=backlog)


def _started(argv: Sequence[str], env: Mapping[str, str], errors: int) -> subprocess.Popen[bytes]:
    """Start a step in a session of its own, so that Ctrl-C does not reach it."""
    try:
        return subprocess.Popen(
            argv,
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=errors,
            env=dict(env),
            cwd="/",
            start_new_session=True,
        )
    except OSError as problem:
        raise Unreachable(
            argv[0], f"{problem.strerror}", "install the clients of the batch system here"
        ) from None


class _SocketPipe:
    """The connection of one task, as a pipe to its agent."""

    def __init__(self, node: str, connection: socket.socket, step: _Step) -> None:
        self._node, self._socket, self._step = node, connection, step
        self._reading = threading.Lock()
        self._closing = threading.Lock()
        self._closed = False

    def receive(self, size: int, timeout: float) -> bytes:
        with self._reading:
            if self._closed:
                raise LinkLost(self._node, "the connection was closed")
            if not _readable(self._socket, timeout):
                raise TimeoutError
            return self._socket.recv(size)

    def send(self, data: bytes) -> None:
        self._socket.sendall(data)

    def close(self) -> None:
        with self._closing:
            if self._closed:
                return
            self._closed = True
        with contextlib.suppress(OSError):
            # Wakes a reader, which holds the lock.
            self._socket.shutdown(socket.SHUT_RDWR)
        with self._reading:
            self._socket.close()
        self._step.release()

    def last_words(self) -> str:
        return self._step.last_words()

    def poll_file(self, on_read: Callable[[], None]) -> int | None:
        return self._socket.fileno()

    def arrived(self) -> tuple[bytes, bool]:
        parts: list[bytes] = []
        with self._reading:
            if self._closed:
                return b"", False
            try:
                while data := self._socket.recv(1 << 18, socket.MSG_DONTWAIT):
                    parts.append(data)
                    if len(parts) == MOST_PIECES:
                        return b"".join(parts), True
            except BlockingIOError:
                return b"".join(parts), True
            except OSError:
                pass
        return b"".join(parts), False

    def can_send(self) -> bool:
        waiting = select.poll()
        waiting.register(self._socket, select.POLLOUT)
        return bool(waiting.poll(0))


# Pieces of one node that are read before the poller turns to the others.
MOST_PIECES = 8


def _readable(connection: socket.socket, timeout: float) -> bool:
    waiting = select.poll()
    waiting.register(connection, select.POLLIN)
    return bool(waiting.poll(timeout * 1000))
