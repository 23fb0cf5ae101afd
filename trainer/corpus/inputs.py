"""The inputs of a build: find the files and their kinds, and read them as one stream of parts.

The stream does not depend on the number of workers. Of GLM's caches, `FILE.lazy/{text,text.len.pkl}`, the
pickle is read without executing anything in it.
"""

from __future__ import annotations

import glob
import io
import pickle
import zlib
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from numpy.typing import NDArray

from trainer.corpus.open import (
    PACKED,
    STDIN,
    InputDigest,
    hash_whole,
    open_stream,
    read_some,
    stamp,
)
from trainer.env import install_command
from trainer.errors import DataError
from trainer.files import BAD_PICKLE

ENDINGS = {
    ".jsonl": "jsonl",
    ".ndjson": "jsonl",
    ".json": "jsonl",
    ".txt": "text",
    ".text": "text",
    ".md": "text",
    ".xml": "mediawiki",
    ".parquet": "parquet",
    ".lazy": "lazy",
}
# Bytes of text in a part: 0.1 s of work for one core, so that the other cores wait little for the last part.
PART_BYTES = 4 << 20
# Most bytes of one line, page or file; a longer record is reported as bad.
LONGEST = 128 << 20
SNIFFED = 4096


@dataclass(frozen=True)
class Input:
    """A file, a folder of GLM's cache or standard input, with its kind."""

    name: str
    kind: str

    @property
    def path(self) -> Path:
        return Path(self.name)


@dataclass(frozen=True)
class Piece:
    """Whole records of one input; if they could not be read, no data and the reason in `bad`."""

    name: str
    kind: str
    data: bytes
    line: int = 1
    bad: str = ""
    lengths: Any = None
    """For `lazy`: the tokens of each document."""
    row_group: int = -1
    """For `parquet`: which row group to read."""


@dataclass(frozen=True)
class Part:
    """The unit in which a build works and resumes; the result does not depend on the division into parts."""

    number: int
    pieces: tuple[Piece, ...]

    @property
    def mark(self) -> str:
        """Return a short checksum: a resumed build compares it with that of the finished part."""
        crc = 0
        for piece in self.pieces:
            crc = zlib.crc32(f"{piece.name}\0{piece.kind}\0{piece.line}\0{piece.row_group}\0".encode(), crc)
            crc = zlib.crc32(piece.data, crc)
        return f"{crc:08x}-{sum(len(piece.data) for piece in self.pieces)}"


# -- find ---------------------------------------------------------------------------------------------------


def find_inputs(names: Sequence[str], kind: str = "") -> list[Input]:
    """Return the inputs for files, globs, folders and `-`, in the given order; raise one error with all
    faults."""
    found: list[Input] = []
    faults: list[str] = []
    for name in names:
        some = list(_named(name))
        if not some:
            problem = "no such file, and no match" if glob.has_magic(name) else "no such file"
            faults.append(f"{name}: {'a folder without files' if Path(name).is_dir() else problem}")
        if _is_stream(Path(name)):
            # The first bytes are read twice, and a resumed build reads all again.
            faults.append(f"{name}: a pipe or device, which can be read only once; - is standard input")
            continue
        for path in some:
            try:
                found.append(Input(path, kind or kind_of(path)))
            except DataError as error:
                faults.append(error.message)
    twice = sorted(name for name, count in Counter(source.name for source in found).items() if count > 1)
    faults += [f"{name}: is named twice" for name in twice]
    if faults:
        raise DataError(
            "\n".join(faults), "--input takes files, folders, quoted globs, or - for standard input"
        )
    return found


def _named(name: str) -> Iterator[str]:
    if name == STDIN:
        yield name
        return
    names = (
        sorted(glob.glob(name, recursive=True))
        if glob.has_magic(name) and not Path(name).exists()
        else [name]
    )
    for candidate in names:
        path = Path(candidate)
        if path.is_dir() and path.suffix != ".lazy":
            yield from _inside(path)
        elif path.exists() and (len(names) == 1 or not _is_stream(path)):
            yield candidate


def _inside(folder: Path) -> Iterator[str]:
    for path in sorted(folder.iterdir()):
        if path.name.startswith("."):
            continue
        if path.is_dir() and path.suffix != ".lazy":
            yield from _inside(path)
        elif not _is_stream(path):
            yield str(path)


def _is_stream(path: Path) -> bool:
    """Return whether a path is a pipe or device; one among the files of a folder is no input."""
    return path.exists() and not path.is_file() and not path.is_dir()


