"""Split a corpus into shards at the ends of documents, and merge shards in the given order."""

from __future__ import annotations

import os
import shutil
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from clusterctl.wire.pair import FileRecord, Manifest, PairCounts
from trainer.corpus.dedup import first_ones
from trainer.corpus.filters import HASH_BYTES
from trainer.corpus.indexed import (
    Corpus,
    Writer,
    bin_path,
    idx_path,
    manifest_path,
    open_corpus,
    write_manifest,
)
from trainer.corpus.store import BAD_KEPT, hashes_path
from trainer.corpus.verify import read_manifest
from trainer.errors import DataError
from trainer.files import sha256
from trainer.splits import split_bounds

TOKENS_AT_ONCE = 1 << 24
NAMES = ("train", "valid", "test")


def shard_name(prefix: Path, number: int, count: int) -> Path:
    return prefix.with_name(f"{prefix.name}-{number:05d}-of-{count:05d}")


def split(
    prefix: Path, output: Path, parts: int = 0, fractions: str = "", overwrite: bool = False
) -> list[PairCounts]:
    """Write `parts` shards with about equal numbers of tokens, or train, valid and test by `fractions`
    (949,50,1)."""
    corpus = open_corpus(prefix)
    if bool(parts) == bool(fractions):
        raise DataError("give either --parts N or --split A,B,C", "as in --parts 8, or --split 949,50,1")
    if parts:
        edges = _even_edges(corpus, parts)
        names = [shard_name(output, number, parts) for number in range(parts)]
    else:
        edges = _fraction_edges(corpus, fractions)
        names = [output.with_name(f"{output.name}-{name}") for name in NAMES]
    _refuse_existing(names, overwrite)
    manifest, _ = read_manifest(prefix)
    made = []
    for name, (begin, end) in zip(names, pairwise(edges), strict=True):
        if begin == end:
            continue
        with Writer(name, corpus.tokens.dtype) as writer:
            _copy(corpus, begin, end, writer)
        source = manifest and replace(_common(manifest), split_from=str(prefix), documents_from=(begin, end))
        made.append(_finished(name, writer, source))
    return made


def _even_edges(corpus: Corpus, parts: int) -> list[int]:
    if not 1 <= parts <= corpus.documents:
        raise DataError(
            f"--parts {parts}: {corpus.prefix} has {corpus.documents} documents",
            f"each shard needs a document: give a number from 1 to {corpus.documents}",
        )
    ends = np.concatenate([[0], np.cumsum(corpus.lengths, dtype=np.int64)])[corpus.marks]
    edges = [0]
    for number in range(1, parts):
        at = int(np.searchsorted(ends, int(ends[-1]) * number / parts))
        edges.append(min(max(at, edges[-1] + 1), corpus.documents - (parts - number)))
    return [*edges, corpus.documents]


def _fraction_edges(corpus: Corpus, fractions: str) -> list[int]:
    try:
        bounds = split_bounds(fractions, corpus.documents)
    except ValueError:
        raise DataError(
            f"--split {fractions}: must be one to three shares", "as in --split 949,50,1"
        ) from None
    return [0, *(end for _, end in bounds)]


def _refuse_existing(names: Iterable[Path], overwrite: bool) -> None:
    existing = [str(path) for name in names for path in (bin_path(name), idx_path(name)) if path.exists()]
    if existing and not overwrite:
        raise DataError(
            f"{', '.join(existing)}: exists already", "use --replace to overwrite, or another --output"
        )


def _copy(
    corpus: Corpus, begin: int, end: int, writer: Writer, keep: NDArray[np.bool_] | None = None
) -> None:
    """Copy the documents [begin, end) that `keep` selects, in blocks that bound memory."""
    for first, last in _runs(corpus, begin, end):
        a, b = int(corpus.marks[first]), int(corpus.marks[last])
        tokens, lengths = corpus.tokens[:0], corpus.lengths[a:b]
        if b > a:
            tokens = corpus.tokens[corpus.offsets[a] : corpus.offsets[b - 1] + corpus.lengths[b - 1]]
        counts = np.diff(corpus.marks[first : last + 1])
        if keep is not None and not keep[first:last].all():
            stays = np.repeat(keep[first:last], counts)
            tokens, lengths, counts = (
                tokens[np.repeat(stays, lengths)],
                lengths[stays],
                counts[keep[first:last]],
            )
        writer.add(tokens, lengths, counts)


