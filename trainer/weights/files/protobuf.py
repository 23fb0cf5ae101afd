"""MindSpore's .ckpt: a list of named tensors as protobuf, read with bounded lengths and written in slices.

    message Checkpoint { repeated Value value = 1; }
    message Value { required string tag = 1; required TensorProto tensor = 2; }
    message TensorProto { repeated int64 dims = 1; required string tensor_type = 2; required bytes tensor_content = 3; }

A large parameter is several Values with the same tag, each with the dims of the whole; their contents are joined.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import BinaryIO

import torch

from clusterctl.wire.saved import SavedFile
from trainer.errors import CheckpointError
from trainer.files import varint
from trainer.weights.files.raw import hashed_file, stored, write_tensor
from trainer.weights.lazy import Lazy, rows_of, shaped, stacked

TYPES = {
    "Float32": torch.float32,
    "Float16": torch.float16,
    "BFloat16": torch.bfloat16,
    "Float64": torch.float64,
    "Int64": torch.int64,
    "Int32": torch.int32,
    "Int16": torch.int16,
    "Int8": torch.int8,
    "UInt8": torch.uint8,
    "Bool": torch.bool,
}
NAMES = {kind: name for name, kind in TYPES.items()}
SLICE = 512 << 20
"""How many bytes of a Value's content are written at a time."""
MOST_NAME = 4096
MOST_VALUES = 1_000_000
MOST_DIMS = 8
CRC = b"crc_num"
BYTES, VARINT = 2, 0


@dataclass
class _Found:
    """A tensor found in Values: its type, its shape, and where its contents are."""

    dtype: str
    dims: tuple[int, ...]
    pieces: list[tuple[int, int]] = field(default_factory=list)


class _Fields:
    """The fields of a message in [at, end) of a file."""

    def __init__(self, file: Path, stream: BinaryIO, at: int, end: int) -> None:
        self.file, self.stream, self.at, self.end = file, stream, at, end

    def varint(self) -> int:
        value = shift = 0
        while True:
            self.stream.seek(self.at)
            content = self.stream.read(1)
            if not content or self.at >= self.end or shift > 63:
                raise CheckpointError(f"{self.file}: a number at byte {self.at:,} does not end")
            self.at += 1
            value |= (content[0] & 0x7F) << shift
            shift += 7
            if content[0] < 0x80:
                return value

    def next(self) -> tuple[int, int, int] | None:
        """Return the next field's number, where its content begins, and its length, which for a varint is the value."""
        if self.at >= self.end:
            return None
        key = self.varint()
        number, kind = key >> 3, key & 7
        if kind == VARINT:
            return number, -1, self.varint()
        if kind != BYTES:
            raise CheckpointError(f"{self.file}: a field of kind {kind} at byte {self.at:,}")
        length = self.varint()
        begin = self.at
        if length > self.end - begin:
            raise CheckpointError(f"{self.file}: claims {length:,} bytes at byte {begin:,}, but has fewer")
        self.at = begin + length
        return number, begin, length

    def text(self, begin: int, length: int) -> str:
        if length > MOST_NAME:
            raise CheckpointError(f"{self.file}: a name of {length:,} bytes")
        self.stream.seek(begin)
        try:
            return self.stream.read(length).decode()
        except UnicodeDecodeError:
            raise CheckpointError(f"{self.file}: a name at byte {begin:,} is not a text") from None


def read_mindspore(file: Path) -> dict[str, Lazy]:
    """Return the tensors of a file; their contents are read on use."""
    try:
        size = file.stat().st_size
        with file.open("rb") as stream:
            end = _without_crc(file, stream, size)
            found = _values(_Fields(file, stream, 0, end))
    except OSError as error:
        raise CheckpointError(f"{file}: {error.strerror}") from None
    return {name: _lazy(file, name, entry) for name, entry in found.items()}


def _without_crc(file: Path, stream: BinaryIO, size: int) -> int:
    """Return where the values end; if a checksum follows them, verify it."""
    tail = len(CRC) + 10
    if size < tail:
        return size
    stream.seek(size - tail)
    content = stream.read(tail)
    if not content.startswith(CRC):
        return size
    stream.seek(0)
    crc, left = 0, size - tail
    while left:
        piece = stream.read(min(left, 1 << 20))
        crc = zlib.crc32(piece, crc)
        left -= len(piece)
    if crc != int.from_bytes(content[len(CRC) :], "big"):
        raise CheckpointError(f"{file}: damaged: its content does not have the checksum that it records")
    return size - tail


