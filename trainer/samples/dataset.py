"""Turn corpora into samples and batches; the position in a training is only a number of samples."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from native.samples import sample_index
from trainer.config.data import DataConfig, DataIdentity, Source
from trainer.config.glm import Infilling, Windows
from trainer.corpus.indexed import Corpus, bin_path, open_corpus
from trainer.corpus.open import stamp
from trainer.corpus.verify import id_range, recorded_largest_id
from trainer.errors import DataError, Together
from trainer.samples.blend import (
    SURPLUS,
    Blend,
    BlendOrder,
    blend_fault,
    blend_order,
    normal,
    sizes,
    split_fault,
)
from trainer.samples.cache import Arrays, IndexCache
from trainer.samples.glm_blanks import GlmBatch
from trainer.samples.gpt import Order, Recipe, Samples, follow
from trainer.splits import SPLITS, Bounds, split_bounds

# The split of a corpus that serves one part only.
WHOLE = "1,0,0"


class Data:
    """All corpora named by a config, opened. Create every order before the first collective operation."""

    def __init__(self, config: DataConfig, sequence: int, cache: IndexCache | None = None) -> None:
        self.config, self.sequence = config, sequence
        self.cache = cache or IndexCache(None)
        self.corpora = _opened(dict.fromkeys(config.prefixes().values()))

    @property
    def notes(self) -> list[str]:
        """Messages for the user about how the samples are found and read."""
        reason = sample_index.why_not()
        plain = [f"note: samples are read by NumPy, not by compiled code: {reason}"] if reason else []
        return [*plain, *self.cache.notes]

    @cached_property
    def hashes(self) -> dict[str, str]:
        """Return a hash of the content of each corpus."""
        return {prefix: corpus.identity() for prefix, corpus in self.corpora.items()}

    def largest_ids(self) -> dict[str, int]:
        """Return the largest token id of each corpus: as its manifest records it, else searched once per node."""
        return {prefix: self._largest_id(Path(prefix), corpus) for prefix, corpus in self.corpora.items()}

    def _largest_id(self, prefix: Path, corpus: Corpus) -> int:
        recorded = recorded_largest_id(prefix, corpus.tokens.nbytes)
        if recorded is not None or not len(corpus.tokens):
            return recorded or 0

        def search() -> dict[str, NDArray[Any]]:
            _, largest = id_range(bin_path(prefix), corpus.tokens.dtype)
            return {"largest": np.array([largest], np.int64)}

        size = corpus.tokens.nbytes
        about = {
            "largest id of": self.hashes[str(prefix)],
            "bytes": size,
            "stamp": stamp(str(bin_path(prefix))),
        }
        return int(self.cache.arrays(about, search)["largest"][0])

    def identity(self) -> DataIdentity:
        """Return what a checkpoint records about the data."""
        sources = self.config.sources("train")
        order: dict[str, object] = {
            "weights": [source.weight for source in sources],
            "split": None if self.config.parted else self.config.split,
            "seed": self.config.seed,
        }
        for key, plain in (("windows", Windows()), ("infilling", Infilling())):
            if getattr(self.config, key) != plain:
                order[key] = asdict(getattr(self.config, key))
        if not self.config.parted:
            corpora = (self.corpora[source.prefix] for source in sources)
            ends = (split_bounds(self.config.split, len(corpus.lengths)) for corpus in corpora)
            order["ends"] = [[end for _, end in bounds] for bounds in ends]
        return DataIdentity(
            tuple(self.hashes[source.prefix] for source in sources),
            order,
            tuple(self.corpora[source.prefix].sample_identity() for source in sources),
        )

    def samples(self, which: str, count: int) -> Samples | Blend:
        """Return at least `count` samples of train or valid; raises an error with a remedy if there are too
        few."""
        sources = self.config.sources(which)
        if not sources:
            raise DataError(f"the job names no corpus for {which}", f"add train.data.{which}")
        if len(sources) == 1 and (sources[0].weight is None or self.config.parted):
            return self._of_one(sources[0], which, count)
        if sources[0].weight is None:
            return self._by_size(sources, which, count)
        weights = normal([source.weight or 0.0 for source in sources])
        order = self._blend_order(weights, sum(sizes(weights, count)))
        drawn = np.bincount(order.corpus, minlength=len(sources)).tolist()
        counts = sizes(weights, count, SURPLUS)
        parts = [self._of_one(source, which, n) for source, n in zip(sources, counts, strict=True)]
        for i, source in enumerate(sources):
            # Rounding can leave none for a corpus when there are very many corpora.
            if drawn[i] > len(parts[i]):
                parts[i] = self._of_one(source, which, drawn[i])
        return Blend(parts, order)

    def _by_size(self, sources: tuple[Source, ...], which: str, count: int) -> Blend:
        """Return one epoch of each corpus, mixed in proportion to the numbers of their samples."""
        parts = [self._of_one(source, which, None) for source in sources]
        available = [len(part) for part in parts]
        if count > sum(available):
            raise DataError(*blend_fault(which, available, count))
        return Blend(parts, self._blend_order([float(n) for n in available], count, available))

    def _of_one(self, source: Source, which: str, count: int | None) -> Samples:
        corpus = self.corpora[source.prefix]
        split = WHOLE if self.config.parted else self.config.split
        part = "train" if self.config.parted else which
        fault = split_fault(source.prefix, corpus.lengths, split, part, self.sequence)
        if fault:
            raise DataError(*fault)
        bounds = split_bounds(split, len(corpus.lengths))[SPLITS.index(part)]
        return Samples(corpus, self._order(source.prefix, bounds, count), self.sequence)

    def _order(self, prefix: str, bounds: Bounds, count: int | None) -> Order:
        lengths = self.corpora[prefix].lengths
        recipe = Recipe.of(lengths, bounds, count, self.sequence, self.config.seed)
        about = {"index": "samples", "idx_sha256": self.hashes[prefix], **asdict(recipe)}

        def build() -> Arrays:
            order = follow(recipe, lengths)
            return {"documents": order.documents, "samples": order.samples, "shuffle": order.shuffle}

        return Order(**self.cache.arrays(about, build))

    def _blend_order(self, weights: list[float], size: int, available: Sequence[int] = ()) -> BlendOrder:
        about = {"index": "blend", "weights": weights, "size": size, "there": list(available)}

        def build() -> Arrays:
            order = blend_order(weights, size, available)
            return {"corpus": order.corpus, "sample": order.sample}

        return BlendOrder(**self.cache.arrays(about, build))


def _opened(prefixes: Iterable[str]) -> dict[str, Corpus]:
    """Open every corpus, or raise one error that lists the faults of all of them."""
    opened, together = {}, Together(DataError)
    for prefix in prefixes:
        with together.collected():
            opened[prefix] = open_corpus(Path(prefix))
    together.check()
    return opened


@dataclass(frozen=True)
class Share:
    """The part of every global batch that belongs to this rank: index `data_rank` of `data` ranks."""

    micro_batch: int
    global_batch: int
    data_rank: int = 0
    data: int = 1

    def samples_of(self, consumed: int, samples: int = 0) -> list[list[int]]:
        """Return the items of each micro-batch of this rank, for the global batch after `consumed` samples.

        `samples` is the size of that batch if it differs from the others.
        """
        unit = self.micro_batch * self.data
        mine = self.data_rank * self.micro_batch
        return [
            list(range(start + mine, start + mine + self.micro_batch))
            for start in range(consumed, consumed + (samples or self.global_batch), unit)
        ]


# A micro-batch in the form that its model unpacks.
Micro = tuple[NDArray[Any], ...]


class Readable(Protocol):
    """Samples by number: GPT's as (samples, sequence + 1), GLM's and those of tasks as arrays of several kinds."""

    def read(self, ks: Sequence[int], /) -> NDArray[np.int64] | GlmBatch | Micro: ...


class Batches:
    """The global batches of a split by position. Their order depends only on the samples consumed."""

    def __init__(self, samples: Readable, share: Share) -> None:
        self.samples, self.share = samples, share

    def at(self, consumed: int, samples: int = 0, length: int = 0) -> list[Micro]:
        """Return this rank's micro-batches of the batch at `consumed` samples; `samples` is its size if it
        differs, and `length` the tokens of GPT's samples, if they are cut."""
        made = [self.samples.read(ks) for ks in self.share.samples_of(consumed, samples)]
        micros = [_arrays(micro) for micro in made]
        # One more: the token that is predicted from the last one of the sample.
        return [tuple(array[:, : length + 1] for array in micro) for micro in micros] if length else micros

    def first(self, batches: int) -> Iterator[list[Micro]]:
        """Yield the first `batches` global batches."""
        for number in range(batches):
            yield self.at(number * self.share.global_batch)


def _arrays(micro: GlmBatch | Micro | NDArray[Any]) -> Micro:
    """Return the arrays of a micro-batch, as the model's `arguments` takes them."""
    if isinstance(micro, GlmBatch):
        return micro.arrays()
    return micro if isinstance(micro, tuple) else (micro,)
