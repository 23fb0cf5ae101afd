"""Export a run's metrics as CSV."""

from __future__ import annotations

import csv
import io
import math

from clusterctl.jobs.run_folder import RunDir
from clusterctl.report.history import COLUMNS, read_history

HEAD = ("event", "step", "attempt", *COLUMNS)


def as_csv(run: RunDir) -> str:
    """Return the steps and evaluations of a run as CSV, in the order in which they were done."""
    history = read_history(run)
    attempts = [start.facts.get("attempt", "") for start in history.starts] or [""]
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(HEAD)
    steps = history.steps
    columns = [steps[name] for name in COLUMNS]
    for index, step in enumerate(steps.step):
        values = ["" if math.isnan(column[index]) else f"{column[index]:.10g}" for column in columns]
        writer.writerow(["step", step, attempts[min(steps.start[index], len(attempts) - 1)], *values])
    blank = [""] * (len(COLUMNS) - 2)
    for line, start in zip(history.evals, history.eval_starts, strict=True):
        attempt, at = attempts[min(start, len(attempts) - 1)], "" if line.time is None else line.time
        writer.writerow(["eval", line.step, attempt, line.loss, *blank, at])
    return text.getvalue()
