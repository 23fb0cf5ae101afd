"""Make a folder from a manifest: use existing files, verify every piece, and replace the folder in one step.

After an interruption, the next transfer continues with the verified pieces.
"""

from __future__ import annotations

import errno
import fcntl
import os
import stat
import threading
import time
from hashlib import sha256
from typing import Callable, Dict, List, NamedTuple, Optional, Sequence, Tuple, Union

from clusterctl.agent.files import tree
from clusterctl.agent.files.file_calls import (
    copy_file,
    exchange,
    is_plain_folder,
    make_folder,
    matches_entry,
    nearest_folder,
    remove_tree,
    status_of,
    write_at,
)
from clusterctl.agent.files.tree import Entry, Piece, Pieces, Range
from clusterctl.agent.files.tree_cache import CacheEntry, Memory
from clusterctl.agent.request import Refused

Data = Union[bytes, memoryview]

# Seconds after which an old tree whose remover was killed is cleared away.
STALE = 3600.0
LOCK_PAUSE = 0.05
NEW_FILE = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW
# Bytes received, hashed and written while they are still in the processor's cache.
STEP = 256 << 10


class Base(NamedTuple):
    """A folder that may contain some of the files, and the cached state of its files."""

    root: str
    rows: Dict[str, CacheEntry]


