"""The one narrow door to the nodes: a transport connects, a connection asks, a fan-out answers for every
node."""

from __future__ import annotations

import os
import pwd
import queue
import select
import shlex
import subprocess
import tempfile
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Generic, Protocol, TypeVar

from clusterctl.agent.frames import Frame
from clusterctl.connection import Completed as Completed
from clusterctl.connection import Connection as Connection
from clusterctl.connection import LinkConnection as LinkConnection
from clusterctl.errors import ClusterctlError, LinkLost, Unreachable
from clusterctl.link import Asked, Link, RequestFailed, agent_argv

if TYPE_CHECKING:
    from clusterctl.inventory import Cluster, Node

T = TypeVar("T")
FANOUT = 32  # nodes at once: more threads only wait for each other's cryptography
END_LIMIT = 10.0  # seconds for a local agent to end what it ran, before it is ended itself
LOGIN_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"


class Stream(Protocol):
    """A program on a node, without an agent: its three streams, and how it ended."""

    def read(self, size: int, timeout: float) -> tuple[str, bytes]:
        """What is there: ("stdout" or "stderr", bytes), or ("", b"") once both ended; TimeoutError when nothing
        came in time, LinkLost when the connection broke."""

    def send(self, data: bytes) -> None:
        """To its standard input; waits while the node takes no more."""

    def finish(self) -> None:
        """No more input will come."""

    def ended(self) -> tuple[int | None, int | None]:
        """Exit code or signal, after both streams ended."""

    def close(self) -> None: ...


class Transport(Protocol):
    """A way to nodes."""

    def connect(self, node: Node) -> Connection:
        """A connection of its own; raises a NodeError in words. The caller closes it."""

    def start(self, node: Node, command: str) -> Stream:
        """One command line for the node's login shell, on a connection of its own; no agent is started."""


# ---- this machine


class LocalTransport:
    """An agent as a child process of this one: this machine as a node, without SSH."""

    def __init__(self, home: Path | None = None) -> None:
        self._home = home

    def connect(self, node: Node) -> Connection:
        login = pwd.getpwuid(os.getuid())
        home = str(self._home or login.pw_dir)
        env = {
            "HOME": home,
            "USER": login.pw_name,
            "LOGNAME": login.pw_name,
            "SHELL": login.pw_shell,
            "PATH": LOGIN_PATH,
        }
        return LinkConnection(Link(node.name, _ChildPipe(node, env), node.workdir))


class _ChildPipe:
    """The standard input and output of a child process."""

    def __init__(self, node: Node, env: Mapping[str, str]) -> None:
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115  closed with the pipe
        argv = agent_argv(os.path.expanduser(node.python))
        try:
            self._process = subprocess.Popen(
                argv,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=self._errors,
                bufsize=0,
                env=dict(env),
                cwd="/",
                start_new_session=True,
            )
        except OSError as problem:
            raise Unreachable(
                node.name, f"{argv[0]}: {problem.strerror}", "check `python` in the inventory"
            ) from None
        self._closing = threading.Lock()

    def receive(self, size: int, timeout: float) -> bytes:
        stdout = self._process.stdout
        assert stdout is not None
        if not select.select([stdout], [], [], timeout)[0]:
            raise TimeoutError
        return os.read(stdout.fileno(), size)

    def send(self, data: bytes) -> None:
        stdin = self._process.stdin
        assert stdin is not None
        view = memoryview(data)
        try:
            while view:
                view = view[stdin.write(view) or 0 :]
        except ValueError:
            raise BrokenPipeError("closed") from None

    def close(self) -> None:
        assert self._process.stdin is not None
        with self._closing:
            self._process.stdin.close()
            try:
                self._process.wait(END_LIMIT)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait()

    def last_words(self) -> str:
        try:
            self._process.wait(1.0)
        except subprocess.TimeoutExpired:
            return ""
        self._errors.seek(0)
        return self._errors.read()[-2000:].decode(errors="replace")


