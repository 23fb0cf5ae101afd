"""Copy the output of a run to this machine while it runs, yield its updates, and stop all nodes when one fails."""

from __future__ import annotations

import contextlib
import queue
import threading
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from clusterctl.agent.frames import ALL_BEAT, SILENCE
from clusterctl.errors import ClusterctlError, NoAddress, NodeError, WorkFailed
from clusterctl.files import make_private_folder
from clusterctl.inventory.cluster import Node
from clusterctl.jobs.phase import Phase
from clusterctl.jobs.run_folder import NodeFiles, RunDir
from clusterctl.logs.lines import LineCutter, dropped
from clusterctl.logs.store import LogKeeper, half_line
from clusterctl.logs.times import LogTimes, age_of
from clusterctl.runs.state import SUPERVISOR_SILENCE, FollowEnd, NodeAnswer
from clusterctl.runs.stop import StopRequest
from clusterctl.runs.watching.kept_watch import KeptWatch
from clusterctl.runs.watching.log_steps import LogSteps
from clusterctl.runs.watching.roller import Roller
from clusterctl.runs.watching.stall import Hang, Outage, Silence
from clusterctl.runs.watching.stopper import Stopper
from clusterctl.runs.watching.updates import Source, Stream, Update, from_lines, from_report
from clusterctl.transport.connection import read_answer
from clusterctl.transport.fanout import on_each
from clusterctl.transport.later import Later

if TYPE_CHECKING:
    from clusterctl.agent.frames import Frame
    from clusterctl.runs.state import SupervisorState
    from clusterctl.transport.fanout import Connections
    from clusterctl.transport.link import PendingRequest

