"""Run work on many nodes in parallel and return an outcome for each.

A transport connects, a connection sends requests, and a fan-out collects the outcomes. `raise_failures`
turns all failed outcomes into one error.
"""

from __future__ import annotations

import queue
import threading
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import TYPE_CHECKING, Any, Generic, Protocol, TypeVar

from clusterctl.errors import ClusterctlError, LinkLost, NodeError, NodesFailed, WorkFailed
from clusterctl.transport.completed import END_LIMIT
from clusterctl.transport.failures import fold_failures
from clusterctl.transport.open_files import too_many

if TYPE_CHECKING:
    from clusterctl.inventory.cluster import Node
    from clusterctl.transport.connection import Connection

T = TypeVar("T")
# Default of nodes handled at the same time: more threads would only wait for each other's cryptography.
FANOUT = 32


class Stream(Protocol):
    """The interface of a program that runs on a node without an agent: its three streams and its exit status."""

    def read(self, size: int, timeout: float) -> tuple[str, bytes]:
        """Return ("stdout" or "stderr", bytes), or ("", b"") once both have ended.

        Raise TimeoutError if nothing arrives in time, and LinkLost if the connection breaks or the node is
        silent for SILENCE seconds.
        """

    def send(self, data: bytes) -> None:
        """Write to its standard input; wait while the node accepts no more.

        Raise LinkLost if nothing reads the input any more.
        """

    def finish(self) -> None:
        """Close its standard input."""

    def exited(self) -> bool:
        """Return whether the program has ended, without waiting; its children may still hold its streams."""

    def ended(self) -> tuple[int | None, int | None]:
        """Return the exit code or the signal, after both streams have ended."""

    def close(self) -> None: ...


class Transport(Protocol):
    """The interface of a way to reach nodes."""

    def connect(self, node: Node) -> Connection:
        """Return a new connection to the node's agent; raise a NodeError. The caller closes it."""

    def start(self, node: Node, command: str) -> Stream:
        """Run one command line in the node's login shell over a new connection, without an agent."""


# ---- many nodes


@dataclass(frozen=True)
class Outcome(Generic[T]):
    """The result for one node: a value, or an error."""

    node: Node
    value: T | None = None
    error: ClusterctlError | None = None

    @property
    def ok(self) -> bool:
        return self.error is None

    def get(self) -> T:
        """Return the value; raise the error if there is one."""
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
    """Call `work` for every node; return the outcomes in the nodes' order.

    At most `fanout` calls run at the same time. An error of one node becomes its outcome and does not stop
    the other nodes; a bug is raised here. Ctrl-C returns immediately: the threads are daemons, and closing
    their connections (`Connections`) ends what they wait for.
    """
    waiting: queue.SimpleQueue[int] = queue.SimpleQueue()
    done: queue.SimpleQueue[tuple[int, Outcome[T] | BaseException]] = queue.SimpleQueue()
    for index in range(len(nodes)):
        waiting.put(index)
    stopped = threading.Event()

    def worker() -> None:
        while not stopped.is_set():
            try:
                index = waiting.get_nowait()
            except queue.Empty:
                return
            try:
                done.put((index, Outcome(nodes[index], work(nodes[index]))))
            except ClusterctlError as error:
                done.put((index, Outcome(nodes[index], error=error)))
            except BaseException as bug:
                lack = too_many(nodes[index].name, bug) if isinstance(bug, OSError) else None
                # A bug is raised again in the caller's thread.
                done.put((index, Outcome(nodes[index], error=lack) if lack else bug))

    for _ in range(min(max(fanout, 1), len(nodes))):
        threading.Thread(target=worker, daemon=True).start()
    outcomes: dict[int, Outcome[T]] = {}
    try:
        while len(outcomes) < len(nodes):
            index, outcome = done.get()
            if isinstance(outcome, BaseException):
                raise outcome
            outcomes[index] = outcome
            if on_outcome:
                on_outcome(outcome)
    finally:
        stopped.set()
    return [outcomes[index] for index in range(len(nodes))]


