"""Copy the output of a run here while it runs, yield what is seen, and stop all nodes when one has failed."""

from __future__ import annotations

import contextlib
import queue
import threading
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from clusterctl.agent.frames import BEAT, SILENCE
from clusterctl.errors import ClusterctlError, NodeError, WorkFailed
from clusterctl.files import make_private_folder
from clusterctl.inventory.cluster import Node
from clusterctl.jobs.phase import Phase
from clusterctl.jobs.run_folder import NodeFiles, RunDir
from clusterctl.logs.lines import LineCutter
from clusterctl.logs.store import LogKeeper, LogTimes, half_line
from clusterctl.runs.kept_watch import KeptWatch
from clusterctl.runs.log_steps import LogSteps
from clusterctl.runs.stall import Hang, Outage, Silence
from clusterctl.runs.state import SUPERVISOR_SILENCE
from clusterctl.runs.stop import stop_nodes
from clusterctl.runs.updates import Source, Stream, Update, from_lines, from_report

if TYPE_CHECKING:
    from clusterctl.runs.state import SupervisorState
    from clusterctl.transport.fanout import Connections

# Seconds that a node may be away, after its connection broke, before it counts as lost.
PATIENCE = 60.0
# The same if no node answers at all: then this machine's own link is probably broken, and the run continues.
ALONE = 600.0
# A node that was never reached has these seconds less than one that falls silent: a start takes them.
SOONER = 3.0
# After these seconds of silence, two nodes are treated as hit by the same outage.
QUIET = 2 * BEAT + 1
# Seconds of grace for the other nodes when one has failed: ranks that wait for a dead one cannot save a checkpoint.
FAILED_GRACE = 5.0
# Seconds between two checks for nodes that have been away for too long.
LOOK = 0.2


