"""Bring a run's files home while it goes on, and show what is seen; stop the rest when one node has failed."""

from __future__ import annotations

import contextlib
import json
import queue
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from clusterctl import contract
from clusterctl.errors import ClusterctlError, NodeError
from clusterctl.inventory import Node
from clusterctl.log_lines import LineCutter, LogChunk, shown
from clusterctl.log_times import LogTimes
from clusterctl.logs import READ, LogKeeper, half_line
from clusterctl.record import cluster_of
from clusterctl.run import FINAL, stop_nodes
from clusterctl.rundir import NodeFiles, RunDir

if TYPE_CHECKING:
    from clusterctl.transport import Connections

PATIENCE = 60.0  # seconds that a cut connection may stay away before its node counts as lost


@dataclass(frozen=True)
class Update:
    """Something that was seen of a run: whole log lines, the trainer's metrics, a node's end, or a note."""

    chunk: LogChunk | None = None
    metric: dict[str, Any] | None = field(default=None, hash=False)
    node: str = ""
    ended: str = ""
    note: str = ""
    problem: BaseException | None = None
    """Why this node can't be watched from here; it says nothing of the run itself."""


class Watch:
    """Brings a run's files home while it goes on, and stops all nodes when one has failed."""

    def __init__(self, run: RunDir, connections: Connections, now: bool = False) -> None:
        """With `now`, what is there is brought home and nothing is waited for."""
        self.run, self.connections, self.now = run, connections, now
        self.record = run.read_record()
        self.cluster = cluster_of(run)
        self.updates: queue.Queue[Update] = queue.Queue(maxsize=128)  # chunks of 64 kB
        self.ends: dict[str, str] = {}
        self.closed = threading.Event()
        self.stopping = False
        self.cutters: dict[Path, LineCutter] = {}
        self.times = LogTimes()
        self.reached: set[str] = set()  # nodes whose present connection has carried a request

    def __iter__(self) -> Iterator[Update]:
        """What is seen, as it is seen, until every node has ended."""
        for node in self.cluster.nodes:
            threading.Thread(
                target=self._follow, args=(node,), daemon=True, name=f"follow {node.name}"
            ).start()
        try:
            while len(self.ends) < len(self.cluster.nodes):
                update = self.updates.get()
                if update.problem:
                    raise update.problem
                if update.ended:
                    self._note_end(update)
                yield update
        finally:
            self.closed.set()

    def _note_end(self, update: Update) -> None:
        self.ends[update.node] = update.ended
        if self.now:
            return
        self.run.add_event("node_ended", node=update.node, state=update.ended)
        others = [node for node in self.cluster.nodes if node.name not in self.ends]
        if update.ended != "finished" and others and not self.stopping:
            self.stopping = True
            threading.Thread(target=self._stop_others, args=(others,), daemon=True).start()

    def _stop_others(self, others: Sequence[Node]) -> None:
        stop_nodes(self.connections, others, self.run, self.record["job"]["grace"])

    def _follow(self, node: Node) -> None:
        """Follow one node in a thread of its own; what goes wrong here is raised where the watch is read."""
        try:
            self._follow_on(node)
        except OSError as error:
            what = f"{self.run.root}: what {node.name} sends can't be kept: {error.strerror or error}"
            hint = f"the run itself goes on; then: clusterctl attach {self.run.run_id}"
            self._put(Update(node=node.name, problem=ClusterctlError(what, hint)))
        except BaseException as bug:  # carried to the reader's thread and raised there
            self._put(Update(node=node.name, problem=bug))

    def _follow_on(self, node: Node) -> None:
        """A cut connection is taken up again from the bytes that came home."""
        gone_since = time.monotonic()
        while not self.closed.is_set():
            self.reached.discard(node.name)
            try:
                ended = self._follow_once(node)
                if ended:
                    self._put(Update(node=node.name, ended=ended))
                return
            except NodeError as error:
                self.connections.drop(node)
                if node.name in self.reached:
                    gone_since = time.monotonic()
                if time.monotonic() - gone_since > PATIENCE:
                    self._put(Update(node=node.name, note=f"{node.name}: {error.reason}"))
                    self._put(Update(node=node.name, ended="lost"))
                    return
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

    def _follow_once(self, node: Node) -> str:
        """Until the node's attempt has ended; gives how, or nothing when the watch was closed."""
        homes = self._files(node)
        for home, _ in homes.values():  # there from the start, so that a person can follow a silent rank too
            home.parent.mkdir(parents=True, exist_ok=True)
            home.touch()
        files = [{"path": path, "offset": LogKeeper.cursor(home)} for path, (home, _) in homes.items()]
        until: Any = {"run_dir": self.record["run_dirs"][node.name], "attempt": self.record["attempt"]}
        until = "now" if self.now else until
        asked = self.connections.of(node).open("follow", {"files": files, "until": until})
        self.reached.add(node.name)
        cutters = {path: self._cutter(home) for path, (home, _) in homes.items()}
        try:
            for frame in asked:
                path = frame.fields["path"]
                home, about = homes[path]
                offset = int(frame.fields["offset"])
                fresh = LogKeeper.keep(home, offset, frame.payload)
                self.times.note(home, offset + len(frame.payload), frame.fields.get("age"))
                self._tell_lines(about, cutters[path].feed(fresh))
                if self.closed.is_set():
                    return ""
            for path, cutter in cutters.items():
                self._tell_lines(homes[path][1], cutter.end())
            return str((asked.result or {}).get("state") or "lost")
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

    def _tell_lines(self, about: tuple[str, int, str], block: bytes) -> None:
        for update in _updates(*about, block):
            self._put(update)


