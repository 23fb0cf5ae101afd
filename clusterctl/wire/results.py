"""The result of a task on a checkpoint, which `eval` writes to a file and a training to its metrics."""

from __future__ import annotations

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