class Connections:
    """One connection per node, opened at its first use and closed at the end of the `with` block."""

    def __init__(self, transport: Transport, fanout: int = FANOUT, kept: bool = False) -> None:
        """`kept`: agents are already running, or keep running for the next command."""
        self.transport = transport
        self.kept = kept
        self.fanout = fanout
        self._open: dict[str, Connection] = {}
        self._locks: dict[str, threading.Lock] = {}
        self._change = threading.Lock()
        self._unanswered = Counter[str]()
        self._closed = False

    def __enter__(self) -> Connections:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def of(self, node: Node) -> Connection:
        """Return the node's connection; open one if there is none or the last attempt failed."""
        with self._change:
            lock = self._locks.setdefault(node.name, threading.Lock())
        with lock:
            connection = self._open.get(node.name)
            if connection is None:
                connection = self.transport.connect(node)
                self.adopt(node, connection)
            return connection

    def adopt(self, node: Node, connection: Connection) -> None:
        """Take over a connection that was opened elsewhere."""
        with self._change:
            closed = self._closed
            if not closed:
                self._open[node.name] = connection
        if closed:
            connection.close()
            raise LinkLost(node.name, "interrupted")

    def silent_for(self, node: Node) -> float:
        """Return the seconds since the last byte arrived from a node; 0 if it has no connection."""
        with self._change:
            connection = self._open.get(node.name)
        return connection.silent_for() if connection is not None else 0.0

    def drop(self, node: Node) -> None:
        """Close the connection of a node; the next use opens a new one."""
        with self._change:
            connection = self._open.pop(node.name, None)
        if connection is not None:
            connection.close()

    def on_each(
        self,
        nodes: Sequence[Node],
        work: Callable[[Node, Connection], T],
        *,
        fanout: int | None = None,
        on_outcome: Callable[[Outcome[T]], None] | None = None,
    ) -> list[Outcome[T]]:
        """Call `work` with every node and its connection; the outcome of an unreachable node is its error."""
        left = Counter(node.name for node in nodes)
        with self._change:
            self._unanswered.update(left)

        def note(outcome: Outcome[T]) -> None:
            with self._change:
                left[outcome.node.name] -= 1
                self._unanswered[outcome.node.name] -= 1
            if on_outcome:
                on_outcome(outcome)

        try:
            return on_each(
                nodes,
                lambda node: work(node, self.of(node)),
                fanout=fanout or self.fanout,
                on_outcome=note,
            )
        finally:
            with self._change:
                self._unanswered.subtract(left)

    def unanswered(self) -> list[str]:
        """Return the nodes whose work has not ended yet."""
        with self._change:
            return [name for name, count in self._unanswered.items() if count > 0]

    def close(self) -> None:
        with self._change:
            self._closed = True
            connections, self._open = list(self._open.values()), {}
        # These connections close without waiting, so threads would only cost time.
        if self.kept:
            for connection in connections:
                connection.close()
            return
        closers = [threading.Thread(target=connection.close, daemon=True) for connection in connections]
        for thread in closers:
            thread.start()
        for thread in closers:
            thread.join(END_LIMIT + 1)


def on_all(
    connections: Connections, nodes: Sequence[Node], work: Callable[[Node, Connection], T]
) -> dict[str, T]:
    """Call `work` for all nodes; return the values by node name, or raise one error that names every failed node."""
    return values(connections.on_each(nodes, work))


def within(
    connections: Connections,
    nodes: Sequence[Node],
    work: Callable[[Node, Connection], Any],
    seconds: float | None = None,
) -> list[Outcome[Any]]:
    """Return an outcome for each node within `seconds`; a node without an answer in time has a LinkLost."""
    if seconds is None:
        return connections.on_each(nodes, work)
    found: dict[str, Outcome[Any]] = {}

    def note(outcome: Outcome[Any]) -> None:
        found[outcome.node.name] = outcome

    asking = threading.Thread(
        target=connections.on_each, args=(nodes, work), kwargs={"on_outcome": note}, daemon=True, name="ask"
    )
    asking.start()
    asking.join(seconds)
    late = f"no answer in {seconds:g} s"
    return [found.get(node.name) or Outcome(node, error=LinkLost(node.name, late)) for node in nodes]


def values(outcomes: Sequence[Outcome[T]]) -> dict[str, T]:
    """Return the values by node name, or raise one error that names every failed node."""
    raise_failures(outcomes)
    return {outcome.node.name: outcome.get() for outcome in outcomes}


def raise_failures(outcomes: Sequence[Outcome[Any]]) -> None:
    """Raise one error for all failed outcomes.

    Unreachable nodes come first and decide the exit code: without them the other results are incomplete.
    """
    errors = [outcome.error for outcome in outcomes if outcome.error is not None]
    if len(errors) == 1:
        raise errors[0]
    unreachable = [error for error in errors if isinstance(error, NodeError)]
    failed = [error for error in errors if not isinstance(error, NodeError)]
    failures = [(outcome.node, outcome.error) for outcome in outcomes if outcome.error is not None]
    shown = fold_failures(sorted(failures, key=lambda failure: not isinstance(failure[1], NodeError)))
    if unreachable:
        raise NodesFailed(unreachable, failed, shown)
    if failed:
        hints = "\n".join(dict.fromkeys(error.hint for error in shown if error.hint))
        raise WorkFailed("\n".join(error.message for error in shown), hints)
