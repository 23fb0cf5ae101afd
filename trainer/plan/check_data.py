"""Check that the corpora and the tokenizer of a job fit its training. Imports NumPy, but no torch."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from clusterctl.wire.train_summary import CorpusUse
from trainer.config.data import Source
from trainer.config.glm import SPECIAL_TOKENS
from trainer.config.train_config import TrainConfig
from trainer.corpus.indexed import Index, bin_path, look
from trainer.corpus.tokenizer import Tokenizer
from trainer.corpus.verify import id_range, other_tokenizer, recorded_largest_id
from trainer.errors import Fault, TrainerError
from trainer.samples.blend import blend_fault, normal, split_fault
from trainer.samples.dataset import WHOLE
from trainer.samples.gpt import tokens_of
from trainer.samples.known_ids import ids_fault, text_ids
from trainer.splits import SPLITS, split_bounds


def check_corpora(
    config: TrainConfig, base: Path, *, ids: bool = True
) -> tuple[list[CorpusUse], list[Fault]]:
    """Return how the training uses its corpora (paths relative to `base`), and all faults.

    `ids`: also compare their token ids with the model's, which needs a valid model and tokenizer.
    """
    indices, faults = {}, []
    for key, prefix in config.data.prefixes().items():
        index, wrong = look(base / prefix)
        faults += [Fault(key, problem, remedy) for problem, remedy in wrong]
        if index is not None and not wrong:
            indices[prefix] = index
    if ids:
        faults += _id_faults(config, base, indices)
    for which in ("train", "valid") if config.eval.batches else ("train",):
        faults += _part_faults(config, indices, which)
    return ([] if faults else _uses(config, indices)), faults


def count_samples(config: TrainConfig, base: Path) -> int:
    """Return the number of samples in one epoch of all corpora; 0 if one of them cannot be read."""
    data, samples = config.data, 0
    split = WHOLE if data.parted else data.split
    for source in data.sources("train"):
        index, wrong = look(base / source.prefix)
        if index is None or wrong:
            return 0
        samples += (
            max(0, _tokens({source.prefix: index}, source, split, "train") - 1) // config.model.sequence
        )
    return samples


def _part_faults(config: TrainConfig, indices: dict[str, Index], which: str) -> Iterator[Fault]:
    """Yield the faults of the corpora for the samples of `which` ("train" or "valid")."""
    data, keys = config.data, {prefix: key for key, prefix in config.data.prefixes().items()}
    split, part = (WHOLE, "train") if data.parted else (data.split, which)
    sources = [source for source in data.sources(which) if source.prefix in indices]
    counts = []
    for source in sources:
        lengths = indices[source.prefix].lengths
        found = split_fault(source.prefix, lengths, split, part, config.model.sequence)
        if found:
            yield Fault(keys[source.prefix], *found)
        counts.append((_tokens(indices, source, split, part) - 1) // config.model.sequence)
    read_once = len(sources) > 1 and sources[0].weight is None
    drawn = {
        "train": config.batches.consumed(config.steps),
        "valid": config.batches.whole * config.eval.batches,
    }
    if read_once and all(n > 0 for n in counts) and sum(counts) < drawn[which]:
        key = f"train.data.{which if data.parted else 'blend'}"
        yield Fault(key, *blend_fault(which, counts, drawn[which]))


# A corpus without a manifest is searched here for its largest token id up to this size; the ranks search larger ones.
SEARCHED = 256 << 20


def _id_faults(config: TrainConfig, base: Path, indices: dict[str, Index]) -> Iterator[Fault]:
    """Yield a fault for each corpus with a token id outside the model's vocabulary."""
    known = text_ids(config, base)
    for key, prefix in config.data.prefixes().items():
        largest = _largest_id(base / prefix, indices[prefix]) if prefix in indices else None
        if largest is not None and (found := ids_fault(config, bin_path(base / prefix), largest, known)):
            yield Fault(key, *found)


def _largest_id(prefix: Path, index: Index) -> int | None:
    """Return the largest token id of a corpus; None if no manifest records it and the file is large."""
    size = index.tokens * index.dtype.itemsize
    recorded = recorded_largest_id(prefix, size)
    if recorded is not None or size > SEARCHED:
        return recorded
    return id_range(bin_path(prefix), index.dtype)[1]


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


# If the tokenizer has less than this fraction of the model's ids, most of the table stays untrained.
FEW = 0.5


def check_tokenizer(config: TrainConfig, base: Path) -> tuple[list[Fault], list[str]]:
    """Return the faults of the job's tokenizer, and notes about it."""
    if not config.data.tokenizer:
        return [], []
    file = base / config.data.tokenizer
    if not file.exists():
        return [Fault("train.data.tokenizer", f"{file} does not exist")], []
    try:
        tokenizer = Tokenizer.load(file)
    except TrainerError as error:
        return [Fault("train.data.tokenizer", error.message, error.hint)], []
    return list(_faults(config, tokenizer, base)), list(_notes(config, tokenizer))


def _ids(config: TrainConfig, tokenizer: Tokenizer) -> int:
    """Return how many ids the model needs for the tokenizer, including GLM's special tokens."""
    laid_on = config.model.kind != "glm" or tokenizer.glm_ids() is not None
    return tokenizer.vocab if laid_on else tokenizer.vocab + SPECIAL_TOKENS


def _faults(config: TrainConfig, tokenizer: Tokenizer, base: Path) -> Iterator[Fault]:
    needed, vocab = _ids(config, tokenizer), config.model.vocab
    if needed > vocab:
        own = " with GLM's special tokens" if config.model.kind == "glm" else ""
        yield Fault(
            "train.model.vocab", f"is {vocab}, but the tokenizer has {needed} ids{own}", f"use {needed}"
        )
    for prefix in config.data.prefixes().values():
        if problem := other_tokenizer(base / prefix, tokenizer):
            yield Fault("train.data.tokenizer", *problem)


def _notes(config: TrainConfig, tokenizer: Tokenizer) -> Iterator[str]:
    needed, vocab = _ids(config, tokenizer), config.model.vocab
    if needed < FEW * vocab:
        yield f"the tokenizer has {needed} ids, the model {vocab}: most of its table is never trained (model.vocab)"
    if config.data.eod is not None and config.data.eod != tokenizer.eod:
        token = tokenizer.token_of(config.data.eod)
        yield (
            f"data.eod is {config.data.eod}, which is {token!r} in the tokenizer; "
            f"its own end of a document is {tokenizer.eod}"
        )
