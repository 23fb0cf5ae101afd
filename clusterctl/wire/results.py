"""What the trainer finds out about checkpoints and weights: results of tasks, differences, the model of weights."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class Figure:
    """A value and its standard error, which is None if the convention defines none."""

    value: float
    standard_error: float | None = None

    def __str__(self) -> str:
        error = "" if self.standard_error is None else f" ± {self.standard_error:.2g}"
        return f"{self.value:.6g}{error}"


@dataclass(frozen=True)
class Evaluation:
    """The result of one task on one checkpoint, or after a step of a training."""

    step: int
    task: str
    convention: str
    data: str
    data_sha256: str
    documents: int
    metrics: dict[str, Figure]
    seconds: float = 0.0
    time: str = ""


@dataclass(frozen=True)
class Difference:
    """How much a tensor of two checkpoints differs, over the numbers that were compared."""

    numbers: int = 0
    different: int = 0
    largest: float = 0.0
    """The largest absolute difference; of the finite ones, as for the sums: JSON has no infinite numbers."""
    squares: float = 0.0
    """The sum of the squares of the differences."""
    squares_of_first: float = 0.0
    """The sum of the squares of the first checkpoint's numbers."""
    infinite: int = 0
    """How many differences are infinite: one of the two numbers is infinite or no number."""

    def plus(self, other: Difference) -> Difference:
        """Return the difference over the numbers of both."""
        return Difference(
            self.numbers + other.numbers,
            self.different + other.different,
            max(self.largest, other.largest),
            self.squares + other.squares,
            self.squares_of_first + other.squares_of_first,
            self.infinite + other.infinite,
        )

    @property
    def gap(self) -> float:
        """Return the largest absolute difference, of all of them."""
        return math.inf if self.infinite else self.largest

    @property
    def relative(self) -> float:
        """Return the norm of the difference divided by the norm of the first checkpoint's tensor."""
        if self.infinite or not self.squares:
            return math.inf if self.infinite else 0.0
        return math.sqrt(self.squares / self.squares_of_first) if self.squares_of_first else math.inf

    def as_json(self) -> dict[str, object]:
        return {
            "numbers": self.numbers,
            "different": self.different,
            "largest": None if self.infinite else self.largest,
            "relative": self.relative if math.isfinite(self.relative) else None,
        }


@dataclass(frozen=True)
class Weights:
    """The model of a folder with weights."""

    model: Mapping[str, object]
    """The keys of `train.model` that describe it."""
    context: int
    """The longest sequence for the model."""
    tokenizer: str
    """Its tokenizer.json; empty if the folder has none."""