class Watch:
    """Copies the output of one attempt here while it runs, and stops all nodes when one has failed."""

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

        `since`, by the monotonic clock, is when a node that is never reached began to be away.
        """
        self.run, self.connections, self.now = run, connections, now
        self.lines, self.patience = lines, patience
        self.record = run.read_record()
        self.cluster = self.record.cluster
        # At most 128 chunks of 64 kB.
        self.updates: queue.Queue[Update] = queue.Queue(maxsize=128)
        self.ends: dict[str, Phase] = {}
        self.closed = threading.Event()
        self.stopping = False
        self.cutters: dict[Path, LineCutter] = {}
        self.times = LogTimes()
        # Nodes with a connection on which a request was sent.
        self.reached: set[str] = set()
        begun = (time.monotonic() if since is None else since) + SILENCE - SOONER
        # By node without a connection: since when.
        self.gone = dict.fromkeys(self.cluster.names, begun)
        self.outage, self.alone = Outage(connections, self.record.spares), False
        # Nodes that reported that their supervisor is dead.
        self.orphaned: set[str] = set()
        self.stopper: threading.Thread | None = None
        self.silence = Silence(self.record)
        self.log_steps = LogSteps(run, self.record)
        # By node, how many reports in a row said that its supervisor does not respond.
        self.stuck: Counter[str] = Counter()

    def __iter__(self) -> Iterator[Update]:
        """Yield updates until every node has ended."""
        for node in self.cluster.nodes:
            threading.Thread(
                target=self._follow, args=(node,), daemon=True, name=f"follow {node.name}"
            ).start()
        try:
            while len(self.ends) < len(self.cluster.nodes):
                yield from self._seen()
            if self.stopper:
                # Wait until the ranks of a node whose supervisor died are ended too.
                self.stopper.join()
            yield from self._rest()
        finally:
            self.closed.set()

    def _rest(self) -> Iterator[Update]:
        """Yield what ranks still wrote on nodes whose supervisor was dead, until they were ended."""
        nodes = [node for node in self.cluster.nodes if node.name in self.orphaned]
        threads = [threading.Thread(target=self._follow_rest, args=(node,), daemon=True) for node in nodes]
        for thread in threads:
            thread.start()
        while any(thread.is_alive() for thread in threads) or (threads and not self.updates.empty()):
            with contextlib.suppress(queue.Empty):
                update = self.updates.get(timeout=LOOK)
                if update.chunk or update.metric:
                    yield update

    def _follow_rest(self, node: Node) -> None:
        # What cannot be copied stays in the folder on the node.
        with contextlib.suppress(ClusterctlError, OSError):
            self._follow_once(node, now=True)

    def _seen(self) -> Iterator[Update]:
        """Yield the nodes that have been away for too long, and the next update."""
        yield from self._overdue()
        hung = None if self.now or self.stopping or self.gone else self.silence.hang(self.ends)
        if hung:
            yield self._call_hung(hung)
        try:
            update = self.updates.get(timeout=LOOK)
        except queue.Empty:
            return
        if update.node in self.ends and not self.now and (update.ended or update.problem):
            # The node came back after the run gave it up.
            return
        if update.problem:
            raise update.problem
        if update.pace:
            self.silence.has_heartbeats()
        if update.failure:
            if not self.now:
                self.run.add_event("failed", node=update.node, rank=update.failure.rank)
            self._stop_rest(update.node, stacks=update.failure.hang is not None)
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
            # Our own link was broken: the time of each node begins anew.
            self._begin_again(away, now)
            return
        overdue = [name for name, since in away.items() if now - since > patience - LOOK]
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
            if now - away[name] > patience - LOOK:
                self.alone = False
                yield self._lose(name)

    def _begin_again(self, away: Mapping[str, float], now: float) -> None:
        self.alone = False
        for name in away:
            self.gone[name] = now
            # Its own thread has reached it meanwhile.
            if name in self.reached:
                self.gone.pop(name, None)

    def _someone_answers(self, away: Mapping[str, float]) -> bool:
        """Return True if any node that still runs was heard lately: each sends a beat every two seconds."""
        left = [node for node in self.cluster.nodes if node.name not in self.ends and node.name not in away]
        return any(self.connections.silent_for(node) < QUIET for node in left)

    def _lose(self, name: str) -> Update:
        update = Update(
            node=name, ended=Phase.LOST, note=f"{name}: lost: it did not come back in {self.patience:g} s"
        )
        self._note_end(update)
        return update

    def _call_hung(self, hung: Hang) -> Update:
        """Record the hang as a failure of the node whose rank wrote last; all ranks write their stacks first."""
        self._stop_rest("", stacks=True, hang=hung)
        return Update(
            node=hung.node, note=f"no rank has written anything for {hung.seconds:g} s: it counts as hung"
        )

    def _check_supervisor(self, node: str, supervisor: SupervisorState) -> Iterator[Update]:
        """Give up an attempt on a node whose supervisor does not respond: nobody there would stop its ranks.

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

    def _stop_rest(self, failed: str, stacks: bool = False, hang: Hang | None = None) -> None:
        """Stop the other nodes; the failed one too if it answers but its supervisor is dead."""
        others = [
            node
            for node in self.cluster.nodes
            if (node.name not in self.ends and node.name != failed)
            or (node.name == failed and self.ends.get(failed) is Phase.LOST and failed not in self.gone)
        ]
        if others and not self.stopping:
            self.stopping = True
            self.stopper = threading.Thread(target=self._stop, args=(others, stacks, hang), daemon=True)
            self.stopper.start()

    def _stop(self, nodes: Sequence[Node], stacks: bool, hang: Hang | None) -> None:
        grace = min(self.record.job.grace, FAILED_GRACE)
        stop_nodes(self.connections, nodes, self.run, grace, stacks=stacks, hang=hang)

    def _follow(self, node: Node) -> None:
        """Follow one node; this runs in a thread, and its errors are raised where the watch is read."""
        try:
            self._follow_on(node)
        except OSError as error:
            subject = f"{self.run.root}: cannot write what {node.name} sends: {error.strerror or error}"
            hint = f"the run itself continues; then: clusterctl attach {self.run.run_id}"
            self._put(Update(node=node.name, problem=ClusterctlError(subject, hint)))
        except BaseException as bug:
            # Raised in the thread that reads the watch.
            self._put(Update(node=node.name, problem=bug))

    def _follow_on(self, node: Node) -> None:
        """Follow a node over as many connections as it takes; each continues at the byte where the copy here ends."""
        reported = False
        while not self.closed.is_set():
            try:
                ended = self._follow_once(node, self.now)
                if ended is Phase.LOST:
                    self.orphaned.add(node.name)
                if ended:
                    self._put(Update(node=node.name, ended=ended))
                return
            except NodeError as error:
                # The silence began before it was noticed.
                silent = max(0.0, self.connections.silent_for(node) - SILENCE)
                self.connections.drop(node)
                if node.name in self.reached or not reported:
                    reported, heard = True, time.monotonic() - silent
                    self.gone[node.name] = min(heard, self.gone.get(node.name, heard))
                    self.reached.discard(node.name)
                    self._put(Update(node=node.name, note=f"{error.message}; trying again"))
                self.closed.wait(1.0)
            except ClusterctlError as error:
                self._put(Update(node=node.name, note=error.message))
                self._put(Update(node=node.name, ended=Phase.LOST))
                return

    def _put(self, update: Update) -> None:
        while not self.closed.is_set():
            try:
                return self.updates.put(update, timeout=0.2)
            except queue.Full:
                continue

    def _follow_once(self, node: Node, now: bool) -> Phase | None:
        """Follow until the node's attempt has ended; return how, or None if the watch was closed."""
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
        until: Any = {"run_dir": self.record.run_dirs[node.name], "attempt": self.record.attempt}
        until = "now" if now else until
        request = self.connections.of(node).open(
            "follow", {"files": files, "until": until, "silent_after": SUPERVISOR_SILENCE / 2}
        )
        self.reached.add(node.name)
        self.gone.pop(node.name, None)
        cutters = {path: self._cutter(home) for path, (home, _) in homes.items()}
        try:
            for frame in request:
                path = frame.fields.get("path")
                if path == "":
                    self._put(from_report(node.name, str(frame.fields.get("word")), frame.payload))
                    continue
                offset = frame.fields.get("offset")
                if path not in homes or not isinstance(offset, int):
                    raise WorkFailed(f"{node.name}: sent a part of a file that was not asked for")
                home, source = homes[path]
                self.silence.broken_by(node.name, source.rank)
                offset += before[path]
                fresh = LogKeeper.keep(home, offset, frame.payload)
                self.times.note(home, offset + len(frame.payload), frame.fields.get("age"))
                for metric in self.log_steps.feed(source, fresh):
                    self.silence.stepped(node.name, source.rank, finished=self.log_steps.finished)
                    self._put(Update(node=node.name, metric=metric))
                if self.lines or source.stream is Stream.METRICS:
                    self._put_lines(source, cutters[path].feed(fresh))
                if self.closed.is_set():
                    return None
            phase = _end_of(request.result)
            for path, cutter in cutters.items() if phase is not Phase.LOST else ():
                self._put_lines(homes[path][1], cutter.end())
            return phase
        finally:
            if request.result is None:
                request.cancel()

    def _cutter(self, home: Path) -> LineCutter:
        """Return the line cutter of a file; it begins with the half line that was copied before, if any."""
        if home not in self.cutters:
            self.cutters[home] = LineCutter(half_line(home))
        return self.cutters[home]

    def _files(self, node: Node) -> dict[str, tuple[Path, Source]]:
        """Return by file on the node its copy here, and what it holds."""
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

    def _put_lines(self, source: Source, block: bytes) -> None:
        for update in from_lines(source, block):
            self._put(update)


def _end_of(result: Mapping[str, Any] | None) -> Phase:
    """Return how an attempt ended on a node; UNKNOWN if only what existed was copied."""
    state = (result or {}).get("state") or Phase.LOST
    try:
        return Phase(state)
    except ValueError:
        return Phase.UNKNOWN


@contextlib.contextmanager
def open_watch(run: RunDir, connections: Connections, now: bool = False) -> Iterator[Watch | KeptWatch]:
    """Yield the watch of a run: our own, or the view of what another process copies here."""
    with run.hold() as ours:
        yield Watch(run, connections, now) if ours else KeptWatch(run)