class KeptWatch:
    """The same view of a run that another process brings home: read from the folder here."""

    def __init__(self, run: RunDir) -> None:
        self.run, self.record = run, run.read_record()
        self.offsets: dict[Path, int] = {}
        """How much of each file has been read; a reader who has seen some of it sets it before."""

    def __iter__(self) -> Iterator[Update]:
        about = {self.run.metrics: ("", -1, "metrics")}
        for node, ranks in self.record["ranks"].items():
            for rank in ranks:
                for stream in ("out", "err"):
                    about[self.run.log(node, rank, stream, self.record["attempt"])] = (node, rank, stream)
        offsets = {path: self.offsets.get(path, 0) for path in about}
        cutters = {path: LineCutter(half_line(path, offsets[path])) for path in about}
        while True:
            final = self.run.read_state().get("phase") in FINAL  # asked before the last look
            grew = False
            for path, (node, rank, stream) in about.items():
                data = _read_from(path, offsets[path])
                offsets[path] += len(data)
                grew = grew or bool(data)
                yield from _updates(node, rank, stream, cutters[path].feed(data))
            if final and not grew:
                for path, (node, rank, stream) in about.items():
                    yield from _updates(node, rank, stream, cutters[path].end())
                return
            if not grew:
                time.sleep(0.1)


def _read_from(path: Path, offset: int) -> bytes:
    try:
        if path.stat().st_size <= offset:
            return b""
    except FileNotFoundError:
        return b""
    with path.open("rb") as file:
        file.seek(offset)
        return file.read(READ)


def _updates(node: str, rank: int, stream: str, block: bytes) -> Iterator[Update]:
    """What whole lines say; rank -1 is the trainer's metrics."""
    if rank >= 0 and block:
        yield Update(node=node, chunk=LogChunk(node, rank, stream, block))
    for text in shown(block) if rank < 0 else ():
        try:
            yield Update(node=node, metric=json.loads(text))
        except ValueError:
            yield Update(node=node, note=f"a line of {contract.METRICS_FILE} is no JSON: {text[:80]!r}")


@contextlib.contextmanager
def open_watch(run: RunDir, connections: Connections, now: bool = False) -> Iterator[Watch | KeptWatch]:
    """The watch of a run: ours where nobody else brings it home, else the view of what the other one brings."""
    with run.hold() as ours:
        yield Watch(run, connections, now) if ours else KeptWatch(run)
