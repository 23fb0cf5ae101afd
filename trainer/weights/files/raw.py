"""Bytes of files: read on request, and hashed while they are written."""

from __future__ import annotations

import hashlib
import io
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO

import torch
from torch import Tensor

from clusterctl.wire.saved import SavedFile
from trainer.checkpoint.write import bytes_of
from trainer.errors import CheckpointError
from trainer.weights.lazy import Lazy


def stored(file: Path, start: int, size: int) -> Lazy:
    """Return `size` bytes of a file, from byte `start` on, as a row of bytes that is read on use."""
    return Lazy(
        (size,), torch.uint8, lambda first, last: _read_bytes(file, start + first, max(0, last - first))
    )


def _read_bytes(file: Path, start: int, size: int) -> Tensor:
    content = torch.empty(size, dtype=torch.uint8)
    target, done = content.numpy().data, 0
    with file.open("rb", buffering=0) as stream:
        while done < size:
            count = os.preadv(stream.fileno(), [target[done:]], start + done)
            if not count:
                raise CheckpointError(f"{file}: ends before byte {start + size:,}, which its tensors need")
            done += count
    return content


class Hashed(io.RawIOBase):
    """A file of one or more archives; it hashes everything that is written."""

    entry: SavedFile
    """The size and hash of the finished file."""

    def __init__(self, stream: BinaryIO) -> None:
        self._stream, self._start, self.total = stream, 0, 0
        self._digest = hashlib.sha256()

    def begin(self) -> None:
        """Start counting at the beginning of another archive."""
        self._start = self.total

    def finish(self) -> None:
        """Sync the file, and note its size and hash."""
        self._stream.flush()
        os.fsync(self._stream.fileno())
        self.entry = SavedFile(self.total, self._digest.hexdigest())

    def writable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return False

    def tell(self) -> int:
        return self.total - self._start

    def write(self, content: Any) -> int:
        view = memoryview(content).cast("B")
        self._stream.write(view)
        self._digest.update(view)
        self.total += len(view)
        return len(view)


@contextmanager
def hashed_file(file: Path) -> Iterator[Hashed]:
    """Yield a new file, which is synced at the end and then has its `entry`."""
    with file.open("wb") as stream:
        hashed = Hashed(stream)
        yield hashed
        hashed.finish()


def write_tensor(write: Callable[[memoryview], object], tensor: Lazy, wrote: Callable[[int], None]) -> None:
    """Write the numbers of a tensor block by block; `wrote` is called with the bytes of each block."""
    for block in tensor.blocks():
        data = bytes_of(block)
        write(data)
        wrote(len(data))
