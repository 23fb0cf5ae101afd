"""The header of a safetensors file, read strictly: sizes are checked before memory is allocated for them."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trainer.errors import CheckpointError
from trainer.json_types import JsonObject

# The library's own limit.
MOST_BYTES = 100_000_000
MOST_DIMENSIONS = 8
WIDTHS = {"F32": 4, "F16": 2, "BF16": 2, "F64": 8, "I64": 8, "I32": 4, "U8": 1, "BOOL": 1}


@dataclass(frozen=True)
class Entry:
    """One tensor of a file: its type, its shape, and where its bytes begin and end in the file."""

    dtype: str
    shape: tuple[int, ...]
    start: int
    stop: int


@dataclass(frozen=True)
class Header:
    """The content of a file according to its header; `data` is where the bytes of the first tensor begin."""

    entries: Mapping[str, Entry]
    metadata: Mapping[str, str]
    data: int


def read_header(file: Path) -> Header:
    """Return the header of a safetensors file; a CheckpointError names the file and the fault."""
    try:
        size = file.stat().st_size
        with file.open("rb") as stream:
            length = int.from_bytes(stream.read(8), "little")
            if not 2 <= length <= min(size - 8, MOST_BYTES):
                raise CheckpointError(f"{file}: claims a header of {length} bytes in a file of {size}")
            content = stream.read(length)
    except OSError as error:
        raise CheckpointError(f"{file}: {error.strerror}") from None
    return decode_header(content, size, file)


def decode_header(content: bytes, size: int, file: Path) -> Header:
    """Return the header in `content`; its tensors must fill a file of `size` bytes, without gap or overlap."""
    try:
        document = json.loads(content)
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{file}: its header is not JSON: {error}") from None
    if not isinstance(document, dict):
        raise CheckpointError(f"{file}: its header is not a JSON object")
    metadata = document.pop("__metadata__", {})
    if not isinstance(metadata, dict) or not all(isinstance(value, str) for value in metadata.values()):
        raise CheckpointError(f"{file}: the metadata in its header are not texts")
    begin = 8 + len(content)
    entries = {name: _entry(name, raw, begin, size, file) for name, raw in document.items()}
    end = begin
    for name, entry in sorted(entries.items(), key=lambda item: (item[1].start, item[1].stop)):
        if entry.start != end:
            raise CheckpointError(f"{file}: tensor {name} overlaps another, or leaves a gap before it")
        end = entry.stop
    if end != size:
        raise CheckpointError(f"{file}: its tensors end at byte {end}, and it has {size}")
    return Header(entries, metadata, begin)


def _entry(name: str, raw: Any, begin: int, size: int, file: Path) -> Entry:
    given: JsonObject = raw if isinstance(raw, dict) else {}
    dtype, shape, ends = given.get("dtype", ""), given.get("shape", 0), given.get("data_offsets", 0)
    known = isinstance(dtype, str) and dtype in WIDTHS
    if not (known and _are_counts(shape, MOST_DIMENSIONS) and _are_counts(ends, 2) and len(ends) == 2):
        raise CheckpointError(f"{file}: tensor {name}: its type, shape or place in the file is wrong")
    need = WIDTHS[dtype] * math.prod(shape)
    start, stop = (begin + end for end in ends)
    if stop - start != need or stop > size:
        raise CheckpointError(f"{file}: tensor {name} needs {need:,} bytes, and its place has not that many")
    return Entry(dtype, tuple(shape), start, stop)


def _are_counts(value: Any, most: int) -> bool:
    return (
        isinstance(value, list)
        and len(value) <= most
        and all(type(number) is int and number >= 0 for number in value)
    )
