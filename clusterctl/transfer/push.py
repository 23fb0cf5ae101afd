"""Push trees to nodes: send a manifest, then only the missing data; verify it, and replace the folder as a whole."""

from __future__ import annotations

import contextlib
import json
import os
import re
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from dataclasses import replace as dataclass_replace
from pathlib import Path
from typing import Any

from clusterctl.agent.files import tree
from clusterctl.agent.files.tree import Entry, Range
from clusterctl.agent.frames import Frame
from clusterctl.agent.request import Refused
from clusterctl.errors import LinkLost, UsageError, WorkFailed
from clusterctl.transfer.manifest import Manifest as Manifest
from clusterctl.transfer.manifest import file_manifest as make_file_manifest
from clusterctl.transfer.manifest import make_manifest as make_manifest
from clusterctl.transfer.relay import Relay
from clusterctl.transport.connection import Connection
from clusterctl.transport.link import PendingRequest, RequestFailed

# Up to this size, data that all nodes need is read only once.
KEPT_BYTES = 64 << 20
CONTINUES = "the same command again: it continues with what has arrived (mtr shows a path that loses packets)"
Progress = Callable[[int, int], None]
"""Called with the bytes sent so far and the bytes to send."""


@dataclass(frozen=True)
class PushResult:
    """The result of a push to one node."""

    path: str
    """The path of the tree on the node, with `~` resolved."""
    bytes_sent: int
    """Bytes that the launcher itself sent."""
    files_sent: int
    seconds: float
    unchanged: bool
    bytes_relayed: int = 0
    """Bytes that came from other nodes."""
    notes: tuple[str, ...] = ()
    """Notes about problems that did not stop the push."""


@dataclass(frozen=True)
class Target:
    """Where a tree goes on a node, and how: the parameters of a request to its agent."""

    dest: str
    replace: bool = False
    recheck: bool = False
    """Compare files by content."""
    note: bool = False
    """Record the state of an unchanged tree."""
    look: bool = False
    """Only report what would be sent."""
    content_named: bool = False
    """`dest` is named by its hash and never changes."""
    relay: bool = False
    transient: bool = False
    """Store no record of the push, because the files will be moved."""


@dataclass(frozen=True)
class Reply:
    """The agent's last message about a tree."""

    path: str
    unchanged: bool
    relayed: int = 0
    files: int = 0
    bytes: int = 0
    notes: tuple[str, ...] = ()

    @classmethod
    def of(cls, value: Mapping[str, Any]) -> Reply:
        return cls(
            str(value.get("path")),
            bool(value.get("unchanged")),
            int(value.get("relayed", 0)),
            int(value.get("files", 0)),
            int(value.get("bytes", 0)),
            tuple(str(note) for note in value.get("notes", ())),
        )


class Source:
    """A local folder (or with `single` one file) and its manifest, read for many nodes."""

    def __init__(self, root: Path, manifest: Manifest, single: bool = False) -> None:
        self.root = root
        self.manifest = manifest
        self.single = single
        self._kept: tuple[list[Range], list[bytes], tuple[str, ...]] | None = None
        self._change = threading.Lock()

    def send(self, ranges: list[Range], send: Callable[[bytes], None]) -> tuple[str, ...]:
        """Send the bytes of some pieces in order; data that several nodes need is read from the disk once.

        Return notes about files that have grown since the manifest was made.
        """
        pieces = self.manifest.pieces
        if pieces.size(ranges) > KEPT_BYTES:
            return tree.send_pieces(self._path_of, pieces, ranges, send)
        with self._change:
            if self._kept is None or self._kept[0] != ranges:
                chunks: list[bytes] = []
                grown = tree.send_pieces(self._path_of, pieces, ranges, chunks.append)
                self._kept = ranges, chunks, grown
            _, chunks, grown = self._kept
        for chunk in chunks:
            send(chunk)
        return grown

    def _path_of(self, entry: Entry) -> str:
        return str(self.root) if self.single else os.path.join(self.root, entry.path)


