"""Cache sample indices on disk, shared by all ranks of a node and all attempts: built once, then mapped.

Each index is one file: a line of JSON that says what the index belongs to and where its arrays start, then
the arrays. The file is named by the hash of what it belongs to, which includes the content of the corpus
index, so that no two indices can be confused. Files are written aside and renamed; an incomplete file is
rebuilt.
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
# Remove an index that has not been used for this long when another one is built.
UNUSED_DAYS = 30
DAY = 86400.0

Arrays = dict[str, NDArray[Any]]


class IndexCache:
    """A folder of indices on this node. With None, or if the folder cannot be written, indices stay in
    memory.

    `notes` lists messages for the user; `built` counts the indices that were missing.
    """

    def __init__(self, folder: Path | None) -> None:
        self.folder = folder
        self.notes: list[str] = []
        self.built = 0

    def arrays(self, about: Mapping[str, Any], build: Callable[[], Arrays]) -> Arrays:
        """Return the arrays for `about`, from the cache or by calling `build`.

        The first process of a node builds them; the others wait for its file. Call this before any
        collective operation, because building may take long.
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
    """Write an index completely or not at all."""
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
    """Return the first line: what the index belongs to, and the offset of each array."""
    start, parts = 0, {}
    for name, array in arrays.items():
        start += -start % ALIGNED
        parts[name] = {"type": array.dtype.str, "shape": list(array.shape), "at": start}
        start += array.nbytes
    line = json.dumps({"about": about, "arrays": parts, "bytes": start}).encode()
    return line + b" " * (-(len(line) + 1) % ALIGNED) + b"\n"


def read(path: Path, about: Mapping[str, Any]) -> Arrays | None:
    """Return the mapped arrays of an index; None if the file is missing, incomplete or belongs to something
    else."""
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
        # Mark the file as used today.
        os.utime(path)
    return arrays


def _part(whole: NDArray[np.uint8], part: Mapping[str, Any]) -> NDArray[Any]:
    dtype, shape = np.dtype(part["type"]), tuple(part["shape"])
    size = int(np.prod(shape, dtype=np.int64)) * dtype.itemsize
    return np.asarray(whole[part["at"] : part["at"] + size].view(dtype).reshape(shape))


def prune(folder: Path) -> None:
    """Remove indices unused for a month, and files that a killed builder left more than a day ago."""
    now = time.time()
    for path in folder.iterdir():
        days = 1 if path.suffix == ".tmp" else UNUSED_DAYS
        with contextlib.suppress(OSError):
            if path.suffix in (ENDING, ".lock", ".tmp") and now - path.stat().st_mtime > days * DAY:
                path.unlink()


@contextlib.contextmanager
def locked(path: Path) -> Iterator[None]:
    """Hold a lock that admits one process of this node; the kernel releases it when the process dies."""
    with path.open("w") as stream:
        _lock(stream)
        yield


def _lock(stream: IO[str]) -> None:
    # Without file locks two processes may write the same bytes one after the other, which is only slower.
    with contextlib.suppress(OSError):
        fcntl.flock(stream, fcntl.LOCK_EX)
