"""Trees to nodes and back: a manifest first, then only what is missing, verified, switched in whole."""

from __future__ import annotations

import json
import os
import re
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from clusterctl.agent import tree
from clusterctl.agent.frames import CHUNK, ByteReader, Frame
from clusterctl.agent.request import Refused
from clusterctl.agent.tree import Entry
from clusterctl.errors import Fault, InputFaults, UsageError, WorkFailed
from clusterctl.link import Asked, RequestFailed
from clusterctl.transport import Connection

VCS_FOLDERS = (".git", ".hg", ".svn", ".jj", "CVS")
ALWAYS_OUT = (
    "__pycache__",
    ".venv",
    ".mypy_cache",
    ".ruff_cache",
    ".pytest_cache",
    ".hypothesis",
    ".DS_Store",
)
IGNORE_FILES = (".gitignore", ".clusterctlignore")
MANY_FILES, MANY_BYTES = 10_000, 1_000_000_000
Progress = Callable[[int, int], None]
"""Called with the bytes sent so far and the bytes to send."""


@dataclass(frozen=True)
class Manifest:
    """A tree as it was when it was read."""

    entries: tuple[Entry, ...]
    warnings: tuple[str, ...] = ()

    @property
    def text(self) -> bytes:
        return tree.to_bytes(self.entries)

    @property
    def id(self) -> str:
        """The tree's name: a hash over every path, mode and content in it."""
        return tree.tree_id(self.text)

    @property
    def files(self) -> list[Entry]:
        return [one for one in self.entries if one.kind == "f"]

    @property
    def size(self) -> int:
        return sum(one.size for one in self.files)


@dataclass(frozen=True)
class PushResult:
    """What a push did to one node."""

    path: str
    """Where the tree lies on the node, `~` resolved."""
    bytes_sent: int
    files_sent: int
    seconds: float
    unchanged: bool


# ---- reading a tree here


def make_manifest(
    root: Path, include_vcs: bool = False, only: Sequence[str] = (), everything: bool = False
) -> Manifest:
    """Read a folder, without what ignore files, version control and caches leave out; only caches with
    `everything`.

    `only` names the entries at the top that are meant, where not all are.
    """
    if not root.is_dir():
        raise UsageError(f"{root} is no folder", "name the folder to send")
    rules = _Ignore(root, include_vcs)

    def skips(path: str, is_dir: bool) -> bool:
        if only and path.split("/")[0] not in only:
            return True
        return path.rsplit("/", 1)[-1] in ALWAYS_OUT if everything else rules.skips(path, is_dir)

    try:
        entries, warnings = tree.scan(str(root), skips)
    except OSError as problem:
        raise UsageError(
            f"{problem.filename}: {problem.strerror}", "add it to .clusterctlignore, or make it readable"
        ) from None
    _refuse_what_no_node_takes(root, entries)
    manifest = Manifest(tuple(entries), tuple(warnings))
    return Manifest(manifest.entries, (*warnings, *_size_warnings(root, manifest)))


def _refuse_what_no_node_takes(root: Path, entries: list[Entry]) -> None:
    remedy = "add it to .clusterctlignore, or push what it points to"
    faults = [
        Fault(str(root / one.path), f"the link leads out of the tree, to {one.content}", remedy)
        for one in entries
        if one.kind == "l" and not tree.link_stays_inside(one.path, one.content)
    ]
    if faults:
        raise InputFaults(faults)
    try:
        tree.check(entries)
    except tree.BadTree as problem:
        raise UsageError(
            f"{root}: {problem}", "rename one of them, or leave it out by .clusterctlignore"
        ) from None


def _size_warnings(root: Path, manifest: Manifest) -> list[str]:
    remedy = "is all of it needed? .clusterctlignore leaves things out"
    found = []
    if len(manifest.entries) > MANY_FILES:
        found.append(f"{root}: {len(manifest.entries):,} entries; {remedy}")
    if manifest.size > MANY_BYTES:
        found.append(f"{root}: {manifest.size / 1e9:.1f} GB; {remedy}")
    return found


