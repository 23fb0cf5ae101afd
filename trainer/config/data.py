"""The `data:` part of a job: its corpora, and how they are divided and mixed. Loads no NumPy."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from clusterctl.wire.fields import setting
from trainer.config.glm import Infilling, Windows
from trainer.errors import Fault
from trainer.splits import split_fractions

# Limit of corpora of a blend, which numbers them with two bytes, as Megatron-core does.
MOST_CORPORA = 32767


@dataclass(frozen=True)
class Source:
    """One corpus of several."""

    prefix: str = setting("", required=True)
    """Path of its .bin and .idx files without these endings."""
    weight: float | None = setting(None, above=0.0)
    """Its share of the samples, relative to the other weights; without weights, each corpus is read once."""


@dataclass(frozen=True)
class DataConfig:
    """Where the tokens come from: `prefix`, or `blend`, or `train` and `valid`."""

    prefix: str = setting("")
    """Path of the .bin and .idx files without these endings."""
    blend: tuple[Source, ...] = setting(())
    """Several corpora: a list of {prefix, weight}."""
    train: tuple[Source, ...] = setting(())
    """Corpora that are used only for training, without `split`: one prefix, or a list of {prefix, weight}."""
    valid: tuple[Source, ...] = setting(())
    """The same for validation."""
    tokenizer: str = setting("")
    """The tokenizer.json of the corpora; copied into every checkpoint, so that a checkpoint's folder is enough to
    generate text.
    """
    split: str = setting("949,50,1")
    """Parts of each corpus for training, validation and test, in the order of the documents."""
    seed: int = setting(1234, least=0, below=2**32)
    """Seed of the order of the samples."""
    eod: int | None = setting(None, least=0)
    """The end-of-document token, if no tokenizer defines it."""
    mask_eod_loss: bool = setting(False)
    """Exclude the token after an end of document from the loss: it begins another document."""
    reset_positions: bool = setting(False)
    """Start the positions at 0 after each end of document."""
    reset_attention: bool = setting(False)
    """Hide all tokens before the last end of document from attention. On GPUs, torch's slower masked attention is
    used.
    """
    windows: Windows = field(default_factory=Windows)
    """GLM: how samples are cut from the documents."""
    infilling: Infilling = field(default_factory=Infilling)
    """GLM: which part of a sample is removed, to be filled in by the model."""

    @property
    def needs_eod(self) -> bool:
        """Return whether the end of a document must be known."""
        return self.mask_eod_loss or self.reset_positions or self.reset_attention

    def sources(self, which: str) -> tuple[Source, ...]:
        """Return the corpora of `which` (train, valid or test)."""
        apart = {"train": self.train, "valid": self.valid}
        if self.parted:
            return apart.get(which, ())
        return self.blend or (Source(self.prefix),)

    @property
    def parted(self) -> bool:
        """Return whether training and validation have separate corpora, so that none is split."""
        return bool(self.train or self.valid)

    def prefixes(self) -> dict[str, str]:
        """Return every corpus with the key that names it."""
        named = {"train.data.prefix": self.prefix} if self.prefix else {}
        for key in ("blend", "train", "valid"):
            for i, source in enumerate(getattr(self, key)):
                named[f"train.data.{key}[{i}].prefix"] = source.prefix
        return named


@dataclass(frozen=True)
class DataIdentity:
    """The record of a training's data in a checkpoint, by which other data are detected."""

    corpora: tuple[str, ...] = ()
    """A hash of each training corpus: of its .idx file, or of the file of a task."""
    order: Mapping[str, object] = field(default_factory=dict)
    """What the order of the samples depends on; `ends` are those of train, valid and test in each corpus."""
    tokens: tuple[str, ...] | None = None
    """A hash of some tokens of each corpus; None where the corpora are files of a task, and in old checkpoints."""

    def as_json(self) -> dict[str, object]:
        if not self.corpora:
            # Of imported weights.
            return {}
        tokens = {} if self.tokens is None else {"tokens": list(self.tokens)}
        return {"corpora": list(self.corpora), **tokens, "order": dict(self.order)}

    @classmethod
    def read(cls, given: Mapping[str, object]) -> DataIdentity:
        corpora, order, tokens = (given.get(key) for key in ("corpora", "order", "tokens"))
        return cls(
            tuple(map(str, corpora)) if isinstance(corpora, list) else (),
            order if isinstance(order, dict) else {},
            tuple(map(str, tokens)) if isinstance(tokens, list) else None,
        )


def listed_sources(raw: Any) -> Any:
    """Return the `data:` part with each single prefix or mapping turned into a list of one."""
    if not isinstance(raw, Mapping):
        return raw

    def mapping(source: object) -> object:
        return {"prefix": source} if isinstance(source, str) else source

    changed = dict(raw)
    for key in ("blend", "train", "valid"):
        given = raw.get(key)
        if isinstance(given, (str, Mapping)):
            changed[key] = [mapping(given)]
        elif isinstance(given, (list, tuple)):
            changed[key] = [mapping(source) for source in given]
    return changed


def data_faults(data: DataConfig, raw: object, evaluates: bool) -> list[Fault]:
    """Return the faults between the keys of a `data:` part; `raw` is the part as given."""
    if not isinstance(raw, Mapping):
        return []
    given = [key for key in ("prefix", "blend", "train") if raw.get(key)]
    faults = []
    if not given:
        problem, remedy = "missing", "add `prefix:`, or `blend:`, or `train:` and `valid:`"
        faults.append(Fault("train.data.prefix", problem, remedy))
    elif len(given) > 1:
        faults.append(
            Fault(f"train.data.{given[1]}", f"is given in addition to `{given[0]}`", "keep one of them")
        )
    if data.train and not data.valid and evaluates:
        remedy = "add `valid:`, or set eval: {batches: 0}"
        faults.append(Fault("train.data.valid", "missing: there is nothing to evaluate on", remedy))
    if data.valid and not data.train:
        faults.append(Fault("train.data.train", "missing; `valid` alone is not enough", "add `train:`"))
    if data.needs_eod and data.eod is None and not data.tokenizer:
        problem = "missing: mask_eod_loss, reset_positions and reset_attention need to know it"
        faults.append(Fault("train.data.eod", problem, "add `eod:`, or `tokenizer:`, which contains it"))
    for key, prefix in data.prefixes().items():
        if "://" in prefix:
            remedy = "name the folder of the store as the job's `data:`, and this as {data}/NAME"
            faults.append(Fault(key, f"{prefix!r} is a URL, and a corpus is read from files", remedy))
    for key in ("blend", "train", "valid"):
        faults += _weight_faults(f"train.data.{key}", getattr(data, key))
    try:
        split_fractions(data.split)
    except ValueError as error:
        faults.append(Fault("train.data.split", str(error), 'write it like "949,50,1"'))
    return faults


def _weight_faults(key: str, sources: tuple[Source, ...]) -> list[Fault]:
    without = [i for i, source in enumerate(sources) if source.weight is None]
    faults = []
    if without and len(without) < len(sources):
        problem = f"has no weight, and {len(sources) - len(without)} of its neighbours have one"
        faults.append(Fault(f"{key}[{without[0]}]", problem, "give a weight to all of them, or to none"))
    if len(sources) > MOST_CORPORA:
        faults.append(Fault(key, f"names {len(sources)} corpora; at most {MOST_CORPORA} can be told apart"))
    return faults
