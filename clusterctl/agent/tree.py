"""A folder as a value (its manifest), and a folder made out of one: checked before, verified after, switched
in whole.

Both sides use it: a node takes a push with it, the launcher takes a pull, and neither trusts what the other
sends.
"""

from __future__ import annotations

import ctypes
import hashlib
import json
import os
import shutil
import stat
import time
import unicodedata
from typing import Any, Callable, Dict, Iterator, List, NamedTuple, Optional, Sequence, Tuple

from clusterctl.agent.frames import CHUNK, ByteReader
from clusterctl.agent.request import Refused, Request

MAX_ENTRIES = 2_000_000
MAX_MANIFEST = 1 << 30
AT_FDCWD, RENAME_EXCHANGE = -100, 2
STALE = 3600.0  # seconds after which a half-made tree of an agent that is gone is cleared away


class Entry(NamedTuple):
    """One name in a tree, relative to its root, with `/` between folders."""

    path: str
    kind: str
    """f, d or l."""
    mode: int
    size: int
    content: str
    """A file's sha256, a link's target, nothing for a folder."""


class BadTree(Exception):
    """A manifest that would write outside its folder, or that no folder can hold."""


def to_bytes(entries: Sequence[Entry]) -> bytes:
    """The manifest's canonical text; its sha256 is the tree's id."""
    return json.dumps([list(one) for one in entries], separators=(",", ":")).encode()


def tree_id(manifest: bytes) -> str:
    return hashlib.sha256(manifest).hexdigest()


def parse(manifest: bytes) -> List[Entry]:
    """A manifest from the other side, believed only after every name in it was checked."""
    try:
        rows = json.loads(manifest)
        entries = [Entry(*row) for row in rows]
    except (ValueError, TypeError, RecursionError) as problem:
        raise BadTree("the manifest is not readable") from problem
    if len(entries) > MAX_ENTRIES:
        raise BadTree(f"{len(entries)} entries; at most {MAX_ENTRIES}")
    check(entries)
    return entries


def check(entries: Sequence[Entry]) -> None:
    """Refuse a tree in which any name or link leads outside, or two names fall together."""
    folders = {""}
    seen: Dict[str, str] = {}
    for one in entries:
        if not _is_well_formed(one):
            raise BadTree(f"{one!r:.200} is no entry of a tree")
        parts = one.path.split("/")
        if one.path.startswith("/") or "\0" in one.path or any(part in ("", ".", "..") for part in parts):
            raise BadTree(f"{one.path!r} leads outside")
        if "/".join(parts[:-1]) not in folders:
            raise BadTree(f"{one.path!r} is in no folder of this tree")
        folded = unicodedata.normalize("NFC", one.path).casefold()
        if folded in seen:
            raise BadTree(f"{one.path!r} and {seen[folded]!r} are one name on some file systems")
        seen[folded] = one.path
        if one.kind == "d":
            folders.add(one.path)
        if one.kind == "l" and not link_stays_inside(one.path, one.content):
            raise BadTree(f"the link {one.path!r} -> {one.content!r} leads outside")


def _is_well_formed(one: Entry) -> bool:
    texts = isinstance(one.path, str) and isinstance(one.content, str) and one.kind in ("f", "d", "l")
    return (
        texts
        and type(one.mode) is int
        and type(one.size) is int
        and 0 <= one.size < 1 << 60
        and 0 <= one.mode <= 0o777
    )


def link_stays_inside(path: str, target: str) -> bool:
    """Whether a link's target is in the tree, by its text alone: any `..` stands at the front and climbs real
    folders.

    Behind a name, `..` would climb from wherever that name, perhaps a link itself, really leads.
    """
    parts = target.split("/")
    climbs = 0
    while climbs < len(parts) and parts[climbs] == "..":
        climbs += 1
    rest = [part for part in parts[climbs:] if part != "."]
    depth = path.count("/")
    return (
        bool(target)
        and not target.startswith("/")
        and "\0" not in target
        and climbs <= depth
        and ".." not in rest
        and "" not in rest[:-1]
    )


