"""Results of `clusterctl eval` that are stored with a run."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from clusterctl.jobs.run_folder import RunDir
from clusterctl.jobs.run_lines import Metric
from clusterctl.wire.contract import EVALUATIONS_DIR
from clusterctl.wire.results import Evaluation
from clusterctl.wire.typed_json import BadValue, decode, parse

# Limit of bytes of a result, which does not contain the scores of single documents.
MOST_BYTES = 1 << 20


@dataclass(frozen=True)
class Evaluations:
    """The results of a run by step and task, and the faults of files without a result."""

    results: tuple[Evaluation, ...] = ()
    damaged: tuple[str, ...] = ()


def read_evaluations(run: RunDir, of_training: Sequence[Metric] = ()) -> Evaluations:
    """Return the results that are stored with a run; `of_training`: those that the training itself reported."""
    results, damaged = [_of_training(line) for line in of_training], list[str]()
    for file in sorted((run.root / EVALUATIONS_DIR).glob("*.json")):
        try:
            results.append(decode(Evaluation, parse(_content(file))))
        except OSError as error:
            damaged.append(f"{EVALUATIONS_DIR}/{file.name}: {error.strerror}")
        except BadValue as error:
            damaged.append(f"{EVALUATIONS_DIR}/{file.name}: {error}")
    # A step that was repeated after a restart is evaluated again.
    last = {
        (found.step, found.task, found.convention, found.data_sha256): found for found in results if found
    }
    ordered = sorted(last.values(), key=lambda result: (result.step, result.task, result.time))
    return Evaluations(tuple(ordered), tuple(damaged))


def _of_training(line: Metric) -> Evaluation | None:
    """Return the result in a line of metrics; None if it is damaged, as other lines of that file may be."""
    moment = time.gmtime(line.time or 0)
    try:
        return decode(Evaluation, {**line.facts, "time": time.strftime("%Y-%m-%dT%H:%M:%SZ", moment)})
    except BadValue:
        return None


def _content(file: Path) -> bytes:
    with file.open("rb") as stream:
        return stream.read(MOST_BYTES)


def figures_text(evaluation: Evaluation) -> str:
    """Return the figures of a result on one line."""
    shown = (f"{name.replace('_', ' ')} {figure}" for name, figure in evaluation.metrics.items())
    return ", ".join(shown)