def _values(fields: _Fields) -> dict[str, _Found]:
    found: dict[str, _Found] = {}
    count = 0
    while (entry := fields.next()) is not None:
        number, begin, length = entry
        count += 1
        if number != 1 or begin < 0 or count > MOST_VALUES:
            raise CheckpointError(f"{fields.file}: not a checkpoint of MindSpore")
        _value(_Fields(fields.file, fields.stream, begin, begin + length), found)
    return found


def _value(fields: _Fields, found: dict[str, _Found]) -> None:
    tag, tensor = "", None
    while (entry := fields.next()) is not None:
        number, begin, length = entry
        if number == 1 and begin >= 0:
            tag = fields.text(begin, length)
        elif number == 2 and begin >= 0:
            tensor = _Fields(fields.file, fields.stream, begin, begin + length)
        else:
            raise CheckpointError(f"{fields.file}: {tag!r} is not a tensor", "only tensors are read")
    if not tag or tensor is None:
        raise CheckpointError(f"{fields.file}: a value without a name or a tensor")
    _tensor(tensor, tag, found)


def _tensor(fields: _Fields, tag: str, found: dict[str, _Found]) -> None:
    dims, dtype, piece = list[int](), "", (0, 0)
    while (entry := fields.next()) is not None:
        number, begin, length = entry
        if number == 1 and begin < 0:
            dims.append(length)
        elif number == 1:
            packed = _Fields(fields.file, fields.stream, begin, begin + length)
            while packed.at < packed.end:
                dims.append(packed.varint())
        elif number == 2 and begin >= 0:
            dtype = fields.text(begin, length)
        elif number == 3 and begin >= 0:
            piece = (begin, length)
        if len(dims) > MOST_DIMS:
            raise CheckpointError(f"{fields.file}: {tag} has more than {MOST_DIMS} dimensions")
    whole = found.setdefault(tag, _Found(dtype, tuple(dims)))
    if (whole.dtype, whole.dims) != (dtype, tuple(dims)):
        raise CheckpointError(f"{fields.file}: the pieces of {tag} differ in shape or type")
    whole.pieces.append(piece)


def _lazy(file: Path, name: str, entry: _Found) -> Lazy:
    dtype, shape = TYPES.get(entry.dtype), entry.dims or (1,)
    if dtype is None:
        raise CheckpointError(f"{file}: {name} has the unknown type {entry.dtype!r}")
    held = sum(length for _, length in entry.pieces)
    if held != math.prod(shape) * dtype.itemsize:
        raise CheckpointError(f"{file}: {name} has {held:,} bytes, which do not fit its shape {list(shape)}")
    return shaped(stacked([stored(file, *piece) for piece in entry.pieces]), shape, dtype)


# -- write --------------------------------------------------------------------------------------------------


def write_mindspore(file: Path, tensors: Mapping[str, Lazy], wrote: Callable[[int], None]) -> SavedFile:
    """Write and sync a file; return its size and hash."""
    with hashed_file(file) as hashed:
        for name, tensor in tensors.items():
            step = max(1, SLICE // max(1, tensor.row_bytes))
            for first in range(0, tensor.rows, step):
                part = rows_of(tensor, first, min(tensor.rows, first + step))
                hashed.write(_start(name, tensor, part.bytes))
                write_tensor(hashed.write, part, wrote)
    return hashed.entry


def _start(name: str, tensor: Lazy, length: int) -> bytes:
    """Return a Value without the content of its tensor, which follows."""
    head = b"".join(b"\x08" + varint(size) for size in tensor.shape)
    kind = NAMES[tensor.dtype].encode()
    head += b"\x12" + varint(len(kind)) + kind + b"\x1a" + varint(length)
    inner = b"\x12" + varint(len(head) + length) + head
    tag = name.encode()
    start = b"\x0a" + varint(len(tag)) + tag + inner
    return b"\x0a" + varint(len(start) + length) + start
