"""One archive with all that a closed network needs: wheels, code and tokenizer. Equal content gives equal bytes.

A bundle is an uncompressed tar file (wheels are compressed already). Its first member lists every other one with
its size and SHA-256. Readers refuse everything else: links, devices, paths outside the bundle, unknown members.
"""

from __future__ import annotations

import hashlib
import io
import json
import os
import re
import tarfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import IO

from clusterctl.errors import Fault, InputFaults, UsageError
from clusterctl.provision.lock import LOCK, Lock, parse_lock
from clusterctl.provision.wheelhouse import sha256
from clusterctl.wire.typed_json import BadValue, decode, parse

FORMAT = 1
LIST = "bundle.json"
WHEELS, CODE, TOKENIZER = "wheelhouse", "code", "tokenizer"
PARTS = (WHEELS, CODE, TOKENIZER)
# Limits for data that is read before it is verified.
MOST_LIST, MOST_FILES = 64 << 20, 200_000
PIECE = 1 << 20
SAFE = re.compile(r"[^\x00-\x1f\x7f\\]+\Z")


@dataclass(frozen=True)
class Member:
    """One file of a bundle."""

    path: str
    size: int
    sha256: str
    executable: bool = False


@dataclass(frozen=True)
class Contents:
    """The list at the beginning of a bundle."""

    format: int
    files: tuple[Member, ...]

    def part(self, name: str) -> list[Member]:
        """Return the files of one part: wheelhouse, code or tokenizer."""
        return [member for member in self.files if member.path.startswith(f"{name}/")]

    @property
    def size(self) -> int:
        return sum(member.size for member in self.files)


# ---- write


@dataclass(frozen=True)
class Input:
    """A local file and its path in the bundle."""

    path: str
    source: Path


def write_bundle(output: Path, inputs: list[Input]) -> tuple[Contents, str]:
    """Write a bundle; return its list and the SHA-256 of the file, which appears only when it is complete."""
    ordered = sorted(inputs, key=lambda item: (item.path != f"{WHEELS}/{LOCK}", item.path))
    members = tuple(_member(item) for item in ordered)
    contents = Contents(FORMAT, members)
    aside = output.with_name(f".{output.name}.{os.getpid()}.new")
    try:
        with aside.open("xb") as file:
            with tarfile.open(fileobj=file, mode="w", format=tarfile.PAX_FORMAT) as archive:
                text = json.dumps(asdict(contents), indent=1, sort_keys=True).encode()
                archive.addfile(_header(LIST, len(text), False), io.BytesIO(text))
                for item, member in zip(ordered, members, strict=True):
                    with item.source.open("rb") as source:
                        _add(archive, member, source)
            file.flush()
            os.fsync(file.fileno())
        os.replace(aside, output)
    except OSError as problem:
        aside.unlink(missing_ok=True)
        place = output if problem.filename in (None, str(aside)) else problem.filename
        raise UsageError(f"{place}: {problem.strerror}", "check the folder and its space") from None
    except BaseException:
        aside.unlink(missing_ok=True)
        raise
    return contents, sha256(output)


def _member(item: Input) -> Member:
    status = item.source.stat()
    return Member(item.path, status.st_size, sha256(item.source), bool(status.st_mode & 0o100))


def _add(archive: tarfile.TarFile, member: Member, source: IO[bytes]) -> None:
    reader = _Hashing(source)
    try:
        archive.addfile(_header(member.path, member.size, member.executable), reader)
    except OSError as problem:
        if problem.errno is not None:
            raise
        # tarfile raises this for a file that became shorter.
        raise UsageError(f"{source.name} changed while it was read", "run the command again") from None
    if reader.hash.hexdigest() != member.sha256:
        raise UsageError(f"{source.name} changed while it was read", "run the command again")


class _Hashing(io.RawIOBase):
    """A file that is hashed while it is read."""

    def __init__(self, source: IO[bytes]) -> None:
        self._source, self.hash = source, hashlib.sha256()

    def read(self, size: int = -1, /) -> bytes:
        data = self._source.read(size)
        self.hash.update(data)
        return data


def _header(path: str, size: int, executable: bool) -> tarfile.TarInfo:
    """Return a header without owner and time, which would differ between two machines."""
    header = tarfile.TarInfo(path)
    header.size, header.mode = size, 0o755 if executable else 0o644
    return header


# ---- read


