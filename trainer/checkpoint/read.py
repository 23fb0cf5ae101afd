"""Read any boxes of logical tensors from a checkpoint's files, and verify while reading."""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from clusterctl.wire.saved import WIDTHS
from clusterctl.wire.saved import Tensor as Entry
from native.hashes import checksum
from native.hashes.sha256 import block_hashes
from trainer.checkpoint.access import header_of
from trainer.checkpoint.names import Shape, name_in_file
from trainer.checkpoint.part import MOMENTS, Box, Part, intersection, volume
from trainer.checkpoint.write import CHECKSUMS, HASHES, PIECE_BYTES
from trainer.errors import CheckpointError

TYPES = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
MOST_PIECE_BYTES = 64 << 20
# Bytes of a tensor that are copied at a time.
BLOCK = 2 << 20
# Bytes of a window that are read and verified at a time: they stay in the processor's cache.
WINDOW = 6 << 20
# Pieces that are read into their targets at a time; AVX-512 hashes as many together.
BATCH = 16
# Bytes that one thread reads at a time.
RUN = 96 << 20
# Limit of bytes of one request, so that threads can share a large tensor.
LARGEST = 32 << 20
Pieces = Mapping[str, Sequence[tuple[str, Box]]]
"""For each tensor: the files that hold parts of it, and which box each file holds."""


@dataclass(frozen=True)
class Request:
    """Rows of a box in a file, and the targets of their numbers."""

    key: str
    start: int
    stop: int
    dtype: torch.dtype
    rows: tuple[int, ...]
    """The shape of the numbers in the bytes [start, stop)."""
    source: tuple[slice, ...]
    target: Tensor
    plain: bool = False
    """Whether the bytes go unchanged and contiguously into the target: complete pieces then need no copy."""


