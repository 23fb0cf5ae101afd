"""Compare the encoding speed of our encoder, `tokenizers` and, if installed, tiktoken, in megabytes per second.

    python -m bench.corpus.encode [--tokenizer gpt2/tokenizer.json] [--megabytes 20] [--threads 1 2] [--json]

All encoders get the same documents and tokenizer, 1,000 documents per call, and must return the same ids. A row shows
wall time and processor time, which is also valid on a busy machine. Without --tokenizer, a tokenizer of 32,000 tokens
is trained on the texts; tiktoken gets its merges as bytes.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import resource
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from bench.field import Option, aligned, read_options

# `tokenizers` reads its number of threads from the environment when it is loaded, so each row needs a process.

AT_ONCE = 1000
GPT2_WORDS = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"


@dataclass(frozen=True)
class Row:
    """One encoder on one corpus: `megabytes` of UTF-8, `digest` of all ids, `peak_mb` of the process."""

    encoder: str
    corpus: str
    threads: int
    megabytes: float
    tokens: int
    digest: int
    clock_s: float
    processor_s: float
    peak_mb: int

    @property
    def speed(self) -> float:
        """Return megabytes per second of wall time."""
        return self.megabytes / self.clock_s


def encoders(path: Path, threads: int) -> dict[str, Callable[[list[str]], Any]]:
    """Return the encoders by name; each takes documents and loads itself at the first call."""
    from trainer.corpus.encoder import Encoder
    from trainer.corpus.tokenizer import Tokenizer

    tokenizer = Tokenizer.load(path)
    own = Encoder.load(tokenizer, threads)
    found: dict[str, Callable[[list[str]], Any]] = {
        "clusterctl": own.encode_many,
        "tokenizers": tokenizer.encode_many,
    }
    with contextlib.suppress(ImportError):
        found["tiktoken"] = _tiktoken(tokenizer, threads)
    return found


def _tiktoken(tokenizer: Any, threads: int) -> Callable[[list[str]], Any]:
    import tiktoken

    from trainer.corpus.encoder import byte_characters

    byte_of = {character: byte for byte, character in enumerate(byte_characters())}
    vocab = tokenizer.definition()["model"]["vocab"]
    ranks = {
        bytes(byte_of[letter] for letter in token): number
        for token, number in vocab.items()
        if all(letter in byte_of for letter in token) and number != tokenizer.eod
    }
    encoding = tiktoken.Encoding(
        "ours", pat_str=GPT2_WORDS, mergeable_ranks=ranks, special_tokens={"<|endoftext|>": tokenizer.eod}
    )
    return lambda texts: encoding.encode_batch(texts, num_threads=threads, allowed_special="all")


def counted(result: Any) -> tuple[int, int]:
    """Return the number of tokens and a sum that depends on the order of the ids."""
    import numpy as np

    ids = (
        result[0]
        if isinstance(result, tuple)
        else np.concatenate([np.asarray(row, np.int64) for row in result])
    )
    places = np.arange(1, len(ids) + 1, dtype=np.int64)
    return len(ids), int((ids.astype(np.int64) * (places % 65521)).sum())


def measure(name: str, corpus: str, path: Path, megabytes: float, threads: int) -> Row:
    """Measure one encoder on a corpus; the first call, which loads and warms up, is not timed."""
    from bench.corpus.texts import corpus as documents

    encode = encoders(path, threads)[name]
    texts = documents(corpus, int(megabytes * 1e6))
    encode(["a few words, to begin with"])
    tokens = digest = 0
    clock = processor = 0.0
    for some in _chunks(texts):
        at, used = time.perf_counter(), time.process_time()
        result = encode(some)
        clock += time.perf_counter() - at
        processor += time.process_time() - used
        count, part = counted(result)
        tokens, digest = tokens + count, (digest * 31 + part) % (1 << 61)
    size = sum(len(text.encode()) for text in texts) / 1e6
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024
    return Row(name, corpus, threads, size, tokens, digest, clock, processor, peak)


def _chunks(texts: list[str]) -> Iterator[list[str]]:
    for start in range(0, len(texts), AT_ONCE):
        yield texts[start : start + AT_ONCE]


def in_process(options: argparse.Namespace, path: Path, name: str, corpus: str, threads: int) -> Row | None:
    """Return a row measured in a process of its own; None if this encoder is not installed."""
    import subprocess

    argv = [sys.executable, "-m", "bench.corpus.encode", "--row", name, corpus, "--threads", str(threads)]
    argv += ["--tokenizer", str(path), "--megabytes", str(options.megabytes)]
    settings = {
        "RAYON_NUM_THREADS": str(threads),
        "TOKENIZERS_PARALLELISM": "true" if threads > 1 else "false",
        "OMP_NUM_THREADS": str(threads),
    }
    done = subprocess.run(argv, env={**os.environ, **settings}, capture_output=True, text=True)
    if done.returncode:
        if "KeyError: 'tiktoken'" in done.stderr:
            return None
        raise SystemExit(done.stderr)
    return Row(**json.loads(done.stdout))


def train(folder: Path) -> Path:
    """Train a tokenizer of 32,000 tokens on parts of every corpus."""
    from bench.corpus.texts import CORPORA
    from bench.corpus.texts import corpus as documents
    from trainer.corpus.tokenizer import train_tokenizer

    path = folder / "tokenizer.json"
    train_tokenizer((text for name in CORPORA for text in documents(name, 3_000_000)), 32_000, path)
    return path


def show(rows: list[Row]) -> str:
    """Return one line per row; `ratio` compares processor time with `tokenizers` on the same corpus and threads."""
    lines: list[tuple[object, ...]] = [
        ("corpus", "threads", "encoder", "MB/s", "MB/cpu-s", "ratio", "peak MB", "ids")
    ]
    for row in rows:
        peer = next(
            r for r in rows if (r.corpus, r.threads, r.encoder) == (row.corpus, row.threads, "tokenizers")
        )
        ids = "same" if (row.tokens, row.digest) == (peer.tokens, peer.digest) else "DIFFERENT"
        rates = (row.speed, row.megabytes / row.processor_s, peer.processor_s / row.processor_s)
        figures = (f"{rate:.1f}" for rate in rates)
        lines.append((row.corpus, row.threads, row.encoder, *figures, row.peak_mb, ids))
    return aligned(lines)


def main() -> None:
    """Print the rows as a table or as JSON."""
    options = read_options(
        __doc__,
        tokenizer=Path,
        megabytes=20.0,
        threads=(1, 2),
        corpora=("prose", "code", "chinese"),
        json=False,
        row=Option((), argparse.SUPPRESS),
    )
    if options.row:
        row = measure(*options.row, options.tokenizer, options.megabytes, options.threads[0])
        print(json.dumps(asdict(row)))
        return
    with tempfile.TemporaryDirectory() as folder:
        path = options.tokenizer or train(Path(folder))
        found = [
            in_process(options, path, name, corpus, threads)
            for corpus in options.corpora
            for threads in options.threads
            for name in ("clusterctl", "tokenizers", "tiktoken")
        ]
    rows = [row for row in found if row is not None]
    print(json.dumps([asdict(row) for row in rows], indent=2) if options.json else show(rows))


if __name__ == "__main__":
    main()