class _Ignore:
    """The rules of ignore files in a tree, in the part of gitignore's language that people use."""

    def __init__(self, root: Path, include_vcs: bool) -> None:
        self._root = root
        self._out = set(ALWAYS_OUT) | (set() if include_vcs else set(VCS_FOLDERS))
        self._rules: dict[str, list[tuple[re.Pattern[str], bool, bool]]] = {}

    def skips(self, path: str, is_dir: bool) -> bool:
        """Whether a path below the root stays at home; the last rule that fits decides, as in git."""
        if path.rsplit("/", 1)[-1] in self._out:
            return True
        skipped = False
        folders = [""] + ["/".join(path.split("/")[:depth]) for depth in range(1, path.count("/") + 1)]
        for folder in folders:
            below = path[len(folder) + 1 :] if folder else path
            for pattern, keeps, folders_only in self._of(folder):
                if (is_dir or not folders_only) and pattern.fullmatch(below):
                    skipped = not keeps
        return skipped

    def _of(self, folder: str) -> list[tuple[re.Pattern[str], bool, bool]]:
        if folder not in self._rules:
            found = []
            for name in IGNORE_FILES:
                path = self._root / folder / name
                if path.is_file():
                    lines = path.read_text(encoding="utf-8", errors="surrogateescape").splitlines()
                    found += [rule for rule in map(_rule, lines) if rule is not None]
            self._rules[folder] = found
        return self._rules[folder]


def _rule(line: str) -> tuple[re.Pattern[str], bool, bool] | None:
    """One line of an ignore file: (pattern over a path, whether it keeps, whether it is about folders
    only)."""
    text = line.rstrip()
    if not text or text.startswith("#"):
        return None
    keeps = text.startswith("!")
    text = text.removeprefix("!").removeprefix("\\")
    folders_only = text.endswith("/")
    text = text.rstrip("/")
    anywhere = "/" not in text
    # A whole `**` takes any number of folders; `*`, `?` and `[…]` stay within a name.
    parts = [
        "(?:.*/)?" if part == "**" else _name_pattern(part) + "/" for part in text.lstrip("/").split("/")
    ]
    pattern = "".join(parts).removesuffix("/")
    if text.endswith("/**"):
        pattern = pattern.removesuffix("(?:.*/)?") + ".+"
    return re.compile(("(?:.*/)?" if anywhere else "") + pattern, re.DOTALL), keeps, folders_only


def _name_pattern(glob: str) -> str:
    """One name of a path as a regular expression."""
    found, place = "", 0
    while place < len(glob):
        letter = glob[place]
        closing = glob.find("]", place + 2) if letter == "[" else -1
        if letter == "\\" and place + 1 < len(glob):
            place += 1
            found += re.escape(glob[place])
        elif closing > 0:
            inside = glob[place + 1 : closing].replace("\\", "\\\\").replace("[", "\\[")
            found += "[^/" + inside[1:] + "]" if inside[0] in "!^" else "[" + inside + "]"
            place = closing
        else:
            found += {"*": "[^/]*", "?": "[^/]"}.get(letter) or re.escape(letter)
        place += 1
    return found


# ---- sending


def push_tree(
    connection: Connection,
    root: Path,
    manifest: Manifest,
    dest: str,
    *,
    replace: bool = False,
    progress: Progress | None = None,
) -> PushResult:
    """Make `dest` on the node the same tree; what the node has already does not travel.

    Files that the node itself made in an earlier pushed tree stay; a folder that no push made is only
    replaced with `replace`.
    """
    return _push(connection, root, manifest, {"dest": dest, "replace": replace}, progress)


def push_store(
    connection: Connection, root: Path, manifest: Manifest, kind: str, *, progress: Progress | None = None
) -> PushResult:
    """Keep a tree on the node under its own hash, where it never changes; nothing travels when it is there
    already."""
    workdir = str(connection.hello()["workdir"])
    dest = f"{workdir}/store/{kind}/{manifest.id}"
    return _push(connection, root, manifest, {"dest": dest, "content_named": True}, progress)


def _push(
    connection: Connection, root: Path, manifest: Manifest, params: dict[str, Any], progress: Progress | None
) -> PushResult:
    began = time.monotonic()
    text = manifest.text
    asked = connection.open("receive", {**params, "tree": tree.tree_id(text), "manifest_size": len(text)})
    sent = files_sent = 0
    try:
        asked.send(text)
        for frame in asked:
            if frame.fields.get("want"):
                wanted = _wanted(connection.node, frame, manifest.files)
                sent, files_sent = _send_files(asked, root, wanted, progress), len(wanted)
    except BaseException as problem:
        asked.cancel()
        raise _worded(connection.node, problem) from None
    result = asked.result or {}
    return PushResult(
        str(result.get("path")), sent, files_sent, time.monotonic() - began, bool(result.get("unchanged"))
    )


