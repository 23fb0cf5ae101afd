"""A folder as a value: its manifest, and its files divided into pieces that are verified one by one.

Both sides use it: a node for a push, the launcher for a pull. Neither trusts what the other sends.
"""

from __future__ import annotations

import bisect
import hashlib
import json
import os
import stat
from typing import Any, Callable, Dict, Iterator, List, NamedTuple, Sequence, Tuple

from clusterctl.agent import compact_json
from clusterctl.agent.frames import CHUNK

Range = Tuple[int, int]
"""Piece numbers, half-open."""
ReadContent = Callable[[str, str, os.stat_result], Tuple[int, str, bytes]]
"""(path below the root, path, its status) -> what `content_of` gives."""

MAX_ENTRIES = 2_000_000
# Bytes: two million names of 250 bytes each.
MAX_MANIFEST = 1 << 29
# Bytes per piece, which is verified and passed on as a unit; a piece fits into a processor's cache.
PIECE = 1 << 20
# A file of terabytes must not have millions of pieces.
LARGE_PIECE, LARGE_FILE = 16 << 20, 1 << 34
# Bytes of a sha256.
DIGEST = 32


class Entry(NamedTuple):
    """One name in a tree, relative to its root, with `/` between folders."""

    path: str
    kind: str
    """f, d or l."""
    mode: int
    size: int
    content: str
    """For a file the name of its content (`content_of`), for a link its target, for a folder ""."""


class BadTree(Exception):
    """A manifest that would write outside its folder, or that no folder can hold."""


def to_bytes(entries: Sequence[Entry]) -> bytes:
    """Return the manifest's canonical text; its sha256 is the tree's id."""
    return compact_json.dumps([list(entry) for entry in entries]).encode()


def tree_id(manifest: bytes) -> str:
    return hashlib.sha256(manifest).hexdigest()


def parse(manifest: bytes) -> List[Entry]:
    """Return the entries of a manifest from the other side, after every name in it was checked."""
    # Small values take up to thirty times their text in memory; names may contain a few of these characters too.
    if manifest.count(b"[") > 3 * MAX_ENTRIES or manifest.count(b",") > 16 * MAX_ENTRIES:
        raise BadTree(f"the manifest unfolds to more than {MAX_ENTRIES} entries")
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
    """Raise BadTree if any name or link leads outside, or if two names are the same on the disk."""
    folders = {""}
    seen: Dict[str, str] = {}
    # 2 us each: a node checks thousands before it takes the first.
    for entry in entries:
        path, kind, mode, size, content = entry
        if not _is_well_formed(path, kind, mode, size, content):
            raise BadTree(f"{entry!r:.200} is not an entry of a tree")
        inside = f"/{path}/"
        if "//" in inside or "/./" in inside or "/../" in inside or "\0" in path:
            raise BadTree(f"{path!r} leads outside")
        if path.rpartition("/")[0] not in folders:
            raise BadTree(f"{path!r} is in no folder of this tree")
        folded = path.lower() if path.isascii() else _folded(path)
        if folded in seen:
            raise BadTree(f"{path!r} and {seen[folded]!r} are one name on some file systems")
        seen[folded] = path
        if kind == "d":
            folders.add(path)
        if kind == "l" and not link_stays_inside(path, content):
            raise BadTree(f"the link {path!r} -> {content!r} leads outside")


def _folded(path: str) -> str:
    # Imported here, because only few trees have names that need this module.
    import unicodedata

    return unicodedata.normalize("NFC", path).casefold()


def _is_well_formed(path: object, kind: object, mode: object, size: object, content: object) -> bool:
    return (
        type(path) is str
        and type(content) is str
        and kind in ("f", "d", "l")
        and type(mode) is int
        and type(size) is int
        and 0 <= size < 1 << 60
        and 0 <= mode <= 0o777
        and _is_of_bytes(path)
        and _is_of_bytes(content)
    )


def _is_of_bytes(text: str) -> bool:
    """Return True if `text` encodes to a valid file name (no lone surrogates except surrogateescape's)."""
    if text.isascii():
        return True
    try:
        text.encode("utf-8", "surrogateescape")
    except UnicodeEncodeError:
        return False
    return True


