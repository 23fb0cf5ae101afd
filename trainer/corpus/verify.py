"""Check every rule for a pair of files and report all faults together. Repair one fault: end-of-document
tokens that the index does not count."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from clusterctl.wire.pair import FileRecord, Manifest
from trainer.corpus.indexed import (
    Index,
    bin_path,
    idx_path,
    load_manifest,
    look,
    manifest_path,
    read_index,
    switch,
    write_index,
)
from trainer.corpus.tokenizer import Tokenizer
from trainer.errors import DataError
from trainer.files import blocks, link_or_copy, sha256
from trainer.side_files import TOKENIZER

TOKENS_AT_ONCE = 1 << 22


@dataclass(frozen=True)
class Finding:
    """One fault, and its remedy."""

    what: str
    remedy: str = ""


@dataclass(frozen=True)
class Verified:
    """The faults of a pair, its counts, and what was checked."""

    prefix: str
    findings: tuple[Finding, ...]
    documents: int = 0
    sequences: int = 0
    tokens: int = 0
    largest_id: int = -1
    checked: tuple[str, ...] = ()

    @property
    def is_there(self) -> bool:
        """Return whether both files exist."""
        return all(path(Path(self.prefix)).is_file() for path in (bin_path, idx_path))

    def as_json(self) -> dict[str, object]:
        return {"ok": not self.findings, **asdict(self)}


@dataclass(frozen=True)
class Repaired:
    """What `repair` did, or would do; `why` says that there was nothing to repair."""

    prefix: str
    repaired: bool
    why: str = ""
    end_of_document: int | None = None
    documents: int = 0
    tokens_before: int = 0
    tokens: int = 0

    def as_json(self) -> dict[str, object]:
        if self.why:
            return {"prefix": self.prefix, "repaired": self.repaired, "why": self.why}
        return {key: value for key, value in asdict(self).items() if key != "why"}


def verify(
    prefix: Path, vocab: int | None = None, hashes: bool = True, tokenizer: Tokenizer | None = None
) -> Verified:
    """Check the index itself, and compare it with the tokens, the vocabulary, the manifest and the tokenizer.

    `tokenizer`: by default the one that the manifest names, if it is there.
    """
    index, faults = look(prefix)
    findings = [Finding(problem, remedy) for problem, remedy in faults]
    checked = ["index"]
    if index is None:
        return Verified(str(prefix), tuple(findings), checked=tuple(checked))
    if (
        any("counts" in finding.what for finding in findings)
        and _missing_ends(index, bin_path(prefix)) is not None
    ):
        findings.append(
            Finding(
                f"{prefix}: the end-of-document token of each document is in .bin and not counted in .idx",
                "clusterctl data repair corrects it exactly",
            )
        )
    manifest, unread = read_manifest(prefix)
    findings += unread
    if manifest is not None:
        checked.append("manifest")
        findings += _against(prefix, manifest, hashes)
        recorded = manifest.tokenizer
        if tokenizer is None and recorded and hashes and Path(recorded.path).is_file():
            tokenizer = Tokenizer.load(Path(recorded.path), manifest.eod_token or "")
        if tokenizer is not None and (other := other_tokenizer(prefix, tokenizer)):
            findings.append(Finding(*other))
    known = vocab if vocab is not None or manifest is None else manifest.vocab
    largest = -1
    if not any("has" in finding.what and ".bin" in finding.what for finding in findings):
        checked.append("ids")
        low, largest = id_range(bin_path(prefix), index.dtype)
        findings += _ids_outside(prefix, low, largest, known)
        if manifest is not None and manifest.largest_id not in (None, largest):
            problem = f"{bin_path(prefix)}: its largest token id is {largest}, its manifest records "
            findings.append(Finding(f"{problem}{manifest.largest_id}", _changed(bin_path(prefix))))
    if not index.tokens:
        findings.append(Finding(f"{prefix}: has no tokens", "build it from texts that have some"))
    return Verified(
        str(prefix),
        tuple(findings),
        len(index.marks) - 1,
        len(index.lengths),
        index.tokens,
        largest,
        tuple(checked),
    )


def read_manifest(prefix: Path) -> tuple[Manifest | None, list[Finding]]:
    """Return the manifest written when the pair was built, if any, and its faults."""
    path = manifest_path(prefix)
    try:
        return load_manifest(path), []
    except ValueError:
        return None, [Finding(f"{path}: not a manifest of a build", "build the data again, or delete it")]


def _against(prefix: Path, manifest: Manifest, hashes: bool) -> Iterator[Finding]:
    for ending, path in (("bin", bin_path(prefix)), ("idx", idx_path(prefix))):
        recorded, size = manifest.outputs.get(ending, FileRecord()), path.stat().st_size
        if recorded.bytes != size:
            yield Finding(f"{path}: has {size} bytes, its manifest says {recorded.bytes}", _changed(path))
        elif hashes and sha256(path) != recorded.sha256:
            yield Finding(f"{path}: is not the file that was built: its hash differs", _changed(path))


def _changed(path: Path) -> str:
    return f"{path.name} was changed or mixed up after it was built: copy it again, or build it again"


def other_tokenizer(prefix: Path, tokenizer: Tokenizer) -> tuple[str, str] | None:
    """Return a problem and its remedy if the manifest of a pair records that another tokenizer encoded it."""
    manifest, _ = read_manifest(prefix)
    recorded = manifest.tokenizer if manifest else None
    # An old manifest has no fingerprint, and a vocabulary with merges has another hash than the same tokenizer.json.
    if (
        recorded is None
        or recorded.sha256 == tokenizer.sha256
        or (not recorded.fingerprint and Path(recorded.path).name != TOKENIZER)
        or recorded.fingerprint == tokenizer.fingerprint
    ):
        return None
    problem = f"{tokenizer.source}: is not the tokenizer that encoded {prefix}"
    return problem, "name that tokenizer, or build the data again with this one"


def id_range(binary: Path, dtype: np.dtype[Any]) -> tuple[int, int]:
    """Return the smallest and the largest token id; reads the file in pieces."""
    low, high = 0, -1
    for some in token_pieces(binary, dtype):
        low, high = min(low, int(some.min())), max(high, int(some.max()))
    return low, high


def recorded_largest_id(prefix: Path, bytes_of_tokens: int) -> int | None:
    """Return the largest token id that the manifest of a pair records; None without one, or with another size."""
    manifest, _ = read_manifest(prefix)
    if manifest is None or manifest.outputs["bin"].bytes != bytes_of_tokens:
        return None
    return manifest.largest_id if manifest.largest_id is not None and manifest.largest_id >= 0 else None


def token_pieces(binary: Path, dtype: np.dtype[Any]) -> Iterator[NDArray[Any]]:
    for block in blocks(binary, TOKENS_AT_ONCE * dtype.itemsize):
        yield np.frombuffer(block, dtype, len(block) // dtype.itemsize)


def _ids_outside(prefix: Path, low: int, largest: int, vocab: int | None) -> Iterator[Finding]:
    if low < 0:
        yield Finding(
            f"{bin_path(prefix)}: has token id {low}",
            "an id is at least 0: the file has another token type, or is damaged",
        )
    if vocab is not None and largest >= vocab:
        yield Finding(
            f"{bin_path(prefix)}: has token id {largest}, but the vocabulary has {vocab}",
            "it was made with another tokenizer, or is damaged",
        )


# -- repair -------------------------------------------------------------------------------------------------


def _missing_ends(index: Index, binary: Path) -> tuple[NDArray[np.int64], int] | None:
    """Return the corrected lengths and the end id if the end of every document is in `.bin` but not
    counted, else None.

    A known preprocessor writes the end of each document and does not count it. This is certain if the number
    of uncounted tokens is the number of non-empty documents, and each of them would then end with the same id.
    """
    if (index.lengths < 0).any() or not len(index.marks) or int(index.marks[-1]) != len(index.lengths):
        return None
    size = binary.stat().st_size
    filled = np.diff(index.marks) > 0
    documents = int(filled.sum())
    if not documents or size != (index.tokens + documents) * index.dtype.itemsize:
        return None
    lengths = index.lengths.astype(np.int64)
    lengths[index.marks[1:][filled] - 1] += 1
    last = np.cumsum(lengths)[index.marks[1:][filled] - 1] - 1
    tokens = np.memmap(binary, index.dtype, mode="r")
    end = int(tokens[last[0]])
    for begin in range(0, len(last), TOKENS_AT_ONCE):
        if (tokens[last[begin : begin + TOKENS_AT_ONCE]] != end).any():
            return None
    return lengths, end


def repair(prefix: Path, output: Path | None = None, dry_run: bool = False) -> Repaired:
    """Write an index that counts the end-of-document tokens; the old one is kept as `.idx.before`.

    With `output` the repaired pair is written there, and its `.bin` is a hard link, or a copy on another disk.
    """
    index, faults = look(prefix)
    if index is None:
        raise DataError("\n".join(problem for problem, _ in faults), faults[0][1])
    if not faults:
        return Repaired(str(prefix), False, "there is nothing to repair")
    missing = _missing_ends(index, bin_path(prefix))
    if missing is None or len(faults) > 1:
        raise DataError(
            "\n".join(
                [
                    *(problem for problem, _ in faults),
                    "the original cannot be reconstructed from what is left",
                ]
            ),
            "build it again; only uncounted end-of-document tokens can be repaired",
        )
    lengths, end = missing
    if not dry_run:
        _write_repaired(index, lengths, prefix, output or prefix)
    return Repaired(
        str(output or prefix),
        not dry_run,
        end_of_document=end,
        documents=len(index.marks) - 1,
        tokens_before=index.tokens,
        tokens=int(lengths.sum()),
    )


def _write_repaired(index: Index, lengths: NDArray[np.int64], prefix: Path, output: Path) -> None:
    output.parent.mkdir(parents=True, exist_ok=True)
    asides = {
        name: output.with_name(f".{output.name}.{os.getpid()}.{name}.tmp")
        for name in ("idx", "l", "m", "bin")
    }
    before = idx_path(output).with_name(idx_path(output).name + ".before")
    try:
        asides["l"].write_bytes(lengths.astype("<i4").tobytes())
        asides["m"].write_bytes(index.marks[1:].astype("<i8").tobytes())
        with (
            asides["idx"].open("wb") as out,
            asides["l"].open("rb") as sizes,
            asides["m"].open("rb") as marks,
        ):
            write_index(out, index.dtype, sizes, marks)
        if output == prefix:
            before.unlink(missing_ok=True)
            link_or_copy(idx_path(prefix), before)
        link_or_copy(bin_path(prefix), asides["bin"])
        switch(asides["bin"], asides["idx"], output)
    finally:
        for path in asides.values():
            path.unlink(missing_ok=True)
    read_index(idx_path(output))
