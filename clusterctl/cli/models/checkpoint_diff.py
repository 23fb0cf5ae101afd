"""Choose where two checkpoints are compared: on machines that have both, or on this one after fetching them."""

from __future__ import annotations

import tempfile
from contextlib import ExitStack
from pathlib import Path

from clusterctl.checkpoints import diff
from clusterctl.checkpoints.diff import Compared, Side
from clusterctl.checkpoints.pull import plan_pull, pull
from clusterctl.cli import screen
from clusterctl.cli.views.progress_bar import bar
from clusterctl.text import size


def compared(first: Side, second: Side) -> Compared:
    """Return the differences of two checkpoints."""
    with ExitStack() as held:
        for holding in (*first.checkpoint.holdings, *second.checkpoint.holdings):
            held.enter_context(holding.holder.held([holding.entry.path]))
        work = diff.assign(first, second, diff.pairs_of(first, second))
        if work is not None:
            return diff.compare(first, second, work)
        return _fetched_and_compared(first, second)


def _fetched_and_compared(first: Side, second: Side) -> Compared:
    """Fetch both to a temporary folder: no machine has files of both."""
    with tempfile.TemporaryDirectory(prefix="clusterctl-diff-") as folder, bar("pull") as drawn:
        paths = Path(folder) / "first", Path(folder) / "second"
        for side, path in zip((first, second), paths, strict=True):
            made = plan_pull(side.checkpoint, side.manifest, path)
            screen.log(f"fetching {side.checkpoint.name}, {size(made.bytes)}: no machine has files of both")
            pull(made, drawn.of)
        return diff.compare_here(*paths, (first, second))
