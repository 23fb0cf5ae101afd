"""Pull trees from nodes: data that is here already is not sent, each piece is verified, nothing is written outside."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from clusterctl.agent import tree
from clusterctl.agent.frames import ByteReader, Frame
from clusterctl.agent.tree import Range
from clusterctl.agent.tree_build import Base, Builder
from clusterctl.transfer.push import Progress, PushResult, worded
from clusterctl.transport.fanout import Connection


def pull_place(dest: Path, node: str, node_path: str) -> Path:
    """Return where a node's tree goes: DST/<node>/<its last name>; of a whole home or root, DST/<node> itself."""
    name = node_path.rstrip("/").rsplit("/", 1)[-1]
    return dest / node if name in ("", "~", ".", "..") else dest / node / name


def pull_tree(
    connection: Connection,
    node_path: str,
    dest: Path,
    *,
    progress: Progress | None = None,
    others: tuple[Path, ...] = (),
) -> PushResult:
    """Make `dest` here the same tree as a folder on the node (a file comes as a folder that holds it).

    Nothing is written outside `dest` whatever the node sends, and what arrives is compared with the hashes
    that it named. `others` are folders here that may hold some of it; after a cut the next pull goes on.
    """
    began = time.monotonic()
    dest = Path(os.path.abspath(dest))
    request = connection.open("tree", {"path": node_path})
    replies = iter(request)
    try:
        builder = _builder(dest, replies)
        builder.look([Base(str(dest), {})])
        if builder.is_same():
            request.cancel()
            return PushResult(str(dest), 0, 0, time.monotonic() - began, True)
        builder.stage()
        try:
            builder.adopt()
            wanted = builder.look([Base(str(other), {}) for other in others])
            builder.room(wanted)
            builder.copy_over()
            answer = json.dumps(wanted).encode()
            request.send(b"%d\n" % len(answer) + answer)
            total = builder.pieces.size(wanted)
            _take(builder, wanted, ByteReader(_Counted(replies, total, progress).next))
            builder.finish()
            # What else is in the folder here is the user's.
            builder.keep_others(())
            builder.switch()
        finally:
            builder.close()
    except BaseException as problem:
        request.cancel()
        raise worded(connection.node, problem) from None
    for _ in replies:
        pass
    files = builder.pieces.file_count(wanted)
    return PushResult(str(dest), total, files, time.monotonic() - began, False)


def _take(builder: Builder, wanted: list[Range], source: ByteReader) -> None:
    for begin, end in wanted:
        for number in range(begin, end):
            try:
                builder.take_from(number, source.read_into)
            except EOFError:
                name = builder.files[builder.pieces[number].file].path
                raise tree.BadTree(f"the transfer ended inside {name}") from None


def _builder(dest: Path, replies: Iterator[Frame]) -> Builder:
    """Return the builder for the manifest that a node sends, checked."""
    text = bytearray()
    size = 0
    for frame in replies:
        if frame.fields.get("ready"):
            break
        size = frame.fields.get("manifest", 0)
        text += frame.payload
        if len(text) > tree.MAX_MANIFEST:
            raise tree.BadTree("its manifest does not end")
    if not isinstance(size, int):
        raise tree.BadTree("its manifest has no size")
    return Builder(str(dest), tree.parse(bytes(text[:size])), bytes(text[size:]))


class _Counted:
    """Counts the chunks of a reply."""

    def __init__(self, replies: Iterator[Frame], total: int, progress: Progress | None) -> None:
        self._replies = replies
        self._total = total
        self._progress = progress
        self._seen = 0

    def next(self) -> bytes:
        frame = next(self._replies, None)
        if frame is None:
            return b""
        self._seen += len(frame.payload)
        if self._progress:
            self._progress(self._seen, self._total)
        return bytes(frame.payload)


def fold(places: Sequence[Path]) -> tuple[int, int]:
    """Make files that are the same in several nodes' trees (content and mode) one file with several names.

    Gives how many were folded away, and their bytes.
    """
    alike: dict[tuple[int, int, int], list[Path]] = {}
    for place in places:
        for _, entry in tree.walk(str(place), "", lambda path, is_dir: False):
            if entry.is_file(follow_symlinks=False):
                status = entry.stat(follow_symlinks=False)
                alike.setdefault((status.st_dev, status.st_size, status.st_mode), []).append(Path(entry.path))
    files = size = 0
    for paths in alike.values():
        firsts: dict[str, Path] = {}
        for path in paths if len(paths) > 1 else ():
            first = firsts.setdefault(tree.content_of(str(path))[1], path)
            if first is path or first.samefile(path):
                continue
            aside = path.with_name(f".{path.name[:100]}.{os.getpid()}.aside")
            os.link(first, aside)
            os.replace(aside, path)
            files, size = files + 1, size + first.stat().st_size
    return files, size