def link_stays_inside(path: str, target: str) -> bool:
    """Return True if a link's target is in the tree, by its text alone.

    Any `..` must stand at the front, where it climbs real folders. After a name, `..` would climb from wherever that
    name, perhaps a link itself, leads.
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


class Scanned(NamedTuple):
    entries: List[Entry]
    """Folders come before their content."""
    warnings: List[str]
    """Names that are neither file, folder nor link."""
    table: bytes
    """The pieces' digests of all files that have several, in the entries' order."""


def read_anew(path: str, full: str, status: os.stat_result) -> Tuple[int, str, bytes]:
    """Read a file and return its content, without a cache."""
    return content_of(full)


def scan(
    root: str,
    skip: Callable[[str, bool], bool] = lambda path, is_dir: False,
    read: ReadContent = read_anew,
) -> Scanned:
    """Return the entries of a folder; `read` may know a file's content without reading it."""
    result = Scanned([], [], b"")
    table = bytearray()
    for path, entry in walk(root, "", skip):
        status = entry.stat(follow_symlinks=False)
        mode = stat.S_IMODE(status.st_mode) & 0o777
        if entry.is_symlink():
            result.entries.append(Entry(path, "l", 0o777, 0, os.readlink(entry.path)))
        elif entry.is_dir():
            result.entries.append(Entry(path, "d", mode, 0, ""))
        elif stat.S_ISREG(status.st_mode):
            size, content, digests = read(path, entry.path, status)
            result.entries.append(Entry(path, "f", mode, size, content))
            table += digests
        else:
            result.warnings.append(f"{path}: neither file, folder nor link; left out")
    return result._replace(table=bytes(table))


def walk(
    root: str, below: str, skip: Callable[[str, bool], bool]
) -> Iterator[Tuple[str, "os.DirEntry[str]"]]:
    """Yield every name below a folder, sorted, each folder before its content; links are not followed."""
    with os.scandir(os.path.join(root, below)) as listing:
        names = sorted(listing, key=lambda item: item.name)
    for entry in names:
        path = f"{below}/{entry.name}" if below else entry.name
        is_dir = entry.is_dir(follow_symlinks=False)
        if skip(path, is_dir):
            continue
        yield path, entry
        if is_dir:
            yield from walk(root, path, skip)


def hash_file(path: str) -> Tuple[int, str]:
    """Return a file's size and sha256."""
    digest, size = hashlib.sha256(), 0
    with open(path, "rb", buffering=0) as file:
        while True:
            chunk = file.read(1 << 20)
            if not chunk:
                return size, digest.hexdigest()
            digest.update(chunk)
            size += len(chunk)


# ---- pieces


def piece_size(size: int) -> int:
    """Return the size of the pieces of a file."""
    return PIECE if size <= LARGE_FILE else LARGE_PIECE


def content_of(path: str) -> Tuple[int, str, bytes]:
    """Return a file's size, its content's name and its pieces' digests; the file is read once.

    The name of a file of one piece is its sha256. Of any other it is `p` with the sha256 of its pieces' digests, the
    third value: a reader that has verified every piece need not read the complete file again.
    """
    with open(path, "rb", buffering=0) as file:
        first = file.read(PIECE + 1)
        size = os.fstat(file.fileno()).st_size
        if len(first) <= PIECE and len(first) >= size:
            return len(first), hashlib.sha256(first).hexdigest(), b""
        digests, seen = _digests(file.fileno(), piece_size(size), size)
    if piece_size(seen) != piece_size(size):
        # The file became shorter than the limit while it was read.
        return content_of(path)
    return seen, content_name(digests), digests


def _digests(handle: int, step: int, end: int) -> Tuple[bytes, int]:
    """Return the digests of a file's pieces, and their bytes; what is written after `end` meanwhile is not read."""
    digests, seen = [], 0
    while True:
        digest, left = hashlib.sha256(), step
        while left:
            chunk = os.pread(handle, min(left, PIECE, end - seen), seen)
            if not chunk:
                break
            digest.update(chunk)
            seen += len(chunk)
            left -= len(chunk)
        if left < step:
            digests.append(digest.digest())
        if left:
            return b"".join(digests), seen


def content_name(digests: bytes) -> str:
    return "p" + hashlib.sha256(digests).hexdigest()


class Piece(NamedTuple):
    file: int
    """Index of the file among the tree's files."""
    offset: int
    size: int
    digest: bytes


