"""Bring a run's files home while it goes on, and show what is seen; stop the rest when one node has failed."""

from __future__ import annotations

import contextlib
import json
import os
import queue
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from clusterctl import contract
from clusterctl.agent.frames import BEAT, SILENCE
from clusterctl.agent.supervisor import FAILED_GRACE
from clusterctl.errors import ClusterctlError, NodeError, WorkFailed
from clusterctl.inventory.cluster import Node
from clusterctl.jobs.record import cluster_of, spares_of
from clusterctl.jobs.run_folder import NodeFiles, RunDir, metric_of
from clusterctl.logs.lines import LineCutter, LogChunk, shown
from clusterctl.logs.store import READ, LogKeeper, LogTimes, half_line
from clusterctl.runs.stall import Hang, Outage, Silence, is_number
from clusterctl.runs.state import FINAL
from clusterctl.runs.stop import stop_nodes

if TYPE_CHECKING:
    from clusterctl.transport.fanout import Connections

# Seconds without a living controller until a reader gives up: a new one takes one to start.
UNWATCHED = 3.0
# Events that a follower sees.
TOLD = ("note", "restart", "straggler")
# Seconds that a cut connection may stay away before its node counts as lost.
PATIENCE = 60.0
# The same where no node answers at all: rather this machine's own link is gone, and the run goes on.
ALONE = 600.0
SOONER = (
    # Seconds that a node which was never reached has less than one that falls silent: a start takes them.
    3.0
)
# Seconds without a word after which a node may be silent for the reason that another one is.
QUIET = 2 * BEAT + 1
# Bytes free on a disk that takes no more records of a run.
NO_ROOM = 64 << 10
# Seconds between two looks at who has been away for too long.
LOOK = 0.2


class ControllerGone(WorkFailed):
    """Nobody brings a run home any more; its ranks go on."""

    def __init__(self, run: RunDir) -> None:
        hint = f"clusterctl attach --take-over {run.run_id} puts a new one in charge"
        free = os.statvfs(run.root)
        full = free.f_bavail * free.f_frsize < NO_ROOM
        # What a controller can't write ends it.
        if full:
            hint = f"free some space, then: {hint}"
        why = f": no space is left for {run.root}" if full else ""
        super().__init__(f"the controller of {run.run_id} is gone{why}; its ranks go on", hint)


@dataclass(frozen=True)
class Update:
    """Something that was seen of a run: whole log lines, the trainer's metrics, a node's end, or a note."""

    chunk: LogChunk | None = None
    metric: dict[str, Any] | None = field(default=None, hash=False)
    node: str = ""
    ended: str = ""
    note: str = ""
    failure: dict[str, Any] | None = field(default=None, hash=False)
    """A node's first failure, told before the node has ended."""
    pace: dict[int, float] = field(default_factory=dict, hash=False)
    """By rank of one node: seconds that it takes for a step itself."""
    problem: BaseException | None = None
    """Why this node can't be watched from here; it says nothing of the run itself."""