class Builder:
    """Makes a tree next to its final path, from existing files and sent pieces, and moves it there in one step."""

    def __init__(
        self,
        dest: str,
        entries: Sequence[Entry],
        table: bytes = b"",
        single: bool = False,
        manifest: bytes = b"",
    ) -> None:
        """Raise BadTree if the digests in `table` are not those of the entries.

        With `single` the tree is one file, and `dest` is that file. `manifest` is the text of the entries as it was
        sent.
        """
        self.dest = dest
        self.root = os.path.dirname(dest) if single else dest
        self._single = single
        self.entries = entries
        self.manifest = manifest
        self.files = [entry for entry in entries if entry.kind == "f"]
        self.pieces = Pieces(self.files, table)
        parent, name = os.path.split(dest)
        self.staging = os.path.join(parent, f".{name}.incoming")
        self.have: Dict[int, str] = {}
        self.known: Dict[str, CacheEntry] = {}
        self.ready = bytearray(self.pieces.count)
        self.closed = False
        self.is_shared = False
        self.written: Dict[str, os.stat_result] = {}
        self._in_place = 0
        self._buffer = memoryview(bytearray(STEP))
        self._lock: Optional[int] = None
        self._moved: Optional[int] = None
        self._handle: Optional[Tuple[int, int]] = None
        self._change = threading.Condition()

    # ---- what exists already

    def find_missing(self, bases: Sequence[Base]) -> List[Range]:
        """Return the pieces that neither an interrupted transfer nor the bases have.

        The present tree is the first base.
        """
        for base in bases:
            memory = Memory(base.rows)
            folders = {"": os.path.isdir(base.root)}
            for index, entry in enumerate(self.files if folders[""] else ()):
                folder = entry.path.rpartition("/")[0]
                if not is_plain_folder(base.root, folder, folders):
                    continue
                if index not in self.have and not self._is_ready(index):
                    self._use_from(index, entry, base, memory)
            if base.root == self.root:
                self._in_place = len(self.have)
                self.known = memory.now
        if not self.have and not any(self.ready):
            return [(0, self.pieces.count)] if self.files else []
        lacking: List[int] = []
        for index in range(len(self.files)):
            if index not in self.have:
                begin, end = self.pieces.of(index)
                lacking += [number for number in range(begin, end) if not self.ready[number]]
        return tree.ranges_of(lacking)

    def _use_from(self, index: int, entry: Entry, base: Base, memory: Memory) -> None:
        path = f"{base.root}/{entry.path}"
        try:
            status = os.lstat(path)
            if not stat.S_ISREG(status.st_mode) or status.st_size != entry.size:
                return
            if memory.read(entry.path, path, status)[1] == entry.content:
                self.have[index] = path
        except OSError:
            # Missing or not readable: it has to be sent.
            return

    def _is_ready(self, index: int) -> bool:
        begin, end = self.pieces.of(index)
        return all(self.ready[begin:end])

    def rescan(self) -> None:
        """Forget what the bases held, and scan the present tree as it is now."""
        self.have.clear()
        self.find_missing([Base(self.root, {})])

    def is_same(self) -> bool:
        """Return True if the present tree already is the requested one, apart from further files in it."""
        return (
            self._in_place == len(self.files)
            and os.path.isdir(self.root)
            and all(matches_entry(self.root, entry) for entry in self.entries)
        )

    # ---- aside

    def stage(self, is_cancelled: Callable[[], bool] = lambda: False) -> bool:
        """Lock the temporary folder for this transfer; return True if it waited for another transfer.

        That may be one of another node on a shared file system.
        """
        os.makedirs(os.path.dirname(self.dest), mode=0o700, exist_ok=True)
        waited = False
        while not self._try_stage():
            waited = True
            if is_cancelled():
                raise Refused("cancelled", f"another transfer to {self.dest} was under way")
            time.sleep(LOCK_PAUSE)
        return waited

    def _try_stage(self) -> bool:
        make_folder(self.staging)
        try:
            handle = os.open(self.staging, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
        except FileNotFoundError:
            # It was switched in just now.
            return False
        except NotADirectoryError:
            raise Refused("exists", f"{self.staging} is in the way; it is not the folder of a push") from None
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as problem:
            if problem.errno in (errno.EWOULDBLOCK, errno.EACCES):
                os.close(handle)
                # This file system has no locks: the last transfer to switch wins.
                return False
        mine, present = os.fstat(handle), status_of(self.staging)
        if present is None or present.st_ino != mine.st_ino:
            os.close(handle)
            return False
        if mine.st_uid != os.geteuid() or mine.st_mode & 0o077:
            os.close(handle)
            raise Refused("exists", f"{self.staging} already exists and is not private to this user")
        self._lock = handle
        return True

    def adopt(self, prune: bool = True) -> None:
        """Take over the valid pieces that an earlier transfer left in the temporary folder."""
        if not os.path.isdir(self.staging) or os.path.islink(self.staging):
            return
        if not os.listdir(self.staging):
            return
        places = {item.path: index for index, item in enumerate(self.files)}
        folders = {item.path for item in self.entries if item.kind == "d"}
        useless = []
        for path, entry in tree.walk(self.staging, "", lambda path, is_dir: False):
            if entry.is_dir(follow_symlinks=False):
                keep = path in folders
            else:
                keep = entry.is_file(follow_symlinks=False) and path in places
                keep = keep and self._adopt_file(places[path], entry.path, prune)
            if not keep:
                useless.append(entry.path)
        for item in useless if prune else ():
            if os.path.lexists(item):
                remove_tree(item)

    def _adopt_file(self, index: int, path: str, prune: bool) -> bool:
        """Return the pieces of a file up to the first wrong one; the rest is cut off."""
        begin, end = self.pieces.of(index)
        good = 0
        with open(path, "rb", buffering=0) as file:
            for number in range(begin, end):
                piece = self.pieces[number]
                data = os.pread(file.fileno(), piece.size, piece.offset)
                if len(data) != piece.size or sha256(data).digest() != piece.digest:
                    break
                self.ready[number] = 1
                good = piece.offset + piece.size
        if self._is_ready(index):
            self.have.pop(index, None)
        elif index in self.have:
            # The whole file is available elsewhere.
            self.ready[begin:end] = bytes(end - begin)
        if prune and good and os.path.getsize(path) != good:
            os.truncate(path, good)
        return bool(self.ready[begin])

    def room(self, wanted: Sequence[Range]) -> None:
        """Raise an error before the first byte if the disk has not enough space for the transfer."""
        folder = self.staging if os.path.isdir(self.staging) else nearest_folder(os.path.dirname(self.dest))
        disk = os.statvfs(folder)
        copied = sum(self.files[index].size for index in self.have)
        needed = self.pieces.size(wanted) + copied + 4096 * len(self.entries)
        free = disk.f_bavail * disk.f_frsize
        if needed > free:
            raise Refused(
                "no-space", f"{folder} has {free / 1e6:.0f} MB free, {needed / 1e6:.0f} MB are needed"
            )
        if disk.f_files and len(self.entries) > disk.f_favail:
            raise Refused(
                "no-space",
                f"{folder} has room for {disk.f_favail} more files (inodes), {len(self.entries)} are needed",
            )

    def copy_over(self) -> None:
        """Make the folders, and copy the files that the bases have."""
        for entry in self.entries:
            if entry.kind == "d":
                path = os.path.join(self.staging, entry.path)
                if not os.path.isdir(path):
                    os.mkdir(path, 0o700)
        for index, source in self.have.items():
            target = os.path.join(self.staging, self.files[index].path)
            copy_file(source, target)
            os.chmod(target, self.files[index].mode)
            begin, end = self.pieces.of(index)
            self._mark(begin, end)

    # ---- pieces

    def take(self, number: int, data: Data, piece: Piece) -> None:
        """Verify a piece, which is `pieces[number]`, and put it in its place."""
        if piece.size == self.files[piece.file].size:
            return self.take_file(piece.file, data)
        self._verify(piece, sha256(data).digest())
        write_at(self._handle_of(piece.file), data, piece.offset)
        self._mark(number, number + 1)

    def take_file(self, index: int, data: Data) -> None:
        """Verify a file of one piece, and write it: seven system calls, since there may be very many."""
        path, _, mode, _, content = self.files[index]
        if sha256(data).hexdigest() != content:
            raise _damaged(path)
        handle = os.open(f"{self.staging}/{path}", NEW_FILE, mode)
        try:
            if os.write(handle, data) != len(data):
                write_at(handle, data, 0)
            status = os.fstat(handle)
            # Add the permissions that the umask removed.
            if status.st_mode & 0o7777 != mode:
                os.fchmod(handle, mode)
                status = os.fstat(handle)
        finally:
            os.close(handle)
        self.written[path] = status
        number = self.pieces.starts[index]
        if self.is_shared:
            self._mark(number, number + 1)
        else:
            self.ready[number] = 1

    def take_from(self, number: int, fill: Callable[[memoryview], None]) -> None:
        """Do the same for a piece that is read in steps; a wrong piece is written, but does not count."""
        piece = self.pieces[number]
        if piece.size <= STEP:
            view = self._buffer[: piece.size]
            fill(view)
            return self.take(number, view, piece)
        digest, done = sha256(), 0
        handle = self._handle_of(piece.file)
        while done < piece.size:
            view = self._buffer[: piece.size - done]
            fill(view)
            digest.update(view)
            write_at(handle, view, piece.offset + done)
            done += len(view)
        self._verify(piece, digest.digest())
        self._mark(number, number + 1)

    def _verify(self, piece: Piece, digest: bytes) -> None:
        if digest != piece.digest:
            raise _damaged(self.files[piece.file].path)

    def _handle_of(self, file: int) -> int:
        """Return the large file that is being written."""
        if self._handle is None or self._handle[0] != file:
            self._close_handle()
            path = os.path.join(self.staging, self.files[file].path)
            self._handle = file, os.open(path, os.O_WRONLY | os.O_CREAT | os.O_NOFOLLOW, 0o600)
        return self._handle[1]

    def _close_handle(self) -> None:
        if self._handle is not None:
            os.close(self._handle[1])
            self._handle = None

    def _mark(self, begin: int, end: int) -> None:
        if not self.is_shared:
            self.ready[begin:end] = b"\1" * (end - begin)
            return
        with self._change:
            self.ready[begin:end] = b"\1" * (end - begin)
            self._change.notify_all()

    def await_piece(self, number: int, timeout: float) -> bool:
        """Return True if a piece is there after at most `timeout` seconds.

        Raise ValueError if none will come any more.
        """
        with self._change:
            if not self.ready[number] and not self.closed:
                self._change.wait(timeout)
            if self.closed:
                raise ValueError("the transfer ended")
            return bool(self.ready[number])

    def open_file(self, file: int) -> int:
        """Open a file of the tree for reading, before or after the tree was moved."""
        folder = self._lock if self._moved is None else self._moved
        return os.open(self.files[file].path, os.O_RDONLY | os.O_NOFOLLOW, dir_fd=folder)

    # ---- switching in

    def finish(self) -> None:
        """Add the links and the remaining modes to the tree that is aside."""
        self._close_handle()
        if not all(self.ready):
            raise Refused("cut", "the transfer ended too early; the old tree is untouched")
        for entry in self.entries:
            if entry.kind == "l":
                os.symlink(entry.content, os.path.join(self.staging, entry.path))
        for index, entry in enumerate(self.files):
            if index not in self.have and entry.path not in self.written:
                path = f"{self.staging}/{entry.path}"
                if stat.S_IMODE(os.lstat(path).st_mode) != entry.mode:
                    os.chmod(path, entry.mode)
        for entry in reversed(self.entries):
            if entry.kind == "d":
                os.chmod(os.path.join(self.staging, entry.path), entry.mode | 0o700)

    def keep_others(self, old: Sequence[str]) -> None:
        """Move further files of the present tree into the new one.

        These are the files that `old`, an earlier transfer, did not bring.
        """
        if not os.path.isdir(self.dest):
            return
        known = set(old) | {item.path for item in self.entries}
        for path, entry in tree.walk(self.dest, "", lambda path, is_dir: path.endswith("__pycache__")):
            target = os.path.join(self.staging, path)
            if path in known or os.path.lexists(target) or not os.path.isdir(os.path.dirname(target)):
                continue
            if entry.is_dir(follow_symlinks=False):
                os.mkdir(target, 0o755)
            elif entry.is_symlink():
                os.symlink(os.readlink(entry.path), target)
            elif entry.is_file():
                # It stays the same file, so a program can continue to write it.
                os.link(entry.path, target)

    def switch(self) -> None:
        """Put the new tree in place of the old one, in one step if the kernel can, else in two renames."""
        if self._single:
            os.replace(os.path.join(self.staging, self.files[0].path), self.dest)
            self._moved = os.open(self.root, os.O_RDONLY | os.O_DIRECTORY)
            return
        self._clear_stale()
        present = status_of(self.dest)
        if present is None:
            os.rename(self.staging, self.dest)
            return
        # Renamed first: the next transfer may use the folder aside right away.
        aside = f"{self.staging}-{os.getpid()}-{time.monotonic_ns()}"
        os.rename(self.staging, aside)
        if stat.S_ISDIR(present.st_mode):
            os.chmod(aside, stat.S_IMODE(present.st_mode) | 0o700)
        if not exchange(aside, self.dest):
            old = aside + ".old"
            os.rename(self.dest, old)
            os.rename(aside, self.dest)
            os.rename(old, aside)
        remove_tree(aside)

    def close(self) -> None:
        """Close what reads the tree; what is aside stays there for the next time, unless it is empty."""
        with self._change:
            self.closed = True
            self._change.notify_all()
        self._close_handle()
        if self._lock is not None:
            present = status_of(self.staging)
            if (
                present is not None
                and present.st_ino == os.fstat(self._lock).st_ino
                and not os.listdir(self._lock)
            ):
                os.rmdir(self.staging)
            os.close(self._lock)
            self._lock = None
        if self._moved is not None:
            os.close(self._moved)
            self._moved = None

    def _clear_stale(self) -> None:
        parent, name = os.path.split(self.dest)
        for entry in os.scandir(parent):
            stale = (
                entry.name.startswith(f".{name}.incoming-")
                and time.time() - entry.stat(follow_symlinks=False).st_mtime > STALE
            )
            if stale and not os.path.exists(f"/proc/{entry.name.rsplit('-', 2)[1]}"):
                remove_tree(entry.path)


def _damaged(path: str) -> Refused:
    subject = f"{path} changed while it was sent, or arrived damaged"
    return Refused("damaged", f"{subject}; the old tree is untouched")
