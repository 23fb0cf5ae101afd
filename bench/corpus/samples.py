"""Compare sample indices with megatron-core: finding samples, blending corpora, reading. Same corpus, same order.

    python -m bench.corpus.samples [--megatron SITE_PACKAGES] [--repeat 7] [--json]

It needs megatron-core 0.16.1 (`pip install --no-deps megatron-core==0.16.1`, here or in a separate folder for
--megatron); without it only our side is measured. Both sides take turns in one process on one thread. A row shows
medians of processor time, which are valid on a busy machine; the one row with two threads shows wall time. The results
are compared first, to the last index.
"""

from __future__ import annotations

import contextlib
import io
import json
import logging
import statistics
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from bench.field import Option, in_turn, read_options, timed
from native.samples import sample_index
from trainer.config.data import DataConfig
from trainer.corpus.indexed import write_index
from trainer.samples.blend import blend_order
from trainer.samples.dataset import Data, Share
from trainer.samples.gpt import Recipe, follow

# Together 1e9 tokens.
DOCUMENTS, MEAN, SEQUENCE = 1_000_000, 1000, 1024
READ, MICRO = 100_000, 8
# A corpus of 240 MB, read from memory: the disk is not compared.
READ_DOCUMENTS = 120_000
Work = Callable[[], Any]


@dataclass(frozen=True)
class Row:
    """One kind of work: milliseconds of each side, and the ratio."""

    work: str
    ours_ms: float
    megatron_ms: float | None
    ratio: float | None


def row(name: str, ours: Work, theirs: Work | None, repeat: int, wall: bool = False) -> Row:
    """Measure both sides in turn; the first round compares the results and is not timed."""
    clock = time.perf_counter if wall else time.process_time
    if theirs is not None:
        same(name, ours(), theirs())
    sides = {side: work for side, work in (("ours", ours), ("theirs", theirs)) if work is not None}
    times = in_turn({side: partial(timed, work, clock) for side, work in sides.items()}, repeat)
    own, other = (
        1000 * statistics.median(times[side]) if side in times else None for side in ("ours", "theirs")
    )
    return Row(name, own or 0.0, other, other / own if other and own else None)


def same(name: str, ours: Any, theirs: Any) -> None:
    for mine, other in zip(ours, theirs, strict=True):
        if not np.array_equal(np.asarray(mine), np.asarray(other)):
            raise SystemExit(f"{name}: the two sides differ")


def lengths_of(documents: int) -> np.ndarray[Any, np.dtype[np.int32]]:
    """Return document lengths that vary as in real texts, 1,000 tokens on average."""
    random = np.random.RandomState(1)
    drawn = random.lognormal(0.0, 1.1, documents)
    return np.maximum(1, drawn * (MEAN / drawn.mean())).astype(np.int32)


def index_rows(helpers: Any, repeat: int) -> Iterator[Row]:
    """Yield the rows for the starts of samples in 1e9 tokens, and for their complete order."""
    lengths = lengths_of(DOCUMENTS)
    tokens = int(lengths.sum(dtype=np.int64))
    for epochs in (1, 2):
        documents = np.tile(np.arange(DOCUMENTS, dtype=np.int32), epochs)
        np.random.RandomState(7).shuffle(documents)
        count = (epochs * tokens - 1) // SEQUENCE

        def theirs(documents: Any = documents, epochs: int = epochs) -> Any:
            return [helpers.build_sample_idx(lengths, documents, SEQUENCE, epochs, tokens, True, True)]

        for threads in (1, 2):

            def ours(documents: Any = documents, count: int = count, threads: int = threads) -> Any:
                out = np.empty((count + 1, 2), np.int32)
                sample_index.sample_starts(lengths, documents, SEQUENCE, out, threads)
                return [out]

            how = "" if threads == 1 else ", 2 threads (wall)"
            name = f"sample index, {epochs}e9 tokens, {count:,} samples{how}"
            yield row(name, ours, theirs if helpers else None, repeat, wall=threads > 1)
    yield row("whole order: documents, samples, shuffle", *_whole_order(helpers, lengths), repeat)


def _whole_order(helpers: Any, lengths: Any) -> tuple[Work, Work | None]:
    """Return the work of making all three indices of 1.46 million samples, over two separately shuffled epochs."""
    recipe = Recipe.of(lengths, (0, DOCUMENTS), 1_460_000, SEQUENCE, 1234)
    tokens, apart = int(lengths.sum(dtype=np.int64)), recipe.before is not None

    def ours() -> Any:
        order = follow(recipe, lengths)
        return [order.documents, order.samples, order.shuffle]

    def theirs() -> Any:
        from megatron.core.datasets.gpt_dataset import _build_document_index, _build_shuffle_index

        random = np.random.RandomState(1234)
        documents = _build_document_index(np.arange(DOCUMENTS, dtype=np.int32), recipe.epochs, random, apart)
        starts = helpers.build_sample_idx(lengths, documents, SEQUENCE, recipe.epochs, tokens, True, True)
        count = len(starts) - 1
        return [documents, starts, _build_shuffle_index(recipe.before if apart else count, count, random)]

    return ours, theirs if helpers else None