def kind_of(name: str) -> str:
    """Return the kind of an input by the ending of its name, else (wiki_00) by its first bytes."""
    if name == STDIN:
        # The reader detects it from the first bytes.
        return ""
    path = Path(name)
    endings = [ending for ending in path.suffixes[-2:] if ending not in PACKED]
    if endings and endings[-1] in ENDINGS:
        return ENDINGS[endings[-1]]
    with closing(open_stream(name, InputDigest(name))) as stream:
        head = read_some(stream, SNIFFED, name)
    kind = sniffed(head)
    if kind == "text" and b"\0" in head:
        raise DataError(f"{name}: binary data, such as a .bin of tokens; --format text reads it nevertheless")
    return kind


def sniffed(head: bytes) -> str:
    """Return the kind that the first bytes of a file suggest; text if they suggest nothing."""
    start = head.removeprefix(b"\xef\xbb\xbf").lstrip()
    if start.startswith(b"PAR1"):
        return "parquet"
    if start.startswith(b"{"):
        return "jsonl"
    if start.startswith(b"<doc "):
        return "wikiextractor"
    return "mediawiki" if start.startswith((b"<mediawiki", b"<?xml")) else "text"


# -- read ---------------------------------------------------------------------------------------------------


class Reader:
    """Read all inputs as parts; `seen` gets the size and hash of each input that was read."""

    def __init__(
        self, inputs: Sequence[Input], each: str = "file", size: int = PART_BYTES, longest: int = LONGEST
    ) -> None:
        self.inputs = inputs
        self.each, self.size, self.longest = each, size, longest
        self.seen: list[InputDigest] = []

    def parts(self) -> Iterator[Part]:
        """Yield parts, each made of pieces until it is full."""
        number, gathered, size = 0, [], 0
        for piece in self._pieces():
            gathered.append(piece)
            size += len(piece.data) + 64 if piece.row_group < 0 else self.size
            if size >= self.size // 2:
                yield Part(number, tuple(gathered))
                number, gathered, size = number + 1, [], 0
        if gathered:
            yield Part(number, tuple(gathered))

    def _pieces(self) -> Iterator[Piece]:
        for source in self.inputs:
            self.seen.append(InputDigest(source.name))
            before = stamp(source.name)
            if source.kind == "parquet":
                yield from _row_groups(source, self.seen[-1])
            elif source.kind == "lazy":
                for data, line, lengths in read_lazy(source.path, self.seen[-1], self.size):
                    yield Piece(source.name, "lazy", data, line, lengths=lengths)
            else:
                yield from self._stream_pieces(source)
            if stamp(source.name) != before:
                raise DataError(
                    f"{source.name}: changed while it was read", "build again while no program writes to it"
                )

    def _stream_pieces(self, source: Input) -> Iterator[Piece]:
        stream = open_stream(source.name, self.seen[-1])
        with closing(stream):
            head = read_some(stream, SNIFFED, source.name)
            kind = source.kind or sniffed(head)
            rest = _after(head, stream, source.name)
            if kind == "jsonl" and head.removeprefix(b"\xef\xbb\xbf").lstrip().startswith(b"["):
                raise DataError(
                    f"{source.name}: is one JSON array, not one document per line",
                    f"jq -c '.[]' {source.name} > lines.jsonl",
                )
            if kind == "text" and self.each == "file":
                ends: tuple[bytes, ...] = ()
            else:
                ends = _ends(kind, self.each, head)
            for data, line, bad in cut(rest, ends, self.size, self.longest):
                yield Piece(source.name, kind, data, line, bad)


def _ends(kind: str, each: str, head: bytes) -> tuple[bytes, ...]:
    """Return the byte strings that end a record."""
    if kind in ("mediawiki", "wikiextractor"):
        return (b"</page>" if kind == "mediawiki" else b"</doc>",)
    if kind == "text" and each == "paragraph":
        return (b"\r\n\r\n" if b"\r\n" in head else b"\n\n",)
    return (b"\n",)


def cut(
    read: Callable[[int], bytes], ends: tuple[bytes, ...], size: int, longest: int
) -> Iterator[tuple[bytes, int, str]]:
    """Yield whole records in blocks of about `size` bytes, each with the number of its first line.

    The blocks depend only on the bytes. A record longer than `longest` is reported and skipped, and is not
    held in memory. Without `ends` the whole input is one record.
    """
    pending, line = bytearray(), 1
    while True:
        pending += _fill(read, size - len(pending))
        if len(pending) < size:
            break
        at = _last(pending, ends)
        while at < 0 and len(pending) <= longest:
            more = _fill(read, size)
            if not more:
                break
            pending += more
            at = _last(pending, ends)
        if at < 0 and len(pending) <= longest:
            # The end of the input ends its last record.
            break
        if at < 0:
            lines, rest = _skip(read, ends, pending, size)
            yield b"", line, f"longer than {longest} bytes"
            line, pending = line + lines, bytearray(rest)
            continue
        block = bytes(pending[:at])
        del pending[:at]
        yield block, line, ""
        line += block.count(b"\n")
    if pending:
        yield bytes(pending), line, ""


