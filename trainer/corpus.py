"""Text -> tokens -> Megatron's `.bin` and `.idx`, and the reader of that pair.

.idx: MMIDIDX\\0\\0, u64 version 1, u8 type, u64 sequences S, u64 document marks D,
      i32[S] lengths, i64[S] byte offsets in .bin, i64[D] marks (counts of sequences; first 0, last S)
.bin: the tokens, nothing else
"""

from __future__ import annotations

import json
import os
import struct
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

import numpy as np
from numpy.typing import NDArray

from trainer.errors import DataError
from trainer.files import replace_file, sha256, sync

if TYPE_CHECKING:
    from trainer.tokenizer import Tokenizer

MAGIC = b"MMIDIDX\x00\x00"
HEADER = struct.Struct("<9sQBQQ")
TYPES: dict[int, Any] = {1: np.uint8, 2: np.int8, 3: np.int16, 4: np.int32, 5: np.int64, 8: np.uint16}
LARGEST_U16_VOCAB = 65500  # Megatron's own limit
AT_ONCE = 256  # documents encoded together


def token_type(vocab: int) -> Any:
    """Two bytes a token where the vocabulary allows it."""
    return np.uint16 if vocab < LARGEST_U16_VOCAB else np.int32


def read_texts(paths: Sequence[Path], key: str = "text") -> Iterator[str]:
    """Documents of JSON-lines files (their `key`) and of text files (each file one document)."""
    for path in paths:
        if path.suffix in (".jsonl", ".json"):
            yield from _read_json_lines(path, key)
        else:
            try:
                yield path.read_text(encoding="utf-8")
            except (OSError, UnicodeDecodeError) as error:
                raise DataError(f"{path}: {_reason(error)}") from None


def _read_json_lines(path: Path, key: str) -> Iterator[str]:
    try:
        with path.open("rb") as stream:
            for number, line in enumerate(stream, 1):
                if line.strip():
                    yield _document(line, key, f"{path}:{number}")
    except OSError as error:
        raise DataError(f"{path}: {_reason(error)}") from None


def _document(line: bytes, key: str, where: str) -> str:
    try:
        record = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise DataError(f"{where}: not a line of JSON: {error}") from None
    if not isinstance(record, dict) or not isinstance(record.get(key), str):
        keys = ", ".join(record) if isinstance(record, dict) else type(record).__name__
        raise DataError(f"{where}: no text under {key!r} (there is: {keys})", "name the right one with --key")
    return str(record[key])


def _reason(error: OSError | UnicodeDecodeError) -> str:
    return (error.strerror or str(error)) if isinstance(error, OSError) else f"not UTF-8: {error}"


class Writer:
    """Writes a pair aside and puts it in place whole; use it in a `with`. An exception leaves no trace."""

    def __init__(self, prefix: Path, dtype: Any) -> None:
        self.prefix = prefix
        self.dtype = np.dtype(dtype)
        self.lengths: list[int] = []
        self.marks = [0]
        self._aside = prefix.with_name(f".{prefix.name}.{os.getpid()}.bin.tmp")
        self._stream: BinaryIO | None = None

    def __enter__(self) -> Writer:
        self.prefix.parent.mkdir(parents=True, exist_ok=True)
        self._stream = self._aside.open("wb")
        return self

    def add_document(self, sequences: Sequence[Sequence[int]]) -> None:
        """One document of one or more sequences."""
        assert self._stream is not None
        for sequence in sequences:
            self._stream.write(np.asarray(sequence, self.dtype).tobytes())
            self.lengths.append(len(sequence))
        self.marks.append(len(self.lengths))

    def __exit__(self, kind: object, *_: object) -> None:
        assert self._stream is not None
        self._stream.close()
        try:
            if kind is None:
                sync(self._aside)
                os.replace(self._aside, bin_path(self.prefix))
                replace_file(idx_path(self.prefix), self._index())
        finally:
            self._aside.unlink(missing_ok=True)

    def _index(self) -> bytes:
        code = next(code for code, dtype in TYPES.items() if np.dtype(dtype) == self.dtype)
        lengths = np.asarray(self.lengths, "<i4")
        ends = np.cumsum(lengths, dtype="<i8") * self.dtype.itemsize
        offsets = np.concatenate([np.zeros(1, "<i8"), ends])[: len(lengths)]
        head = HEADER.pack(MAGIC, 1, code, len(lengths), len(self.marks))
        return head + lengths.tobytes() + offsets.tobytes() + np.asarray(self.marks, "<i8").tobytes()


def bin_path(prefix: Path) -> Path:
    return prefix.with_name(prefix.name + ".bin")


def idx_path(prefix: Path) -> Path:
    return prefix.with_name(prefix.name + ".idx")


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

    def identity(self) -> str:
        """What a checkpoint remembers of its data: the hash of the index."""
        return sha256(idx_path(self.prefix))


