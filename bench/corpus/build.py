"""Compare `data build` with the loop of Megatron's preprocess_data.py: JSON lines to `.bin/.idx`, same corpus.

    python -m bench.corpus.build [--megabytes 200] [--tokenizer gpt2/tokenizer.json] [--workers 2] [--times 10] [--json]
                         [--peer-python VENV/bin/python]

The peer repeats that loop: worker processes under `imap` with 32 lines per task, `tokenizers` on one document after
another, and megatron-core's IndexedDatasetBuilder, which --peer-python must be able to import (pip install --no-deps
megatron-core==0.16.1; it needs torch and numpy). Both must write the same bytes. Processor time is the sum over all
processes; memory is the highest sum of proportional set sizes, sampled 20 times per second. --times 10 also builds a
corpus ten times as large, to show that memory does not grow with it.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import sys
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parents[2]))

from bench.field import ROOT, Option, aligned, read_options, run
from bench.reach.inside import Watched

# Lines per task, as in that loop.
LINES_A_TASK = 32


@dataclass(frozen=True)
class Row:
    """One build; `digest` is the hash of both files."""

    name: str
    megabytes: float
    documents: int
    clock_s: float
    processor_s: float
    peak_mb: float
    digest: str

    @property
    def rate(self) -> float:
        """Return documents per second of wall time."""
        return self.documents / self.clock_s


# -- the peer, in a process of its own ----------------------------------------------------------------------


class Encode:
    """Encodes lines in a worker, which loads the tokenizer once."""

    def __init__(self, tokenizer: str, end: int) -> None:
        self._path, self._end = tokenizer, end

    def begin(self) -> None:
        import tokenizers

        Encode.words = tokenizers.Tokenizer.from_file(self._path)  # type: ignore[attr-defined]

    def line(self, line: str) -> tuple[list[int], list[int]]:
        text = json.loads(line)["text"]
        ids: list[int] = list(Encode.words.encode(text, add_special_tokens=False).ids)  # type: ignore[attr-defined]
        lengths = [len(ids)] if ids else []
        if ids:
            ids.append(self._end)
            lengths[-1] += 1
        return ids, lengths


def peer(source: str, tokenizer: str, output: str, workers: int) -> None:
    """Run Megatron's loop: encode lines in a pool, then add the documents in the order of the input."""
    import multiprocessing

    import tokenizers
    from megatron.core.datasets.indexed_dataset import DType, IndexedDatasetBuilder

    tokenizer_object = tokenizers.Tokenizer.from_file(tokenizer)
    encode = Encode(tokenizer, tokenizer_object.token_to_id("<|endoftext|>"))
    builder = IndexedDatasetBuilder(
        output + ".bin", dtype=DType.optimal_dtype(tokenizer_object.get_vocab_size())
    )
    with (
        open(source, encoding="utf-8") as lines,
        multiprocessing.get_context("fork").Pool(workers, initializer=encode.begin) as pool,
    ):
        for ids, lengths in pool.imap(encode.line, lines, LINES_A_TASK):
            builder.add_document(ids, lengths)
    builder.finalize(output + ".idx")


# -- measured -----------------------------------------------------------------------------------------------


def corpus(path: Path, megabytes: float) -> int:
    """Write JSON lines of generated documents with a few to several thousand words; return how many."""
    from bench.corpus.texts import prose

    size = count = 0
    with path.open("w", encoding="utf-8") as out:
        for text in prose():
            size += out.write(json.dumps({"id": count, "text": text}, ensure_ascii=False) + "\n")
            count += 1
            if size >= megabytes * 1e6:
                return count
    return count


