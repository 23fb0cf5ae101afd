"""One rank's file of a checkpoint: a safetensors file whose header also holds the hashes of its data.

The data are hashed in pieces of a fixed size, so that a reader of a slice verifies only the pieces that it reads. Each
piece has a SHA-256, and a checksum that a load verifies instead because it costs much less. The manifest contains the
hash of the header, which covers all others.
"""

from __future__ import annotations

import hashlib
import json
import os
import threading
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import torch
from torch import Tensor

from clusterctl.wire.saved import SavedFile
from native.hashes import checksum
from native.hashes.sha256 import block_hashes
from trainer.checkpoint.names import Shape, held_boxes, name_in_file
from trainer.checkpoint.part import Part
from trainer.files import write_whole

PIECE = 1 << 20
"""Bytes of data per hash and checksum."""
BLOCK = 8 << 20
"""Bytes that are copied, hashed and written at a time."""
AHEAD = 2
"""Blocks that wait for their hash while the next ones are written."""
HASHES = "sha256"
PIECE_BYTES = "sha256_piece_bytes"
CHECKSUMS = "checksum128"
TYPES = {torch.float32: ("F32", 4)}


def write_parts(file: Path, parts: Sequence[Part], table: Mapping[str, Shape], nice: int = 0) -> SavedFile:
    """Write a rank's parts to a file of their own and have the disk hold it; OSError where the disk refuses.

    `nice`: how much lower than the training's the priority of hashing is.
    """
    entries, size = _entries(parts)
    pieces = -(-size // PIECE)
    blank = _header(entries, {name: "00" * width * pieces for name, width in _hash_widths().items()})
    handle = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644)
    try:
        write_whole(handle, memoryview(blank))
        hashes = _write_data(handle, parts, nice)
        header = _header(entries, hashes)
        os.pwrite(handle, header, 0)
        os.fsync(handle)
    finally:
        os.close(handle)
    held = held_boxes(((part.key, part.box) for part in parts), list(table))
    return SavedFile(len(header) + size, hashlib.sha256(header).hexdigest(), held)


def _entries(parts: Sequence[Part]) -> tuple[dict[str, object], int]:
    """Return the header's entry of each tensor, and the bytes of all data."""
    entries: dict[str, object] = {}
    end = 0
    for part in parts:
        name, width = TYPES[part.tensor.dtype]
        begin, end = end, end + part.tensor.numel() * width
        key = name_in_file(part.key, part.box, part.shape)
        entries[key] = {"dtype": name, "shape": list(part.tensor.shape), "data_offsets": [begin, end]}
    return entries, end


def _hash_widths() -> dict[str, int]:
    """Return the bytes of each kind of hash that a piece has; without the compiled library it has no checksum."""
    return {HASHES: 32, **({CHECKSUMS: checksum.SIZE} if checksum.is_available() else {})}


def _header(entries: Mapping[str, object], hashes: Mapping[str, str]) -> bytes:
    """Return the start of a file: the length of its header, and the header, padded to a multiple of 8."""
    metadata = {"format": "pt", PIECE_BYTES: str(PIECE), **hashes}
    text = json.dumps({"__metadata__": metadata, **entries}, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def _write_data(handle: int, parts: Sequence[Part], nice: int) -> dict[str, str]:
    """Write all data and return the hashes of their pieces by kind; a separate thread computes them."""
    hashes = PieceHashes()
    waiting: deque[Future[None]] = deque()
    with ThreadPoolExecutor(1, initializer=lower_priority, initargs=(nice,)) as pool:
        for block in _blocks(parts):
            waiting.append(pool.submit(hashes.add, block))
            write_whole(handle, block)
            while len(waiting) > AHEAD:
                waiting.popleft().result()
        while waiting:
            waiting.popleft().result()
    return hashes.finish()


def _blocks(parts: Sequence[Part]) -> Iterator[memoryview]:
    """Yield the bytes of all parts in order; small ones are joined, large ones are divided into blocks."""
    joined, size = list[Tensor](), 0
    for part in parts:
        for rows in _by_rows(part.tensor.detach()):
            if rows.numel() * rows.element_size() >= PIECE:
                if joined:
                    yield bytes_of(torch.cat(joined))
                    joined, size = [], 0
                yield bytes_of(rows)
                continue
            joined.append(rows.reshape(-1).cpu())
            size += rows.numel() * rows.element_size()
            if size >= PIECE:
                yield bytes_of(torch.cat(joined))
                joined, size = [], 0
    if joined:
        yield bytes_of(torch.cat(joined))


def _by_rows(tensor: Tensor) -> Iterator[Tensor]:
    """Yield a tensor in neighbouring pieces of at most BLOCK bytes, or of one row."""
    size = tensor.numel() * tensor.element_size()
    if size <= BLOCK:
        yield tensor
    elif len(tensor) == 1:
        yield from _by_rows(tensor[0])
    else:
        yield from tensor.split(max(1, len(tensor) * BLOCK // size))


def bytes_of(tensor: Tensor) -> memoryview:
    """Return the bytes of a tensor, in this machine's memory."""
    return tensor.cpu().contiguous().view(-1).view(torch.uint8).numpy().data


def lower_priority(nice: int) -> None:
    """Let the training's threads run before this one; on Linux each thread has its own priority."""
    if nice:
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), nice)


class PieceHashes:
    """Hashes and checksums of neighbouring pieces of a stream of bytes."""

    def __init__(self) -> None:
        self._found = {name: list[str]() for name in _hash_widths()}
        self._open = bytearray()
        """The beginning of a piece."""

    def add(self, content: memoryview) -> None:
        while content:
            whole = 0 if self._open else len(content) // PIECE * PIECE
            if whole:
                self._hash([content[start : start + PIECE] for start in range(0, whole, PIECE)])
                content = content[whole:]
                continue
            taken = content[: PIECE - len(self._open)]
            self._open += taken
            content = content[len(taken) :]
            if len(self._open) == PIECE:
                self._close()

    def _hash(self, pieces: Sequence[memoryview]) -> None:
        self._found[HASHES].append(block_hashes(pieces).hex())
        if CHECKSUMS in self._found:
            self._found[CHECKSUMS].append(checksum.block_checksums(pieces).hex())

    def _close(self) -> None:
        self._hash([memoryview(self._open)])
        self._open = bytearray()

    def finish(self) -> dict[str, str]:
        """Return for each kind of hash those of all pieces, one after the other."""
        if self._open:
            self._close()
        return {name: "".join(found) for name, found in self._found.items()}