def _runs(corpus: Corpus, begin: int, end: int) -> Iterator[tuple[int, int]]:
    while begin < end:
        last = min(end, begin + 65536)
        while last > begin + 1 and _size(corpus, begin, last) > TOKENS_AT_ONCE:
            last = begin + max(1, (last - begin) // 2)
        yield begin, last
        begin = last


def _size(corpus: Corpus, begin: int, end: int) -> int:
    return int(corpus.lengths[int(corpus.marks[begin]) : int(corpus.marks[end])].sum(dtype=np.int64))


def merge(prefixes: Sequence[Path], output: Path, overwrite: bool = False, dedup: bool = False) -> PairCounts:
    """Merge the documents of several pairs; raise one error for all pairs whose token type or tokenizer
    differs.

    `dedup` drops later copies across the pairs, by the hashes stored next to them.
    """
    corpora = _open_all(prefixes)
    if output in prefixes:
        raise DataError(f"{output}: is one of the pairs to merge", "name another --output")
    _refuse_existing([output], overwrite)
    manifests = [read_manifest(prefix)[0] for prefix in prefixes]
    keeps = _firsts(corpora, output) if dedup else [None] * len(corpora)
    with Writer(output, corpora[0].tokens.dtype) as writer:
        for corpus, keep in zip(corpora, keeps, strict=True):
            _copy(corpus, 0, corpus.documents, writer, keep)
    whole = [manifest for manifest in manifests if manifest is not None]
    if len(whole) < len(manifests):
        return _finished(output, writer, None)
    duplicates = sum(corpus.documents for corpus in corpora) - writer.documents
    return _finished(output, writer, _merged(prefixes, whole, duplicates))


def _merged(prefixes: Sequence[Path], manifests: Sequence[Manifest], duplicates: int) -> Manifest:
    """Return what the pairs have in common, with the totals of their manifests."""
    dropped: Counter[str] = Counter({"bad": 0, "short": 0, "language": 0, "duplicate": duplicates})
    for manifest in manifests:
        dropped.update(manifest.dropped or {})
    return replace(
        _common(manifests[0]),
        merged_from=tuple(str(prefix) for prefix in prefixes),
        empty_documents=sum(manifest.empty_documents or 0 for manifest in manifests),
        characters=sum(manifest.characters or 0 for manifest in manifests),
        dropped=dict(dropped),
        bad=tuple(line for manifest in manifests for line in manifest.bad)[:BAD_KEPT],
        inputs=tuple(source for manifest in manifests for source in manifest.inputs),
    )


def _common(manifest: Manifest) -> Manifest:
    """Return the values of a manifest that also hold for parts of the corpus."""
    return Manifest(
        format=manifest.format,
        token_type=manifest.token_type,
        unit=manifest.unit,
        append_eod=manifest.append_eod,
        vocab=manifest.vocab,
        eod=manifest.eod,
        eod_token=manifest.eod_token,
        glm=manifest.glm,
        tokenizer=manifest.tokenizer,
        filters=manifest.filters,
        outputs={},
    )


def _firsts(corpora: Sequence[Corpus], output: Path) -> list[NDArray[np.bool_]]:
    """Return for each pair which of its documents are not copies of earlier ones."""
    faults = []
    for corpus in corpora:
        path = hashes_path(corpus.prefix)
        if not path.is_file() or path.stat().st_size != HASH_BYTES * corpus.documents:
            faults.append(f"{path}: does not have the hashes of {corpus.documents} documents")
    if faults:
        raise DataError("\n".join(faults), "build with --dedup --keep-hashes")
    output.parent.mkdir(parents=True, exist_ok=True)
    joined = output.with_name(f".{output.name}.{os.getpid()}.hashes.tmp")
    try:
        with joined.open("wb") as out:
            for corpus in corpora:
                with hashes_path(corpus.prefix).open("rb") as source:
                    shutil.copyfileobj(source, out, 1 << 20)
        keep = first_ones(joined)
    finally:
        joined.unlink(missing_ok=True)
    ends = np.cumsum([corpus.documents for corpus in corpora])
    return np.split(keep, ends[:-1])


def _open_all(prefixes: Sequence[Path]) -> list[Corpus]:
    faults, corpora = [], []
    for prefix in prefixes:
        try:
            corpora.append(open_corpus(prefix))
        except DataError as error:
            faults.append(error.message)
    faults += _unlike("holds", [(corpus.prefix, corpus.tokens.dtype.name) for corpus in corpora])
    named = [(prefix, read_manifest(prefix)[0]) for prefix in prefixes]
    known = [
        (prefix, manifest.tokenizer.sha256[:12])
        for prefix, manifest in named
        if manifest and manifest.tokenizer
    ]
    faults += _unlike("was made with the tokenizer", known)
    if faults:
        raise DataError(
            "\n".join(faults), "merge only pairs of one tokenizer; `clusterctl data verify` shows details"
        )
    return corpora


def _unlike(relation: str, values: Sequence[tuple[Path, str]]) -> list[str]:
    return [
        f"{prefix}: {relation} {value}, but {values[0][0]} {values[0][1]}"
        for prefix, value in values
        if value != values[0][1]
    ]


def _finished(prefix: Path, writer: Writer, source: Manifest | None) -> PairCounts:
    """Write the manifest of the new pair if its source has one: the common values, its own counts and
    hashes."""
    outputs = {
        ending: FileRecord(path.stat().st_size, sha256(path))
        for ending, path in (("bin", bin_path(prefix)), ("idx", idx_path(prefix)))
    }
    counts = PairCounts(
        str(prefix), writer.documents, writer.sequences, writer.tokens, outputs["bin"].bytes or 0
    )
    if source is None:
        manifest_path(prefix).unlink(missing_ok=True)
        return counts
    manifest = replace(
        source,
        documents=counts.documents,
        sequences=counts.sequences,
        tokens=counts.tokens,
        outputs=outputs,
    )
    write_manifest(manifest_path(prefix), manifest)
    return counts
