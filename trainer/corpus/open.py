"""Open files as streams of bytes: decompressed by their ending, hashed and counted while they are read."""

from __future__ import annotations

import bz2
import gzip
import hashlib
import io
import lzma
import sys
import zlib
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

from clusterctl.wire.pair import InputRecord
from trainer.env import install_command
from trainer.errors import DataError
from trainer.files import blocks

PACKED = (".gz", ".bz2", ".xz", ".zst")
STDIN = "-"


@dataclass
class InputDigest:
    """What was read of one input, for the manifest."""

    name: str
    bytes: int = 0
    digest: Any = field(default_factory=hashlib.sha256)

    def record(self) -> InputRecord:
        return InputRecord(self.name, self.bytes, self.digest.hexdigest())


def open_stream(name: str, seen: InputDigest) -> BinaryIO:
    """Return the decompressed bytes of a file or of standard input as a stream."""
    try:
        inner = sys.stdin.buffer if name == STDIN else open(name, "rb", buffering=0)  # noqa: SIM115
    except OSError as error:
        raise DataError(f"{name}: {error.strerror}") from None
    raw = io.BufferedReader(_Counted(inner, seen), 1 << 20)
    unpack: Any = {".gz": gzip.GzipFile, ".bz2": bz2.BZ2File, ".xz": lzma.LZMAFile, ".zst": _zst}
    ending = Path(name).suffix
    if ending not in unpack:
        return raw
    stream: Any = gzip.GzipFile(fileobj=raw) if ending == ".gz" else unpack[ending](raw)
    found: BinaryIO = stream
    return found


def read_some(stream: BinaryIO, size: int, name: str) -> bytes:
    """Return up to `size` bytes; report a file that ends in the middle of its compressed data as damaged."""
    try:
        return stream.read(size)
    except (OSError, EOFError, zlib.error, lzma.LZMAError) as error:
        reason = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
        raise DataError(f"{name}: cannot be read to its end: {reason}", "fetch or unpack it again") from None


class _Counted(io.RawIOBase):
    """A file that is hashed while it is read."""

    def __init__(self, inner: BinaryIO, seen: InputDigest) -> None:
        self._inner, self._seen = inner, seen

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        count = self._inner.readinto(buffer)  # type: ignore[attr-defined]
        self._seen.digest.update(memoryview(buffer)[:count])
        self._seen.bytes += count
        return int(count)

    def close(self) -> None:
        self._inner.close()
        super().close()


def _zst(raw: BinaryIO) -> BinaryIO:
    try:
        import zstandard
    except ImportError:
        raise DataError(
            "a .zst file needs the package zstandard",
            f"{install_command('data')}; or unpack it with `zstd -d`",
        ) from None
    return io.BufferedReader(_Zst(raw, zstandard), 1 << 20)


class _Zst(io.RawIOBase):
    """A reader of concatenated zstd frames; the library's own reader accepts a truncated file."""

    def __init__(self, raw: BinaryIO, library: Any) -> None:
        self._raw, self._library = raw, library
        self._frame = library.ZstdDecompressor().decompressobj()
        self._began = False
        self._ready = memoryview(b"")

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        while not self._ready:
            packed = (self._frame.unused_data if self._frame.eof else b"") or self._raw.read(1 << 16)
            if not packed:
                if self._began and not self._frame.eof:
                    raise EOFError("it ends in the middle of a frame")
                return 0
            if self._frame.eof:
                self._frame = self._library.ZstdDecompressor().decompressobj()
            self._began = True
            try:
                self._ready = memoryview(self._frame.decompress(packed))
            except self._library.ZstdError as error:
                raise OSError(f"not zstd: {error}") from None
        count = min(len(buffer), len(self._ready))
        buffer[:count] = self._ready[:count]
        self._ready = self._ready[count:]
        return count


def stamp(name: str) -> tuple[int, int] | None:
    """Return values that change when a file is written to."""
    if name == STDIN:
        return None
    status = Path(name).stat()
    return status.st_size, status.st_mtime_ns


def hash_whole(path: Path, seen: InputDigest) -> None:
    """Read a whole file to hash it."""
    for block in blocks(path):
        seen.digest.update(block)
        seen.bytes += len(block)
