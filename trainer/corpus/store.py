"""On-disk state of a build, so that an interrupted build resumes: `.NAME.building/` next to NAME.

plan.json       what is being built; a build with another plan starts from the beginning
journal         one JSON line per part: the length of each file after it, and a checksum of what it added
bin lengths marks hashes    the data of the parts, one after the other
manifest.json   present when everything is made: only publishing the files remains
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import shutil
import socket
import zlib
from collections import Counter
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from numpy.typing import NDArray

from clusterctl.wire.data_requests import Recipe
from clusterctl.wire.typed_json import decode, parse
from trainer.corpus.indexed import manifest_path
from trainer.corpus.worker import EncodedPart
from trainer.errors import DataError
from trainer.files import replace_file, sync, write_whole

SPOOLS = ("bin", "lengths", "marks", "hashes")
LOCK, PLAN, JOURNAL, MANIFEST = "lock", "plan.json", "journal", "manifest.json"
# Descriptions of bad lines that a build keeps; all bad lines are counted.
BAD_KEPT = 100


def work_folder(prefix: Path) -> Path:
    return prefix.with_name(f".{prefix.name}.building")


def hashes_path(prefix: Path) -> Path:
    return prefix.with_name(prefix.name + ".hashes")


class Lock:
    """Allow one build of one output at a time; the system releases the lock when its process ends."""

    def __init__(self, folder: Path) -> None:
        while True:
            folder.mkdir(parents=True, exist_ok=True)
            self._handle = os.open(folder / LOCK, os.O_RDWR | os.O_CREAT, 0o644)
            try:
                fcntl.flock(self._handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
                if os.fstat(self._handle).st_ino == (folder / LOCK).stat().st_ino:
                    break
            except BlockingIOError:
                whose = os.read(self._handle, 200).decode(errors="replace").strip()
                os.close(self._handle)
                raise DataError(
                    f"{folder}: another build of the same output is running ({whose or 'it just began'})",
                    "wait until it ends, or use another --output",
                ) from None
            except FileNotFoundError:
                # The other build has finished and removed its folder.
                pass
            os.close(self._handle)
        os.ftruncate(self._handle, 0)
        os.write(self._handle, f"process {os.getpid()} on {socket.gethostname()}\n".encode())

    def release(self) -> None:
        os.close(self._handle)


@dataclass(frozen=True)
class BuildPlan:
    """Everything that determines the bytes of the result: parts made with another plan are unusable."""

    inputs: list[list[object]]
    """Name, kind, size and modification time of each input."""
    tokenizer: str
    """Hash of the tokenizer."""
    eod: int
    recipe: Recipe
    language_model: list[int]
    """Its size and modification time; empty without one."""
    part_bytes: int

    def as_json(self) -> dict[str, object]:
        """Return what plan.json holds; the keys are shown to the user when one has changed."""
        return {
            "inputs": self.inputs,
            "tokenizer": self.tokenizer,
            "end of document": self.eod,
            "options": asdict(self.recipe),
            "language model": self.language_model,
            "part": self.part_bytes,
        }

    def changes(self, folder: Path) -> list[str] | None:
        """Return the keys whose values differ from the plan.json of an earlier build; None without a readable one."""
        try:
            before = json.loads((folder / PLAN).read_bytes())
        except (OSError, ValueError, RecursionError):
            return None
        if not isinstance(before, dict):
            return None
        now = self.as_json()
        return sorted(key for key in {*now, *before} if now.get(key) != before.get(key))


@dataclass(frozen=True)
class JournalEntry:
    """One part that is complete on disk."""

    part: int
    mark: str
    sizes: dict[str, int]
    """The length of each file after this part."""
    crc: int
    """Checksum of what the part added."""
    facts: dict[str, int]
    bad: tuple[str, ...]


class Store:
    """The files of a build in progress; the caller holds its lock."""

    def __init__(self, folder: Path, plan: BuildPlan, dtype: np.dtype[Any], vocab: int) -> None:
        self.folder = folder
        self.dtype = dtype
        self.note = ""
        """A message for the user about an earlier build in this folder; empty without one."""
        self.marks: list[str] = []
        """The checksums of the finished parts' inputs, in order."""
        self.facts: Counter[str] = Counter()
        self.bad: list[str] = []
        self.counts = np.zeros(vocab, np.int64)
        """How often each id occurs in the tokens."""
        self.digest = hashlib.sha256()
        """The SHA-256 of all tokens so far."""
        self._sizes = dict.fromkeys(SPOOLS, 0)
        self._begin(plan)
        self._files: dict[str, BinaryIO] = {}
        for name in SPOOLS:
            self._files[name] = (folder / name).open("ab", buffering=0)
        self._journal = (folder / JOURNAL).open("ab", buffering=0)

    # -- resuming

    def _begin(self, plan: BuildPlan) -> None:
        changed = plan.changes(self.folder)
        if changed == []:
            self._resume()
            return
        if changed:
            self.note = f"started again: {', '.join(changed)} changed since {self.folder.name} was made"
        for name in (MANIFEST, JOURNAL, *SPOOLS):
            (self.folder / name).unlink(missing_ok=True)
        replace_file(self.folder / PLAN, json.dumps(plan.as_json(), indent=1).encode())

    def _resume(self) -> None:
        """Keep the parts before the first incomplete one; truncate the files after them."""
        good = 0
        with (self.folder / JOURNAL).open("a+b") as journal:
            journal.seek(0)
            for line in journal:
                if not self._is_whole(line):
                    break
                good += len(line)
            journal.truncate(good)
        for name in SPOOLS:
            with (self.folder / name).open("ab") as file:
                file.truncate(self._sizes[name])
        if self.marks:
            self.note = f"resuming after {len(self.marks)} parts, {self._sizes['bin']:,} bytes of tokens"

    def _is_whole(self, line: bytes) -> bool:
        try:
            entry = decode(JournalEntry, parse(line))
            if not line.endswith(b"\n") or entry.part != len(self.marks):
                return False
            added = {name: self._read(name, self._sizes[name], entry.sizes[name]) for name in SPOOLS}
        except (ValueError, KeyError, TypeError, OSError):
            return False
        if any(len(data) != entry.sizes[name] - self._sizes[name] for name, data in added.items()):
            return False
        if _crc(added) != entry.crc:
            return False
        self._account(entry, added["bin"])
        return True

    def _read(self, name: str, begin: int, end: int) -> bytes:
        with (self.folder / name).open("rb") as file:
            file.seek(begin)
            return file.read(end - begin)

    # -- adding parts

    def append(self, made: EncodedPart) -> None:
        """Append the next part: first its data, then its journal line, without which the data does not count."""
        reached = self._sizes["lengths"] // 4
        added = {
            "bin": made.tokens.tobytes(),
            "lengths": made.lengths.astype("<i4").tobytes(),
            "marks": (np.cumsum(made.counts, dtype=np.int64) + reached).astype("<i8").tobytes(),
            "hashes": made.hashes,
        }
        for name, data in added.items():
            write_whole(self._files[name].fileno(), data)
        sizes = {name: self._sizes[name] + len(data) for name, data in added.items()}
        entry = JournalEntry(made.number, made.mark, sizes, _crc(added), made.facts, tuple(made.bad))
        write_whole(self._journal.fileno(), json.dumps(asdict(entry)).encode() + b"\n")
        self._account(entry, added["bin"])

    def _account(self, entry: JournalEntry, tokens: bytes) -> None:
        self.marks.append(entry.mark)
        self.facts.update(entry.facts)
        self.bad += entry.bad[: BAD_KEPT - len(self.bad)]
        self._sizes = entry.sizes
        self.digest.update(tokens)
        self.counts += np.bincount(np.frombuffer(tokens, self.dtype), minlength=len(self.counts))

    # -- the current state

    @property
    def documents(self) -> int:
        return self._sizes["marks"] // 8

    @property
    def sequences(self) -> int:
        return self._sizes["lengths"] // 4

    @property
    def tokens(self) -> int:
        return self._sizes["bin"] // self.dtype.itemsize

    def path(self, name: str) -> Path:
        return self.folder / name

    def replaced(self, sizes: dict[str, int], digest: Any, counts: NDArray[np.int64]) -> None:
        """Record that the files were rewritten with fewer documents."""
        self._sizes, self.digest, self.counts = {**self._sizes, **sizes}, digest, counts

    def close(self) -> None:
        for file in (*self._files.values(), self._journal):
            file.close()


def _crc(added: dict[str, bytes]) -> int:
    crc = 0
    for name in SPOOLS:
        crc = zlib.crc32(added[name], crc)
    return crc


def put_in_place(folder: Path, prefix: Path) -> None:
    """Move the finished files to their final names and remove the work folder.

    The old index is removed first, and the manifest is moved last. After an interruption, a second call
    gives the same result.
    """
    if (folder / "bin").exists() or (folder / "idx").exists():
        prefix.with_name(prefix.name + ".idx").unlink(missing_ok=True)
        manifest_path(prefix).unlink(missing_ok=True)
        for ending in ("bin", "idx"):
            if (folder / ending).exists():
                os.replace(folder / ending, prefix.with_name(f"{prefix.name}.{ending}"))
        sync(prefix.parent)
    for name in (JOURNAL, "lengths", "marks", "hashes"):
        (folder / name).unlink(missing_ok=True)
    os.replace(folder / MANIFEST, manifest_path(prefix))
    sync(prefix.parent)
    shutil.rmtree(folder)