class Watch:
    """Brings a run's files home while it goes on, and stops all nodes when one has failed."""

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
        """With `now`, what is there is brought home and nothing is waited for; without `lines`, none is told. A node
        that is never reached counts from `since`, by the steady clock."""
        self.run, self.connections, self.now = run, connections, now
        self.lines, self.patience = lines, patience
        self.record = run.read_record()
        self.cluster = cluster_of(run)
        # Chunks of 64 kB.
        self.updates: queue.Queue[Update] = queue.Queue(maxsize=128)
        self.ends: dict[str, str] = {}
        self.closed = threading.Event()
        self.stopping = False
        self.cutters: dict[Path, LineCutter] = {}
        self.times = LogTimes()
        # Nodes whose present connection has carried a request.
        self.reached: set[str] = set()
        begun = (time.monotonic() if since is None else since) + SILENCE - SOONER
        # Since, or from, when a node has no connection.
        self.gone = dict.fromkeys(self.cluster.names, begun)
        self.outage, self.alone = Outage(connections, spares_of(run)), False
        # Nodes that said that their supervisor is dead.
        self.orphaned: set[str] = set()
        self.stopper: threading.Thread | None = None
        self.silence = Silence(self.record)

    def __iter__(self) -> Iterator[Update]:
        """What is seen, as it is seen, until every node has ended."""
        for node in self.cluster.nodes:
            threading.Thread(
                target=self._follow, args=(node,), daemon=True, name=f"follow {node.name}"
            ).start()
        try:
            while len(self.ends) < len(self.cluster.nodes):
                yield from self._seen()
            if self.stopper:
                # A node whose supervisor died has its ranks ended by then.
                self.stopper.join()
            yield from self._rest()
        finally:
            self.closed.set()

    def _rest(self) -> Iterator[Update]:
        """What ranks still wrote on nodes whose supervisor was dead already, until they were ended too."""
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
        # What can't be had any more is in the node's folder.
        with contextlib.suppress(ClusterctlError, OSError):
            self._follow_once(node, now=True)

    def _seen(self) -> Iterator[Update]:
        """The next update, or the nodes that have been away for too long: a try to connect may take longer."""
        yield from self._overdue()
        hung = None if self.now or self.stopping or self.gone else self.silence.hang(self.ends)
        if hung:
            yield self._call_hung(hung)
        try:
            update = self.updates.get(timeout=LOOK)
        except queue.Empty:
            return
        if update.node in self.ends and not self.now and (update.ended or update.problem):
            # It came back after it was given up.
            return
        if update.problem:
            raise update.problem
        if update.pace:
            self.silence.steps_are_told()
        if update.failure:
            if not self.now:
                self.run.add_event("failed", node=update.node, rank=update.failure.get("rank"))
            self._stop_rest(update.node, stacks="hang" in update.failure)
        if update.ended:
            self._note_end(update)
        yield update

    def _overdue(self) -> Iterator[Update]:
        """The nodes that have been away for too long; where nobody answers at all, that is much longer."""
        now, patience = time.monotonic(), self.patience
        away = {
            name: since for name, since in list(self.gone.items()) if since <= now and name not in self.ends
        }
        if self.alone and self._someone_answers(away):
            # Our own link was cut: each has its time from now on.
            self._begin_again(away, now)
            return
        overdue = [name for name, since in away.items() if now - since > patience - LOOK]
        if not away or self._someone_answers(away):
            self.outage.over()
        elif self.outage.is_ours():
            patience = max(ALONE, self.patience)
            if overdue and not self.alone:
                yield Update(
                    note="no node answers: this machine's own link may be gone; the ranks go on meanwhile"
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
            # Meanwhile, by its own thread.
            if name in self.reached:
                self.gone.pop(name, None)

    def _someone_answers(self, away: Mapping[str, float]) -> bool:
        """Whether a word of any node that still runs has come lately: each says one every two seconds."""
        left = [node for node in self.cluster.nodes if node.name not in self.ends and node.name not in away]
        return any(self.connections.silent_for(node) < QUIET for node in left)

    def _lose(self, name: str) -> Update:
        update = Update(
            node=name, ended="lost", note=f"{name}: lost: it did not come back in {self.patience:g} s"
        )
        self._note_end(update)
        return update

    def _call_hung(self, hung: Hang) -> Update:
        """Make a failure of it, on the node whose rank was heard last; all ranks say first where they stand."""
        self._stop_rest("", stacks=True, hang=hung)
        return Update(
            node=hung.node, note=f"no rank has written anything for {hung.seconds:g} s: it counts as hung"
        )

    def _note_end(self, update: Update) -> None:
        self.ends[update.node] = update.ended
        if self.now:
            return
        self.run.add_event("node_ended", node=update.node, state=update.ended)
        if update.ended != "finished":
            self._stop_rest(update.node)

    def _stop_rest(self, failed: str, stacks: bool = False, hang: Hang | None = None) -> None:
        """End what still runs elsewhere; on a node without its supervisor too, where nobody else would."""
        name = self.ends.get(failed)
        there = [
            node
            for node in self.cluster.nodes
            if (node.name not in self.ends and node.name != failed)
            or (node.name == failed and name == "lost" and failed not in self.gone)
        ]
        if there and not self.stopping:
            self.stopping = True
            self.stopper = threading.Thread(target=self._stop, args=(there, stacks, hang), daemon=True)
            self.stopper.start()

    def _stop(self, nodes: Sequence[Node], stacks: bool, hang: Hang | None) -> None:
        grace = min(self.record["job"]["grace"], FAILED_GRACE)
        stop_nodes(self.connections, nodes, self.run, grace, stacks=stacks, hang=hang)

    def _follow(self, node: Node) -> None:
        """Follow one node in a thread of its own; what goes wrong here is raised where the watch is read."""
        try:
            self._follow_on(node)
        except OSError as error:
            what = f"{self.run.root}: what {node.name} sends can't be kept: {error.strerror or error}"
            hint = f"the run itself goes on; then: clusterctl attach {self.run.run_id}"
            self._put(Update(node=node.name, problem=ClusterctlError(what, hint)))
        except BaseException as bug:
            # Carried to the reader's thread and raised there.
            self._put(Update(node=node.name, problem=bug))

    def _follow_on(self, node: Node) -> None:
        """A cut connection is taken up again from the bytes that came home."""
        told = False
        while not self.closed.is_set():
            try:
                ended = self._follow_once(node, self.now)
                if ended == "lost":
                    self.orphaned.add(node.name)
                if ended:
                    self._put(Update(node=node.name, ended=ended))
                return
            except NodeError as error:
                # A look at it comes late.
                silent = max(0.0, self.connections.silent_for(node) - SILENCE)
                self.connections.drop(node)
                if node.name in self.reached or not told:
                    told, heard = True, time.monotonic() - silent
                    self.gone[node.name] = min(heard, self.gone.get(node.name, heard))
                    self.reached.discard(node.name)
                    self._put(Update(node=node.name, note=f"{error.message}; trying again"))
                self.closed.wait(1.0)
            except ClusterctlError as error:
                self._put(Update(node=node.name, note=error.message))
                self._put(Update(node=node.name, ended="lost"))
                return

    def _put(self, update: Update) -> None:
        while not self.closed.is_set():
            try:
                return self.updates.put(update, timeout=0.2)
            except queue.Full:
                continue

    def _follow_once(self, node: Node, now: bool) -> str:
        """Until the node's attempt has ended; gives how, or nothing when the watch was closed."""
        homes = self._files(node)
        # There from the start, so that a person can follow a silent rank too.
        for home, _ in homes.values():
            home.parent.mkdir(parents=True, exist_ok=True)
            home.touch()
        before = {path: self._before(about) for path, (_, about) in homes.items()}
        files = [
            {"path": path, "offset": LogKeeper.cursor(home) - before[path]}
            for path, (home, _) in homes.items()
        ]
        until: Any = {"run_dir": self.record["run_dirs"][node.name], "attempt": self.record["attempt"]}
        until = "now" if now else until
        asked = self.connections.of(node).open("follow", {"files": files, "until": until})
        self.reached.add(node.name)
        self.gone.pop(node.name, None)
        cutters = {path: self._cutter(home) for path, (home, _) in homes.items()}
        try:
            for frame in asked:
                path = frame.fields["path"]
                if not path:
                    self._put(_word(node.name, str(frame.fields.get("word")), frame.payload))
                    continue
                home, about = homes[path]
                self.silence.broken_by(node.name, about[1])
                offset = int(frame.fields["offset"]) + before[path]
                fresh = LogKeeper.keep(home, offset, frame.payload)
                self.times.note(home, offset + len(frame.payload), frame.fields.get("age"))
                if self.lines or about[2] == "metrics":
                    self._tell_lines(about, cutters[path].feed(fresh))
                if self.closed.is_set():
                    return ""
            state = str((asked.result or {}).get("state") or "lost")
            for path, cutter in cutters.items() if state != "lost" else ():
                self._tell_lines(homes[path][1], cutter.end())
            return state
        finally:
            if asked.result is None:
                asked.cancel()

    def _cutter(self, home: Path) -> LineCutter:
        """The cutter of a file's lines; it begins with the half line that came home before, if any."""
        if home not in self.cutters:
            self.cutters[home] = LineCutter(half_line(home))
        return self.cutters[home]

    def _files(self, node: Node) -> dict[str, tuple[Path, tuple[str, int, str]]]:
        """Each file on the node, where it goes here, and whose it is; rank -1 is the trainer's metrics."""
        remote = NodeFiles(self.record["run_dirs"][node.name], self.record["attempt"])
        found = {}
        for rank in self.record["ranks"][node.name]:
            for stream in ("out", "err"):
                home = self.run.log(node.name, rank, stream, remote.attempt)
                found[remote.log(rank, stream)] = (home, (node.name, rank, stream))
            if rank == 0:
                found[remote.metrics] = (self.run.metrics, (node.name, -1, "metrics"))
        return found

    def _before(self, about: tuple[str, int, str]) -> int:
        """How many bytes of a file here came from another node: rank 0 may move, and its metrics with it."""
        return int(self.record.get("metrics_base", 0)) if about[2] == "metrics" else 0

    def _tell_lines(self, about: tuple[str, int, str], block: bytes) -> None:
        for update in _updates(*about, block):
            self._put(update)


class KeptWatch:
    """The same view of a run that another process brings home: read from the folder here, attempt after attempt."""

    def __init__(self, run: RunDir, first: int | None = None) -> None:
        """From attempt `first` on; from the present one where nothing is said."""
        self.run, self.first, self.attempt, self.read = run, first, 0, 0
        self.about = {run.metrics: ("", -1, "metrics"), run.events: ("", -1, "events")}
        self.offsets = {run.events: run.events.stat().st_size if run.events.exists() else 0}
        """How much of each file has been read; a reader who has seen some of it sets it before."""
        self.cutters: dict[Path, LineCutter] = {}

    def __iter__(self) -> Iterator[Update]:
        """What is seen until the run's end is written; a ControllerGone where nobody is left to write it."""
        unwatched = 0.0
        while True:
            self._find()
            # Asked before the last look.
            final = self.run.read_state().get("phase") in FINAL
            before = self.read
            yield from self._grown()
            # Bytes, not lines: a line may be longer than many looks.
            grew = self.read > before
            if final and not grew:
                # Also a half line that was read before, and never grew.
                for (
                    path,
                    about,
                ) in self.about.items():
                    yield from _updates(*about, self._cutter(path).end())
                return
            if not grew:
                # A look at a thousand files costs 10 ms.
                pause = max(0.1, 2e-4 * len(self.about))
                time.sleep(pause)
                unwatched = 0.0 if self.run.is_watched() else unwatched + pause
                if unwatched > UNWATCHED and self.run.read_state().get("phase") not in FINAL:
                    raise ControllerGone(self.run)

    def _find(self) -> None:
        """The files of an attempt that began."""
        record = self.run.read_record()
        if record["attempt"] == self.attempt:
            return
        since = self.attempt + 1 if self.attempt else self.first or record["attempt"]
        # Over before we looked, on nodes that may be others by now.
        for passed in range(since, record["attempt"]):
            for path in sorted(self.run.logs(passed).glob("*/rank-*.*")):
                rank, _, stream = path.name.removeprefix("rank-").partition(".")
                if rank.isdecimal() and stream in ("out", "err"):
                    self.about.setdefault(path, (path.parent.name, int(rank), stream))
        self.attempt = record["attempt"]
        for node, ranks in record["ranks"].items():
            for rank in ranks:
                for stream in ("out", "err"):
                    self.about[self.run.log(node, rank, stream, self.attempt)] = (node, rank, stream)

    def _cutter(self, path: Path) -> LineCutter:
        """A file's lines go on where it was read up to before, if it was."""
        if path not in self.cutters:
            self.cutters[path] = LineCutter(half_line(path, self.offsets.get(path, 0)))
        return self.cutters[path]

    def _grown(self) -> Iterator[Update]:
        for path, (node, rank, stream) in self.about.items():
            data = _read_from(path, self.offsets.get(path, 0))
            if data:
                cutter = self._cutter(path)
                self.offsets[path] = self.offsets.get(path, 0) + len(data)
                self.read += len(data)
                yield from _updates(node, rank, stream, cutter.feed(data))


def _read_from(path: Path, offset: int) -> bytes:
    try:
        if path.stat().st_size <= offset:
            return b""
    except FileNotFoundError:
        return b""
    with path.open("rb") as file:
        file.seek(offset)
        return file.read(READ)


def _word(node: str, word: str, payload: bytes) -> Update:
    """What a node tells beside its files: its ranks' pace, or its first failure; what makes no sense is one too."""
    try:
        value = json.loads(payload)
    except ValueError:
        value = None
    value = value if isinstance(value, dict) else {}
    if word == "pace":
        pairs = ((str(rank), seconds) for rank, seconds in value.items())
        known = {
            int(rank): float(seconds) for rank, seconds in pairs if rank.isdecimal() and is_number(seconds)
        }
        return Update(node=node, pace=known)
    return Update(node=node, failure={**value, "node": node})


def _updates(node: str, rank: int, stream: str, block: bytes) -> Iterator[Update]:
    """What whole lines say; rank -1 is the trainer's metrics, or the controller's own words."""
    if rank >= 0 and block:
        yield Update(node=node, chunk=LogChunk(node, rank, stream, block))
    for text in shown(block) if rank < 0 else ():
        try:
            said = json.loads(text)
            if stream == "metrics":
                if (metric := metric_of(said)) is not None:
                    yield Update(node=node, metric=metric)
            elif said["event"] in TOLD:
                yield Update(node=said.get("node", ""), note=said["text"])
        except ValueError:
            yield Update(node=node, note=f"a line of {contract.METRICS_FILE} is no JSON: {text[:80]!r}")


@contextlib.contextmanager
def open_watch(run: RunDir, connections: Connections, now: bool = False) -> Iterator[Watch | KeptWatch]:
    """The watch of a run: ours where nobody else brings it home, else the view of what the other one brings."""
    with run.hold() as ours:
        yield Watch(run, connections, now) if ours else KeptWatch(run)
