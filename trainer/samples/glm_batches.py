"""Make GLM batches from the corpora that a job names: one corpus, or several by weight."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from trainer.config.data import Source
from trainer.config.glm import SPECIAL_TOKENS
from trainer.config.train_config import TrainConfig
from trainer.corpus.tokenizer import GLM_TOKENS, Tokenizer
from trainer.errors import DataError
from trainer.samples.blend import normal
from trainer.samples.dataset import WHOLE, Data
from trainer.samples.glm_blanks import (
    GlmBatch,
    GlmBatches,
    Row,
    batch_of,
)
from trainer.samples.glm_windows import (
    GlmSamples,
    GlmTokens,
    Sampling,
    generator,
    sentence_ends,
)
from trainer.splits import SPLITS, split_bounds

# Separates the random choice of a corpus from the choices within it (glm_blanks.BLANKS is 1).
CORPUS = 2


class GlmMix:
    """Samples of several corpora; the number of a sample determines its corpus."""

    def __init__(self, parts: Sequence[GlmBatches], weights: Sequence[float], seed: int) -> None:
        self.parts, self.seed = list(parts), seed
        self.edges = np.cumsum(normal(weights))

    def row(self, number: int) -> Row:
        at = generator(self.seed, number, CORPUS).random_sample()
        part = min(int(np.searchsorted(self.edges, at, side="right")), len(self.parts) - 1)
        return self.parts[part].row(number)

    def read(self, numbers: Sequence[int]) -> GlmBatch:
        """Return the micro-batch of these samples."""
        return batch_of([self.row(number) for number in numbers])


def glm_tokens(config: TrainConfig, base: Path = Path()) -> GlmTokens:
    """Return GLM's own token ids: those of the tokenizer (its path is relative to `base`), else the ids above it.

    Without a tokenizer they are the last ids of the model.
    """
    if not config.data.tokenizer:
        # The rules of the config have checked this.
        assert config.data.eod is not None
        return GlmTokens.above(config.model.vocab - SPECIAL_TOKENS, config.data.eod)
    tokenizer = Tokenizer.load(base / config.data.tokenizer)
    return tokens_of(tokenizer, tokenizer.eod if config.data.eod is None else config.data.eod)


def tokens_of(tokenizer: Tokenizer, eos: int) -> GlmTokens:
    """Return GLM's own token ids for a tokenizer, which may already contain them."""
    own = tokenizer.glm_ids()
    if own is None:
        return GlmTokens.above(tokenizer.vocab, eos)
    return GlmTokens(eos, *(own[name] for name in GLM_TOKENS))


def _sentence_ends(config: TrainConfig) -> NDArray[np.bool_]:
    if not config.data.tokenizer:
        return np.zeros(0, np.bool_)
    return sentence_ends(Tokenizer.load(Path(config.data.tokenizer)))


def glm_batches(config: TrainConfig, data: Data) -> dict[str, GlmBatches | GlmMix]:
    """Return the batches for training and validation; GLM samples never run out, so no count is needed."""
    tokens, ends = glm_tokens(config), _sentence_ends(config)

    def of_one(source: Source, which: str) -> GlmBatches:
        corpus = data.corpora[source.prefix]
        split, part = (WHOLE, "train") if config.data.parted else (config.data.split, which)
        bounds = split_bounds(split, corpus.documents)[SPLITS.index(part)]
        sampling = Sampling(config.model.sequence, **asdict(config.data.windows))
        samples = GlmSamples(corpus, tokens, ends, config.data.seed, sampling, bounds)
        return GlmBatches(samples, config.data.infilling)

    def of_all(which: str) -> GlmBatches | GlmMix:
        sources = config.data.sources(which)
        if not sources:
            raise DataError(f"the job names no corpus for {which}", f"add train.data.{which}")
        parts = [of_one(source, which) for source in sources]
        if len(parts) == 1:
            return parts[0]
        weights = [
            source.weight or float(part.samples.edges[-1] - part.samples.edges[0])
            for source, part in zip(sources, parts, strict=True)
        ]
        return GlmMix(parts, weights, config.data.seed)

    names = ["train", *(["valid"] if config.eval.batches else [])]
    return {which: of_all(which) for which in names}
