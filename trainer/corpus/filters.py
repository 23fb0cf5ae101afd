"""Keep the documents that are long enough and in the requested language. `dedup` drops duplicates later."""

from __future__ import annotations

import hashlib
from typing import Any

import numpy as np

from clusterctl.wire.data_requests import Filters
from trainer.env import install_command
from trainer.errors import DataError

# The first characters of a document, from which its language is detected: about 1024 tokens.
LOOKED_AT = 4096
# Bytes of a document's hash. That two of 1e9 documents share a hash has a probability below 1e-20.
HASH_BYTES = 16


class Sieve:
    """Filters loaded in one process."""

    def __init__(self, filters: Filters) -> None:
        self._filters = filters
        self._model: Any = _load(filters.language_model) if filters.language else None

    def refusal(self, document: str | list[int]) -> str:
        """Return why a document is dropped (`short`, `language`), or "". Documents given as ids are not
        checked."""
        if not isinstance(document, str):
            return ""
        if len(document) < self._filters.min_chars:
            return "short"
        if self._model is not None and not self._is_wanted(document):
            return "language"
        return ""

    def _is_wanted(self, text: str) -> bool:
        labels, shares = self._model.predict(" ".join(text[:LOOKED_AT].split()), k=1)
        label = labels[0].removeprefix("__label__") if labels else ""
        return label == self._filters.language and float(shares[0]) >= self._filters.min_confidence


def _load(path: str) -> Any:
    try:
        import fasttext
    except ImportError:
        raise DataError(
            "--language needs the package fasttext-predict", f"{install_command('data')}; or leave it out"
        ) from None
    try:
        return fasttext.load_model(path)
    except (ValueError, RuntimeError, OSError) as error:
        raise DataError(
            f"{path}: not a model of fastText: {error}", "give lid.176.bin or lid.176.ftz, decompressed"
        ) from None


def content_hash(document: str | list[int]) -> bytes:
    """Return a hash of the exact content of a document."""
    data = document.encode() if isinstance(document, str) else np.asarray(document, "<i4").tobytes()
    return hashlib.blake2b(data, digest_size=HASH_BYTES).digest()
