"""Encode hostile texts with both encoders: the C++ code must return exactly the ids of `tokenizers`.

    python -m bench.corpus.encode_fuzz --texts 1000000 [--tokenizer gpt2/tokenizer.json] [--start N] [--processes 2]

Text N is always the same, so its number identifies a difference, and a campaign can continue with --start. Without
--tokenizer, three tokenizers are trained first, one of them with a space before each text and more added tokens.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from itertools import pairwise
from pathlib import Path

import numpy as np

from bench.corpus.texts import hostile
from trainer.corpus.encoder import Encoder
from trainer.corpus.tokenizer import END_OF_DOCUMENT, Tokenizer, train_tokenizer

AT_ONCE = 2000
# One contains another, one is the start of another, one has two-byte characters, and one is for the second pass.
ADDED = (END_OF_DOCUMENT, "<|end", "<|", "<pad>", "中文", "|>", "\n\n<mask>")
LATE = ("<|", "<mask>")


def trained(folder: Path, vocab: int, prefix_space: bool = False, added: Sequence[str] = ()) -> Path:
    """Train a tokenizer on some of the hostile texts."""
    path = folder / f"{vocab}-{prefix_space}-{len(added)}.json"
    train_tokenizer((hostile(-n) for n in range(1, 3000)), vocab, path)
    data = json.loads(path.read_text())
    data["pre_tokenizer"]["add_prefix_space"] = prefix_space
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "special": False}
    known = {entry["content"] for entry in data["added_tokens"]}
    first = len(data["model"]["vocab"])
    for number, content in enumerate(token for token in added if token not in known):
        late = content in LATE
        data["added_tokens"].append({"id": first + number, "content": content, "normalized": late, **flags})
    path.write_text(json.dumps(data))
    return path


def differing(path: Path, numbers: range, added: tuple[str, ...], threads: int = 1) -> list[int]:
    """Return the numbers of the texts that the two encoders encode differently."""
    tokenizer = Tokenizer.load(path)
    encoder = Encoder.load(tokenizer, threads)
    found = []
    for some in _chunks(numbers):
        texts = [hostile(number, added) for number in some]
        ids, lengths = encoder.encode_many(texts)
        ends = np.concatenate([[0], np.cumsum(lengths)])
        theirs = tokenizer.encode_many(texts)
        for number, own, (start, end) in zip(some, theirs, pairwise(ends.tolist()), strict=True):
            if ids[start:end].tolist() != own:
                found.append(number)
    return found


def _chunks(numbers: range) -> Iterator[range]:
    for start in range(numbers.start, numbers.stop, AT_ONCE):
        yield range(start, min(start + AT_ONCE, numbers.stop))


def _share(task: tuple[Path, range]) -> list[int]:
    return differing(task[0], task[1], ADDED)


def main() -> int:
    """Return 0 if both encoders agree on every text, else 1."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--texts", type=int, default=100_000, help="number of texts per tokenizer")
    parser.add_argument("--start", type=int, default=0, help="number of the first text")
    parser.add_argument("--processes", type=int, default=1)
    parser.add_argument("--tokenizer", type=Path, action="append", help="a tokenizer.json; may be repeated")
    options = parser.parse_args()
    began = time.monotonic()
    with tempfile.TemporaryDirectory() as folder, multiprocessing.Pool(options.processes) as pool:
        made = [(300, False, ()), (2000, True, ADDED), (9000, False, ADDED)]
        paths = options.tokenizer or [trained(Path(folder), *arguments) for arguments in made]
        wrong = 0
        for path in paths:
            stop = options.start + options.texts
            tasks = [(path, range(n, min(n + 20_000, stop))) for n in range(options.start, stop, 20_000)]
            found = [number for some in pool.imap(_share, tasks) for number in some]
            wrong += len(found)
            print(
                f"{path.name}: {options.texts} texts, {len(found)} encoded differently {found[:5] or ''}",
                flush=True,
            )
    print(f"{time.monotonic() - began:.0f} s")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