def open_corpus(prefix: Path) -> Corpus:
    """Open a pair and check all that can be checked without reading the tokens."""
    idx, binary = idx_path(prefix), bin_path(prefix)
    for path in (idx, binary):
        if not path.is_file():
            raise DataError(
                f"{path}: no such file", "build it with `data-build`; a prefix has no .bin or .idx ending"
            )
    dtype, lengths, pointers, marks = _parse_index(idx)
    ends = np.cumsum(lengths, dtype=np.int64)
    offsets = ends - lengths
    total = int(ends[-1]) if len(ends) else 0
    if not np.array_equal(pointers, offsets * dtype.itemsize):
        raise DataError(f"{idx}: its offsets are not the sums of its lengths", "build the data again")
    size = binary.stat().st_size
    if size != total * dtype.itemsize:
        raise DataError(
            f"{binary}: has {size} bytes, but its index counts {total} tokens of {dtype.itemsize} bytes",
            "it was cut, is of another index, or its end-of-document tokens are uncounted; build it again",
        )
    tokens = np.memmap(binary, dtype, mode="r") if total else np.zeros(0, dtype)
    return Corpus(prefix, tokens, lengths, offsets, marks)


def _parse_index(idx: Path) -> tuple[np.dtype[Any], NDArray[np.int32], NDArray[np.int64], NDArray[np.int64]]:
    content = idx.read_bytes()
    if len(content) < HEADER.size or not content.startswith(MAGIC):
        raise DataError(f"{idx}: not an MMIDIDX index")
    _, version, code, sequences, count = HEADER.unpack_from(content)
    if version != 1 or code not in TYPES:
        raise DataError(f"{idx}: version {version}, token type {code}: not supported")
    size = HEADER.size + 12 * sequences + 8 * count
    if len(content) != size:
        raise DataError(
            f"{idx}: has {len(content)} bytes; {sequences} sequences and {count} marks need {size}",
            "the file was cut; build it again",
        )
    at = HEADER.size
    lengths = np.frombuffer(content, "<i4", sequences, at)
    pointers = np.frombuffer(content, "<i8", sequences, at + 4 * sequences)
    marks = np.frombuffer(content, "<i8", count, at + 12 * sequences)
    if (lengths < 0).any():
        raise DataError(f"{idx}: a sequence of negative length")
    if not count or marks[0] != 0 or marks[-1] != sequences or (np.diff(marks) < 0).any():
        raise DataError(f"{idx}: its document marks do not rise from 0 to {sequences}")
    return np.dtype(TYPES[code]), lengths, pointers, marks


def build_corpus(
    texts: Iterable[str], tokenizer: Tokenizer, prefix: Path, append_eod: bool
) -> dict[str, Any]:
    """Encode documents into a pair at `prefix`; the answer has documents, tokens, bytes and entropy."""
    counts = np.zeros(tokenizer.vocab, np.int64)
    characters = empty = 0
    with Writer(prefix, token_type(tokenizer.vocab)) as writer:
        for some in _chunks(texts, AT_ONCE):
            characters += sum(len(text) for text in some)
            for ids in tokenizer.encode_many(some):
                if not ids:
                    empty += 1
                    continue
                if append_eod:
                    ids.append(tokenizer.eod)
                writer.add_document([ids])
                counts += np.bincount(ids, minlength=len(counts))
        if not writer.lengths:
            raise DataError("the input has no document with text in it", "check the files and --key")
    summary = {
        "prefix": str(prefix),
        "documents": len(writer.lengths),
        "empty_documents": empty,
        "tokens": int(counts.sum()),
        "characters": characters,
        "bytes": bin_path(prefix).stat().st_size,
        "vocab": tokenizer.vocab,
        "eod": tokenizer.eod,
        "append_eod": append_eod,
        "unigram_entropy_nats": entropy(counts),
        "idx_sha256": sha256(idx_path(prefix)),
    }
    replace_file(prefix.with_name(prefix.name + ".info.json"), json.dumps(summary, indent=2).encode() + b"\n")
    return summary


def _chunks(items: Iterable[str], size: int) -> Iterator[list[str]]:
    chunk: list[str] = []
    for item in items:
        chunk.append(item)
        if len(chunk) == size:
            yield chunk
            chunk = []
    if chunk:
        yield chunk


def entropy(counts: NDArray[np.int64]) -> float:
    """Nats a token when each is drawn by its frequency alone: the best without any context."""
    share = counts[counts > 0] / counts.sum()
    return float(-(share * np.log(share)).sum())


def describe(prefix: Path) -> dict[str, Any]:
    """What `data-info` shows of a pair."""
    corpus = open_corpus(prefix)
    counts = np.bincount(corpus.tokens) if len(corpus.tokens) else np.zeros(0, np.int64)
    return {
        "prefix": str(prefix),
        "documents": corpus.documents,
        "sequences": len(corpus.lengths),
        "tokens": len(corpus.tokens),
        "token_type": corpus.tokens.dtype.name,
        "bytes": bin_path(prefix).stat().st_size,
        "largest_id": len(counts) - 1,
        "shortest": int(corpus.lengths.min(initial=0) if not len(corpus.lengths) else corpus.lengths.min()),
        "longest": int(corpus.lengths.max(initial=0)),
        "unigram_entropy_nats": entropy(counts) if len(counts) else 0.0,
        "idx_sha256": corpus.identity(),
    }
