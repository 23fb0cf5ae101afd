"""Pull trees from nodes: only missing data is sent, and each piece is verified.

Nothing is written outside the destination.
"""

from __future__ import annotations

import contextlib
import json
import os
import posixpath
import shlex
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from clusterctl.agent.files import tree
from clusterctl.agent.files.tree import Range
from clusterctl.agent.files.tree_build import Base, Builder
from clusterctl.agent.frames import ByteReader, Frame
from clusterctl.errors import LinkLost
from clusterctl.transfer.push import Progress, PushResult, launcher_error
from clusterctl.transport.connection import Connection
from clusterctl.transport.link import PendingRequest, RequestFailed


def pull_place(dest: Path, node: str, node_path: str) -> Path:
    """Return where a node's tree is written: DST/<node>/<last name>, or DST/<node> for a whole home or
    root."""
    name = node_path.rstrip("/").rsplit("/", 1)[-1]
    return dest / node if name in ("", "~", ".", "..") else dest / node / name


def pull_tree(
    connection: Connection,
    node_path: str,
    dest: Path,
    *,
    progress: Progress | None = None,
    others: tuple[Path, ...] = (),
    files: Sequence[str] | None = None,
    without: str = "",
) -> PushResult:
    """Make the local folder `dest` equal to a folder on the node; a file arrives inside a folder.

    Nothing is written outside `dest`, even if the node sends bad paths, and the data is compared with the
    hashes of the node's manifest. Data that is already in one of the local folders `others` is not sent. An
    interrupted pull is resumed by the next one. With `files`, only these files of the folder are pulled, with `without`
    only those that differ from this other folder on the node.
    """
    began = time.monotonic()
    dest = Path(os.path.abspath(dest))
    which = {} if files is None else {"files": list(files)}
    request = connection.open("tree", {"path": node_path, "without": without, **which})
    replies = iter(request)
    try:
        builder = _builder(dest, replies)
        builder.find_missing([Base(str(dest), {})])
        if builder.is_same():
            request.send(b"2\n[]")
            return PushResult(
                str(dest), 0, 0, time.monotonic() - began, True, notes=_left_out(request, replies)
            )
        builder.stage()
        try:
            builder.adopt()
            wanted = builder.find_missing([Base(str(other), {}) for other in others])
            builder.room(wanted)
            builder.copy_over()
            answer = json.dumps(wanted).encode()
            request.send(b"%d\n" % len(answer) + answer)
            total = builder.pieces.size(wanted)
            _take(builder, wanted, ByteReader(_Counted(replies, total, progress).next))
            builder.finish()
            # Other files in the local folder belong to the user.
            builder.keep_others(())
            builder.switch()
        finally:
            builder.close()
    except BaseException as problem:
        with contextlib.suppress(LinkLost):
            request.cancel()
        raise _with_remedy(launcher_error(connection.node, problem), node_path) from None
    notes = _left_out(request, replies)
    count = builder.pieces.file_count(wanted)
    return PushResult(str(dest), total, count, time.monotonic() - began, False, notes=notes)


def _left_out(request: PendingRequest, replies: Iterator[Frame]) -> tuple[str, ...]:
    """Wait for the end of a reply; return what the node left out, as it is neither file, folder nor link."""
    for _ in replies:
        pass
    found = (request.result or {}).get("warnings")
    return tuple(str(warning) for warning in found) if isinstance(found, list) else ()


def _with_remedy(problem: BaseException, node_path: str) -> BaseException:
    """Return the error of a path that a node lacks, with the command that lists the folder above it."""
    if not (isinstance(problem, RequestFailed) and problem.kind in ("not-found", "os") and not problem.hint):
        return problem
    above = posixpath.dirname(node_path.rstrip("/")) or ("/" if node_path.startswith("/") else "~")
    shell, listing = "", f"ls -la {shlex.quote(above)}"
    if above.startswith("~"):
        shell, listing = "--shell ", shlex.quote(f"ls -la {above}")
    remedy = f"list what is there: clusterctl exec -b {shell}all -- {listing}"
    return RequestFailed(problem.node, problem.kind, problem.reason.removeprefix("tree: "), remedy)


def _take(builder: Builder, wanted: list[Range], source: ByteReader) -> None:
    for begin, end in wanted:
        for number in range(begin, end):
            try:
                builder.take_from(number, source.read_into)
            except EOFError:
                name = builder.files[builder.pieces[number].file].path
                raise tree.BadTree(f"the transfer ended inside {name}") from None


def _builder(dest: Path, replies: Iterator[Frame]) -> Builder:
    """Return the builder for the manifest that a node sends, after checking it."""
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
    """Replace equal files (content and mode) in the trees of several nodes by hard links to one file.

    Return how many files were replaced, and their size in bytes.
    """
    alike: dict[tuple[int, int, int], list[Path]] = {}
    for folder in places:
        for _, entry in tree.walk(str(folder), "", lambda path, is_dir: False):
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
