"""Drop exact duplicates by hash: the first copy of a document stays. Memory is bounded for any corpus."""

from __future__ import annotations

import hashlib
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from trainer.corpus.filters import HASH_BYTES
from trainer.corpus.store import Store

# Hashes that are sorted at one time. With the document numbers and the sort order they take 100 MB.
AT_ONCE = 1 << 21
DOCUMENTS_AT_ONCE = 1 << 12


def drop_duplicates(store: Store) -> int:
    """Rewrite the files of the build without later copies of a document; return how many were dropped."""
    keep = first_ones(store.path("hashes"))
    dropped = int((~keep).sum())
    if dropped:
        _write_kept(store, keep)
    return dropped


def first_ones(path: Path) -> NDArray[np.bool_]:
    """Return for each document whether no earlier one has its hash.

    Reads the file several times, each time for a share of the hashes.
    """
    count = path.stat().st_size // HASH_BYTES
    keep = np.ones(count, bool)
    if not count:
        return keep
    hashes = np.memmap(path, "<u8", mode="r", shape=(count, 2))
    shares = -(-count // AT_ONCE)
    for share in range(shares):
        mine = _documents_of_share(hashes, share, shares)
        low, high = hashes[mine, 0], hashes[mine, 1]
        order = np.lexsort((mine, low, high))
        low, high = low[order], high[order]
        alike = (low[1:] == low[:-1]) & (high[1:] == high[:-1])
        keep[mine[order[1:][alike]]] = False
    return keep


def _documents_of_share(hashes: NDArray[np.uint64], share: int, shares: int) -> NDArray[np.int64]:
    """Return the numbers of the documents whose hash belongs to a share."""
    found = []
    for begin in range(0, len(hashes), AT_ONCE):
        some = hashes[begin : begin + AT_ONCE, 0] % np.uint64(shares) == share
        found.append(np.flatnonzero(some) + begin)
    return np.concatenate(found)


def _write_kept(store: Store, keep: NDArray[np.bool_]) -> None:
    dtype = store.dtype
    digest, counts = hashlib.sha256(), np.zeros_like(store.counts)
    sizes = dict.fromkeys(("bin", "lengths", "marks", "hashes"), 0)
    hashes = np.memmap(store.path("hashes"), "<u8", mode="r", shape=(len(keep), 2))
    lengths = np.memmap(store.path("lengths"), "<i4", mode="r") if store.sequences else np.zeros(0, "<i4")
    marks = np.memmap(store.path("marks"), "<i8", mode="r")
    tokens = np.memmap(store.path("bin"), dtype, mode="r") if store.tokens else np.zeros(0, dtype)
    sequence = token = written = 0
    asides = {name: store.path(f"{name}.kept").open("wb") for name in sizes}
    for begin in range(0, len(marks), DOCUMENTS_AT_ONCE):
        ends = marks[begin : begin + DOCUMENTS_AT_ONCE]
        some = keep[begin : begin + DOCUMENTS_AT_ONCE]
        per_document = np.diff(ends, prepend=sequence)
        here = lengths[sequence : int(ends[-1])]
        stays = np.repeat(some, per_document)
        reached = token + int(here.sum(dtype=np.int64))
        remaining = tokens[token:reached][np.repeat(stays, here)]
        digest.update(remaining.tobytes())
        counts += np.bincount(remaining, minlength=len(counts))
        new_marks = np.cumsum(per_document[some]) + written
        written += int(per_document[some].sum())
        written_now = {
            "bin": remaining,
            "lengths": here[stays],
            "marks": new_marks.astype("<i8"),
            "hashes": hashes[begin : begin + DOCUMENTS_AT_ONCE][some],
        }
        for name, data in written_now.items():
            sizes[name] += asides[name].write(data.tobytes())
        sequence, token = int(ends[-1]), reached
    for name, aside in asides.items():
        aside.close()
        store.path(f"{name}.kept").replace(store.path(name))
    store.replaced(sizes, digest, counts)
