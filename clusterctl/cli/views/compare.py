"""Show the comparison of runs on a terminal."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from rich.table import Table
from rich.text import Text

from clusterctl.cli import screen
from clusterctl.cli.views import tables
from clusterctl.jobs.sweep import Variant
from clusterctl.report.compare import Comparison, losses, measure_rows
from clusterctl.report.curve import Point, finite, thinned
from clusterctl.report.summary import RunSummary
from clusterctl.text import count, duration, escape_controls

if TYPE_CHECKING:
    from rich.console import Console, RenderableType

# Differing settings that are shown; `--html` and `--json` have all of them.
SETTINGS = 40
# The letter of each run in the plot.
LETTERS = "ABCDEFGHIJKLMNOPQRSTUVWXYZ"
HEIGHT = 14


def parts(comparison: Comparison, console: Console) -> list[RenderableType]:
    """Return the tables and the plot of a comparison."""
    names = [
        f"{letter} {summary.run}" for letter, summary in zip(LETTERS, comparison.summaries, strict=False)
    ]
    drawn: list[RenderableType] = [tables.table(["", *names], measure_rows(comparison), right=names), ""]
    drawn += [Text(f"{escape_controls(row.run)}: {row.describe()}") for row in comparison.first]
    curves = [finite(losses(subject.history)) for subject in comparison.subjects]
    if sum(map(bool, curves)) > 1:
        drawn += ["", overlaid(curves, min(console.width, 100))]
    rows = [[row.key, *(_short(value) for value in row.values)] for row in comparison.config]
    if rows:
        drawn += ["", tables.table(["SETTING", *names], rows[:SETTINGS])]
    if len(rows) > SETTINGS:
        drawn.append(
            Text(f"{len(rows) - SETTINGS} more settings differ; --html FILE shows them", style="dim")
        )
    if not rows:
        drawn += ["", screen.safe("no setting differs")]
    return drawn


def _short(value: str) -> str:
    return value if len(value) <= 60 else f"{value[:28]}...{value[-28:]}"


def overlaid(curves: Sequence[Sequence[Point]], width: int) -> Text:
    """Return the training losses of several runs in one plot; each run has its letter."""
    points = [point for curve in curves for point in curve]
    low, high = min(y for _, y in points), max(y for _, y in points)
    first, last = min(x for x, _ in points), max(x for x, _ in points)
    columns = max(20, width - 10)
    cells = [[" "] * columns for _ in range(HEIGHT)]
    for letter, curve in zip(LETTERS, curves, strict=False):
        for x, y in thinned(curve, columns):
            across = int((x - first) / ((last - first) or 1.0) * (columns - 1))
            down = int((high - y) / ((high - low) or 1.0) * (HEIGHT - 1))
            # "*": several runs share the cell.
            cells[down][across] = letter if cells[down][across] in (" ", letter) else "*"
    text = Text()
    for row, line in enumerate(cells):
        value = high - (high - low) * row / (HEIGHT - 1)
        label = f"{value:8.3f} " if row % 3 == 0 or row == HEIGHT - 1 else " " * 9
        text.append(label, style="dim").append("|" + "".join(line).rstrip() + "\n")
    left, right = f"step {first:g}", f"step {last:g}"
    return text.append(" " * 10 + left + " " * max(1, columns - len(left) - len(right)) + right, style="dim")


HEADS = ["VARIANT", "RUN", "PHASE", "STEPS", "LOSS", "VALIDATION", "TOKENS/S", "TIME", ""]


def results(variants: Sequence[Variant], summaries: Mapping[int, RunSummary]) -> Table:
    """Return a row for each variant; the lowest validation loss, or else training loss, is marked."""
    best = _best(summaries)
    rows = []
    for number, variant in enumerate(variants):
        summary = summaries.get(number)
        cells = [variant.label, variant.run, variant.phase]
        if summary is not None:
            speed = summary.speed.tokens_per_second
            cells += [
                "" if summary.steps_done is None else f"{summary.steps_done:,}",
                *("" if loss is None else f"{loss:.4f}" for loss in (summary.last_loss, summary.best_eval)),
                count(speed) if speed else "",
                duration(summary.seconds),
            ]
        cells += [""] * (len(HEADS) - 1 - len(cells))
        rows.append([*cells, "best" if number == best else variant.problem[:60]])
    return tables.table(HEADS, rows, right=HEADS[3:8])


def _best(summaries: Mapping[int, RunSummary]) -> int | None:
    """Return the variant with the lowest loss; validation losses count only if all variants have some."""
    evals = {number: summary.best_eval for number, summary in summaries.items()}
    losses = {number: summary.last_loss for number, summary in summaries.items()}
    chosen = evals if all(loss is not None for loss in evals.values()) else losses
    known = {number: loss for number, loss in chosen.items() if loss is not None}
    return min(known, key=lambda number: known[number]) if len(known) > 1 else None
