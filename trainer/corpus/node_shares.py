"""Divide the inputs of a build into shares, one per node. A share is a folder with everything that a node
needs for its part."""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path

from clusterctl.wire.arguments import arguments_of
from clusterctl.wire.data_requests import BuildOptions, BuildRequest
from clusterctl.wire.pair import InputShare, InputShares
from trainer.corpus.build import opened
from trainer.corpus.inputs import Input
from trainer.corpus.open import PACKED, STDIN
from trainer.corpus.tokenizer import tokenizer_files
from trainer.errors import DataError
from trainer.files import link_or_copy

COPIED_AT_ONCE = 1 << 24


@dataclass(frozen=True)
class Slice:
    """A file, or the lines of a file from `begin` to `end` (bytes)."""

    source: Input
    begin: int
    end: int
    size: int


def make_shares(order: BuildRequest, count: int, folder: Path) -> InputShares:
    """Write `count` shares below `folder` (fewer if there is less to divide); whole files become hard
    links."""
    inputs, _ = opened(order)
    if any(source.name == STDIN for source in inputs):
        raise DataError("standard input cannot be cut into shares", "write it to a file first")
    shares = [share for share in cut_even(inputs, count, order.recipe.each) if share]
    made = []
    for number, slices in enumerate(shares):
        share = folder / f"{number:05d}"
        _write(slices, share, order)
        made.append(InputShare(share, len(slices), sum(piece.end - piece.begin for piece in slices)))
    return InputShares(tuple(made), tuple(words_of(order)))


def words_of(order: BuildRequest) -> list[str]:
    """Return the options of a build that are the same on every node."""
    same = BuildOptions(**{item.name: getattr(order, item.name) for item in fields(BuildOptions)})
    # The model has another name there.
    recipe = replace(same.recipe, filters=replace(same.recipe.filters, language_model=""))
    return arguments_of(replace(same, recipe=recipe, keep_hashes=recipe.dedup))


def cut_even(inputs: Sequence[Input], count: int, each: str) -> list[list[Slice]]:
    """Return the inputs in order, divided into shares of about equal bytes; only uncompressed files of lines
    are divided."""
    sizes = [_size(Path(entry.name)) for entry in inputs]
    total = sum(sizes)
    shares: list[list[Slice]] = [[] for _ in range(count)]
    reached = 0
    for source, size in zip(inputs, sizes, strict=True):
        if size and _is_cut(source, each):
            begin = 0
            for share in range(count):
                wanted = (share + 1) * total // count - reached
                end = (
                    size
                    if share == count - 1 or wanted >= size
                    else _line_after(source.name, max(wanted, begin))
                )
                if end > begin:
                    shares[share].append(Slice(source, begin, end, size))
                    begin = end
        elif size:
            middle = reached + size // 2
            shares[min(count - 1, middle * count // max(total, 1))].append(Slice(source, 0, size, size))
        reached += size
    return shares


def _is_cut(source: Input, each: str) -> bool:
    plain = Path(source.name).suffix not in PACKED
    return plain and (source.kind == "jsonl" or (source.kind == "text" and each == "line"))


def _size(path: Path) -> int:
    if path.is_dir():
        return sum(file.stat().st_size for file in path.iterdir())
    return path.stat().st_size


def _line_after(name: str, at: int) -> int:
    """Return the start of the first line that starts at or after `at`."""
    if at == 0:
        return 0
    with open(name, "rb") as file:
        file.seek(at - 1)
        while piece := file.read(1 << 16):
            end = piece.find(b"\n")
            if end >= 0:
                return file.tell() - len(piece) + end + 1
        return file.tell()


def _write(slices: Sequence[Slice], share: Path, order: BuildRequest) -> None:
    shutil.rmtree(share, ignore_errors=True)
    (share / "in").mkdir(parents=True)
    (share / "tokenizer").mkdir()
    for number, part in enumerate(slices):
        _take(part, share / "in", number)
    for name, file in tokenizer_files(order.tokenizer).items():
        _link(file, share / "tokenizer" / name)
    if order.recipe.filters.language_model:
        (share / "model").mkdir()
        _link(Path(order.recipe.filters.language_model), share / "model" / "lid.bin")


def _take(part: Slice, folder: Path, number: int) -> None:
    """Write one input into a share.

    A number before its name keeps the order; the name of a part of a file contains its first line's number.
    """
    source = Path(part.source.name)
    if part.begin == 0 and part.end == part.size:
        _link(source, folder / f"{number:06d}-{source.name}")
        return
    line = 1 + sum(piece.count(b"\n") for piece in _bytes(source, 0, part.begin))
    with (folder / f"{number:06d}-{source.stem}-from-line-{line}{source.suffix}").open("wb") as out:
        for piece in _bytes(source, part.begin, part.end):
            out.write(piece)


def _bytes(path: Path, begin: int, end: int) -> Iterator[bytes]:
    with path.open("rb") as file:
        file.seek(begin)
        while begin < end and (piece := file.read(min(COPIED_AT_ONCE, end - begin))):
            begin += len(piece)
            yield piece


def _link(source: Path, target: Path) -> None:
    """Create hard links to a file or to the files of a folder; copy where a link is not possible."""
    source = source.resolve()
    if source.is_dir():
        target.mkdir()
        for file in source.iterdir():
            _link(file, target / file.name)
        return
    link_or_copy(source, target)
