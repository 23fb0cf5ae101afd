"""Results of `clusterctl eval` that are stored with a run."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from clusterctl.contract import EVALUATIONS_DIR
from clusterctl.typed_json import BadValue, decode, parse

if TYPE_CHECKING:
    from clusterctl.jobs.run_folder import RunDir

# More than any result: the scores of single documents are not in it.
MOST_BYTES = 1 << 20


@dataclass(frozen=True)
class Figure:
    """One figure of a task and its standard error."""

    value: float
    standard_error: float | None = None

    def __str__(self) -> str:
        error = "" if self.standard_error is None else f" ± {self.standard_error:.2g}"
        return f"{self.value:.6g}{error}"


@dataclass(frozen=True)
class Evaluation:
    """The result of one task on one checkpoint."""

    task: str
    convention: str
    step: int
    data: str
    data_sha256: str
    documents: int
    metrics: dict[str, Figure]
    time: str = ""


def read_evaluations(run: RunDir) -> tuple[Evaluation, ...]:
    """Return the results of a run, by step and task; files that are damaged are left out."""
    results = []
    for file in (run.root / EVALUATIONS_DIR).glob("*.json"):
        try:
            results.append(decode(Evaluation, parse(_content(file))))
        except (OSError, BadValue):
            continue
    return tuple(sorted(results, key=lambda result: (result.step, result.task, result.time)))


def _content(file: Path) -> bytes:
    with file.open("rb") as stream:
        return stream.read(MOST_BYTES)


def figures_text(evaluation: Evaluation) -> str:
    """Return the figures of a result on one line."""
    shown = (f"{name.replace('_', ' ')} {figure}" for name, figure in evaluation.metrics.items())
    return ", ".join(shown)