def scan(
    root: str, skip: Callable[[str, bool], bool] = lambda path, is_dir: False
) -> Tuple[List[Entry], List[str]]:
    """The entries of a folder, folders before what is in them, and warnings of what is neither file, folder
    nor link."""
    entries: List[Entry] = []
    warnings: List[str] = []
    for path, entry in _walk(root, "", skip):
        status = entry.stat(follow_symlinks=False)
        mode = stat.S_IMODE(status.st_mode) & 0o777
        if entry.is_symlink():
            entries.append(Entry(path, "l", 0o777, 0, os.readlink(entry.path)))
        elif entry.is_dir():
            entries.append(Entry(path, "d", mode, 0, ""))
        elif stat.S_ISREG(status.st_mode):
            size, digest = hash_file(entry.path)
            entries.append(Entry(path, "f", mode, size, digest))
        else:
            warnings.append(f"{path}: neither file, folder nor link; left out")
    return entries, warnings


def _walk(
    root: str, below: str, skip: Callable[[str, bool], bool]
) -> Iterator[Tuple[str, "os.DirEntry[str]"]]:
    with os.scandir(os.path.join(root, below)) as listing:
        names = sorted(listing, key=lambda one: one.name)
    for entry in names:
        path = f"{below}/{entry.name}" if below else entry.name
        is_dir = entry.is_dir(follow_symlinks=False)
        if skip(path, is_dir):
            continue
        yield path, entry
        if is_dir:
            yield from _walk(root, path, skip)


def hash_file(path: str) -> Tuple[int, str]:
    """A file's size and sha256 as they were read."""
    digest, size = hashlib.sha256(), 0
    with open(path, "rb", buffering=0) as file:
        while True:
            chunk = file.read(1 << 20)
            if not chunk:
                return size, digest.hexdigest()
            digest.update(chunk)
            size += len(chunk)


def send_contents(root: str, entries: Sequence[Entry], send: Callable[[bytes], None]) -> None:
    """The files' bytes one after another, packed into whole chunks; each exactly as long as its entry
    says."""
    waiting = bytearray()
    for one in entries:
        left = one.size
        with open(os.path.join(root, one.path), "rb", buffering=0) as file:
            while left:
                chunk = file.read(min(left, CHUNK))
                if not chunk:
                    raise BadTree(f"{one.path} became shorter while it was sent")
                left -= len(chunk)
                waiting += chunk
                if len(waiting) >= CHUNK:
                    send(bytes(waiting))
                    waiting.clear()
    if waiting:
        send(bytes(waiting))