# ---- answers out of a table


Answer = Any
"""A dict (the result), a Completed (for run), a list of (fields, payload) with the result last, or an
error."""


class ScriptedTransport:
    """Nodes that answer from a table, for tests and rehearsals of everything above this module.

    A key is (node, what), or ("*", what) for every node; `what` is an operation's name, or for `run` the
    command line as a shell would be given it. What was asked is kept in `asked` as (node, what, params).
    """

    def __init__(self, table: Mapping[tuple[str, str], Answer]) -> None:
        self.table = dict(table)
        self.asked: list[tuple[str, str, dict[str, Any]]] = []

    def connect(self, node: Node) -> Connection:
        answer = self.table.get((node.name, "connect"), self.table.get(("*", "connect")))
        if isinstance(answer, ClusterctlError):
            raise answer
        return _ScriptedConnection(node.name, self)


class _ScriptedConnection(Connection):
    def __init__(self, node: str, script: ScriptedTransport) -> None:
        super().__init__(node)
        self._script = script

    def open(self, op: str, params: Mapping[str, Any]) -> Asked:
        what = shlex.join(params["argv"]) if op == "run" else op
        self._script.asked.append((self.node, what, dict(params)))
        table = self._script.table
        for key in ((self.node, what), ("*", what), (self.node, op), ("*", op)):
            if key in table:
                answer = table[key]
                if isinstance(answer, ClusterctlError):
                    raise answer
                return _ScriptedAsked(op, answer)
        raise RequestFailed(self.node, "unscripted", f"the script has no answer to {what!r}")

    def close(self) -> None:
        pass


class _ScriptedAsked(Asked):
    """A reply that was written beforehand."""

    def __init__(self, op: str, answer: Answer) -> None:
        self.op = op
        self.result = None
        if isinstance(answer, Completed):
            ends = {"exit_code": answer.exit_code, "signal": answer.signal, "timed_out": answer.timed_out}
            answer = [({"stream": "stdout"}, answer.stdout), ({"stream": "stderr"}, answer.stderr), ends]
        self._chunks = answer[:-1] if isinstance(answer, list) else []
        self._last = answer[-1] if isinstance(answer, list) else answer

    def send(self, data: bytes) -> None:
        pass

    def finish(self) -> None:
        pass

    def cancel(self) -> None:
        pass

    def __iter__(self) -> Iterator[Frame]:
        for fields, payload in self._chunks:
            yield Frame(1, "data", fields, payload)
        self.result = dict(self._last)


# ---- many nodes


@dataclass(frozen=True)
class Outcome(Generic[T]):
    """What came of one node: a value, or the error that stands in its place."""

    node: Node
    value: T | None = None
    error: ClusterctlError | None = None

    @property
    def ok(self) -> bool:
        return self.error is None

    def get(self) -> T:
        """The value; raises the error where there is none."""
        if self.error is not None:
            raise self.error
        return self.value  # type: ignore[return-value]


def on_each(
    nodes: Sequence[Node],
    work: Callable[[Node], T],
    *,
    fanout: int = FANOUT,
    on_outcome: Callable[[Outcome[T]], None] | None = None,
) -> list[Outcome[T]]:
    """Do something on every node, at most `fanout` at once; every outcome, in the nodes' order.

    An error of one node is that node's outcome and stops no other; a bug is raised here. Ctrl-C leaves at
    once: the threads are daemons, and closing their connections (`Connections`) ends what they wait for.
    """
    waiting: queue.SimpleQueue[int] = queue.SimpleQueue()
    done: queue.SimpleQueue[tuple[int, Outcome[T] | BaseException]] = queue.SimpleQueue()
    for place in range(len(nodes)):
        waiting.put(place)
    stopped = threading.Event()

    def worker() -> None:
        while not stopped.is_set():
            try:
                place = waiting.get_nowait()
            except queue.Empty:
                return
            try:
                done.put((place, Outcome(nodes[place], work(nodes[place]))))
            except ClusterctlError as error:
                done.put((place, Outcome(nodes[place], error=error)))
            except BaseException as bug:  # carried to the caller's thread and raised there
                done.put((place, bug))

    for _ in range(min(max(fanout, 1), len(nodes))):
        threading.Thread(target=worker, daemon=True).start()
    outcomes: dict[int, Outcome[T]] = {}
    try:
        while len(outcomes) < len(nodes):
            place, outcome = done.get()
            if isinstance(outcome, BaseException):
                raise outcome
            outcomes[place] = outcome
            if on_outcome:
                on_outcome(outcome)
    finally:
        stopped.set()
    return [outcomes[place] for place in range(len(nodes))]


