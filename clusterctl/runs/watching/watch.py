"""Copy the output of a run to this machine while it runs, yield its updates, and stop all nodes when one fails."""

from __future__ import annotations

import contextlib
import queue
import threading
import time
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from clusterctl.agent.frames import SILENCE
from clusterctl.errors import ClusterctlError, NoAddress, NodeError, WorkFailed
from clusterctl.files import make_private_folder
from clusterctl.inventory.cluster import Node
from clusterctl.jobs.phase import Phase
from clusterctl.jobs.run_folder import NodeFiles, RunDir
from clusterctl.logs.lines import LineCutter, dropped
from clusterctl.logs.store import LogKeeper, half_line
from clusterctl.logs.times import LogTimes, age_of
from clusterctl.runs.decide import attempt as decide
from clusterctl.runs.decide.attempt import FAILED_GRACE, LOOK, PATIENCE, RETRY
from clusterctl.runs.state import SUPERVISOR_SILENCE, FollowEnd, NodeAnswer
from clusterctl.runs.stop import read_request, send_stop
from clusterctl.runs.watching.kept_watch import KeptWatch
from clusterctl.runs.watching.log_steps import LogSteps
from clusterctl.runs.watching.roller import Roller
from clusterctl.runs.watching.stall import Silence
from clusterctl.runs.watching.updates import Source, Stream, Update, from_lines, from_report
from clusterctl.transport.connection import read_answer
from clusterctl.transport.fanout import on_each
from clusterctl.transport.later import Later

if TYPE_CHECKING:
    from clusterctl.agent.frames import Frame
    from clusterctl.transport.fanout import Connections
    from clusterctl.transport.link import PendingRequest

# Limit of pieces of one node's output that are stored before the turn of the next node.
AT_ONCE = 16


class NotCopied(ClusterctlError):
    """What the nodes sent cannot be written on this machine."""


@dataclass(eq=False)
class Follow:
    """The files of one node, as they are followed over one connection."""

    node: Node
    request: PendingRequest
    homes: dict[str, tuple[Path, Source]]
    """For each file on the node: its copy here, and what it holds."""
    before: dict[str, int]
    """For each file on the node: how many bytes of its copy came from other nodes."""
    is_queued: bool = False


