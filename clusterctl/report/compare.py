"""Compare runs: configuration, losses, speed, and the first step at which their losses differ."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from clusterctl.report import charts
from clusterctl.report.config import Difference, differences, flat_config
from clusterctl.report.curve import Point
from clusterctl.report.history import History
from clusterctl.report.page import Subject, document
from clusterctl.report.summary import RunSummary
from clusterctl.report.tables import safe, table
from clusterctl.text import count, duration, size

# Rows of differing settings on a page.
ROWS = 300


@dataclass(frozen=True)
class FirstDifference:
    """The first step at which the loss of a run differs from that of the first run."""

    run: str
    step: int | None
    """None if all common steps have the same loss."""
    common: int
    """Number of steps that both runs have."""
    loss: float = 0.0
    other: float = 0.0
    silent: tuple[str, ...] = ()
    """Which of the two runs have printed no steps."""

    def describe(self) -> str:
        """Return the result in words."""
        if self.silent:
            return f"losses can't be compared: no steps were found in {' and '.join(self.silent)}"
        if not self.common:
            return "no step in common"
        if self.step is None:
            return f"the same loss in all {self.common:,} common steps"
        return f"the loss first differs at step {self.step:,}: {self.loss:.9g} and {self.other:.9g}"


@dataclass(frozen=True)
class Comparison:
    """Several runs side by side; the others are compared with the first one."""

    subjects: tuple[Subject, ...]
    config: tuple[Difference, ...]
    first: tuple[FirstDifference, ...]

    @property
    def summaries(self) -> list[RunSummary]:
        return [subject.summary for subject in self.subjects]

    def as_json(self) -> dict[str, object]:
        return {
            "runs": [summary.as_json() for summary in self.summaries],
            "config": {row.key: list(row.values) for row in self.config},
            "first_difference": {
                row.run: {"step": row.step, "common_steps": row.common, "losses": [row.loss, row.other]}
                for row in self.first
            },
        }


def compare(subjects: Sequence[Subject], tolerance: float = 0.0) -> Comparison:
    """Return how runs differ; losses within the relative `tolerance` count as the same."""
    configs = [flat_config(subject.sources.record, subject.history) for subject in subjects]
    base = losses(subjects[0].history)
    first = [_first_difference(subjects[0].summary.run, base, subject, tolerance) for subject in subjects[1:]]
    return Comparison(tuple(subjects), tuple(differences(configs)), tuple(first))


def losses(history: History) -> list[Point]:
    """Return (step, training loss) of the steps that count."""
    steps = history.steps
    return [(float(steps.step[index]), steps["loss"][index]) for index in steps.kept()]


def _first_difference(
    base_run: str, base: Sequence[Point], other: Subject, tolerance: float
) -> FirstDifference:
    run, theirs = other.summary.run, dict(losses(other.history))
    if silent := tuple(name for name, points in ((base_run, base), (run, theirs)) if not points):
        return FirstDifference(run, None, 0, silent=silent)
    common = [(step, loss, theirs[step]) for step, loss in base if step in theirs]
    for step, loss, their in common:
        same = math.isclose(loss, their, rel_tol=tolerance) or (math.isnan(loss) and math.isnan(their))
        if not same:
            return FirstDifference(run, int(step), len(common), loss, their)
    return FirstDifference(run, None, len(common))


def measures(summary: RunSummary) -> list[tuple[str, str]]:
    """Return the compared values of each run, with their names."""
    speed = summary.speed

    def shown(value: float | None, form: str = ".4f") -> str:
        return "" if value is None else format(value, form)

    return [
        ("phase", str(summary.phase)),
        ("steps", "" if summary.steps_done is None else f"{summary.steps_done:,}"),
        ("last loss", shown(summary.last_loss)),
        ("last validation loss", shown(summary.last_eval)),
        ("lowest validation loss", shown(summary.best_eval)),
        ("accuracy", shown(summary.last_accuracy, ".2%")),
        ("best accuracy", shown(summary.best_accuracy, ".2%")),
        ("tokens/s", count(speed.tokens_per_second) if speed.tokens_per_second else ""),
        ("samples/s", shown(speed.samples_per_second, ".4g")),
        ("seconds per step", shown(speed.step_seconds, ".4g")),
        ("TFLOP/s per device", shown(speed.tflops, ".3g")),
        ("peak memory", size(summary.memory_bytes) if summary.memory_bytes is not None else ""),
        ("time", duration(summary.seconds)),
        ("goodput", shown(summary.goodput, ".0%")),
        ("device-hours", shown(summary.device_hours, ".3g")),
        ("restarts", str(summary.restarts)),
    ]


def measure_rows(comparison: Comparison) -> list[list[str]]:
    """Return a row for each measure that any run has: its name, then its value in each run."""
    columns = [measures(summary) for summary in comparison.summaries]
    rows = [[cells[0][0], *(cell[1] for cell in cells)] for cells in zip(*columns, strict=True)]
    return [row for row in rows if any(row[1:])]


def page(comparison: Comparison) -> str:
    """Return the comparison as one HTML file."""
    names = [summary.run for summary in comparison.summaries]
    curves = [
        charts.line_chart(
            title, _overlaid(comparison, column), wide=column == "loss", from_zero=column != "loss"
        )
        for title, column in (
            ("Loss", "loss"),
            ("Tokens per second", "tokens_per_second"),
            ("Samples per second", "samples_per_second"),
            ("Seconds per step", "step_seconds"),
        )
    ]
    settings = [[row.key, *row.values] for row in comparison.config][:ROWS]
    found = [[row.run, row.describe()] for row in comparison.first]
    return document(
        " and ".join(names),
        [
            f"<h1>{safe(', '.join(names))}</h1>",
            table(["", *names], measure_rows(comparison), right=names),
            table(["Run", f"Compared with {names[0]}"], found),
            f'<section><h2>Curves</h2><div class="charts">{"".join(curves)}</div></section>',
            "<section><h2>Settings that differ</h2>"
            + (table(["Key", *names], settings) or "<p>Nothing differs.</p>")
            + "</section>",
        ],
    )


def _overlaid(comparison: Comparison, column: str) -> list[charts.Line]:
    lines = []
    for number, subject in enumerate(comparison.subjects):
        steps = subject.history.steps
        points = [(float(steps.step[index]), steps[column][index]) for index in steps.kept()]
        lines.append(charts.Line(subject.summary.run, points, number))
        if column == "loss" and (evals := subject.history.kept_evals()):
            validation = [(float(step), loss) for step, loss in evals]
            lines.append(
                charts.Line(f"{subject.summary.run}, validation", validation, number, dots=True, faint=True)
            )
    return lines