class Bundle:
    """A bundle whose list was read and checked; the files are verified while they are unpacked."""

    def __init__(self, path: Path, archive: tarfile.TarFile) -> None:
        self.path, self._archive = path, archive
        self.contents = self._list()

    def _list(self) -> Contents:
        header = self._next()
        if header is None or header.name != LIST or header.size > MOST_LIST:
            raise self._wrong(f"its first member is not {LIST}")
        try:
            contents = decode(Contents, parse(self._read(header)))
        except BadValue as problem:
            raise self._wrong(f"{LIST}: {problem}") from None
        if contents.format != FORMAT:
            raise UsageError(f"{self.path}: it has format {contents.format}", "use the version that wrote it")
        faults = list(_faults_of(contents))
        if faults:
            raise InputFaults([Fault(f"{self.path}: {where}", text) for where, text in faults[:20]], REMEDY)
        return contents

    def lock(self) -> Lock:
        """Return the lock file, which is the second member."""
        first = self.contents.files[0] if self.contents.files else None
        if first is None or first.path != f"{WHEELS}/{LOCK}":
            raise UsageError(f"{self.path}: it has no wheelhouse", "make it with --wheelhouse FOLDER")
        header = self._next()
        self._require(header, first)
        assert header is not None
        data = self._read(header)
        if hashlib.sha256(data).hexdigest() != first.sha256:
            raise self._wrong(f"{first.path} differs from its SHA-256")
        try:
            return parse_lock(data.decode(), f"{self.path}:{first.path}")
        except UnicodeDecodeError:
            raise self._wrong(f"{first.path} is not UTF-8 text") from None

    def unpack(self, folder: Path, parts: tuple[str, ...], report: Callable[[int], None]) -> None:
        """Write the files of some parts below a new folder, and verify every file of the bundle."""
        with tarfile.open(self.path, "r:") as archive:
            again = Bundle(self.path, archive)
            for member in again.contents.files:
                header = again._next()
                again._require(header, member)
                assert header is not None
                wanted = member.path.partition("/")[0] in parts
                again._copy(header, member, folder / member.path if wanted else None, report)
            if again._next() is not None:
                raise again._wrong("more members follow the listed ones")

    def _next(self) -> tarfile.TarInfo | None:
        try:
            return self._archive.next()
        except (tarfile.TarError, OSError, ValueError, UnicodeError, OverflowError, EOFError) as problem:
            raise self._wrong(f"it is not a complete tar file: {problem}") from None

    def _read(self, header: tarfile.TarInfo) -> bytes:
        file = self._archive.extractfile(header) if header.isreg() and not header.issparse() else None
        data = file.read(MOST_LIST) if file is not None and header.size <= MOST_LIST else b""
        if file is None or len(data) != header.size:
            raise self._wrong(f"{header.name} is not complete")
        return data

    def _require(self, header: tarfile.TarInfo | None, member: Member) -> None:
        if header is None:
            raise self._wrong(f"it ends before {member.path}")
        if header.name != member.path:
            raise self._wrong(f"{header.name[:80]!r} is in the place of {member.path}")
        if not header.isreg() or header.issparse():
            raise self._wrong(f"{member.path} is not a plain file")
        if header.size != member.size:
            raise self._wrong(f"{member.path} has {header.size} bytes, its list says {member.size}")

    def _copy(
        self, header: tarfile.TarInfo, member: Member, to: Path | None, report: Callable[[int], None]
    ) -> None:
        file = self._archive.extractfile(header)
        assert file is not None
        found = hashlib.sha256()
        with _written(to, member.executable) as output:
            try:
                while data := file.read(PIECE):
                    found.update(data)
                    output.write(data)
                    report(len(data))
            except (tarfile.TarError, EOFError) as problem:
                raise self._wrong(f"{member.path} is not complete: {problem}") from None
        if found.hexdigest() != member.sha256:
            raise self._wrong(f"{member.path} differs from its SHA-256")

    def _wrong(self, text: str) -> UsageError:
        return UsageError(f"{self.path}: {text}", REMEDY)


REMEDY = "copy the bundle again, or make it again; nothing of it was used"


@contextmanager
def _written(path: Path | None, executable: bool) -> Iterator[IO[bytes]]:
    if path is None:
        with open(os.devnull, "wb") as nowhere:
            yield nowhere
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    descriptor = os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o755 if executable else 0o644)
    with os.fdopen(descriptor, "wb") as file:
        yield file


def _faults_of(contents: Contents) -> Iterator[tuple[str, str]]:
    """Yield the place and the text of every fault in a bundle's list."""
    if len(contents.files) > MOST_FILES:
        yield LIST, f"more than {MOST_FILES:,} files"
        return
    seen: set[str] = set()
    for number, member in enumerate(contents.files):
        where = f"file {number}"
        parts = member.path.split("/")
        if len(parts) < 2 or parts[0] not in PARTS:
            yield where, f"{member.path[:80]!r} is in none of {', '.join(PARTS)}"
        elif any(part in ("", ".", "..") for part in parts) or not SAFE.match(member.path):
            yield where, f"{member.path[:80]!r} is not a path inside the bundle"
        if member.path in seen:
            yield where, f"{member.path[:80]!r} is listed twice"
        if member.size < 0 or not re.fullmatch(r"[0-9a-f]{64}", member.sha256):
            yield where, "its size or SHA-256 is not valid"
        seen.add(member.path)
    inside = [
        path
        for path in seen
        if any("/".join(path.split("/")[:n]) in seen for n in range(2, path.count("/") + 1))
    ]
    for path in sorted(inside)[:5]:
        yield LIST, f"{path[:80]!r} is below a path that is a file"


@contextmanager
def open_bundle(path: Path) -> Iterator[Bundle]:
    """Open a bundle and check its list."""
    try:
        with tarfile.open(path, "r:") as archive:
            yield Bundle(path, archive)
    except tarfile.TarError as problem:
        raise UsageError(
            f"{path}: it is not a tar file: {problem}", "name an archive of `clusterctl bundle`"
        ) from None
    except OSError as problem:
        raise UsageError(
            f"{problem.filename or path}: {problem.strerror or problem}", "check the path"
        ) from None