# ---- one node


def push_tree(
    connection: Connection,
    source: Source,
    dest: str,
    *,
    replace: bool = False,
    recheck: bool = False,
    note: bool = False,
    progress: Progress | None = None,
    relay: Relay | None = None,
) -> PushResult:
    """Make `dest` on the node equal to the local tree; data that the node already has is not sent.

    In a folder of an earlier push, files that the node created stay; a folder that no push made is replaced
    only with `replace`. With a `relay` the node may receive data from other nodes. With `note` the node
    records the state of an unchanged tree for the next UnchangedCheck.
    """
    target = Target(dest, replace=replace, recheck=recheck, note=note)
    return _Sending(connection, source, target, progress, relay).result()


def push_store(
    connection: Connection, source: Source, kind: str, *, relay: Relay | None = None
) -> PushResult:
    """Store a tree on the node under its hash, where it never changes; send nothing if it is there already."""
    workdir = connection.hello().workdir
    dest = f"{workdir}/store/{kind}/{source.manifest.id}"
    return _Sending(connection, source, Target(dest, content_named=True), None, relay).result()


def push_apart(connection: Connection, source: Source, dest: str, relay: Relay) -> PushResult:
    """Put a tree into a new folder from which its files will be moved: the node keeps no record of it."""
    return _Sending(connection, source, Target(dest, transient=True), None, relay).result()


@dataclass(frozen=True)
class PushEstimate:
    """What a push would send to one node."""

    path: str
    unchanged: bool
    files: int
    bytes: int


def estimate(connection: Connection, source: Source, dest: str, *, replace: bool = False) -> PushEstimate:
    """Return what a push would send to a node; change nothing there."""
    request = _open(connection, source, Target(dest, replace=replace, look=True))
    for frame in request:
        if frame.fields.get("manifest"):
            _send_manifest(request, source.manifest)
    reply = Reply.of(request.result or {})
    return PushEstimate(reply.path, reply.unchanged, reply.files, reply.bytes)


def _open(connection: Connection, source: Source, target: Target) -> PendingRequest:
    manifest = source.manifest
    named = {"tree": manifest.id, "manifest_size": len(manifest.text), "table_size": len(manifest.table)}
    return connection.open("receive", {**asdict(target), "single": source.single, **named})


def _send_manifest(request: PendingRequest, manifest: Manifest) -> None:
    request.send(manifest.text)
    request.send(manifest.table)