class VerifiedFile:
    """Bytes of one file, verified while they are read: each piece is compared with its checksum or its SHA-256."""

    def __init__(self, file: Path, digest: str | None, fast: bool = True) -> None:
        """`digest`: SHA-256 of the header; None for a file of version 0.1, which was completely verified before.

        `fast`: verify by the checksums, where the file has some. Checksums detect damage, but not deliberate changes.
        """
        self.file, self._fast = file, fast and checksum.is_available()
        self._handle = os.open(file, os.O_RDONLY | os.O_CLOEXEC)
        try:
            self.size = os.fstat(self._handle).st_size
            self.header = header_of(self._handle, file, digest or "")
            self.hashes, self.piece_bytes = self._read_hashes(digest is not None)
            self.checksums = self._read_checksums()
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        os.close(self._handle)

    def __enter__(self) -> VerifiedFile:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

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

    def _read_checksums(self) -> bytes:
        """Return the checksum of each piece; b"" if they are not used, or an older version wrote the file."""
        try:
            found = bytes.fromhex(self.header.metadata.get(CHECKSUMS, "") if self._fast else "")
        except ValueError:
            found = b"\0"
        if found and len(found) * 32 != len(self.hashes) * checksum.SIZE:
            raise CheckpointError(f"{self.file}: its header has not one checksum for each piece of its data")
        return found

    def piece_at(self, offset: int) -> int:
        """Return the number of the piece that holds a byte of the file."""
        return (offset - self.header.data) // self.piece_bytes

    def place_of(self, piece: int) -> int:
        """Return the offset of a piece in the file; the end of the file for pieces after the last."""
        return min(self.header.data + piece * self.piece_bytes, self.size)

    def read_pieces(self, first: int, target: memoryview) -> None:
        """Fill `target` with complete pieces, from piece `first` on."""
        each = self.piece_bytes
        self.read_blocks(first, [target[start : start + each] for start in range(0, len(target), each)])

    def read_blocks(self, first: int, targets: Sequence[memoryview]) -> None:
        """Fill each target with a complete piece, from piece `first` on."""
        if not self.checksums:
            self._read(first, targets)
            self._compare_hashes(first, targets)
            return
        for piece, target in enumerate(targets, first):
            # One at a time, so that the checksum finds the bytes in the processor's cache.
            self._read(piece, [target])
            found, at = checksum.block_checksums([target]), checksum.SIZE * piece
            if found != self.checksums[at : at + checksum.SIZE]:
                # The hash decides.
                self._compare_hashes(piece, [target])

    def _read(self, first: int, targets: Sequence[memoryview]) -> None:
        begin, left = self.place_of(first), list(targets)
        while left:
            count = os.preadv(self._handle, left, begin)
            if not count:
                raise CheckpointError(f"{self.file}: became shorter while it was read")
            begin += count
            while left and count >= len(left[0]):
                count -= len(left.pop(0))
            left[:1] = [block[count:] for block in left[:1]]

    def _compare_hashes(self, first: int, targets: Sequence[memoryview]) -> None:
        """Raise a CheckpointError if neighbouring pieces do not have their hashes."""
        if not self.hashes:
            return
        found = block_hashes(targets)
        if found == self.hashes[32 * first : 32 * first + len(found)]:
            return
        at = next(at for at in range(0, len(found), 32) if found[at : at + 32] != self._hash(first, at))
        start = self.place_of(first + at // 32)
        range_text = f"bytes {start:,} to {self.place_of(first + at // 32 + 1):,}"
        raise CheckpointError(f"{self.file}: damaged: {range_text} are not what was saved (sha256 differs)")

    def _hash(self, first: int, at: int) -> bytes:
        return self.hashes[32 * first + at : 32 * first + at + 32]

    def verify(self) -> None:
        """Read all pieces."""
        window = Window(self)
        for offset in range(self.header.data, self.size, WINDOW):
            window.bytes_of(offset, min(offset + WINDOW, self.size), self.size)


class Window:
    """Neighbouring pieces of a file in memory, verified; the window moves towards the end of the file."""

    def __init__(self, file: VerifiedFile) -> None:
        self._file = file
        self._memory = np.empty(0, np.uint8)
        self._first = self._last = 0
        """The pieces [first, last) are in memory."""

    def bytes_of(self, start: int, stop: int, limit: int) -> NDArray[np.uint8]:
        """Return the bytes [start, stop) of the file; `limit`: where the bytes end that may be read ahead.

        The bytes are valid until the next call. `start` must not be less than in the call before.
        """
        file = self._file
        if stop > file.place_of(self._last) or start < file.place_of(self._first):
            self._move(start, stop, limit)
        begin = start - file.place_of(self._first)
        return self._memory[begin : begin + stop - start]

    def _move(self, start: int, stop: int, limit: int) -> None:
        file, first = self._file, self._file.piece_at(start)
        end = file.piece_at(min(limit, max(stop, start + WINDOW)) - 1) + 1
        size = file.place_of(end) - file.place_of(first)
        memory = self._memory if size <= len(self._memory) else np.empty(size, np.uint8)
        held = 0
        if self._first <= first < self._last:
            # Pieces that were verified already.
            skipped = file.place_of(first) - file.place_of(self._first)
            held = file.place_of(self._last) - file.place_of(first)
            memory[:held] = self._memory[skipped : skipped + held].copy()
        self._memory, self._first = memory, first
        # If the next line fails, no piece counts as verified.
        done, self._last = self._last, first
        file.read_pieces(done if held else first, memory.data[held:size])
        self._last = end


def read_parts(
    folder: Path, parts: Sequence[Part], pieces: Pieces, digests: Mapping[str, str | None], threads: int = 1
) -> None:
    """Fill every part from the files that hold it; a CheckpointError names the wrong file or tensor."""
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
    for name, wanted in sorted(by_file.items()):
        try:
            with VerifiedFile(folder / name, digests[name]) as file:
                _fill(file, wanted, threads)
        except OSError as error:
            raise CheckpointError(f"{folder / name}: {error.strerror}") from None


def _fill(file: VerifiedFile, wanted: Sequence[tuple[Part, Box]], threads: int) -> None:
    found = [request for part, box in wanted for request in _requests(file, part, box)]
    found.sort(key=lambda request: (request.start, request.stop))
    plain = list(_runs(file, [request for request in found if request.plain]))
    others = list(_runs(file, [request for request in found if not request.plain]))
    work = [partial(_fill_plain, file, run) for run in plain] + [
        partial(_fill_run, file, run) for run in others
    ]
    if threads == 1 or len(work) == 1:
        for fill in work:
            fill()
        return
    with ThreadPoolExecutor(threads) as pool:
        for _ in pool.map(lambda fill: fill(), work):
            pass


def _runs(file: VerifiedFile, requests: Sequence[Request]) -> Iterator[list[Request]]:
    """Yield neighbouring requests together, up to RUN bytes: every piece in between is needed."""
    run: list[Request] = []
    for request in requests:
        far = run and file.piece_at(request.start) > file.piece_at(run[-1].stop - 1) + 1
        if run and (far or request.stop - run[0].start > RUN):
            yield run
            run = []
        run.append(request)
    if run:
        yield run


@torch.no_grad()
def _fill_run(file: VerifiedFile, run: Sequence[Request]) -> None:
    window, limit = Window(file), max(request.stop for request in run)
    for request in run:
        room = torch.from_numpy(window.bytes_of(request.start, request.stop, limit))
        numbers = view_as(room, request.dtype).view(request.rows)[request.source]
        _check_finite(file, request, numbers)
        request.target.copy_(numbers)


@torch.no_grad()
def _fill_plain(file: VerifiedFile, run: Sequence[Request]) -> None:
    """Read whole pieces into their targets and verify them there; others, with two tensors, pass through a copy."""
    first, last = file.piece_at(run[0].start), file.piece_at(run[-1].stop - 1) + 1
    rooms = np.empty((min(BATCH, last - first), file.piece_bytes), np.uint8)
    waiting = deque((request, request.target.view(torch.uint8).numpy()) for request in run)
    for begin in range(first, last, BATCH):
        end = min(begin + BATCH, last)
        while waiting and waiting[0][0].stop <= file.place_of(begin):
            waiting.popleft()
        _read_batch(file, range(begin, end), rooms, waiting)
    for request in run:
        _check_finite(file, request, request.target)


def _read_batch(
    file: VerifiedFile,
    pieces: range,
    rooms: NDArray[np.uint8],
    waiting: Iterable[tuple[Request, NDArray[np.uint8]]],
) -> None:
    """Read and verify neighbouring pieces, and pass their bytes to all requests for them."""
    places = [file.place_of(piece) for piece in (*pieces, pieces.stop)]
    blocks = [room[: stop - start] for room, (start, stop) in zip(rooms, pairwise(places), strict=False)]
    read_there = set[int]()
    copies: list[tuple[NDArray[np.uint8], int, int]] = []
    for request, target in waiting:
        if request.start >= places[-1]:
            break
        for at, (place, after) in enumerate(pairwise(places)):
            start, stop = max(place, request.start), min(after, request.stop)
            own = target[start - request.start : stop - request.start]
            if stop - start == after - place and at not in read_there:
                blocks[at] = own
                read_there.add(at)
            elif start < stop:
                copies.append((own, at, start - place))
    file.read_blocks(pieces.start, [block.data for block in blocks])
    for own, at, offset in copies:
        own[:] = blocks[at][offset : offset + len(own)]


def _check_finite(file: VerifiedFile, request: Request, numbers: Tensor) -> None:
    if not request.key.startswith(MOMENTS) and not _is_finite(numbers):
        raise CheckpointError(f"{file.file}: {request.key} holds numbers that are not finite")


def view_as(room: Tensor, dtype: torch.dtype) -> Tensor:
    """Return bytes as numbers; in files of other programs they may be unaligned."""
    return (room if room.data_ptr() % dtype.itemsize == 0 else room.clone()).view(dtype)


def _is_finite(numbers: Tensor) -> bool:
    """Return whether all numbers are finite; usually a test of their sum is enough, which is 30 times as fast."""
    return bool(torch.isfinite(numbers.sum()) or torch.isfinite(numbers).all())


def _requests(file: VerifiedFile, part: Part, box: Box) -> Iterator[Request]:
    """Yield requests for the rows of a box in a file that a part needs, at most a block of rows at a time."""
    entry = _entry_of(file, part, box)
    shared = intersection(part.box, box)
    assert shared is not None
    target = part.tensor.detach()
    for dim, ((start, stop), (begin, _)) in enumerate(zip(shared, part.box, strict=True)):
        target = target.narrow(dim, start - begin, stop - start)
    source = tuple(slice(a - c, b - c) for (a, b), (c, _) in zip(shared, box, strict=True))
    each = (entry.stop - entry.start) // entry.shape[0]
    first, last = source[0].start, source[0].stop
    if shared[1:] == box[1:] and _takes_bytes(file, entry, target):
        flat, width = target.view(-1), TYPES[entry.dtype].itemsize
        for at in range(0, flat.numel(), LARGEST // width):
            numbers = flat[at : at + LARGEST // width]
            start = entry.start + first * each + at * width
            stop = start + numbers.numel() * width
            yield Request(part.key, start, stop, TYPES[entry.dtype], (), (), numbers, plain=True)
        return
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


def _takes_bytes(file: VerifiedFile, entry: Entry, target: Tensor) -> bool:
    """Return whether the target has the type of the file, and no number crosses two pieces."""
    dtype = TYPES[entry.dtype]
    whole = not (entry.start - file.header.data) % dtype.itemsize and not file.piece_bytes % dtype.itemsize
    return whole and target.dtype == dtype and target.device.type == "cpu" and target.is_contiguous()


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
