"""Read and write Megatron's pair of files, `.bin` and `.idx`, byte for byte; also read the older TNTIDX.

.idx: MMIDIDX\\0\\0, u64 version 1, u8 type, u64 sequences S, u64 document marks D, i32[S] lengths, i64[S]
byte offsets in .bin, i64[D] marks (mark i: the number of sequences before document i; first 0, last S), and in
multimodal files i8[S] modes, which are skipped
.bin: the tokens, nothing else
"""

from __future__ import annotations

import fcntl
import glob
import hashlib
import json
import os
import shutil
import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from numpy.typing import NDArray

from clusterctl.wire.pair import Manifest
from clusterctl.wire.pair import read_manifest as manifest_of
from trainer.errors import DataError
from trainer.files import replace_file, sha256, sync

MAGIC = b"MMIDIDX\x00\x00"
HEADER = struct.Struct("<9sQBQQ")
OLD_MAGIC = b"TNTIDX\x00\x00"
OLD_HEADER = struct.Struct("<8sQQQQQQ")
TYPES: dict[int, Any] = {1: np.uint8, 2: np.int8, 3: np.int16, 4: np.int32, 5: np.int64, 8: np.uint16}
# Floating-point types; the tools that write them disagree about their widths.
FLOAT_TYPES = (6, 7)
# The limit that Megatron uses.
LARGEST_U16_VOCAB = 65500
# The most tokens of a sequence: its length is stored as an i32.
LONGEST = 2**31 - 1
OF_TOKENS = "name a pair of Megatron-LM or of `clusterctl data build`"
# Temporary files that a writer keeps next to the pair until it is complete.
ASIDE = ("bin", "idx", "lengths", "marks")
# `sample_identity` hashes this many places of a corpus, and this many bytes at each.
SAMPLES, SAMPLE_BYTES = 64, 4096
# Entries of an index that are checked together: 8 MiB.
AT_ONCE = 1 << 20


def token_type(vocab: int) -> Any:
    """Return the type of the tokens: two bytes if the vocabulary allows it."""
    return np.uint16 if vocab < LARGEST_U16_VOCAB else np.int32


def bin_path(prefix: Path) -> Path:
    return prefix.with_name(prefix.name + ".bin")


def idx_path(prefix: Path) -> Path:
    return prefix.with_name(prefix.name + ".idx")


def manifest_path(prefix: Path) -> Path:
    return prefix.with_name(prefix.name + ".manifest.json")


def write_manifest(path: Path, manifest: Manifest) -> None:
    replace_file(path, json.dumps(manifest.as_json(), indent=2, ensure_ascii=False).encode() + b"\n")


def load_manifest(path: Path) -> Manifest | None:
    """Return the manifest in a file, or None without one; raise ValueError for a file that is no manifest."""
    try:
        return manifest_of(path.read_bytes())
    except FileNotFoundError:
        return None
    except OSError as error:
        raise ValueError(f"not a manifest: {error}") from None


# -- reading ------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Index:
    """The content of an `.idx` file; the arrays are views of the mapped file."""

    path: Path
    dtype: np.dtype[Any]
    lengths: NDArray[np.int32]
    # Where each sequence begins in the `.bin` file, in bytes.
    pointers: NDArray[np.int64]
    marks: NDArray[np.int64]

    @property
    def tokens(self) -> int:
        return int(self.lengths.sum(dtype=np.int64))


@dataclass(frozen=True)
class Corpus:
    """An open pair. `lengths` and `offsets` (in tokens) are those of the sequences."""

    prefix: Path
    tokens: NDArray[Any]
    lengths: NDArray[np.int32]
    offsets: NDArray[np.int64]
    marks: NDArray[np.int64]

    @property
    def documents(self) -> int:
        return len(self.marks) - 1

    def document(self, number: int) -> NDArray[Any]:
        """Return the tokens of one document, its sequences joined."""
        first, last = int(self.marks[number]), int(self.marks[number + 1])
        if first == last:
            return self.tokens[:0]
        return self.tokens[self.offsets[first] : self.offsets[last - 1] + self.lengths[last - 1]]

    def identity(self) -> str:
        """Return the hash of the index, which a checkpoint records to identify its data."""
        return sha256(idx_path(self.prefix))

    def sample_identity(self) -> str:
        """Return a hash of tokens at evenly spread places: two corpora with the same index can differ in tokens."""
        content = self.tokens.view(np.uint8)
        starts = np.linspace(0, max(0, len(content) - SAMPLE_BYTES), SAMPLES, dtype=np.int64)
        digest = hashlib.sha256(str(len(content)).encode())
        for start in np.unique(starts):
            digest.update(content[start : start + SAMPLE_BYTES].tobytes())
        return digest.hexdigest()