def measured(name: str, argv: list[str], source: Path, documents: int, output: Path) -> Row:
    """Run a build, sampling all its processes; return its row."""
    env = {**os.environ, "PYTHONPATH": str(ROOT), "TOKENIZERS_PARALLELISM": "false"}
    watched: list[Watched] = []
    used = run(argv, env=env, started=lambda pid: watched.append(Watched(pid)))
    # In units of a million bytes, as the corpus.
    peak = watched[0].pss * 1.048576
    digest = hashlib.sha256()
    for ending in (".bin", ".idx"):
        digest.update(output.with_name(output.name + ending).read_bytes())
    return Row(
        name, source.stat().st_size / 1e6, documents, used.wall, used.cpu, peak, digest.hexdigest()[:16]
    )


def ours(source: Path, tokenizer: Path, output: Path, workers: int) -> list[str]:
    words = ["--input", str(source), "--tokenizer", str(tokenizer), "--output", str(output), "--append-eod"]
    words += ["--workers", str(workers), "--replace", "--json"]
    return [sys.executable, "-m", "trainer", "data-build", *words]


def made_tokenizer(folder: Path, source: Path) -> Path:
    arguments = ["--input", str(source), "--vocab-size", "32000", "--output", str(folder / "tokenizer.json")]
    run([sys.executable, "-m", "trainer", "tokenizer-train", *arguments, "--replace"])
    return folder / "tokenizer.json"


def rows(options: argparse.Namespace, folder: Path) -> list[Row]:
    source = folder / "corpus.jsonl"
    documents = corpus(source, options.megabytes)
    tokenizer = options.tokenizer or made_tokenizer(folder, source)
    found = []
    if options.peer_python:
        argv = [options.peer_python, __file__, "--peer", str(source), str(tokenizer), str(folder / "peer")]
        argv.append(str(options.workers))
        found.append(measured("preprocess_data's loop", argv, source, documents, folder / "peer"))
    argv = ours(source, tokenizer, folder / "ours", options.workers)
    found.append(measured("data build", argv, source, documents, folder / "ours"))
    if options.times > 1:
        large = folder / "large.jsonl"
        with large.open("wb") as out:
            for _ in range(options.times):
                out.write(source.read_bytes())
        argv = ours(large, tokenizer, folder / "large", options.workers)
        name = f"data build, {options.times} times as much"
        found.append(measured(name, argv, large, documents * options.times, folder / "large"))
    return found


def table(found: list[Row]) -> str:
    rows = [("", "MB", "documents/s", "MB/s", "processor s", "MB/s of it", "peak MB")]
    for row in found:
        speed, worked = row.megabytes / row.clock_s, row.megabytes / row.processor_s
        figures = (f"{row.megabytes:.0f}", f"{row.rate:,.0f}", f"{speed:.1f}", f"{row.processor_s:.1f}")
        rows.append((row.name, *figures, f"{worked:.1f}", f"{row.peak_mb:.0f}"))
    lines = [aligned(rows)]
    if len(found) > 1 and found[0].name != "data build":
        first, second = found[:2]
        same = "the same bytes" if first.digest == second.digest else "OTHER BYTES"
        lines.append(
            f"ratio: {second.rate / first.rate:.1f} times its documents a second, "
            f"{first.processor_s / second.processor_s:.1f} times by processor time, "
            f"{second.peak_mb / first.peak_mb:.2f} of its memory, {same}"
        )
    return "\n".join(lines)


def main() -> None:
    options = read_options(
        __doc__,
        megabytes=200.0,
        tokenizer=Path,
        workers=len(os.sched_getaffinity(0)),
        times=Option(1, "build a corpus so many times as large too"),
        peer_python=Option(str, "a Python that imports megatron-core and tokenizers"),
        json=False,
    )
    with tempfile.TemporaryDirectory(prefix="bench-data-") as folder:
        found = rows(options, Path(folder))
    print(json.dumps([asdict(row) for row in found], indent=2) if options.json else table(found))


if __name__ == "__main__":
    if sys.argv[1:2] == ["--peer"]:
        peer(sys.argv[2], sys.argv[3], sys.argv[4], int(sys.argv[5]))
    else:
        main()
