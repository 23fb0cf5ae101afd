"""Check that the corpora and the tokenizer of a job fit its training. Loads NumPy, no torch."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from trainer.config.data import Source
from trainer.config.glm import SPECIAL_TOKENS
from trainer.corpus.indexed import Index, look
from trainer.corpus.tokenizer import Tokenizer
from trainer.errors import Fault, TrainerError
from trainer.plan.checks import CorpusUse
from trainer.samples.blend import blend_fault, normal, split_fault
from trainer.samples.dataset import WHOLE
from trainer.samples.gpt import SPLITS, split_bounds, tokens_of

if TYPE_CHECKING:
    from trainer.config.train_config import TrainConfig


def check_corpora(config: TrainConfig, base: Path) -> tuple[list[CorpusUse], list[Fault]]:
    """How the training uses its corpora below `base`, and all that is wrong with them."""
    indices, faults = {}, []
    for key, prefix in config.data.prefixes().items():
        index, wrong = look(base / prefix)
        faults += [Fault(key, what, remedy) for what, remedy in wrong]
        if index is not None and not wrong:
            indices[prefix] = index
    for which in ("train", "valid") if config.eval.batches else ("train",):
        faults += _part_faults(config, indices, which)
    return ([] if faults else _uses(config, indices)), faults


def _part_faults(config: TrainConfig, indices: dict[str, Index], which: str) -> Iterator[Fault]:
    """What keeps the corpora from giving the samples of train or valid."""
    data, keys = config.data, {prefix: key for key, prefix in config.data.prefixes().items()}
    split, part = (WHOLE, "train") if data.parted else (data.split, which)
    sources = [source for source in data.sources(which) if source.prefix in indices]
    there = []
    for source in sources:
        lengths = indices[source.prefix].lengths
        found = split_fault(source.prefix, lengths, split, part, config.model.sequence)
        if found:
            yield Fault(keys[source.prefix], *found)
        there.append((_tokens(indices, source, split, part) - 1) // config.model.sequence)
    read_once = len(sources) > 1 and sources[0].weight is None
    drawn = {
        "train": config.batches.consumed(config.steps),
        "valid": config.batches.whole * config.eval.batches,
    }
    if read_once and all(n > 0 for n in there) and sum(there) < drawn[which]:
        key = f"train.data.{which if data.parted else 'blend'}"
        yield Fault(key, *blend_fault(which, there, drawn[which]))


def _uses(config: TrainConfig, indices: dict[str, Index]) -> list[CorpusUse]:
    data = config.data
    split = WHOLE if data.parted else data.split
    sources = data.sources("train")
    tokens = [_tokens(indices, source, split, "train") for source in sources]
    shares = normal([source.weight or n for source, n in zip(sources, tokens, strict=True)])
    drawn = config.batches.consumed(config.steps) * config.model.sequence
    return [
        CorpusUse(source.prefix, len(indices[source.prefix].lengths), n, share, drawn * share / n)
        for source, n, share in zip(sources, tokens, shares, strict=True)
    ]


def _tokens(indices: dict[str, Index], source: Source, split: str, part: str) -> int:
    lengths = indices[source.prefix].lengths
    return tokens_of(lengths, split_bounds(split, len(lengths))[SPLITS.index(part)])


# Of the model's ids: a tokenizer with fewer leaves most of the table untrained.
FEW = 0.5


def check_tokenizer(config: TrainConfig, base: Path) -> tuple[list[Fault], list[str]]:
    """What keeps a training from starting with the tokenizer that the job names, and what is surely not meant."""
    if not config.data.tokenizer:
        return [], []
    file = base / config.data.tokenizer
    if not file.exists():
        return [Fault("train.data.tokenizer", f"{file} does not exist")], []
    try:
        words = Tokenizer.load(file)
    except TrainerError as error:
        return [Fault("train.data.tokenizer", error.message, error.hint)], []
    return list(_faults(config, words)), list(_notes(config, words))


def _ids(config: TrainConfig, words: Tokenizer) -> int:
    """What a model must have for the tokenizer, GLM's own on top of it included."""
    laid_on = config.model.kind != "glm" or words.glm_ids() is not None
    return words.vocab if laid_on else words.vocab + SPECIAL_TOKENS


def _faults(config: TrainConfig, words: Tokenizer) -> Iterator[Fault]:
    needed, there = _ids(config, words), config.model.vocab
    if needed > there:
        own = " with GLM's own" if config.model.kind == "glm" else ""
        yield Fault(
            "train.model.vocab", f"is {there}, but the tokenizer has {needed} ids{own}", f"use {needed}"
        )


def _notes(config: TrainConfig, words: Tokenizer) -> Iterator[str]:
    needed, there = _ids(config, words), config.model.vocab
    if needed < FEW * there:
        yield f"the tokenizer has {needed} ids and the model {there}: most of its table is never trained (model.vocab)"
    if config.data.eod is not None and config.data.eod != words.eod:
        token = words.token_of(config.data.eod)
        yield (
            f"data.eod is {config.data.eod}, which the tokenizer has as {token!r}; "
            f"its own end of a document is {words.eod}"
        )
