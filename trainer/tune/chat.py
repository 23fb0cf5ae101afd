"""The files of instruction tuning as samples."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from numpy.typing import NDArray

from trainer.config.data import DataIdentity
from trainer.config.train_config import TrainConfig
from trainer.corpus.tokenizer import Tokenizer
from trainer.errors import DataError
from trainer.files import sha256
from trainer.side_files import SideFiles
from trainer.tune.conversations import FORMS, ChatReader, Marked, read_examples
from trainer.tune.examples import Adjust, Examples, JoinedExamples, Limits, PackedExamples, examples_of


class Samples(Protocol):
    """The samples of a file, by number."""

    def __len__(self) -> int:
        """Return the number of samples."""

    def read(self, numbers: Sequence[int]) -> tuple[NDArray[Any], ...]:
        """Return the samples with these numbers as a micro-batch."""


class ChatData:
    """Conversations to train on and to evaluate on."""

    notes: tuple[str, ...] = ()
    form = FORMS
    """The form of a line, for error messages."""

    def __init__(self, config: TrainConfig, base: Path = Path()) -> None:
        """`base`: the folder that paths are relative to."""
        self.config, self.base = config, base
        place = base / config.data.tokenizer
        self.tokenizer = Tokenizer.load(place)
        if self.tokenizer.vocab > config.model.vocab:
            problem = (
                f"train.model.vocab is {config.model.vocab}, but the tokenizer has {self.tokenizer.vocab}"
            )
            raise DataError(problem, f"use vocab: {self.tokenizer.vocab}")
        own = base / config.tune.template if config.tune.template else None
        self.template = SideFiles.beside(place).template(own)
        self.reader = ChatReader(self.template)
        self.eod = self.tokenizer.eos if config.data.eod is None else config.data.eod

    adjust: Adjust | None = None

    def marked(self, line: int, row: Mapping[str, object]) -> list[Marked]:
        """Return the examples of a row as texts."""
        return self.reader.example(line, row)

    def examples(self, name: str) -> Examples:
        """Return the examples of a file."""
        file, limits = self.base / name, Limits(self.config.model.sequence, self.config.tune.too_long)
        texts = read_examples(file, self.marked, self.form)
        return examples_of(file, texts, self.tokenizer, self.eod, limits, self.adjust)

    def order(self, name: str, seed: int | None) -> Samples:
        """Return the samples of a file; without a seed, in the order of the file and only once."""
        examples = self.examples(name)
        if self.config.tune.packing:
            return PackedExamples(examples, self.config.model.sequence, self.eod, seed)
        return JoinedExamples(examples, seed)

    def orders(self) -> dict[str, Samples]:
        """Return the samples to train on and the samples to evaluate on."""
        tune = self.config.tune
        orders = {"train": self.order(tune.train, self.config.data.seed)}
        if self.config.eval.batches and tune.valid:
            orders["valid"] = self.order(tune.valid, None)
        return orders

    def samples(self, name: str) -> int:
        """Return how many samples a file has: examples, or packed rows."""
        return len(self.order(name, None))

    def identity(self) -> DataIdentity:
        """Return what a checkpoint records about the data."""
        tune = self.config.tune
        order: dict[str, object] = {"task": tune.task, "packing": tune.packing, "too_long": tune.too_long}
        for key in ("fields", "labels"):
            order |= {key: list(getattr(tune, key))} if tune.task == "classify" else {}
        template = self.template.source if self.template else ""
        order |= {"template": template, "seed": self.config.data.seed}
        return DataIdentity((sha256(self.base / tune.train),), order)
