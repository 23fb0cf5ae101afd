"""The interface of a task, and its inputs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from clusterctl.wire.results import Figure
from trainer.errors import InputError
from trainer.evaluate.request import Example, Score
from trainer.evaluate.text import Reader


class Task(Protocol):
    """Examples with requests, and metrics that are computed from their scores."""

    convention: str

    @property
    def examples(self) -> Sequence[Example]:
        """Return the documents of the task, each with its requests."""

    def metrics(self, scores: Sequence[Sequence[Score]]) -> dict[str, Figure]:
        """Return the metrics of the task, given the scores of each example's requests."""


@dataclass(frozen=True)
class Inputs:
    """The data that the user chose, and how to read and score it."""

    data: Path
    reader: Reader
    convention: str = ""
    """One of the task's conventions; "" means its first."""
    stride: int = 32
    """Tokens between the starts of overlapping windows (Megatron's convention for WikiText)."""
    pattern: int = 0
    """Which wording of a GLM cloze question is used."""
    split: str = "all"
    """The part of a .bin/.idx corpus: train, valid, test or all."""
    fractions: str = ""
    """How the training split its corpora, as in train.data.split."""
    limit: int = 0
    """Use only the first N documents; 0: use all."""

    def pick(self, task: str, conventions: Sequence[str]) -> str:
        """Return the convention to use; raise an InputError if the task does not have it."""
        if self.convention and self.convention not in conventions:
            problem = f"task {task} has no convention {self.convention!r}"
            raise InputError(problem, f"use one of: {', '.join(conventions)}")
        return self.convention or conventions[0]


def sums(scores: Sequence[Sequence[Score]]) -> list[float]:
    """Return the log likelihood of each example: the sum over its requests."""
    return [sum(score.log_likelihood for score in own) for own in scores]


def accuracy(right: Sequence[bool]) -> list[float]:
    """Return 1.0 for each right answer and 0.0 for each wrong one."""
    return [float(value) for value in right]
