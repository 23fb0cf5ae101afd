"""GLM's caches of a corpus, `FILE.lazy/{text,text.len.pkl}`, read without trusting the pickle."""

from __future__ import annotations

import pickle
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from trainer.data_open import Seen, hash_whole
from trainer.errors import DataError

# What a damaged or hostile pickle makes the library raise.
UNSOUND = (
    pickle.UnpicklingError,
    EOFError,
    ValueError,
    TypeError,
    OverflowError,
    AttributeError,
    IndexError,
    KeyError,
    MemoryError,
)


class _Numbers(pickle.Unpickler):
    """Lists of whole numbers and nothing else: a pickle can call anything that it names."""

    def find_class(self, module: str, name: str) -> Any:
        raise pickle.UnpicklingError(f"it names {module}.{name}, and lengths are plain numbers")

    def persistent_load(self, pid: Any) -> Any:
        raise pickle.UnpicklingError("it refers to something outside")


def read_lazy(folder: Path, seen: Seen, size: int) -> Iterator[tuple[bytes, int, NDArray[np.int64]]]:
    """Blocks of whole documents: their int32 tokens, the number of the first, the tokens of each."""
    binary, listing = folder / "text", folder / "text.len.pkl"
    lengths = _lengths(listing, binary)
    hash_whole(listing, seen)
    with binary.open("rb") as stream:
        first = 0
        while first < len(lengths):
            ends = np.cumsum(lengths[first : first + 4096])
            last = first + max(1, int(np.searchsorted(ends * 4, size, side="right")))
            here = lengths[first:last]
            data = stream.read(4 * int(here.sum()))
            seen.digest.update(data)
            seen.bytes += len(data)
            yield data, first + 1, here
            first = last


def _lengths(listing: Path, binary: Path) -> NDArray[np.int64]:
    for path in (listing, binary):
        if not path.is_file():
            raise DataError(f"{path}: no such file", "a .lazy folder has `text` and `text.len.pkl` in it")
    try:
        with listing.open("rb") as stream:
            found = _Numbers(stream).load()
        lengths = np.array(found, np.int64) if isinstance(found, (list, tuple)) else None
    except (OSError, *UNSOUND) as error:
        raise DataError(f"{listing}: not a plain list of lengths: {error}", "nothing of it was run") from None
    if lengths is None or lengths.ndim != 1 or (lengths < 0).any():
        raise DataError(f"{listing}: not a plain list of lengths", "nothing of it was run")
    size, total = binary.stat().st_size, int(lengths.sum())
    if size == total and (lengths % 4 == 0).all():  # counted in bytes, as some versions do
        return lengths // 4
    if size != 4 * total:
        raise DataError(
            f"{binary}: has {size} bytes, but its lengths count {total} tokens of 4 bytes",
            "it was cut, or holds text and not tokens; build from the JSON lines instead",
        )
    return lengths