def _fill(read: Callable[[int], bytes], size: int) -> bytes:
    """Return `size` bytes, or all that are left."""
    found = bytearray()
    while len(found) < size and (piece := read(size - len(found))):
        found += piece
    return bytes(found)


def _last(data: bytearray, ends: tuple[bytes, ...]) -> int:
    """Return the position after the last end of a record, or -1."""
    return max((at + len(end) for end in ends if (at := data.rfind(end)) >= 0), default=-1)


def _skip(
    read: Callable[[int], bytes], ends: tuple[bytes, ...], pending: bytearray, size: int
) -> tuple[int, bytes]:
    """Skip to the end of a record that is too long; return the number of lines skipped and the bytes after
    it."""
    lines, tail = pending.count(b"\n"), bytes(pending[-16:])
    while more := _fill(read, size):
        joined = tail + more
        at = min((at + len(end) for end in ends if (at := joined.find(end)) >= 0), default=-1)
        if at >= 0:
            passed, rest = joined[len(tail) : at], joined[at:]
            return lines + passed.count(b"\n"), rest
        lines, tail = lines + more.count(b"\n"), more[-16:]
    return lines, b""


def _after(head: bytes, stream: BinaryIO, name: str) -> Callable[[int], bytes]:
    """Return a read function that starts with bytes read earlier."""
    first = io.BytesIO(head)

    def read(size: int) -> bytes:
        return first.read(size) or read_some(stream, size, name)

    return read


# -- kinds that are not read as one stream of bytes ---------------------------------------------------------


def _row_groups(source: Input, seen: InputDigest) -> Iterator[Piece]:
    hash_whole(source.path, seen)
    for number in range(parquet_file(source.name).num_row_groups):
        yield Piece(source.name, "parquet", b"", row_group=number)


def parquet_file(name: str) -> Any:
    """Return an open Parquet file; needs the library of the extra `data`."""
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError:
        raise DataError(f"{name}: needs the package pyarrow", install_command("data")) from None
    try:
        return pyarrow.parquet.ParquetFile(name)
    except (OSError, pyarrow.ArrowInvalid) as error:
        raise DataError(f"{name}: not a Parquet file: {error}") from None


class _Numbers(pickle.Unpickler):
    """Unpickle plain values only: a pickle can call every function that it names."""

    def find_class(self, module: str, name: str) -> Any:
        raise pickle.UnpicklingError(f"it refers to {module}.{name}; only plain numbers are allowed")

    def persistent_load(self, pid: Any) -> Any:
        raise pickle.UnpicklingError("it refers to an object outside the file")


def read_lazy(folder: Path, seen: InputDigest, size: int) -> Iterator[tuple[bytes, int, NDArray[np.int64]]]:
    """Yield blocks of whole documents: their int32 tokens, the number of the first document, and how many
    tokens each has."""
    binary, listing = folder / "text", folder / "text.len.pkl"
    lengths = _lengths(listing, binary)
    hash_whole(listing, seen)
    with binary.open("rb") as stream:
        first = 0
        while first < len(lengths):
            ends = np.cumsum(lengths[first : first + 4096])
            last = first + max(1, int(np.searchsorted(ends * 4, size, side="right")))
            here = lengths[first:last]
            data = stream.read(4 * int(here.sum()))
            seen.digest.update(data)
            seen.bytes += len(data)
            yield data, first + 1, here
            first = last


def _lengths(listing: Path, binary: Path) -> NDArray[np.int64]:
    for path in (listing, binary):
        if not path.is_file():
            raise DataError(f"{path}: no such file", "a .lazy folder contains `text` and `text.len.pkl`")
    try:
        with listing.open("rb") as stream:
            found = _Numbers(stream).load()
        lengths = np.array(found, np.int64) if isinstance(found, (list, tuple)) else None
    except (OSError, *BAD_PICKLE) as error:
        raise DataError(
            f"{listing}: not a plain list of lengths: {error}", "build from the JSON lines"
        ) from None
    if lengths is None or lengths.ndim != 1 or (lengths < 0).any():
        raise DataError(f"{listing}: not a plain list of lengths", "build from the JSON lines")
    size, total = binary.stat().st_size, int(lengths.sum())
    # Some versions of GLM count bytes instead of tokens.
    if size == total and (lengths % 4 == 0).all():
        return lengths // 4
    if size != 4 * total:
        raise DataError(
            f"{binary}: has {size} bytes, but its lengths count {total} tokens of 4 bytes",
            "it was truncated, or holds text instead of tokens; build from the JSON lines",
        )
    return lengths