def blend_rows(helpers: Any, repeat: int) -> Iterator[Row]:
    for corpora, size in ((5, 1_000_000), (100, 200_000)):
        weights = np.random.RandomState(corpora).gamma(1.0, size=corpora) + 0.05
        weights /= weights.sum()

        def ours(weights: Any = weights, size: int = size) -> Any:
            order = blend_order(weights, size)
            return [order.corpus, order.sample]

        shares = np.asarray(weights / np.sum(weights), np.float64)

        def theirs(shares: Any = shares, size: int = size, corpora: int = corpora) -> Any:
            which, sample = np.zeros(size, np.int16), np.zeros(size, np.int64)
            helpers.build_blending_indices(which, sample, shares, corpora, size, False)
            return [which, sample]

        yield row(f"blend of {corpora} corpora, {size:,} samples", ours, theirs if helpers else None, repeat)


def reading_rows(megatron: bool, folder: Path, repeat: int) -> Iterator[Row]:
    """Yield the rows for reading random samples: one by one, and in micro-batches as in training."""
    prefix = _corpus(folder)
    samples = Data(DataConfig(prefix, split="1"), SEQUENCE).samples("train", 1)
    shares = Share(MICRO, READ)
    random = np.random.RandomState(3).randint(0, len(samples), READ)
    theirs = _their_dataset(prefix) if megatron else None

    def one_by_one() -> Any:
        for k in random[1:]:
            samples[k]
        tokens = samples[random[0]]
        return [tokens[:-1], tokens[1:]]

    def their_one_by_one() -> Any:
        assert theirs is not None
        for k in random[1:]:
            theirs[k]
        item = theirs[random[0]]
        return [item["tokens"], item["labels"]]

    def in_batches() -> Any:
        for ks in shares.samples_of(0):
            read = samples.read(ks)
        return [read[:, :-1], read[:, 1:]]

    def their_batches() -> Any:
        import torch

        assert theirs is not None
        for ks in shares.samples_of(0):
            items = [theirs[k] for k in ks]
            read = {name: torch.stack([item[name] for item in items]) for name in items[0]}
        return [read["tokens"], read["labels"]]

    number = f"{len(random):,} samples of {SEQUENCE} tokens"
    yield row(f"read {number}, one by one", one_by_one, their_one_by_one if megatron else None, repeat)
    yield row(
        f"read {number}, micro-batches of {MICRO}", in_batches, their_batches if megatron else None, repeat
    )


def _corpus(folder: Path) -> str:
    lengths = lengths_of(READ_DOCUMENTS)
    tokens = np.random.RandomState(5).randint(0, 50_000, int(lengths.sum()), dtype=np.uint16)
    (folder / "corpus.bin").write_bytes(tokens.tobytes())
    marks = np.arange(1, len(lengths) + 1, dtype=np.int64)
    with (folder / "corpus.idx").open("wb") as index:
        write_index(index, tokens.dtype, io.BytesIO(lengths.tobytes()), io.BytesIO(marks.tobytes()))
    return str(folder / "corpus")


class _Words:
    """The parts of a tokenizer that a GPTDataset uses."""

    eod, vocab_size = 0, 50_000
    unique_identifiers: dict[str, str] = {}  # noqa: RUF012


def _their_dataset(prefix: str) -> Any:
    from megatron.core.datasets.blended_megatron_dataset_builder import BlendedMegatronDatasetBuilder
    from megatron.core.datasets.gpt_dataset import GPTDataset, GPTDatasetConfig

    config = GPTDatasetConfig(
        random_seed=1234,
        sequence_length=SEQUENCE,
        tokenizer=_Words(),
        blend=([prefix], None),
        split="1",
        reset_position_ids=False,
        reset_attention_mask=False,
        eod_mask_loss=False,
        # This setting is the faster one: the kernel makes the masks, and the rest is cached.
        create_attention_mask=False,
    )
    return BlendedMegatronDatasetBuilder(GPTDataset, [1, 0, 0], lambda: True, config).build()[0]


def measure(megatron: str, repeat: int) -> Iterator[Row]:
    helpers = None
    if megatron:
        sys.path.append(megatron)
    with contextlib.suppress(ImportError), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        logging.disable(logging.WARNING)
        import torch
        from megatron.core.datasets import helpers as found

        torch.set_num_threads(1)
        helpers = found
    if sample_index.why_not():
        raise SystemExit(f"nothing compiled to measure: {sample_index.why_not()}")
    yield from index_rows(helpers, repeat)
    yield from blend_rows(helpers, repeat)
    with tempfile.TemporaryDirectory() as folder:
        yield from reading_rows(helpers is not None, Path(folder), repeat)


def main() -> None:
    given = read_options(__doc__, megatron=Option("", "a folder with megatron-core"), repeat=7, json=False)
    if not given.json:
        print(f"{'work':62} {'ours ms':>10} {'megatron':>10} {'times':>7}")
    for result in measure(given.megatron, given.repeat):
        if given.json:
            print(json.dumps(asdict(result)), flush=True)
            continue
        other = "-" if result.megatron_ms is None else f"{result.megatron_ms:10.1f}"
        ratio = "-" if result.ratio is None else f"{result.ratio:7.2f}"
        print(f"{result.work:62} {result.ours_ms:10.1f} {other:>10} {ratio:>7}", flush=True)


if __name__ == "__main__":
    main()
