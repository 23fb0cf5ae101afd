"""Draw the live screen of `top` for any size of a terminal."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from rich.console import Group
from rich.segment import Segment
from rich.table import Table
from rich.text import Text

from clusterctl.cli.views.run_end import number, speed_text
from clusterctl.cli.views.tables import PHASE_STYLE
from clusterctl.report.curve import sparkline
from clusterctl.runs.overview import state_of_rank
from clusterctl.text import count, duration, escape_controls, plural, size

if TYPE_CHECKING:
    from rich.console import Console, ConsoleOptions, RenderableType

    from clusterctl.report.board import Board
    from clusterctl.report.summary import RunSummary
    from clusterctl.runs.state import RankState

KEYS = "j/k rank  n/p run  g/G first/last  / filter  l long log  s stop  ? help  q quit"
HELP = """\
  j, k, arrows   move among the ranks       n, p   next, previous run
  g, G           first, last rank           l      more of the log, and back
  /              filter ranks by node or state; Enter ends it, Escape clears it
  s              stop the run; asks first   q      quit: the run continues"""
# Below this height, blank lines are left out and one run is listed.
COMPACT = 18
# From this width on, all columns are shown.
WIDE = 80
WIDEST = 100
RANK_COLUMNS = ("", "RANK", "NODE", "DEVICE", "STATE", "STEP", "AGE", "OWN STEP", "MEMORY", "BUSY")


def screenful(
    board: Board, width: int, height: int, *, unicode: bool, note: str = "", long_log: bool = False
) -> RenderableType:
    """Return all that fits into a terminal of this size."""
    rows = board.rows()
    compact = height < COMPACT
    listed = 1 if compact else min(len(rows), max(1, height // 6))
    # Heads, the three lines of the training, the name of the log and the keys; blank lines between the parts.
    room = height - listed - (8 if compact else 11) - note.count("\n")
    log_lines = max(room * 3 // 4, 1) if long_log else max(room // 3, 1)
    ranks = max(room - log_lines, 1)
    head = head_line(board)
    name, lines = board.log(log_lines)
    blank = [] if compact else [Text("")]
    drawn = Group(
        Text(head, style="bold", no_wrap=True, overflow="ellipsis"),
        runs_table(board, listed),
        *blank,
        *training_lines(board, width, unicode=unicode),
        *blank,
        _ranks(board, ranks, width),
        *blank,
        Text(name or "no rank is shown", style="bold", no_wrap=True, overflow="ellipsis"),
        *(Text(escape_controls(line)[: width - 1], no_wrap=True, overflow="ellipsis") for line in lines),
        Text(note or KEYS, style="reverse" if note else "dim", no_wrap=True, overflow="ellipsis"),
    )
    return drawn if unicode else _Plain(drawn)


def head_line(board: Board) -> str:
    """Return the first line of the screen."""
    active = sum(row.phase in ("running", "restarting") for row in board.rows())
    return f"clusterctl top  {plural(len(board.runs), 'run')}, {active} active  {time.strftime('%H:%M:%S')}"


class _Plain:
    """Draws a renderable without the character that rich writes where it cuts a text."""

    def __init__(self, inner: RenderableType) -> None:
        self.inner = inner

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterator[Segment]:
        for segment in console.render(self.inner, options):
            yield Segment(segment.text.replace("\u2026", "~"), segment.style, segment.control)


def _table(columns: Sequence[str], right: Sequence[str] = ()) -> Table:
    drawn = Table(box=None, pad_edge=False, header_style="bold", padding=(0, 2, 0, 0))
    for name in columns:
        drawn.add_column(
            name, justify="right" if name in right else "left", no_wrap=True, overflow="ellipsis"
        )
    return drawn


def runs_table(board: Board, most: int) -> Table:
    """Return a table of the runs around the chosen one, at most so many."""
    rows = board.rows()
    begin = max(0, min(board.chosen - most // 2, len(rows) - most))
    drawn = _table(["", "RUN", "PHASE", "STEP", "LOSS"], ["STEP", "LOSS"])
    for index, row in list(enumerate(rows))[begin : begin + most]:
        loss = "" if row.loss is None else number(row.loss)
        cells = [">" if index == board.chosen else "", row.run]
        phase = Text(row.phase, style=PHASE_STYLE.get(row.phase, ""))
        drawn.add_row(*cells, phase, "" if row.step is None else f"{row.step:,}", loss)
    return drawn


def training_lines(board: Board, width: int, *, unicode: bool) -> list[Text]:
    """Return three lines about the training of the chosen run."""
    summary = board.summary
    if summary is None:
        return [Text(board.problem or "nothing is known of this run", style="yellow")] + [Text("")] * 2
    lines = [_progress(summary)]
    curve = sparkline(summary.curve, max(10, width - 30), unicode=unicode)
    loss = "" if summary.last_loss is None else f"loss {number(summary.last_loss)}  "
    lines.append(loss + curve if loss else "no step yet" if summary.trains else "a program without steps")
    facts = [speed_text(summary.speed)]
    if summary.memory_bytes is not None:
        facts.append(f"memory {size(summary.memory_bytes)}")
    if summary.goodput is not None:
        facts.append(f"goodput {summary.goodput:.0%}")
    lines.append("  ".join(filter(None, facts)))
    return [Text(escape_controls(line), no_wrap=True, overflow="ellipsis") for line in lines]


def _progress(summary: RunSummary) -> str:
    parts = [summary.run, str(summary.phase), duration(summary.seconds)]
    if summary.steps_done is not None:
        of = f"/{summary.steps:,}" if summary.steps else ""
        share = f" ({summary.steps_done / summary.steps:.0%})" if summary.steps else ""
        parts.append(f"step {summary.steps_done:,}{of}{share}")
    if summary.tokens:
        parts.append(f"{count(summary.tokens)} tokens")
    if summary.restarts:
        parts.append(plural(summary.restarts, "restart"))
    return "  ".join(parts)


def _ranks(board: Board, most: int, width: int) -> Table:
    ranks, late = board.ranks(), board.stragglers()
    begin = max(0, min(board.rank - most // 2, len(ranks) - most))
    names, shown = list(RANK_COLUMNS), rank_columns(width)
    drawn = _table(shown, ["RANK", "STEP", "AGE", "OWN STEP", "MEMORY", "BUSY"])
    for index, rank in list(enumerate(ranks))[begin : begin + most]:
        cells = dict(zip(names, rank_cells(board, rank, late.get(rank.rank)), strict=True))
        cells[""] = Text(">" if index == board.rank else "")
        drawn.add_row(*[cells[name] for name in shown])
    return drawn


def rank_columns(width: int) -> list[str]:
    """Return the columns of the ranks that fit a width."""
    if width < WIDE:
        return ["", "RANK", "NODE", "STATE", "STEP"]
    return list(RANK_COLUMNS) if width >= WIDEST else list(RANK_COLUMNS[:8])


def rank_cells(board: Board, rank: RankState, times: float | None) -> list[Text]:
    """Return the cells of a rank in all columns; `times`: how many times as long as the others it takes."""
    state = state_of_rank(rank)
    style = "bold red" if times or state in ("failed", "hung") else PHASE_STYLE.get(state, "")
    age = "" if rank.step_age is None else duration(rank.step_age)
    own = "" if not rank.step_seconds else f"{rank.step_seconds:.3g} s"
    cells = ["", str(rank.rank), rank.node, "" if rank.device is None else str(rank.device)]
    texts = [Text(cell) for cell in cells]
    texts.append(Text(f"{state}, {times:.1f}x slower" if times else state, style=style))
    step = "" if rank.step is None else f"{rank.step:,}"
    usage = board.usage.get(rank.rank)
    memory = f"{size(usage.used)}/{size(usage.total)}" if usage and usage.total else ""
    busy = f"{usage.busy:.0%}" if usage and usage.busy is not None else ""
    return [*texts, Text(step), Text(age), Text(own), Text(memory), Text(busy)]