def open_corpus(prefix: Path) -> Corpus:
    """Open a pair and check everything that can be checked without reading the tokens."""
    index, faults = look(prefix)
    if faults or index is None:
        raise DataError("\n".join(problem for problem, _ in faults), faults[0][1])
    binary = bin_path(prefix)
    tokens = np.memmap(binary, index.dtype, mode="r") if index.tokens else np.zeros(0, index.dtype)
    return Corpus(prefix, tokens, index.lengths, index.pointers // index.dtype.itemsize, index.marks)


def look(prefix: Path) -> tuple[Index | None, list[tuple[str, str]]]:
    """Return the index of a pair (None if unreadable) and all its faults, each as (problem, remedy)."""
    if not prefix.name:
        return None, [
            (f"{prefix}: a folder, not a pair", "name a pair in it: FOLDER/NAME, without .bin or .idx")
        ]
    absent = [path for path in (idx_path(prefix), bin_path(prefix)) if not path.is_file()]
    if absent:
        remedy = "build it with `clusterctl data build`; a prefix has no .bin or .idx ending"
        return None, [(f"{path}: no such file", remedy) for path in absent]
    try:
        index = read_index(idx_path(prefix))
    except DataError as error:
        return None, [(error.message, error.hint)]
    return index, list(_faults(index, bin_path(prefix)))


def _faults(index: Index, binary: Path) -> Iterator[tuple[str, str]]:
    path, sequences, marks = index.path, len(index.lengths), index.marks
    again = "build the data again"
    if (index.lengths < 0).any():
        yield f"{path}: a sequence of negative length", again
        return
    if not _are_sums(index):
        yield f"{path}: its offsets are not the sums of its lengths", again
    if not len(marks) or marks[0] != 0 or marks[-1] != sequences or (np.diff(marks) < 0).any():
        yield f"{path}: its document marks do not rise from 0 to {sequences}", again
    size, total = binary.stat().st_size, index.tokens
    if size != total * index.dtype.itemsize:
        yield (
            f"{binary}: has {size} bytes, but its index counts {total} tokens of {index.dtype.itemsize} bytes",
            "it was truncated, belongs to another index, or its end-of-document tokens are not counted: "
            "see `clusterctl data verify` and `clusterctl data repair`, or build it again",
        )


def _are_sums(index: Index) -> bool:
    """Return whether each sequence starts where the one before ends; checked in pieces to bound memory."""
    reached = 0
    for at in range(0, len(index.lengths), AT_ONCE):
        ends = np.cumsum(index.lengths[at : at + AT_ONCE], dtype=np.int64) + reached
        starts = np.concatenate([[reached], ends[:-1]]) * index.dtype.itemsize
        if not np.array_equal(index.pointers[at : at + AT_ONCE], starts):
            return False
        reached = int(ends[-1])
    return True


def read_index(path: Path) -> Index:
    """Read an `.idx` file of either format and check its header and its size."""
    try:
        with path.open("rb") as stream:
            head = stream.read(max(HEADER.size, OLD_HEADER.size))
        content = np.memmap(path, np.uint8, mode="r") if head else np.zeros(0, np.uint8)
    except OSError as error:
        raise DataError(f"{path}: {error.strerror}") from None
    if head.startswith(MAGIC) and len(head) >= HEADER.size:
        return _read_new(path, head, content)
    if head.startswith(OLD_MAGIC) and len(head) >= OLD_HEADER.size:
        return _read_old(path, head, content)
    raise DataError(f"{path}: not an MMIDIDX index", OF_TOKENS)


def _read_new(path: Path, head: bytes, content: NDArray[np.uint8]) -> Index:
    _, version, code, sequences, count = HEADER.unpack_from(head)
    dtype = _known_type(path, version, code)
    size = HEADER.size + 12 * sequences + 8 * count
    if len(content) not in (size, size + sequences):
        raise DataError(
            f"{path}: has {len(content)} bytes; {sequences} sequences and {count} marks need {size}",
            "the file was truncated; build it again",
        )
    at = HEADER.size
    return Index(
        path,
        dtype,
        np.frombuffer(content, "<i4", sequences, at),
        np.frombuffer(content, "<i8", sequences, at + 4 * sequences),
        np.frombuffer(content, "<i8", count, at + 12 * sequences),
    )


def _read_old(path: Path, head: bytes, content: NDArray[np.uint8]) -> Index:
    """Read TNTIDX: u64 version, type, element size, items, sizes, marks; i64 dimension and data offsets,
    sizes, marks."""
    _, version, code, width, items, sizes, count = OLD_HEADER.unpack_from(head)
    dtype = _known_type(path, version, code)
    needed = OLD_HEADER.size + 8 * (2 * (items + 1) + sizes + count)
    if len(content) != needed:
        problem = (
            f"{path}: has {len(content)} bytes; {items} items, {sizes} sizes and {count} marks need {needed}"
        )
        raise DataError(problem, "the file was truncated; build it again")
    whole = np.frombuffer(content, "<i8", offset=OLD_HEADER.size)
    dims, offsets, lengths, marks = np.split(whole, np.cumsum([items + 1, items + 1, sizes]))
    if width != dtype.itemsize or sizes != items or not np.array_equal(dims, np.arange(items + 1)):
        raise DataError(f"{path}: its items are not plain rows of tokens", "build the data again")
    if ((lengths < 0) | (lengths > LONGEST)).any():
        raise DataError(f"{path}: a sequence of impossible length", "build the data again")
    return Index(path, dtype, lengths.astype(np.int32), offsets[:-1] * dtype.itemsize, marks)


def _known_type(path: Path, version: int, code: int) -> np.dtype[Any]:
    if code in FLOAT_TYPES:
        raise DataError(f"{path}: token type {code}: holds floating-point numbers, no tokens", OF_TOKENS)
    if version != 1 or code not in TYPES:
        raise DataError(f"{path}: version {version}, token type {code}: not supported", OF_TOKENS)
    known: np.dtype[Any] = np.dtype(TYPES[code])
    return known


# -- writing ------------------------------------------------------------------------------------------------


class Writer:
    """Write a pair to temporary files and rename them when they are complete. A context manager; after an
    exception no files remain.

    Lengths and marks are kept on disk too, so that memory does not grow with the corpus.
    """

    def __init__(self, prefix: Path, dtype: Any) -> None:
        self.prefix = prefix
        self.dtype = np.dtype(dtype)
        self.documents = self.sequences = self.tokens = 0
        self._streams: dict[str, BinaryIO] = {}

    def __enter__(self) -> Writer:
        self.prefix.parent.mkdir(parents=True, exist_ok=True)
        self._clear()
        self._streams = {ending: self._aside(ending).open("w+b") for ending in ("bin", "lengths", "marks")}
        # The system releases this lock even if the process is killed.
        fcntl.flock(self._streams["bin"], fcntl.LOCK_EX)
        return self

    def add_document(self, sequences: Sequence[Sequence[int]]) -> None:
        """Add one document of one or more sequences."""
        tokens = np.fromiter((token for sequence in sequences for token in sequence), np.int64)
        self.add(tokens, [len(sequence) for sequence in sequences], [len(sequences)])

    def add(self, tokens: NDArray[Any], lengths: Any, counts: Any) -> None:
        """Add whole documents: their tokens, the lengths of their sequences, the number of sequences of
        each document."""
        lengths, counts = np.asarray(lengths, np.int64), np.asarray(counts, np.int64)
        assert lengths.sum() == len(tokens) and counts.sum() == len(lengths)
        self._streams["bin"].write(_fitting(tokens, self.dtype, self.prefix).data)
        if len(lengths) and int(lengths.max()) > LONGEST:
            raise DataError(
                f"{self.prefix}: a sequence has {int(lengths.max())} tokens; an index allows {LONGEST}"
            )
        self._streams["lengths"].write(lengths.astype("<i4").data)
        self._streams["marks"].write((np.cumsum(counts) + self.sequences).astype("<i8").data)
        self.documents += len(counts)
        self.sequences += len(lengths)
        self.tokens += len(tokens)

    def __exit__(self, kind: object, *_: object) -> None:
        try:
            if kind is None:
                self._finish()
        finally:
            for stream in self._streams.values():
                stream.close()
            for ending in ASIDE:
                self._aside(ending).unlink(missing_ok=True)

    def _finish(self) -> None:
        with self._aside("idx").open("wb") as index:
            write_index(index, self.dtype, self._streams["lengths"], self._streams["marks"])
        self._streams["bin"].flush()
        switch(self._aside("bin"), self._aside("idx"), self.prefix)

    def _clear(self) -> None:
        """Remove the temporary files of killed writers of this pair: those on which no process holds a lock."""
        for left in self.prefix.parent.glob(f".{glob.escape(self.prefix.name)}.*.bin.tmp"):
            with left.open("rb") as tokens:
                try:
                    fcntl.flock(tokens, fcntl.LOCK_EX | fcntl.LOCK_NB)
                except BlockingIOError:
                    continue
                for ending in ASIDE:
                    left.with_name(left.name.removesuffix("bin.tmp") + f"{ending}.tmp").unlink(
                        missing_ok=True
                    )

    def _aside(self, ending: str) -> Path:
        return self.prefix.with_name(f".{self.prefix.name}.{os.getpid()}.{ending}.tmp")


def write_index(index: BinaryIO, dtype: np.dtype[Any], lengths: BinaryIO, marks: BinaryIO) -> None:
    """Write an `.idx` from two files: the i32 lengths, and the i64 marks without their leading 0."""
    code = next(code for code, known in TYPES.items() if np.dtype(known) == dtype)
    index.write(HEADER.pack(MAGIC, 1, code, _size(lengths) // 4, _size(marks) // 8 + 1))
    lengths.seek(0)
    shutil.copyfileobj(lengths, index, 1 << 20)
    lengths.seek(0)
    reached = 0
    while piece := lengths.read(4 * AT_ONCE):
        ends = np.cumsum(np.frombuffer(piece, "<i4"), dtype="<i8") * dtype.itemsize + reached
        index.write(np.concatenate([np.array([reached], "<i8"), ends[:-1]]).data)
        reached = int(ends[-1])
    index.write(bytes(8))
    marks.seek(0)
    shutil.copyfileobj(marks, index, 1 << 20)


def switch(binary: Path, index: Path, prefix: Path) -> None:
    """Rename two finished files to .bin and .idx. The old index is removed first, so that no reader combines
    it with new tokens."""
    sync(binary)
    sync(index)
    idx_path(prefix).unlink(missing_ok=True)
    os.replace(binary, bin_path(prefix))
    os.replace(index, idx_path(prefix))
    sync(prefix.parent)


def _size(stream: BinaryIO) -> int:
    return stream.seek(0, os.SEEK_END)


def _fitting(tokens: NDArray[Any], dtype: np.dtype[Any], prefix: Path) -> NDArray[Any]:
    """Return the tokens in the type of the file; raise DataError if one does not fit."""
    if tokens.dtype == dtype or not len(tokens):
        return np.ascontiguousarray(tokens, dtype)
    limits, low, high = np.iinfo(dtype), int(tokens.min()), int(tokens.max())
    if low < limits.min or high > limits.max:
        wrong = low if low < limits.min else high
        raise DataError(
            f"{prefix}: token id {wrong} does not fit {dtype.name}", "use the ids of the tokenizer"
        )
    return np.ascontiguousarray(tokens, dtype)