class RunWatcher:
    """Copies the output of one attempt to this machine while it runs, and stops all nodes when one fails."""

    def __init__(
        self,
        run: RunDir,
        connections: Connections,
        now: bool = False,
        *,
        lines: bool = True,
        patience: float = PATIENCE,
        since: float | None = None,
    ) -> None:
        """`now`: copy what exists and return. `lines=False`: yield no log lines.

        `since` is the monotonic time from which a node that was never reached counts as away.
        """
        self.run, self.connections, self.now = run, connections, now
        self.lines, self.patience = lines, patience
        self.record = run.read_record()
        self.cluster = self.record.cluster
        # At most 128 chunks of 64 kB.
        self.updates: queue.Queue[Update | decide.Event] = queue.Queue(maxsize=128)
        # Nodes that have sent something; None ends the thread that reads it.
        self.arrived: queue.SimpleQueue[Follow | None] = queue.SimpleQueue()
        # Opens connections, and opens them again.
        self.dialer = Later()
        self.follows: dict[str, Follow] = {}
        self.closed = threading.Event()
        self.cutters: dict[Path, LineCutter] = {}
        self.times = LogTimes()
        self.state = decide.begin(
            frozenset(self.cluster.names),
            time.monotonic() if since is None else since,
            patience=patience,
            grace=min(self.record.job.grace, FAILED_GRACE),
            has_spares=bool(self.record.spares),
            only_reads=now,
        )
        self.roller = Roller(
            run, connections, lambda: self.state.away, lambda text: self._put(Update(note=text))
        )
        # When the nodes that are away, a request to stop and silence were last looked at.
        self.looked = 0.0
        self.silence = Silence(self.record)
        self.log_steps = LogSteps(run, self.record)
        # Nodes of which this machine could not look up the address, with the reason.
        self.nameless: dict[str, str] = {}
        # What nodes reported with the end of an attempt that finished there.
        self.reports: dict[str, NodeAnswer] = {}

    @property
    def gone(self) -> Collection[str]:
        """The nodes without a connection."""
        return self.state.away.keys()

    def __iter__(self) -> Iterator[Update]:
        """Yield updates until every node has ended."""
        threading.Thread(target=self._copy, daemon=True, name="copy").start()
        for node in self.cluster.nodes:
            self.dialer.call(partial(self._try_to_begin, node))
        try:
            while not self.state.is_over:
                yield from self._seen()
            yield from self._rest()
        finally:
            self._close()

    def _close(self) -> None:
        self.closed.set()
        self.dialer.close()
        self.arrived.put(None)
        for follow in list(self.follows.values()):
            if follow.request.result is None:
                with contextlib.suppress(ClusterctlError):
                    follow.request.cancel()

    def _rest(self) -> Iterator[Update]:
        """Yield updates from ranks on nodes whose supervisor is dead, until these ranks are ended."""
        nodes = [node for node in self.cluster.nodes if node.name in self.state.orphaned]
        reading = threading.Thread(target=on_each, args=(nodes, self._read_rest), daemon=True)
        if nodes:
            reading.start()
        while reading.is_alive() or (nodes and not self.updates.empty()):
            with contextlib.suppress(queue.Empty):
                update = self.updates.get(timeout=LOOK)
                if isinstance(update, Update) and (update.chunk or update.metric):
                    yield update

    def _read_rest(self, node: Node) -> None:
        # What cannot be copied stays in the folder on the node.
        with contextlib.suppress(ClusterctlError, OSError):
            follow = self._begin(node, now=True)
            for frame in follow.request:
                self._store(follow, frame)
            self._finish(follow)

    def _seen(self) -> Iterator[Update]:
        """Yield what follows from the time that has passed, and the next update."""
        if time.monotonic() - self.looked >= LOOK:
            self.looked = time.monotonic()
            yield from self._decide(decide.Tick(self._quiet()))
            if not self.now:
                if not self.state.by_user and self.run.stop_asked.exists():
                    yield from self._decide(decide.StopAsked(read_request(self.run, self.record)))
                yield from self._check_silence()
        try:
            update = self.updates.get(timeout=LOOK)
        except queue.Empty:
            return
        if not isinstance(update, Update):
            yield from self._decide(update)
            return
        name = update.node
        if update.problem:
            if name not in self.state.ends or self.now:
                raise update.problem
            return
        if update.pace:
            self.silence.has_heartbeats()
        if update.failure:
            yield from self._decide(decide.Failed(name, update.failure.rank, update.failure.hang))
        if update.supervisor:
            silent, words = update.supervisor.silent or 0.0, update.supervisor.describe()
            yield from self._decide(decide.Stuck(name, silent, SUPERVISOR_SILENCE, words))
            return
        if update.ended and name in self.state.ends:
            # The node answers again after it counted as lost.
            return
        if update.ended:
            yield from self._decide(decide.Ended(frozenset([name]), update.ended))
        yield update

    def _check_silence(self) -> Iterator[Update]:
        """Yield a hang of ranks without heartbeats; report a long silence."""
        ends, away = self.state.ends, self.state.away
        if self.state.request:
            return
        if not away and (hang := self.silence.hang(ends)):
            yield from self._decide(decide.Hung(hang))
            note = f"no rank has written anything for {hang.seconds:g} s: it counts as hung"
            yield Update(node=hang.node, note=note, hung=True)
        elif seconds := self.silence.notice(ends):
            self.roller.report_silence(seconds, self.silence.last)

    def _quiet(self) -> float:
        """Return the seconds since the last byte of any node that still runs; each sends a heartbeat often."""
        ends, away = self.state.ends, self.state.away
        left = [node for node in self.cluster.nodes if node.name not in ends and node.name not in away]
        return min((self.connections.silent_for(node) for node in left), default=float("inf"))

    def _decide(self, event: decide.Event) -> Iterator[Update]:
        """Carry out what follows from an event; yield the updates for the user."""
        self.state, actions = decide.step(self.state, event, time.monotonic())
        for action in actions:
            match action:
                case decide.Say():
                    yield Update(node=action.name, note=action.text)
                case decide.Lose():
                    yield Update(node=action.name, ended=Phase.LOST, note=action.text)
                case decide.Note(kind="failed"):
                    self.run.add_event("failed", node=action.name, rank=action.fact)
                case decide.Note():
                    self.run.add_event("node_ended", node=action.name, state=action.fact)
                case decide.Dial():
                    self.dialer.call(partial(self._begin_anew, self.cluster.node(action.name)))
                case decide.CallRoll():
                    self._aside("roll call", self._call_roll, action)
                case decide.SendStop():
                    self._aside("stop", self._send_stop, action)
                case decide.AskSpares():
                    self._aside("ask spares", self._ask_spares)

    def _aside(self, name: str, work: Callable[..., object], *args: object) -> None:
        threading.Thread(target=work, args=args, daemon=True, name=name).start()

    def _call_roll(self, action: decide.CallRoll) -> None:
        self._put(decide.Rolled(self.roller.before_end(action.seconds, action.request)))

    def _send_stop(self, action: decide.SendStop) -> None:
        nodes = [node for node in self.cluster.nodes if node.name in action.names]
        outcomes = send_stop(self.connections, nodes, self.run, action.request)
        names = frozenset(outcome.node.name for outcome in outcomes if outcome.ok)
        self._put(decide.Answered(names, action.names - names))

    def _ask_spares(self) -> None:
        outcomes = self.connections.on_each(self.record.spares, lambda node, link: link.call("hello"))
        for outcome in outcomes:
            if not outcome.ok:
                self.connections.drop(outcome.node)
        self._put(decide.SparesAsked(any(outcome.ok for outcome in outcomes)))

    # -- connections

    def _try_to_begin(self, node: Node) -> None:
        """Follow a node at the byte where the copy here ends; this runs in a thread of the dialer."""
        if self.closed.is_set():
            return
        with self._reporting(node):
            follow = self._begin(node, self.now)
            self.follows[node.name] = follow
            follow.request.on_arrival = partial(self._note_arrival, follow)
            # What arrived before was not reported.
            self._note_arrival(follow)

    def _note_arrival(self, follow: Follow) -> None:
        if not follow.is_queued:
            follow.is_queued = True
            self.arrived.put(follow)

    def _copy(self) -> None:
        """Store what arrives from all nodes. One thread suffices, because one disk stores everything."""
        while (follow := self.arrived.get()) is not None:
            # Do this first: data that arrives later queues the node again.
            follow.is_queued = False
            with self._reporting(follow.node):
                self._take(follow)

    def _take(self, follow: Follow) -> None:
        """Store some of what a node has sent; the rest waits until the other nodes had a turn."""
        request = follow.request
        for _ in range(AT_ONCE):
            try:
                frame = request.arrived()
            except TimeoutError:
                return
            if frame is None:
                self._end(follow)
                return
            self._store(follow, frame)
            if self.closed.is_set():
                return
        self._note_arrival(follow)

    def _end(self, follow: Follow) -> None:
        self.follows.pop(follow.node.name, None)
        phase = self._finish(follow)
        if phase:
            self._put(Update(node=follow.node.name, ended=phase))

    @contextlib.contextmanager
    def _reporting(self, node: Node) -> Iterator[None]:
        """Turn the errors of a node into updates; begin again after its connection broke."""
        try:
            yield
        except NodeError as error:
            self._note_broken(node, error)
        except ClusterctlError as error:
            self._put(Update(node=node.name, note=error.message))
            self._put(Update(node=node.name, ended=Phase.LOST))
        except OSError as error:
            where = error.filename or self.run.root
            subject = f"{where}: cannot write what {node.name} sends: {error.strerror or error}"
            hint = f"the run itself continues; then: clusterctl attach {self.run.run_id}"
            self._put(Update(node=node.name, problem=NotCopied(subject, hint)))
        except BaseException as bug:
            # Raised in the thread that reads the watch.
            self._put(Update(node=node.name, problem=bug))

    def _note_broken(self, node: Node, error: NodeError) -> None:
        self.follows.pop(node.name, None)
        if isinstance(error, NoAddress):
            self.nameless[node.name] = error.reason
        else:
            self.nameless.pop(node.name, None)
        # The silence began before it was noticed.
        since = time.monotonic() - max(0.0, self.connections.silent_for(node) - SILENCE)
        self._put(decide.Broken(node.name, since, error.message, isinstance(error, NoAddress)))

    def _begin_anew(self, node: Node) -> None:
        # Closing a connection may take seconds.
        self.connections.drop(node)
        self.dialer.call(partial(self._try_to_begin, node), RETRY)

    def _put(self, update: Update | decide.Event) -> None:
        while not self.closed.is_set():
            try:
                return self.updates.put(update, timeout=0.2)
            except queue.Full:
                continue

    def _begin(self, node: Node, now: bool) -> Follow:
        """Request the files of a node from where their copies here end; `now`: only what exists."""
        homes = self._files(node)
        # Create the files, so that a person can follow a silent rank too.
        for home, _ in homes.values():
            make_private_folder(home.parent)
            home.touch(mode=0o600)
        before = {path: self._from_others(source) for path, (_, source) in homes.items()}
        files = [
            {"path": path, "offset": LogKeeper.cursor(home) - before[path]}
            for path, (home, _) in homes.items()
        ]
        attempt = {"run_dir": self.record.run_dirs[node.name], "attempt": self.record.attempt}
        until = "now" if now else attempt
        request = self.connections.of(node).open(
            "follow", {"files": files, "until": until, "silent_after": SUPERVISOR_SILENCE / 2}
        )
        self.nameless.pop(node.name, None)
        self._put(decide.Reached(frozenset([node.name])))
        return Follow(node, request, homes, before)

    def _store(self, follow: Follow, frame: Frame) -> None:
        """Append what a node has sent to the copy here, and report its whole lines."""
        node, path = follow.node, frame.fields.get("path")
        if path == "":
            self._put(from_report(node.name, str(frame.fields.get("word")), frame.payload))
            return
        offset = frame.fields.get("offset")
        if path not in follow.homes or not isinstance(offset, int):
            raise WorkFailed(f"{node.name}: sent a part of a file that was not asked for")
        home, source = follow.homes[path]
        self.silence.broken_by(node.name, source.rank)
        offset += follow.before[path]
        # Make the cutter before the copy grows: it begins with the half line at the end of the copy.
        cutter = self._cutter(home)
        hole = frame.fields.get("hole")
        hole = hole if isinstance(hole, int) and source.rank >= 0 else 0
        if hole and self.lines:
            self._put_lines(source, cutter.end() + dropped(hole), time.time())
        limit = self.record.job.log_limit if source.rank >= 0 else 0
        fresh = LogKeeper.keep(home, offset, frame.payload, hole, limit)
        age = frame.fields.get("age")
        self.times.note(home, offset + len(frame.payload), age)
        for metric in self.log_steps.feed(source, fresh, age):
            self.silence.stepped(node.name, source.rank, finished=self.log_steps.finished)
            self._put(Update(node=node.name, metric=metric))
        if self.lines or source.stream is Stream.METRICS:
            self._put_lines(source, cutter.feed(fresh), time.time() - (age_of(age) or 0.0))

    def _finish(self, follow: Follow) -> Phase:
        """Report incomplete lines, because no more data will come; return how the attempt ended there."""
        end = read_answer(FollowEnd, follow.request.result, follow.node.name, "follow")
        for metric in self.log_steps.end(follow.node.name):
            self._put(Update(node=follow.node.name, metric=metric))
        if end.report is not None:
            self.reports[follow.node.name] = end.report
        for home, source in follow.homes.values() if end.state is not Phase.LOST else ():
            self._put_lines(source, self._cutter(home).end(), time.time())
        return end.state

    def _cutter(self, home: Path) -> LineCutter:
        """Return the line cutter of a file; it begins with the half line that was copied before, if any."""
        if home not in self.cutters:
            self.cutters[home] = LineCutter(half_line(home))
        return self.cutters[home]

    def _files(self, node: Node) -> dict[str, tuple[Path, Source]]:
        """Return, for each file on the node, its copy here and what it holds."""
        remote = NodeFiles(self.record.run_dirs[node.name], self.record.attempt)
        result = {}
        for rank in self.record.ranks[node.name]:
            for stream in (Stream.OUT, Stream.ERR):
                home = self.run.log(node.name, rank, stream.value, remote.attempt)
                result[remote.log(rank, stream.value)] = (home, Source(node.name, rank, stream))
            if rank == 0:
                result[remote.metrics] = (self.run.metrics, Source(node.name, -1, Stream.METRICS))
        return result

    def _from_others(self, source: Source) -> int:
        """Return how many bytes of a file here came from other nodes: rank 0 may move, and its metrics with it."""
        return self.record.metrics_base if source.stream is Stream.METRICS else 0

    def _put_lines(self, source: Source, block: bytes, at: float) -> None:
        for update in from_lines(source, block, at):
            self._put(update)


@contextlib.contextmanager
def open_watch(run: RunDir, connections: Connections, now: bool = False) -> Iterator[RunWatcher | KeptWatch]:
    """Yield a watch of the run: a RunWatcher of this process, or a KeptWatch if another process copies the output."""
    with run.hold() as ours:
        yield RunWatcher(run, connections, now) if ours else KeptWatch(run)
