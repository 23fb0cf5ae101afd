"""Show the results of a sweep on a terminal."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from clusterctl.cli.views import tables
from clusterctl.text import count, duration

if TYPE_CHECKING:
    from rich.table import Table

    from clusterctl.jobs.sweep import Variant
    from clusterctl.report.summary import RunSummary

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