class Connections:
    """One connection a node, opened when it is first needed, all closed at the end; use it as a context
    manager."""

    def __init__(self, transport: Transport, fanout: int = FANOUT) -> None:
        self._transport = transport
        self._fanout = fanout
        self._open: dict[str, Connection] = {}
        self._locks: dict[str, threading.Lock] = {}
        self._change = threading.Lock()
        self._closed = False

    def __enter__(self) -> Connections:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def of(self, node: Node) -> Connection:
        """The node's connection; opens it, and after a failure tries anew."""
        with self._change:
            lock = self._locks.setdefault(node.name, threading.Lock())
        with lock:
            there = self._open.get(node.name)
            if there is None:
                there = self._transport.connect(node)
                with self._change:
                    closed = self._closed
                    if not closed:
                        self._open[node.name] = there
                if closed:
                    there.close()
                    raise LinkLost(node.name, "interrupted")
            return there

    def drop(self, node: Node) -> None:
        """Close one node's connection; the next use opens a new one."""
        with self._change:
            there = self._open.pop(node.name, None)
        if there is not None:
            there.close()

    def on_each(
        self,
        nodes: Sequence[Node],
        work: Callable[[Node, Connection], T],
        *,
        fanout: int | None = None,
        on_outcome: Callable[[Outcome[T]], None] | None = None,
    ) -> list[Outcome[T]]:
        """`on_each` with each node's connection; a node that can't be reached is its own outcome."""
        return on_each(
            nodes,
            lambda node: work(node, self.of(node)),
            fanout=fanout or self._fanout,
            on_outcome=on_outcome,
        )

    def close(self) -> None:
        with self._change:
            self._closed = True
            there, self._open = list(self._open.values()), {}
        closers = [threading.Thread(target=one.close, daemon=True) for one in there]
        for thread in closers:
            thread.start()
        for thread in closers:
            thread.join(END_LIMIT + 1)


class _ByHost:
    """SSH for every node, but this machine itself for a node whose host is `local`."""

    def __init__(self, ssh: Callable[[], Transport]) -> None:
        self._make_ssh = ssh
        self._ssh: Transport | None = None
        self._local = LocalTransport()
        self._change = threading.Lock()

    def connect(self, node: Node) -> Connection:
        return self._way_to(node).connect(node)

    def start(self, node: Node, command: str) -> Stream:
        return self._way_to(node).start(node, command)

    def _way_to(self, node: Node) -> Transport:
        if node.host == "local":
            return self._local
        with self._change:
            self._ssh = self._ssh or self._make_ssh()
        return self._ssh


def transport_to(cluster: Cluster, *, accept_new: bool = False, connect_timeout: float = 10.0) -> Transport:
    """The way to a cluster's nodes; paramiko is loaded when the first SSH connection is wanted."""

    def ssh() -> Transport:
        from clusterctl.ssh import SshTransport

        known = Path(cluster.known_hosts) if cluster.known_hosts else None
        return SshTransport(known_hosts=known, accept_new=accept_new, connect_timeout=connect_timeout)

    return _ByHost(ssh)
