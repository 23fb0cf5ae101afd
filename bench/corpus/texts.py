"""Corpora for measurements: each an endless stream of documents, always the same."""

from __future__ import annotations

import sysconfig
from collections.abc import Iterator
from pathlib import Path
from random import Random

import numpy as np


def prose(seed: int = 1) -> Iterator[str]:
    """Yield generated Latin prose: 200,000 words by Zipf's law, so that new words keep appearing as in real texts."""
    random = np.random.default_rng(seed)
    vocabulary = _vocabulary(random, 200_000)
    weight = 1 / np.arange(3, len(vocabulary) + 3) ** 1.05
    ends = np.cumsum(weight / weight.sum())
    while True:
        size = int(random.gamma(1.5, 300)) + 20
        chosen = np.searchsorted(ends, random.random(size)).tolist()
        yield _sentences([vocabulary[min(i, len(vocabulary) - 1)] for i in chosen], random)


def _vocabulary(random: np.random.Generator, size: int) -> list[str]:
    syllables = [
        a + b + c for a in ("", *"bcdfglmnprst", "th", "st", "ch") for b in "aeiou" for c in ("", *"nrstl")
    ]
    found: dict[str, None] = {}
    while len(found) < size:
        # Frequent words are short: the first ones have one syllable.
        parts = 1 + int(random.random() * (1 + np.log2(1 + len(found) / 50) / 3))
        found["".join(syllables[i] for i in random.integers(len(syllables), size=parts))] = None
    return list(found)


def _sentences(vocabulary: list[str], random: np.random.Generator) -> str:
    kinds = random.random(len(vocabulary))
    out: list[str] = []
    begins = True
    for word, kind in zip(vocabulary, kinds.tolist(), strict=True):
        out.append(("" if not out else " ") + (word.capitalize() if begins or kind < 0.02 else word))
        begins = 0.9 < kind < 0.96
        if kind > 0.96:
            out.append(",")
        elif begins:
            out.append("." if kind < 0.95 else ".\n\n")
        elif kind < 0.025:
            out.append("'s")
        elif kind < 0.035:
            out.append(f" {int(kind * 1e6) % 3000}")
    return "".join(out) + "."


def code(seed: int = 1) -> Iterator[str]:
    """Yield the sources of Python's standard library again and again, each time in another order."""
    paths = sorted(Path(sysconfig.get_paths()["stdlib"]).glob("[a-z]*/*.py"))
    random = Random(seed)
    while True:
        for path in random.sample(paths, len(paths)):
            text = path.read_text(encoding="utf-8", errors="replace")
            if text:
                yield text


def chinese(seed: int = 1) -> Iterator[str]:
    """Yield clauses of 3,000 different characters by Zipf's law: long words that never repeat."""
    random = np.random.default_rng(seed)
    weight = 1 / np.arange(5, 3005)
    ends = np.cumsum(weight / weight.sum())
    order = random.permutation(3000)
    while True:
        chosen = order[np.minimum(np.searchsorted(ends, random.random(2000)), 2999)] + 0x4E00
        breaks = random.random(2000)
        yield "".join(
            chr(c) + ("，" if b < 0.06 else "。\n" if b < 0.09 else "")
            for c, b in zip(chosen.tolist(), breaks.tolist(), strict=True)
        )


CORPORA = {"prose": prose, "code": code, "chinese": chinese}


def corpus(name: str, size: int) -> list[str]:
    """Return documents of about `size` bytes of UTF-8 in total."""
    found: list[str] = []
    total = 0
    for text in CORPORA[name]():
        found.append(text)
        total += len(text.encode())
        if total >= size:
            break
    return found
