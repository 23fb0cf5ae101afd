"""The folder that a conversion writes: under a temporary name, continued after a kill, renamed when it is complete."""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import os
import shutil
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

from clusterctl.wire.saved import SavedFile
from trainer.checkpoint.disk import disk_failures
from trainer.errors import InputError, TrainingFailed
from trainer.files import sha256, sync

UNFINISHED = ".unfinished-"
JOURNAL = ".journal"


Report = Callable[[int, int], None]
"""Called with the bytes that are done, and the total."""


def silent(done: int, total: int) -> None:
    """Report nothing."""


class Target:
    """The files of a folder that appears only when it is complete. Files in the journal are not written again."""

    def __init__(
        self, path: Path, aside: Path, journal: int, done: dict[str, SavedFile], report: Report = silent
    ) -> None:
        self.path, self.aside, self._report = path, aside, report
        self._journal, self._done = journal, done
        self.total, self._wrote = 0, 0
        """The bytes of all tensors, with which reports compare those that are written."""
        self.resumed = len(done)
        """How many files were already finished by an earlier conversion that was killed."""

    @property
    def entries(self) -> Mapping[str, SavedFile]:
        """Return the journal's entry of each finished file."""
        return self._done

    def write(self, name: str, write: Callable[[Path], SavedFile]) -> SavedFile:
        """Let `write` make a file unless it is already finished; return its entry."""
        if name not in self._done:
            file = self.aside / name
            file.parent.mkdir(parents=True, exist_ok=True)
            file.unlink(missing_ok=True)
            entry = write(file)
            line = json.dumps({"name": name, **entry.as_json()}) + "\n"
            os.write(self._journal, line.encode())
            os.fsync(self._journal)
            self._done[name] = entry
        return self._done[name]

    def forget(self, *names: str) -> None:
        """Write these files again, even if an earlier conversion finished them."""
        for name in names:
            self._done.pop(name, None)

    def write_bytes(self, name: str, content: bytes) -> SavedFile:
        """Write a small file."""

        def write(file: Path) -> SavedFile:
            file.write_bytes(content)
            sync(file)
            return SavedFile(len(content), hashlib.sha256(content).hexdigest())

        return self.write(name, write)

    def write_files(self, files: Mapping[str, Path | bytes]) -> None:
        """Write small files, given their content or files to copy."""
        for name, content in files.items():
            self.write_bytes(name, content if isinstance(content, bytes) else content.read_bytes())

    def wrote(self, size: int) -> None:
        """Report that more bytes of tensors are written."""
        if size and self._wrote < self.total:
            self._wrote = min(self._wrote + size, self.total)
            self._report(self._wrote, self.total)

    def write_tensors(self, name: str, size: int, write: Callable[..., SavedFile]) -> None:
        """Let `write` make a file of `size` bytes of tensors, of which it tells `wrote`; verify the file."""
        finished = name in self._done
        self.write(name, lambda file: write(file, wrote=self.wrote))
        if finished:
            self.wrote(size)
        self.verify(name)

    def verify(self, name: str) -> None:
        """Read a file again and compare it with what was written."""
        if sha256(self.aside / name) != self._done[name].sha256:
            problem = f"{self.path / name}: the disk does not return what was written to it"
            raise TrainingFailed(problem, "check the disk of this folder, and try again")

    def verify_all(self, verify: Callable[[Path], object]) -> None:
        """Let `verify` compare the whole folder with its own records."""
        verify(self.aside)

    def publish(self) -> None:
        """Rename the folder to its final name."""
        (self.aside / JOURNAL).unlink()
        for folder, _, _ in os.walk(self.aside):
            sync(Path(folder))
        with contextlib.suppress(FileNotFoundError, OSError):
            # The final name may belong to an empty folder.
            self.path.rmdir()
        os.rename(self.aside, self.path)
        sync(self.path.parent)


class Rehearsal(Target):
    """A target that writes nothing, so that a conversion only makes its checks."""

    def __init__(self, path: Path) -> None:
        super().__init__(path, path, -1, {})

    def write(self, name: str, write: Callable[[Path], SavedFile]) -> SavedFile:
        """Record the name of a file."""
        return self._done.setdefault(name, SavedFile(0, ""))

    def verify(self, name: str) -> None:
        """Compare nothing: there is no file."""

    def verify_all(self, verify: Callable[[Path], object]) -> None:
        """Compare nothing: there is no folder."""


