"""The accuracy of an evaluation over all ranks, and when a training no longer improves."""

from __future__ import annotations

from typing import Protocol

from trainer.parallel.group import Group
from trainer.tune.model import ClozeModel


def accuracy_of(model: ClozeModel, group: Group) -> float:
    """Return the share of right answers in the evaluation that just ended; NaN if no question counted.

    Ranks that share a question count it equally often, and those of other pipeline stages count none.
    """
    right, seen = model.take_accuracy()
    everything = group.total(float(seen))
    return group.total(float(right)) / everything if everything else float("nan")


class HasAccuracy(Protocol):
    """The result of an evaluation."""

    @property
    def accuracy(self) -> float | None:
        """Return the share of right answers."""


class EarlyStop:
    """Says that a training is over after so many evaluations without a better accuracy; 0: never."""

    def __init__(self, patience: int) -> None:
        self._patience, self._best, self._without = patience, -1.0, 0

    def __call__(self, measured: HasAccuracy) -> bool:
        if measured.accuracy is None or not self._patience:
            return False
        better = measured.accuracy > self._best
        self._best = max(self._best, measured.accuracy)
        self._without = 0 if better else self._without + 1
        return self._without >= self._patience