class _Sending:
    """One push to one node: answers its requests until the tree is in place."""

    def __init__(
        self,
        connection: Connection,
        source: Source,
        target: Target,
        progress: Progress | None,
        relay: Relay | None,
    ) -> None:
        self._node = connection.node
        self._dest = target.dest
        self._source = source
        self._progress = progress
        self._relay = relay
        self._began = time.monotonic()
        self._sent = self._relayed = self._files = self._total = 0
        self._grown: tuple[str, ...] = ()
        self._requests = _open(connection, source, dataclass_replace(target, relay=relay is not None))

    def result(self) -> PushResult:
        reply: Reply | None = None
        try:
            for frame in self._requests:
                reply = self._answer(frame)
                if reply:
                    break
        except BaseException as problem:
            with contextlib.suppress(LinkLost):
                self._requests.cancel()
            if self._relay:
                self._relay.leave(self._node)
            raise _with_path(launcher_error(self._node, problem), self._dest) from None
        reply = reply or Reply.of(self._requests.result or {})
        seconds = time.monotonic() - self._began
        notes = (*reply.notes, *self._grown)
        return PushResult(reply.path, self._sent, self._files, seconds, reply.unchanged, reply.relayed, notes)

    def _answer(self, frame: Frame) -> Reply | None:
        """Fulfil the node's requests; return its last message once the tree is in place, else None."""
        fields = frame.fields
        if fields.get("manifest"):
            _send_manifest(self._requests, self._source.manifest)
        elif fields.get("want"):
            self._begin(_ranges(self._node, frame, self._source.manifest))
        elif fields.get("feed"):
            if self._relay:
                self._relay.record(self._relayed, int(fields.get("failed", 0)))
            self._feed(_ranges(self._node, frame, self._source.manifest))
        elif "listening" in fields and self._relay:
            self._send_json(self._relay.join(self._node, int(fields["listening"])))
        elif "got" in fields:
            self._relayed = int(fields["got"])
            if self._relay:
                self._relay.record(self._relayed, 0)
            self._report()
        elif fields.get("built") and self._relay:
            self._relay.linger(self._requests)
            return Reply.of(json.loads(frame.payload))
        return None

    def _begin(self, wanted: list[Range]) -> None:
        pieces = self._source.manifest.pieces
        self._total = pieces.size(wanted)
        self._files = pieces.file_count(wanted)
        if self._relay:
            self._send_json(
                self._relay.terms(self._node, self._total, sum(end - begin for begin, end in wanted))
            )
        else:
            self._feed(wanted)

    def _feed(self, wanted: list[Range]) -> None:
        try:
            self._grown += self._source.send(wanted, self._send)
        except OSError as problem:
            raise WorkFailed(f"{problem.filename}: {problem.strerror}", "nothing was changed there") from None
        self._report()

    def _send(self, data: bytes) -> None:
        self._requests.send(data)
        self._sent += len(data)
        self._report()

    def _send_json(self, value: Any) -> None:
        text = json.dumps(value).encode()
        self._requests.send(b"%d\n" % len(text) + text)

    def _report(self) -> None:
        if self._progress:
            self._progress(self._sent + self._relayed, self._total)


def _with_path(problem: BaseException, dest: str) -> BaseException:
    """Return an error of a node's disk with the path that was to be written, and a remedy."""
    if not (isinstance(problem, RequestFailed) and problem.kind == "os"):
        return problem
    reason = re.sub(r"^receive: (\[Errno \d+\] )?", "", problem.reason)
    remedy = "name a path on the nodes that you can write to, on a disk with space"
    return RequestFailed(problem.node, "os", f"{dest} cannot be written: {reason}", remedy)


def _ranges(node: str, frame: Frame, manifest: Manifest) -> list[Range]:
    """Return the pieces that a node requests; an invalid list is the node's error."""
    try:
        return manifest.pieces.checked(json.loads(frame.payload))
    except (ValueError, RecursionError, tree.BadTree):
        raise RequestFailed(node, "bad-tree", "it requests pieces that are not in the tree") from None


def file_source(path: Path, dest: str, recheck: bool = False) -> tuple[Source, str]:
    """Return one file to push, and its path on the node; a `dest` that ends with `/` is the folder for it."""
    target = dest + path.name if dest.endswith("/") else dest
    name = target.rpartition("/")[2]
    if name in ("", "~", ".", ".."):
        raise UsageError(f"{dest} is a folder", f"name the file, or the folder with a / at its end: {dest}/")
    return Source(path, make_file_manifest(path, name, recheck), single=True), target


def launcher_error(node: str, problem: BaseException) -> BaseException:
    """Return an error of the shared tree code as one of the launcher's errors; a lost connection has a remedy."""
    if isinstance(problem, LinkLost):
        return LinkLost(node, problem.reason, CONTINUES)
    if isinstance(problem, tree.BadTree):
        return RequestFailed(node, "bad-tree", str(problem), "nothing was changed")
    if isinstance(problem, Refused):
        return RequestFailed(node, problem.kind, str(problem), "nothing was changed")
    if isinstance(problem, OSError):
        return WorkFailed(f"{node}: {problem}", "nothing was changed there")
    if isinstance(problem, RequestFailed) and problem.kind == "exists" and not problem.hint:
        return RequestFailed(
            node, "exists", problem.reason, "name another path, or --replace it with all that is in it"
        )
    return problem
