"""Read boxes of logical tensors from a checkpoint's files, whatever boxes the files hold, and verify while reading."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from trainer.checkpoint.header import WIDTHS, Entry, Header, decode_header
from trainer.checkpoint.names import Shape, name_in_file
from trainer.checkpoint.part import MOMENTS, Box, Part, intersection, volume
from trainer.checkpoint.write import HASHES, PIECE_BYTES
from trainer.errors import CheckpointError

TYPES = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
MOST_PIECE_BYTES = 64 << 20
# Bytes that are read, verified and copied at a time: they stay in the processor's cache.
BLOCK = 2 << 20
Pieces = Mapping[str, Sequence[tuple[str, Box]]]
"""Of each tensor, the files that hold it and which box of it each holds."""


@dataclass(frozen=True)
class Request:
    """Rows of a box in a file, and which numbers of them go where."""

    key: str
    start: int
    stop: int
    dtype: torch.dtype
    rows: tuple[int, ...]
    """Shape of what the bytes [start, stop) are."""
    source: tuple[slice, ...]
    target: Tensor


class VerifiedFile:
    """Bytes of one file; each piece is compared with its hash when it is first read."""

    def __init__(self, file: Path, digest: str | None) -> None:
        """`digest`: of the header. None: a file of version 0.1, which is verified as a whole before."""
        self.file = file
        self._handle = os.open(file, os.O_RDONLY | os.O_CLOEXEC)
        try:
            self.size = os.fstat(self._handle).st_size
            self.header = self._read_header(digest)
            self._hashes, self._piece_bytes = self._read_hashes(digest is not None)
        except BaseException:
            self.close()
            raise
        self._kept = -1
        self._piece = bytearray()

    def close(self) -> None:
        os.close(self._handle)

    def __enter__(self) -> VerifiedFile:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _read_header(self, digest: str | None) -> Header:
        length = int.from_bytes(os.pread(self._handle, 8, 0), "little")
        if not 2 <= length <= self.size - 8:
            raise CheckpointError(f"{self.file}: claims a header of {length} bytes in a file of {self.size}")
        content = os.pread(self._handle, 8 + length, 0)
        if digest is not None and hashlib.sha256(content).hexdigest() != digest:
            raise CheckpointError(f"{self.file}: damaged: its header does not have the hash in the manifest")
        return decode_header(content[8:], self.size, self.file)

    def _read_hashes(self, hashed: bool) -> tuple[bytes, int]:
        if not hashed:
            return b"", BLOCK
        try:
            hashes = bytes.fromhex(self.header.metadata[HASHES])
            each = int(self.header.metadata[PIECE_BYTES])
        except (KeyError, ValueError):
            raise CheckpointError(f"{self.file}: its header has no hashes of its data") from None
        pieces = -(-(self.size - self.header.data) // each) if 0 < each <= MOST_PIECE_BYTES else -1
        if len(hashes) != 32 * pieces:
            raise CheckpointError(f"{self.file}: its header has not one hash for each piece of its data")
        return hashes, each

    def verify(self) -> None:
        """Read all pieces."""
        for at in range(-(-(self.size - self.header.data) // self._piece_bytes)):
            self._read_piece(at)

    def read(self, start: int, target: memoryview) -> None:
        """Fill `target` with the bytes of the file from `start` on."""
        done = 0
        while done < len(target):
            at, skipped = divmod(start + done - self.header.data, self._piece_bytes)
            begin = self.header.data + at * self._piece_bytes
            whole = min(self._piece_bytes, self.size - begin)
            if not skipped and len(target) - done >= whole and at != self._kept:
                self._read_verified(at, target[done : done + whole])
                done += whole
                continue
            part = min(whole - skipped, len(target) - done)
            target[done : done + part] = memoryview(self._read_piece(at))[skipped : skipped + part]
            done += part

    def _read_piece(self, at: int) -> bytearray:
        """Return a piece, and keep it: the next request often begins in it."""
        if at != self._kept:
            begin = self.header.data + at * self._piece_bytes
            self._piece = bytearray(min(self._piece_bytes, self.size - begin))
            self._kept = -1
            self._read_verified(at, memoryview(self._piece))
            self._kept = at
        return self._piece

    def _read_verified(self, at: int, target: memoryview) -> None:
        begin = self.header.data + at * self._piece_bytes
        done = 0
        while done < len(target):
            count = os.preadv(self._handle, [target[done:]], begin + done)
            if not count:
                raise CheckpointError(f"{self.file}: became shorter while it was read")
            done += count
        if self._hashes and hashlib.sha256(target).digest() != self._hashes[32 * at : 32 * at + 32]:
            place = f"bytes {begin:,} to {begin + len(target):,}"
            raise CheckpointError(f"{self.file}: damaged: {place} are not what was saved (sha256 differs)")


def read_parts(
    folder: Path, parts: Sequence[Part], pieces: Pieces, digests: Mapping[str, str | None]
) -> None:
    """Fill every part from the files that hold it; a CheckpointError names the file or tensor that is wrong."""
    by_file: dict[str, list[tuple[Part, Box]]] = {}
    for part in parts:
        found = 0
        for name, box in pieces[part.key]:
            shared = intersection(part.box, box)
            if shared is not None:
                by_file.setdefault(name, []).append((part, box))
                found += volume(shared)
        if found != volume(part.box):
            raise CheckpointError(
                f"{folder}: no file holds all of {part.key}, or several hold the same of it"
            )
    block = torch.empty(BLOCK, dtype=torch.uint8)
    for name, wanted in sorted(by_file.items()):
        try:
            with VerifiedFile(folder / name, digests[name]) as file:
                _fill(file, wanted, block)
        except OSError as error:
            raise CheckpointError(f"{folder / name}: {error.strerror}") from None


@torch.no_grad()
def _fill(file: VerifiedFile, wanted: Sequence[tuple[Part, Box]], block: Tensor) -> None:
    found = [request for part, box in wanted for request in _requests(file, part, box)]
    for request in sorted(found, key=lambda request: (request.start, request.stop)):
        size = request.stop - request.start
        room = block if size <= len(block) else torch.empty(size, dtype=torch.uint8)
        file.read(request.start, room.numpy().data[:size])
        numbers = room[:size].view(request.dtype).view(request.rows)[request.source]
        if not request.key.startswith(MOMENTS) and not _is_finite(numbers):
            raise CheckpointError(f"{file.file}: {request.key} holds numbers that are not finite")
        request.target.copy_(numbers)


def _is_finite(numbers: Tensor) -> bool:
    """Return whether all are finite; the sum, which is 30 times as fast to test, mostly tells."""
    return bool(torch.isfinite(numbers.sum()) or torch.isfinite(numbers).all())


def _requests(file: VerifiedFile, part: Part, box: Box) -> Iterator[Request]:
    """Yield what a part needs of a box in a file, at most a block of rows at a time."""
    entry = _entry_of(file, part, box)
    shared = intersection(part.box, box)
    assert shared is not None
    target = part.tensor
    for dim, ((start, stop), (begin, _)) in enumerate(zip(shared, part.box, strict=True)):
        target = target.narrow(dim, start - begin, stop - start)
    source = tuple(slice(a - c, b - c) for (a, b), (c, _) in zip(shared, box, strict=True))
    each = (entry.stop - entry.start) // entry.shape[0]
    first, last = source[0].start, source[0].stop
    for row in range(first, last, max(1, BLOCK // each)):
        end = min(last, row + max(1, BLOCK // each))
        yield Request(
            part.key,
            entry.start + row * each,
            entry.start + end * each,
            TYPES[entry.dtype],
            (end - row, *entry.shape[1:]),
            (slice(None), *source[1:]),
            target[row - first : end - first],
        )


def _entry_of(file: VerifiedFile, part: Part, box: Box) -> Entry:
    entry = file.header.entries.get(name_in_file(part.key, box, part.shape))
    if entry is None or entry.shape != tuple(stop - start for start, stop in box) or entry.dtype not in TYPES:
        raise CheckpointError(f"{file.file}: does not hold {part.key} as the manifest says")
    assert entry.stop - entry.start == volume(box) * WIDTHS[entry.dtype]
    return entry


def tensors_to_fill(
    table: Mapping[str, Shape], keys: Sequence[str], device: str = "cpu"
) -> tuple[dict[str, Tensor], list[Part]]:
    """Return new tensors in fp32 for whole logical tensors, and the parts that fill them."""
    tensors = {key: torch.empty(table[key], device=device) for key in keys}
    return tensors, [
        Part(key, table[key], tuple((0, size) for size in table[key]), tensor)
        for key, tensor in tensors.items()
    ]