class Builder:
    """Makes a tree beside its place, out of what is there already and what comes, and switches it in
    whole."""

    def __init__(self, dest: str, entries: Sequence[Entry]) -> None:
        self.dest = dest
        self.entries = entries
        self.files = [one for one in entries if one.kind == "f"]
        parent, name = os.path.split(dest)
        self.staging = os.path.join(parent, f".{name}.incoming-{os.getpid()}-{time.monotonic_ns()}")
        self.have: Dict[str, str] = {}

    def look(self) -> List[int]:
        """Which files (as places in `files`) the present tree does not hold with that very content."""
        wanted = []
        for place, one in enumerate(self.files):
            path = os.path.join(self.dest, one.path)
            if (
                is_plain(self.dest, one.path)
                and os.path.getsize(path) == one.size
                and hash_file(path)[1] == one.content
            ):
                self.have[one.path] = path
            else:
                wanted.append(place)
        return wanted

    def is_same(self) -> bool:
        """Whether the present tree is the wanted one already, apart from what it holds besides."""
        return len(self.have) == len(self.files) and all(self._is_there(one) for one in self.entries)

    def _is_there(self, one: Entry) -> bool:
        path = os.path.join(self.dest, one.path)
        if one.kind == "l":
            return os.path.islink(path) and os.readlink(path) == one.content
        if os.path.islink(path) or not os.path.exists(path):
            return False
        return (
            os.path.isdir(path) == (one.kind == "d")
            and stat.S_IMODE(os.lstat(path).st_mode) & 0o777 == one.mode
        )

    def room(self, wanted: Sequence[int]) -> None:
        """Refuse before the first byte when the disk can't hold what would come."""
        parent = os.path.dirname(self.dest)
        os.makedirs(parent, mode=0o700, exist_ok=True)
        needed = sum(self.files[place].size for place in wanted) + 4096 * len(self.entries)
        disk = os.statvfs(parent)
        free = disk.f_bavail * disk.f_frsize
        if needed > free:
            raise Refused(
                "no-space", f"{parent} has {free / 1e6:.0f} MB free, {needed / 1e6:.0f} MB are needed"
            )

    def build(self, wanted: Sequence[int], source: ByteReader) -> None:
        """Make the whole tree aside; `source` holds the wanted files' bytes in order."""
        self._clear_stale()
        os.mkdir(self.staging, 0o700)
        for one in self.entries:
            if one.kind == "d":
                os.mkdir(os.path.join(self.staging, one.path), 0o700)
        for path, there in self.have.items():
            self._take_over(path, there)
        for place in wanted:
            self._write(self.files[place], source)
        for one in self.entries:
            if one.kind == "l":
                os.symlink(one.content, os.path.join(self.staging, one.path))
        for one in self.files:
            os.chmod(os.path.join(self.staging, one.path), one.mode)
        for one in reversed(self.entries):
            if one.kind == "d":
                os.chmod(os.path.join(self.staging, one.path), one.mode | 0o700)

    def _take_over(self, path: str, there: str) -> None:
        """Copied, not linked: a program that still writes into the old tree must not change the new one."""
        shutil.copyfile(there, os.path.join(self.staging, path))

    def _write(self, one: Entry, source: ByteReader) -> None:
        digest, left = hashlib.sha256(), one.size
        handle = os.open(
            os.path.join(self.staging, one.path), os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600
        )
        with open(handle, "wb", buffering=0) as file:
            while left:
                chunk = source.read(min(left, CHUNK))
                if not chunk:
                    raise Refused("cut", f"the transfer ended inside {one.path}; the old tree is untouched")
                file.write(chunk)
                digest.update(chunk)
                left -= len(chunk)
        if digest.hexdigest() != one.content:
            raise Refused(
                "damaged",
                f"{one.path} changed while it was sent, or arrived damaged; the old tree is untouched",
            )

    def keep_others(self, old: Sequence[str]) -> None:
        """What the present tree holds besides, and `old`, an earlier transfer, did not bring, moves on into
        the new one."""
        if not os.path.isdir(self.dest):
            return
        known = set(old) | {one.path for one in self.entries}
        for path, entry in _walk(self.dest, "", lambda path, is_dir: path.endswith("__pycache__")):
            target = os.path.join(self.staging, path)
            if path in known or os.path.lexists(target) or not os.path.isdir(os.path.dirname(target)):
                continue
            if entry.is_dir(follow_symlinks=False):
                os.mkdir(target, 0o755)
            elif entry.is_symlink():
                os.symlink(os.readlink(entry.path), target)
            elif entry.is_file():
                os.link(entry.path, target)  # the same file: a program that writes it goes on writing it

    def switch(self) -> None:
        """Put the new tree in the old one's place in one step where the kernel can, else in two renames."""
        if not os.path.lexists(self.dest):
            os.rename(self.staging, self.dest)
            return
        if not _exchange(self.staging, self.dest):
            old = self.staging + ".old"
            os.rename(self.dest, old)
            os.rename(self.staging, self.dest)
            os.rename(old, self.staging)
        remove_tree(self.staging)

    def clear(self) -> None:
        if os.path.lexists(self.staging):
            remove_tree(self.staging)

    def _clear_stale(self) -> None:
        parent, name = os.path.split(self.dest)
        for entry in os.scandir(parent):
            stale = (
                entry.name.startswith(f".{name}.incoming-")
                and time.time() - entry.stat(follow_symlinks=False).st_mtime > STALE
            )
            if stale and not os.path.exists(f"/proc/{entry.name.rsplit('-', 2)[1]}"):
                remove_tree(entry.path)


def is_plain(root: str, path: str) -> bool:
    """Whether a name below `root` is a regular file that no link on the way leads to."""
    here = root
    for part in path.split("/"):
        here = os.path.join(here, part)
        if os.path.islink(here):
            return False
    return os.path.isfile(here)


def remove_tree(path: str) -> None:
    """Remove a tree also where a folder in it forbids writing."""
    if os.path.islink(path) or not os.path.isdir(path):
        os.unlink(path)
        return
    for folder, _, _ in os.walk(path):
        os.chmod(folder, 0o700)
    shutil.rmtree(path)


