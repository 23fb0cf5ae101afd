"""Compute the accuracy of an evaluation over all ranks, and stop a training that no longer improves."""

from __future__ import annotations

from typing import Protocol

import torch.nn.functional as F
from torch import Tensor

from trainer.model.masks import UNCOUNTED
from trainer.parallel.group import Group


class CountsAnswers:
    """A model that counts right answers in evaluations."""

    right: int = 0
    """Right answers since `take_accuracy` was called, in evaluations only."""
    seen: int = 0

    def take_accuracy(self) -> tuple[int, int]:
        """Return how many answers of this rank's evaluations were right, of how many; then reset both counts."""
        counts = self.right, self.seen
        self.right = self.seen = 0
        return counts

    def label_loss(self, scores: Tensor, labels: Tensor, training: bool) -> Tensor:
        """Return the mean loss of the labels that count; without `training`, count the right ones."""
        counted = labels != UNCOUNTED
        if not training:
            self.right += int((scores.argmax(1) == labels)[counted].sum().item())
            self.seen += int(counted.sum().item())
        if not bool(counted.any()):
            return scores.sum() * 0.0
        return F.cross_entropy(scores, labels, ignore_index=UNCOUNTED)


def accuracy_of(model: CountsAnswers, group: Group) -> float:
    """Return the fraction of right answers in the last evaluation; NaN if no question counted.

    Ranks that share a question count it equally often; ranks of earlier pipeline stages count none.
    """
    right, seen = model.take_accuracy()
    everything = group.total(float(seen))
    return group.total(float(right)) / everything if everything else float("nan")


class HasAccuracy(Protocol):
    """The result of an evaluation."""

    @property
    def loss(self) -> float | None:
        """Return the mean loss."""

    @property
    def accuracy(self) -> float | None:
        """Return the fraction of right answers."""


class EarlyStop:
    """Decides whether a training ends: after `patience` evaluations without a better result; 0: never."""

    def __init__(self, patience: int, by_loss: bool = False) -> None:
        """`by_loss`: the best result is the lowest loss; otherwise the highest accuracy."""
        self._patience, self._best, self._without = patience, float("-inf"), 0
        self._by_loss = by_loss

    def __call__(self, measured: HasAccuracy) -> bool:
        result = measured.accuracy
        if self._by_loss:
            result = None if measured.loss is None else -measured.loss
        if result is None or not self._patience:
            return False
        better = result > self._best
        self._best = max(self._best, result)
        self._without = 0 if better else self._without + 1
        return self._without >= self._patience
