"""Compare the numbers of two checkpoints, file by file; the boxes of their files may differ."""

from __future__ import annotations

import math
import os
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

import torch
from torch import Tensor

from clusterctl.wire.results import Difference
from clusterctl.wire.saved import Tensor as Entry
from trainer.checkpoint.part import Box, intersection, whole_box
from trainer.checkpoint.read import BLOCK, TYPES, VerifiedFile, Window, view_as
from trainer.checkpoint.store import open_checkpoint
from trainer.errors import CheckpointError


def _difference(first: Tensor, second: Tensor) -> Difference:
    """Return the difference of blocks of the same numbers."""
    differ = (first != second) & ~(first.isnan() & second.isnan())
    # The usual case of equal checkpoints needs no more arithmetic.
    count, squares = int(differ.sum()), float(first.double().square().sum())
    if not math.isfinite(squares):
        squares = float(first[first.isfinite()].double().square().sum())
    if not count:
        return Difference(first.numel(), squares_of_first=squares)
    gap = (first.double() - second.double()).abs()[differ]
    finite = gap[gap.isfinite()]
    largest = float(finite.max()) if finite.numel() else 0.0
    return Difference(
        first.numel(), count, largest, float(finite.square().sum()), squares, count - finite.numel()
    )


def compare(first: Path, second: Path, pairs: Iterable[Sequence[str]]) -> dict[str, Difference]:
    """Return the difference of each tensor over pairs of files, the first of which belongs to the first checkpoint."""
    digests, others = open_checkpoint(first).digests, open_checkpoint(second).digests
    found: dict[str, Difference] = {}
    try:
        for name, other in pairs:
            with (
                VerifiedFile(first / name, digests[os.path.basename(name)]) as file,
                VerifiedFile(second / other, others[os.path.basename(other)]) as other_file,
            ):
                _compare_files(file, other_file, found)
    except OSError as error:
        raise CheckpointError(f"{error.filename}: {error.strerror}") from None
    return found


@torch.no_grad()
def _compare_files(first: VerifiedFile, second: VerifiedFile, found: dict[str, Difference]) -> None:
    others: dict[str, list[tuple[Box, Entry]]] = {}
    for key, box, entry in _boxes(second):
        others.setdefault(key, []).append((box, entry))
    for key, box, entry in _boxes(first):
        for other_box, other in others.get(key, ()):
            shared = intersection(box, other_box) if len(box) == len(other_box) else None
            if shared is not None:
                pieces = _pieces(first, entry, box, shared), _pieces(second, other, other_box, shared)
                for numbers, others_numbers in zip(*pieces, strict=True):
                    more = _difference(numbers, others_numbers)
                    found[key] = found.get(key, Difference()).plus(more)


def _boxes(file: VerifiedFile) -> Iterator[tuple[str, Box, Entry]]:
    """Yield the logical name and the box of each tensor in a file."""
    for name, entry in file.header.entries.items():
        key, _, ranges = name.partition("@")
        try:
            pairs = [part.split(":") for part in ranges.split(",")] if ranges else []
            box = tuple((int(start), int(stop)) for start, stop in pairs) or whole_box(entry.shape)
        except ValueError:
            raise CheckpointError(f"{file.file}: tensor {name}: its name has wrong ranges") from None
        yield key, box, entry


def _pieces(file: VerifiedFile, entry: Entry, box: Box, shared: Box) -> Iterator[Tensor]:
    """Yield the numbers of a part of a box, some rows at a time: as many for every box with the part."""
    if entry.dtype not in TYPES:
        raise CheckpointError(f"{file.file}: numbers of type {entry.dtype} cannot be compared")
    each = (entry.stop - entry.start) // entry.shape[0]
    first = entry.start - box[0][0] * each
    inner = tuple(slice(a - c, b - c) for (a, b), (c, _) in zip(shared[1:], box[1:], strict=True))
    window, limit = Window(file), first + shared[0][1] * each
    step = max(1, BLOCK // (4 * max(1, math.prod(stop - start for start, stop in shared[1:]))))
    for row in range(shared[0][0], shared[0][1], step):
        last = min(row + step, shared[0][1])
        content = torch.from_numpy(window.bytes_of(first + row * each, first + last * each, limit))
        numbers = view_as(content, TYPES[entry.dtype]).view(last - row, *entry.shape[1:])
        rows = (slice(None), *inner)
        yield numbers[rows].float()