def _exchange(first: str, second: str) -> bool:
    """Swap two names in one step (Linux 3.15 and newer, on most file systems); False where that can't be."""
    libc = ctypes.CDLL(None, use_errno=True)
    call = getattr(libc, "renameat2", None)
    if call is None:
        return False
    return bool(call(AT_FDCWD, os.fsencode(first), AT_FDCWD, os.fsencode(second), RENAME_EXCHANGE) == 0)


# ---- asked by the launcher


def receive(request: Request) -> Dict[str, Any]:
    """Take a tree: first its manifest, then, after the answer which files are lacking, those files' bytes.

    `dest` may be a path below the work folder's store (`exists` is enough there: the name is the content), or
    any folder that does not exist, is empty, or came from an earlier push; anything else only with `replace`.
    """
    dest = request.path("dest")
    manifest = _read_manifest(request)
    if request.params.get("content_named") and os.path.isdir(dest):
        return {"path": dest, "unchanged": True, "files": 0}
    try:
        builder = Builder(dest, parse(manifest))
    except BadTree as problem:
        raise Refused("bad-tree", str(problem)) from None
    record = _record_path(request, dest)
    old = _read_record(record)
    if old is None and not request.params.get("replace") and os.path.lexists(dest) and not _is_empty(dest):
        raise Refused("exists", f"{dest} is there and was not put there by a push")
    wanted = builder.look()
    if builder.is_same():
        _write_record(record, builder.entries)
        return {"path": dest, "unchanged": True, "files": 0}
    builder.room(wanted)
    request.send(json.dumps(wanted).encode(), want=True)
    try:
        builder.build(wanted, request.body)
        if old is not None:
            builder.keep_others(old)
        builder.switch()
    finally:
        builder.clear()
    _write_record(record, builder.entries)
    return {"path": dest, "unchanged": False, "files": len(wanted)}


def _read_manifest(request: Request) -> bytes:
    size = request.need("manifest_size", int)
    if not 0 < size <= MAX_MANIFEST:
        raise Refused("usage", f"a manifest of {size} bytes")
    manifest = request.body.read(size)
    if tree_id(manifest) != request.need("tree", str):
        raise Refused("damaged", "the manifest arrived damaged")
    return manifest


def _is_empty(path: str) -> bool:
    return os.path.isdir(path) and not os.path.islink(path) and not os.listdir(path)


def _record_path(request: Request, dest: str) -> str:
    """Where it is kept what a push put into `dest`: not beside it, since that folder is the user's."""
    name = hashlib.sha256(os.fsencode(os.path.realpath(dest))).hexdigest()[:32]
    return os.path.join(request.agent.workdir, "trees", name + ".json")


def _read_record(path: str) -> Optional[List[str]]:
    try:
        with open(path, encoding="utf-8") as file:
            names = json.load(file)
    except (OSError, ValueError):
        return None
    return names if isinstance(names, list) else None


def _write_record(path: str, entries: Sequence[Entry]) -> None:
    os.makedirs(os.path.dirname(path), mode=0o700, exist_ok=True)
    aside = f"{path}.{os.getpid()}.aside"
    with open(aside, "w", encoding="utf-8") as file:
        json.dump([one.path for one in entries], file)
    os.replace(aside, path)


def send_tree(request: Request) -> Dict[str, Any]:
    """Give a folder or a file: its manifest, then, of the files that the launcher asks for, their bytes."""
    path = request.path()
    if not os.path.lexists(path):
        raise Refused("not-found", f"no {path}")
    if os.path.isdir(path):
        root, (entries, warnings) = path, scan(path)
    else:
        root = os.path.dirname(path)
        status = os.stat(path)
        entries, warnings = (
            [Entry(os.path.basename(path), "f", stat.S_IMODE(status.st_mode) & 0o777, *hash_file(path))],
            [],
        )
    manifest = to_bytes(entries)
    for begin in range(0, len(manifest), CHUNK):
        request.send(manifest[begin : begin + CHUNK], manifest=len(manifest))
    request.send(b"", ready=True)
    wanted = json.loads(request.body.read(int(request.body.read_line(32))))
    files = [one for one in entries if one.kind == "f"]
    send_contents(root, [files[place] for place in wanted], request.send)
    return {"path": path, "is_folder": os.path.isdir(path), "warnings": warnings}