# Seconds after its connection broke until a node counts as lost.
PATIENCE = 60.0
# The same if no node answers at all: then this machine's own link is probably broken, and the run continues.
ALONE = 600.0
# A node that was never reached counts as lost this many seconds earlier than a node that stops answering: a start takes
# that long.
SOONER = 3.0
# After these seconds of silence, two nodes are treated as hit by the same outage: when the first one is given up, the
# other may have answered the last beat.
QUIET = SILENCE - ALL_BEAT
# Seconds of grace for the other nodes when one has failed: ranks that wait for a dead one cannot save a checkpoint.
FAILED_GRACE = 5.0
# Seconds between two checks for nodes that have been away for too long.
LOOK = 0.2
# Seconds before a connection that broke is opened again.
RETRY = 1.0
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
        self.updates: queue.Queue[Update] = queue.Queue(maxsize=128)
        # Nodes that have sent something; None ends the thread that reads it.
        self.arrived: queue.SimpleQueue[Follow | None] = queue.SimpleQueue()
        # Opens connections, and opens them again.
        self.dialer = Later()
        self.follows: dict[str, Follow] = {}
        self.ends: dict[str, Phase] = {}
        self.closed = threading.Event()
        self.cutters: dict[Path, LineCutter] = {}
        self.times = LogTimes()
        # Nodes with a connection on which a request was sent.
        self.reached: set[str] = set()
        begun = (time.monotonic() if since is None else since) + SILENCE - SOONER
        # By node without a connection: since when it has none.
        self.gone = dict.fromkeys(self.cluster.names, begun)
        self.roller = Roller(run, connections, self.gone, lambda text: self._put(Update(note=text)))
        self.outage, self.alone = Outage(connections, self.record.spares), False
        # Nodes that reported that their supervisor is dead.
        self.orphaned: set[str] = set()
        self.stopper = Stopper(run, self.record, connections)
        self.silence = Silence(self.record)
        self.log_steps = LogSteps(run, self.record)
        # Nodes of which this machine could not look up the address, with the reason.
        self.nameless: dict[str, str] = {}
        # Nodes whose broken connection was reported.
        self.reported: set[str] = set()
        # What nodes reported with the end of an attempt that finished there.
        self.reports: dict[str, NodeAnswer] = {}
        # By node, how many reports in a row said that its supervisor does not respond.
        self.stuck: Counter[str] = Counter()

    def __iter__(self) -> Iterator[Update]:
        """Yield updates until every node has ended."""
        threading.Thread(target=self._copy, daemon=True, name="copy").start()
        for node in self.cluster.nodes:
            self.dialer.call(partial(self._try_to_begin, node))
        try:
            while len(self.ends) < len(self.cluster.nodes):
                yield from self._seen()
            # Wait until the ranks of a node whose supervisor died are ended too.
            self.stopper.join()
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
        nodes = [node for node in self.cluster.nodes if node.name in self.orphaned]
        reading = threading.Thread(target=on_each, args=(nodes, self._read_rest), daemon=True)
        if nodes:
            reading.start()
        while reading.is_alive() or (nodes and not self.updates.empty()):
            with contextlib.suppress(queue.Empty):
                update = self.updates.get(timeout=LOOK)
                if update.chunk or update.metric:
                    yield update

    def _read_rest(self, node: Node) -> None:
        # What cannot be copied stays in the folder on the node.
        with contextlib.suppress(ClusterctlError, OSError):
            follow = self._begin(node, now=True)
            for frame in follow.request:
                self._store(follow, frame)
            self._finish(follow)

    def _seen(self) -> Iterator[Update]:
        """Yield the nodes that have been away for too long, and the next update."""
        yield from self._overdue()
        if not self.now and self.stopper.must_obey():
            away = {*self.ends, *self.gone}
            self.stopper.obey([node for node in self.cluster.nodes if node.name not in away])
        hung = None if self.now or self.stopper.request or self.gone else self.silence.hang(self.ends)
        if hung:
            yield self._call_hung(hung)
        elif not (self.now or self.stopper.request) and (seconds := self.silence.notice(self.ends)):
            self.roller.report_silence(seconds, self.silence.last)
        try:
            update = self.updates.get(timeout=LOOK)
        except queue.Empty:
            return
        if update.node in self.ends and not self.now and (update.ended or update.problem):
            # The node answers again after it counted as lost.
            return
        if update.problem:
            raise update.problem
        if update.pace:
            self.silence.has_heartbeats()
        if update.failure:
            if not self.now:
                self.run.add_event("failed", node=update.node, rank=update.failure.rank)
            seconds = update.failure.hang
            self._stop_rest(update.node if seconds is None else "", seconds)
        if update.supervisor:
            yield from self._check_supervisor(update.node, update.supervisor)
            return
        if update.ended:
            self._note_end(update)
        yield update

    def _overdue(self) -> Iterator[Update]:
        """Give up nodes that have been away for too long; if no node answers at all, that takes much longer."""
        now, patience = time.monotonic(), self.patience
        away = {
            name: since for name, since in list(self.gone.items()) if since <= now and name not in self.ends
        }
        if self.alone and self._someone_answers(away):
            # Our own link was broken: the time of each node starts again.
            self._begin_again(away, now)
            return
        # A look-up that fails is this machine's fault, and says nothing about the node.
        patiences = {name: max(ALONE, patience) if name in self.nameless else patience for name in away}
        overdue = [name for name, since in away.items() if now - since > patiences[name] - LOOK]
        if not away or self._someone_answers(away):
            self.outage.over()
        elif self.outage.is_ours():
            patience = max(ALONE, self.patience)
            if overdue and not self.alone:
                yield Update(
                    note="no node answers: this machine's own link may be broken; the ranks continue meanwhile"
                )
            self.alone = bool(overdue)
        for name in overdue:
            limit = max(patience, patiences[name])
            if now - away[name] > limit - LOOK:
                self.alone = False
                yield self._lose(name, limit)

    def _begin_again(self, away: Mapping[str, float], now: float) -> None:
        self.alone = False
        for name in away:
            self.gone[name] = now
            # A thread of the dialer has reached the node meanwhile.
            if name in self.reached:
                self.gone.pop(name, None)

    def _someone_answers(self, away: Mapping[str, float]) -> bool:
        """Return True if data came recently from any node that still runs: each sends a heartbeat every few seconds."""
        left = [node for node in self.cluster.nodes if node.name not in self.ends and node.name not in away]
        return any(self.connections.silent_for(node) < QUIET for node in left)

    def _lose(self, name: str, seconds: float) -> Update:
        note = f"{name}: lost: it did not come back in {seconds:g} s"
        update = Update(node=name, ended=Phase.LOST, note=note)
        self._note_end(update)
        return update

    def _call_hung(self, hung: Hang) -> Update:
        """Record the hang as a failure, after a roll call."""
        self._stop_rest("", hung.seconds, hung)
        return Update(
            node=hung.node,
            note=f"no rank has written anything for {hung.seconds:g} s: it counts as hung",
            hung=True,
        )

    def _check_supervisor(self, node: str, supervisor: SupervisorState) -> Iterator[Update]:
        """Give up an attempt on a node whose supervisor does not respond: no process there would stop its ranks.

        Two reports in a row are needed: after a pause of the whole machine, the first one may be wrong.
        """
        self.stuck[node] += (supervisor.silent or 0.0) >= SUPERVISOR_SILENCE
        if self.stuck[node] < 2 or node in self.ends or self.now:
            return
        self.orphaned.add(node)
        note = f"{node}: the supervisor does not respond: {supervisor.describe()}; its ranks are ended"
        update = Update(node=node, ended=Phase.LOST, note=note)
        self._note_end(update)
        yield update

    def _note_end(self, update: Update) -> None:
        assert update.ended is not None
        self.ends[update.node] = update.ended
        if self.now:
            return
        self.run.add_event("node_ended", node=update.node, state=update.ended)
        if update.ended is not Phase.FINISHED:
            self._stop_rest(update.node)

    def _stop_rest(self, failed: str, hung: float | None = None, hang: Hang | None = None) -> None:
        """Stop the other nodes; the failed one too if it answers but its supervisor is dead.

        `hung`: for how many seconds ranks hang; a roll call of all nodes comes first.
        """
        others = [
            node
            for node in self.cluster.nodes
            if (node.name not in self.ends and node.name != failed)
            or (node.name == failed and self.ends.get(failed) is Phase.LOST and failed not in self.gone)
        ]
        grace = min(self.record.job.grace, FAILED_GRACE)
        request = StopRequest(grace, hang=hang)
        if hung is None:
            self.stopper.stop(others, failed, request)
        else:
            self.stopper.stop(others, failed, request, partial(self.roller.before_end, hung))

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
            if not self.now:
                self.stopper.stop_again(node)

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
        if phase is Phase.LOST:
            self.orphaned.add(follow.node.name)
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
        silent = max(0.0, self.connections.silent_for(node) - SILENCE)
        if node.name in self.reached or node.name not in self.reported:
            self.reported.add(node.name)
            last_output = time.monotonic() - silent
            self.gone[node.name] = min(last_output, self.gone.get(node.name, last_output))
            self.reached.discard(node.name)
            self._put(Update(node=node.name, note=f"{error.message}; trying again"))
        self.dialer.call(partial(self._begin_anew, node))

    def _begin_anew(self, node: Node) -> None:
        # Closing a connection may take seconds.
        self.connections.drop(node)
        self.dialer.call(partial(self._try_to_begin, node), RETRY)

    def _put(self, update: Update) -> None:
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
        self.reached.add(node.name)
        self.gone.pop(node.name, None)
        self.nameless.pop(node.name, None)
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
