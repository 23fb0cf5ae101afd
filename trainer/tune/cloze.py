"""Cloze questions as samples: each answer fills in the mask, and the right answer should be the most likely."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from trainer.config.data import DataIdentity
from trainer.config.train_config import TrainConfig
from trainer.corpus.tokenizer import Tokenizer
from trainer.errors import DataError
from trainer.evaluate.choice import around_mask, read_choices
from trainer.evaluate.copa import Question, cloze_texts, read_questions
from trainer.evaluate.text import Reader
from trainer.files import sha256
from trainer.samples.glm_batches import glm_tokens
from trainer.samples.glm_windows import GlmTokens
from trainer.tune.examples import UNCOUNTED, shuffled


@dataclass(frozen=True)
class Cloze:
    """A question: a source with a mask, the possible answers, and the index of the right one."""

    source: tuple[int, ...]
    mask: int
    answers: tuple[tuple[int, ...], ...]
    label: int

    @property
    def length(self) -> int:
        return len(self.source) + max(map(len, self.answers))


class ClozeSamples:
    """The questions of a file: shuffled in each epoch, or in the order of the file."""

    def __init__(self, questions: Sequence[Cloze], tokens: GlmTokens, seed: int | None) -> None:
        """`seed`: with None the questions are read once, in the order of the file; further samples do not count."""
        self.questions, self.tokens, self.seed = list(questions), tokens, seed
        self.choices = max(len(question.answers) for question in questions)

    def read(self, numbers: Sequence[int]) -> tuple[NDArray[Any], ...]:
        """Return a micro-batch: tokens, targets, positions, lengths of sources, labels."""
        places = [shuffled(number, len(self.questions), self.seed) for number in numbers]
        questions = [self.questions[at] for at, _ in places]
        shape = (len(questions), self.choices, max(question.length for question in questions))
        tokens = np.full(shape, self.tokens.eos, np.int64)
        targets = np.full(shape, UNCOUNTED, np.int64)
        positions = np.zeros((*shape[:2], 2, shape[2]), np.int64)
        separators = np.ones(shape[:2], np.int64)
        right = [self.questions[at].label if counts else UNCOUNTED for at, counts in places]
        labels = np.array(right, np.int64)
        for row, question in enumerate(questions):
            source = len(question.source)
            for column, answer in enumerate(question.answers):
                end = source + len(answer)
                tokens[row, column, :end] = (*question.source, self.tokens.sop, *answer[:-1])
                targets[row, column, source:end] = answer
                positions[row, column, 0, :source] = np.arange(source)
                positions[row, column, 0, source:end] = question.mask
                positions[row, column, 1, source:end] = np.arange(1, len(answer) + 1)
                separators[row, column] = source
        return tokens, targets, positions, separators, labels


class TuneData:
    """The files of a cloze task."""

    notes: tuple[str, ...] = ()

    def __init__(self, config: TrainConfig) -> None:
        self.config = config
        tokenizer = Tokenizer.load(Path(config.data.tokenizer))
        self.tokens = glm_tokens(config)
        if self.tokens.vocab > config.model.vocab:
            problem = (
                f"train.model.vocab is {config.model.vocab}, but the tokenizer needs {self.tokens.vocab}"
            )
            raise DataError(problem, f"use vocab: {self.tokens.vocab}")
        self.reader = Reader(tokenizer, config.model.sequence, self.tokens)

    def orders(self) -> dict[str, ClozeSamples]:
        """Return the samples to train on and the samples to evaluate on."""
        tune = self.config.tune
        train = self._questions(Path(tune.train), mirror=tune.mirror)
        orders = {"train": ClozeSamples(train, self.tokens, self.config.data.seed)}
        if self.config.eval.batches and tune.valid:
            orders["valid"] = ClozeSamples(self._questions(Path(tune.valid)), self.tokens, None)
        return orders

    def identity(self) -> DataIdentity:
        """Return what a checkpoint records about the data."""
        tune = self.config.tune
        order = {
            "task": tune.task,
            "pattern": tune.pattern,
            "mirror": tune.mirror,
            "seed": self.config.data.seed,
        }
        return DataIdentity((sha256(Path(tune.train)),), order)

    def _questions(self, file: Path, *, mirror: bool = False) -> list[Cloze]:
        if self.config.tune.task == "copa":
            questions = read_questions(file)
            made = [self._of_copa(question) for question in questions]
            if mirror:
                made += [self._of_copa(question.mirrored()) for question in questions]
        else:
            made = [
                self._cloze(*around_mask(file, choice), choice.texts, choice.label)
                for choice in read_choices(file)
            ]
        longest = max(question.length for question in made)
        if longest > self.config.model.sequence:
            problem = f"{file}: its longest question has {longest} tokens"
            raise DataError(f"{problem}; train.model.sequence is {self.config.model.sequence}", "shorten it")
        return made

    def _of_copa(self, question: Question) -> Cloze:
        before, answers = cloze_texts(question, self.config.tune.pattern)
        return self._cloze(before, ".", answers, question.label)

    def _cloze(self, before: str, after: str, answers: Sequence[str], label: int) -> Cloze:
        source, mask = self.reader.cloze_source(before, after)
        ids = tuple(tuple(self.reader.tokenizer.encode(f" {answer}")) for answer in answers)
        return Cloze(source, mask, ids, label)