def rehearsal(path: Path, need: int) -> Rehearsal:
    """Return a target for a dry run, after the checks that a real conversion makes of its folder."""
    path = path.resolve()
    _refuse_existing(path)
    _check_room(path, need)
    return Rehearsal(path)


@contextlib.contextmanager
def open_target(
    path: Path, identity: Mapping[str, object], need: int, report: Report = silent
) -> Iterator[Target]:
    """Yield the target of a conversion; `identity` distinguishes it from others; `need`: the bytes to write."""
    path = path.resolve()
    _refuse_existing(path)
    aside = path.with_name(f"{UNFINISHED}{path.name}")
    try:
        aside.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InputError(f"{aside}: {error.strerror}", "name another folder with -o") from None
    with disk_failures(path, need):
        journal = os.open(aside / JOURNAL, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        try:
            _lock(journal, path)
            done = _finished(journal, identity, aside)
            with _removed_if_refused(aside, keep=bool(done)):
                _check_room(path, need - sum(entry.bytes for entry in done.values()))
            with _removed_if_refused(aside):
                yield Target(path, aside, journal, done, report)
        finally:
            os.close(journal)


@contextlib.contextmanager
def _removed_if_refused(aside: Path, *, keep: bool = False) -> Iterator[None]:
    """Remove the unfinished folder if the source or the request is refused, because no conversion could continue it."""
    try:
        yield
    except InputError:
        if not keep:
            shutil.rmtree(aside, ignore_errors=True)
        raise


def _refuse_existing(path: Path) -> None:
    if path.exists() and (not path.is_dir() or any(path.iterdir())):
        raise InputError(f"{path} exists", "remove it, or name another folder with -o")


def _lock(journal: int, path: Path) -> None:
    try:
        fcntl.flock(journal, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise InputError(f"{path} is being written by another conversion", "wait for it") from None


def _entry_of(line: str) -> tuple[str, SavedFile] | None:
    """Return a file's name and its journal entry; None for a damaged line, whose file is written again."""
    try:
        entry = json.loads(line)
        name = entry.pop("name")
        sound = isinstance(name, str) and type(entry["bytes"]) is int and isinstance(entry["sha256"], str)
        inside = sound and "\0" not in name and ".." not in name.split("/") and not name.startswith("/")
        return (name, SavedFile(entry["bytes"], entry["sha256"], entry.get("holds"))) if inside else None
    except (ValueError, RecursionError, TypeError, KeyError, AttributeError):
        return None


def _finished(journal: int, identity: Mapping[str, object], aside: Path) -> dict[str, SavedFile]:
    """Return the entries of files that this conversion has finished; remove the files of another conversion."""
    first = json.dumps(identity, sort_keys=True)
    content = os.pread(journal, os.fstat(journal).st_size, 0).decode(errors="replace")
    lines = content.split("\n")
    done = {}
    if lines[0] == first:
        # The last line may be incomplete.
        for line in lines[1:-1]:
            name, entry = _entry_of(line) or ("", SavedFile(0, ""))
            file = aside / name
            if name and file.is_file() and file.stat().st_size == entry.bytes:
                done[name] = entry
        os.ftruncate(journal, len("\n".join(lines[:-1]).encode()) + 1)
    else:
        for found in aside.iterdir():
            if found.name != JOURNAL:
                shutil.rmtree(found) if found.is_dir() else found.unlink()
        os.ftruncate(journal, 0)
        os.pwrite(journal, f"{first}\n".encode(), 0)
        os.fsync(journal)
    os.lseek(journal, 0, os.SEEK_END)
    return done


def _check_room(path: Path, need: int) -> None:
    folder = next(parent for parent in path.parents if parent.is_dir())
    status = os.statvfs(folder)
    free = status.f_bavail * status.f_frsize
    if need > free:
        problem = f"{path}: {need / 1e6:,.0f} MB are needed, and the disk has {free / 1e6:,.0f} MB left"
        raise InputError(problem, "free some space, or name another folder with -o")


def identity_of(folder: Path, more: Mapping[str, object]) -> dict[str, object]:
    """Return an object that distinguishes a source from others: its path, and the size and time of each file."""
    files = sorted(file for file in folder.rglob("*") if file.is_file()) if folder.is_dir() else [folder]
    listing = [
        [str(file.relative_to(folder)), file.stat().st_size, file.stat().st_mtime_ns] for file in files
    ]
    digest = hashlib.sha256(json.dumps(listing).encode()).hexdigest()
    return {"source": str(folder.resolve()), "files": digest, **more}
