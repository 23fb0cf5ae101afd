"""What a job's corpora hold, and whether they can give what it asks: looked at before anything starts."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from trainer.blend import normal
from trainer.config import TrainConfig
from trainer.data_config import Source
from trainer.dataset import WHOLE
from trainer.errors import Fault
from trainer.gpt_samples import SPLITS, split_bounds, tokens_of
from trainer.indexed import Index, look
from trainer.split_faults import blend_fault, split_fault


@dataclass(frozen=True)
class CorpusUse:
    """One corpus of the training: `epochs` says how often each of its tokens is read."""

    prefix: str
    sequences: int
    tokens: int  # of the training's part
    share: float  # of the samples
    epochs: float


def look_at_data(config: TrainConfig, base: Path) -> tuple[list[CorpusUse], list[Fault]]:
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
    drawn = {"train": config.batches.consumed(config.steps), "valid": config.batches.whole * config.eval.batches}
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