class Pieces:
    """Every file of a tree cut into pieces, which are numbered; every file has at least one, an empty one too."""

    def __init__(self, files: Sequence[Entry], table: bytes) -> None:
        """Raise BadTree if the digests do not match the names of the files' contents."""
        self.files = files
        self.starts = [0]
        self._sums = [0]
        self._tables: Dict[int, bytes] = {}
        offset = 0
        for number, entry in enumerate(files):
            size = entry.size
            count = 1 if size <= PIECE else -(-size // piece_size(size))
            self.starts.append(self.starts[-1] + count)
            self._sums.append(self._sums[-1] + size)
            if count > 1:
                digests = table[offset : offset + count * DIGEST]
                offset += count * DIGEST
                if content_name(digests) != entry.content:
                    raise BadTree(f"{entry.path!r} is not made of the pieces that came with it")
                self._tables[number] = digests
            elif len(entry.content) != 2 * DIGEST or entry.content.strip("0123456789abcdef"):
                raise BadTree(f"{entry.path!r} has no hash")
        if offset != len(table):
            raise BadTree("there are more pieces than files for them")
        self.count = self.starts[-1]

    def of(self, file: int) -> Range:
        return self.starts[file], self.starts[file + 1]

    def spans(self, ranges: Sequence[Range]) -> "Iterator[Tuple[int, int, int]]":
        """Yield ranges cut where files end: (file, begin, end)."""
        for begin, end in ranges:
            file = bisect.bisect_right(self.starts, begin) - 1
            while begin < end:
                last = min(end, self.starts[file + 1])
                yield file, begin, last
                begin, file = last, file + 1

    def __getitem__(self, number: int) -> Piece:
        file = bisect.bisect_right(self.starts, number) - 1
        entry = self.files[file]
        step = piece_size(entry.size)
        index = number - self.starts[file]
        table = self._tables.get(file)
        digest = table[index * DIGEST : (index + 1) * DIGEST] if table else bytes.fromhex(entry.content)
        return Piece(file, index * step, min(step, entry.size - index * step), digest)

    def checked(self, ranges: Any) -> List[Range]:
        """Return ranges from the other side, after a check that they are in order and exist."""
        result, last = [], 0
        try:
            if not isinstance(ranges, list):
                raise TypeError
            for begin, end in ranges:
                if not (type(begin) is int and type(end) is int and last <= begin < end <= self.count):
                    raise ValueError
                result.append((begin, end))
                last = end
        except (TypeError, ValueError):
            raise BadTree("it requests pieces that are not in the tree") from None
        return result

    def file_count(self, ranges: Sequence[Range]) -> int:
        """Return how many files some pieces belong to, in order."""
        count, last = 0, -1
        for begin, end in ranges:
            first = bisect.bisect_right(self.starts, begin) - 1
            count -= first == last
            last = bisect.bisect_right(self.starts, end - 1) - 1
            count += last - first + 1
        return count

    def size(self, ranges: Sequence[Range]) -> int:
        """Return the number of bytes in some pieces."""
        return sum(self._end(end) - self._end(begin) for begin, end in ranges)

    def _end(self, number: int) -> int:
        """Return the number of bytes before a piece, of all files together."""
        file = bisect.bisect_right(self.starts, number) - 1
        if file >= len(self.files):
            return self._sums[-1]
        return self._sums[file] + (number - self.starts[file]) * piece_size(self.files[file].size)


def ranges_of(numbers: Sequence[int]) -> List[Range]:
    """Return sorted numbers as half-open ranges."""
    result: List[List[int]] = []
    for number in numbers:
        if result and result[-1][1] == number:
            result[-1][1] += 1
        else:
            result.append([number, number + 1])
    return [(begin, end) for begin, end in result]


def send_pieces(
    path_of: Callable[[Entry], str], pieces: Pieces, ranges: Sequence[Range], send: Callable[[bytes], None]
) -> "Tuple[str, ...]":
    """Send the bytes of pieces one after another in whole chunks; each has exactly the length of its entry.

    Return notes about files that have grown since their entries were made.
    """
    waiting = bytearray()
    notes: Dict[int, str] = {}
    for index, begin, end in pieces.spans(ranges):
        entry, left = pieces.files[index], pieces.size([(begin, end)])
        with open(path_of(entry), "rb", buffering=0) as file:
            file.seek(pieces[begin].offset)
            while left:
                chunk = file.read(min(left, CHUNK))
                if not chunk:
                    raise BadTree(f"{entry.path} became shorter while it was sent")
                left -= len(chunk)
                if not waiting and len(chunk) == CHUNK:
                    # This avoids a copy for most of a large file.
                    send(chunk)
                    continue
                waiting += chunk
                if len(waiting) >= CHUNK:
                    send(bytes(waiting))
                    waiting.clear()
            size = os.fstat(file.fileno()).st_size
            if size > entry.size:
                first = f"its first {entry.size} of {size} bytes came"
                notes[index] = f"{entry.path} grew while it was sent: {first}"
    if waiting:
        send(bytes(waiting))
    return tuple(notes.values())