def push_file(
    connection: Connection, path: Path, dest: str, *, progress: Progress | None = None
) -> PushResult:
    """One file to the node, verified, whole or not at all; a `dest` that ends with `/` is the folder for
    it."""
    began = time.monotonic()
    target = dest + path.name if dest.endswith("/") else dest
    try:
        size, digest = tree.hash_file(str(path))
        params = {"path": target, "mode": path.stat().st_mode & 0o777, "sha256": digest}
    except OSError as problem:
        raise UsageError(f"{path}: {problem.strerror}", "name a file that can be read") from None

    def pieces() -> Iterator[bytes]:
        sent = 0
        with path.open("rb") as file:
            while chunk := file.read(CHUNK):
                sent += len(chunk)
                yield chunk
                if progress:
                    progress(sent, size)

    result = connection.call("put", params, pieces())
    return PushResult(str(result["path"]), size, 1, time.monotonic() - began, False)


def _wanted(node: str, frame: Frame, files: list[Entry]) -> list[Entry]:
    """The files that a node asks for; a list that makes no sense is its fault, not a reason to send anything
    else."""
    try:
        return [files[place] for place in json.loads(frame.payload) if place >= 0]
    except (ValueError, TypeError, IndexError):
        raise RequestFailed(node, "bad-tree", "it asks for files that are not in the tree") from None


def _send_files(asked: Asked, root: Path, wanted: list[Entry], progress: Progress | None) -> int:
    total, sent = sum(one.size for one in wanted), 0

    def send(data: bytes) -> None:
        nonlocal sent
        asked.send(data)
        sent += len(data)
        if progress:
            progress(sent, total)

    tree.send_contents(str(root), wanted, send)
    asked.finish()
    return sent


def _worded(node: str, problem: BaseException) -> BaseException:
    """What the shared tree code says, as an error of this side."""
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


# ---- fetching


def pull_place(dest: Path, node: str, node_path: str) -> Path:
    """Where a node's tree goes: DST/<node>/<its last name>; of a whole home or root, DST/<node> itself."""
    name = node_path.rstrip("/").rsplit("/", 1)[-1]
    return dest / node if name in ("", "~", ".", "..") else dest / node / name


def pull_tree(
    connection: Connection, node_path: str, dest: Path, *, progress: Progress | None = None
) -> PushResult:
    """Make `dest` here the same tree as a folder on the node (a file comes as a folder that holds it).

    Nothing is written outside `dest` whatever the node sends, and what arrives is compared with the hashes
    that it named.
    """
    began = time.monotonic()
    dest = Path(os.path.abspath(dest))
    asked = connection.open("tree", {"path": node_path})
    replies = iter(asked)
    try:
        entries = tree.parse(_read_manifest(replies))
        builder = tree.Builder(str(dest), entries)
        wanted = builder.look()
        if builder.is_same() and dest.is_dir():
            asked.cancel()
            return PushResult(str(dest), 0, 0, time.monotonic() - began, True)
        builder.room(wanted)
        answer = json.dumps(wanted).encode()
        asked.send(b"%d\n" % len(answer) + answer)
        total = sum(builder.files[place].size for place in wanted)
        try:
            builder.build(wanted, ByteReader(_Counted(replies, total, progress).next))
            builder.keep_others(())  # what else is in the folder here is the user's
            builder.switch()
        finally:
            builder.clear()
    except BaseException as problem:
        asked.cancel()
        raise _worded(connection.node, problem) from None
    for _ in replies:
        pass
    return PushResult(str(dest), total, len(wanted), time.monotonic() - began, False)


def _read_manifest(replies: Any) -> bytes:
    manifest = bytearray()
    for frame in replies:
        if frame.fields.get("ready"):
            break
        manifest += frame.payload
        if len(manifest) > tree.MAX_MANIFEST:
            raise tree.BadTree("its manifest does not end")
    return bytes(manifest)


class _Counted:
    """The chunks of a reply, counted."""

    def __init__(self, replies: Any, total: int, progress: Progress | None) -> None:
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
