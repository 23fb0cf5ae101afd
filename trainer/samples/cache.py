"""Indices that all ranks of a node and all attempts have in common: built once, kept in a file, mapped.

One file an index: a line of JSON that says what it belongs to and where its arrays lie, then the arrays. Its
name is the hash of what it belongs to (the content of the corpus' own index among it), so that no other's is
taken for it. It is written aside and renamed, and one that is not whole is built anew.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import os
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import IO, Any

import numpy as np
from numpy.typing import NDArray

from trainer.files import sync

FORMAT = 1
ENDING = ".index"
# Bytes.
ALIGNED = 64
LONGEST_HEAD = 1 << 20
# After which an index makes room, when another is built.
UNUSED_DAYS = 30
DAY = 86400.0

Arrays = dict[str, NDArray[Any]]


class IndexCache:
    """A folder of indices on this node; without one (None), or where it cannot be written, they are kept in memory.

    `notes` says what a user should know of it, `built` counts what was not there.
    """

    def __init__(self, folder: Path | None) -> None:
        self.folder = folder
        self.notes: list[str] = []
        self.built = 0

    def arrays(self, about: Mapping[str, Any], build: Callable[[], Arrays]) -> Arrays:
        """What `build` makes of `about`. The first process of a node builds it; the others wait for its file.

        Call it before any other rank is awaited: building takes as long as it takes.
        """
        if self.folder is None:
            return self._build(build)
        text = json.dumps({"format": FORMAT, **about}, sort_keys=True).encode()
        about = json.loads(text)
        path = self.folder / (hashlib.sha256(text).hexdigest()[:32] + ENDING)
        found = read(path, about)
        if found is not None:
            return found
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            with locked(path.with_suffix(".lock")):
                return read(path, about) or self._build_file(path, about, build)
        except OSError as error:
            reason = error.strerror or str(error)
            self.notes.append(f"note: {self.folder}: {reason}; each rank has its own index in memory")
            return self._build(build)

    def _build(self, build: Callable[[], Arrays]) -> Arrays:
        self.built += 1
        return build()

    def _build_file(self, path: Path, about: Mapping[str, Any], build: Callable[[], Arrays]) -> Arrays:
        arrays = self._build(build)
        prune(path.parent)
        write(path, about, arrays)
        return read(path, about) or arrays


def write(path: Path, about: Mapping[str, Any], arrays: Arrays) -> None:
    """Write an index whole or not at all."""
    aside = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with aside.open("wb") as stream:
            stream.write(_head(about, arrays))
            for array in arrays.values():
                stream.write(bytes(-stream.tell() % ALIGNED))
                stream.write(np.ascontiguousarray(array).data)
        sync(aside)
        os.replace(aside, path)
    finally:
        aside.unlink(missing_ok=True)
    sync(path.parent)


def _head(about: Mapping[str, Any], arrays: Arrays) -> bytes:
    """The first line: what the index belongs to, and the place of each array after it."""
    start, parts = 0, {}
    for name, array in arrays.items():
        start += -start % ALIGNED
        parts[name] = {"type": array.dtype.str, "shape": list(array.shape), "at": start}
        start += array.nbytes
    line = json.dumps({"about": about, "arrays": parts, "bytes": start}).encode()
    return line + b" " * (-(len(line) + 1) % ALIGNED) + b"\n"


def read(path: Path, about: Mapping[str, Any]) -> Arrays | None:
    """The arrays of an index, mapped; None where there is none, or not one of `about`, or not whole."""
    try:
        with path.open("rb") as stream:
            line = stream.readline(LONGEST_HEAD)
            head = json.loads(line)
            size = os.fstat(stream.fileno()).st_size
            if head["about"] != about or size != len(line) + head["bytes"]:
                return None
            whole = np.memmap(stream, np.uint8, mode="r")
        arrays = {name: _part(whole[len(line) :], part) for name, part in head["arrays"].items()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return None
    with contextlib.suppress(OSError):
        # Used today.
        os.utime(path)
    return arrays


def _part(whole: NDArray[np.uint8], part: Mapping[str, Any]) -> NDArray[Any]:
    dtype, shape = np.dtype(part["type"]), tuple(part["shape"])
    size = int(np.prod(shape, dtype=np.int64)) * dtype.itemsize
    return np.asarray(whole[part["at"] : part["at"] + size].view(dtype).reshape(shape))


def prune(folder: Path) -> None:
    """Remove what nothing has used for a month, and what a killed builder left a day ago."""
    now = time.time()
    for path in folder.iterdir():
        days = 1 if path.suffix == ".tmp" else UNUSED_DAYS
        with contextlib.suppress(OSError):
            if path.suffix in (ENDING, ".lock", ".tmp") and now - path.stat().st_mtime > days * DAY:
                path.unlink()


@contextlib.contextmanager
def locked(path: Path) -> Iterator[None]:
    """Only one process of this node at a time; the kernel frees the lock of one that dies."""
    with path.open("w") as stream:
        _lock(stream)
        yield


def _lock(stream: IO[str]) -> None:
    # A file system without locks makes two builders write the same bytes, one after the other: only slower.
    with contextlib.suppress(OSError):
        fcntl.flock(stream, fcntl.LOCK_EX)
