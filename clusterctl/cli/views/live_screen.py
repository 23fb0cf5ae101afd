"""Draw the live screen of `top` for any size of a terminal."""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from rich.console import Group
from rich.text import Text

from clusterctl.cli.views.live_lines import (
    CUT,
    GAP,
    PLAIN_CUT,
    Line,
    Span,
    columns,
    filled,
    fitted,
    width_of,
)
from clusterctl.cli.views.run_end import milliseconds, number, speed_text
from clusterctl.cli.views.tables import PHASE_STYLE
from clusterctl.report.curve import sparkline
from clusterctl.report.summary import RunSummary
from clusterctl.runs.overview import state_of_rank
from clusterctl.runs.state import RankState
from clusterctl.text import count, duration, escape_controls, plural, size

if TYPE_CHECKING:
    from clusterctl.report.board import Board
    from clusterctl.runs.watching.usage import DeviceUsage

# The keys, from the widest line to the narrowest.
KEYS = (
    "j/k rank  n/p run  g/G first/last  / filter  l long log  s stop  ? help  q quit",
    "j/k rank  n/p run  / filter  l log  s stop  ? help  q quit",
    "j/k n/p / l s  ? help  q quit",
)
HELP = """\
  j, k, arrows   move among the ranks       n, p   next, previous run
  g, G           first, last rank           l      more of the log, and back
  /              filter ranks by node or state; Enter ends it, Escape clears it
  s              stop the run; asks first   q      quit: the run continues"""
NARROW_HELP = """\
  j, k, arrows  move among the ranks
  n, p          next, previous run
  g, G          first, last rank
  l             more of the log, and back
  /             filter ranks by node or state
  s             stop the run; asks first
  q             quit: the run continues"""
# Below this height, blank lines are left out and one run is listed.
COMPACT = 18
# From this width on, more columns are shown.
WIDE = 80
WIDEST = 100
RANK_COLUMNS = ("", "RANK", "NODE", "DEVICE", "STATE", "STEP", "AGE", "OWN STEP", "MEMORY", "BUSY")
TO_THE_RIGHT = ("RANK", "DEVICE", "STEP", "LOSS", "AGE", "OWN STEP", "MEMORY", "BUSY")


class ScreenLines:
    """Composes the lines of the screen; keeps what has not changed since the last time."""

    def __init__(self, board: Board, *, unicode: bool) -> None:
        self.board, self.unicode = board, unicode
        self.cut = CUT if unicode else PLAIN_CUT
        self.ranks = RankRows(board, self.cut)
        self._training: tuple[object, list[Line]] = (None, [])

    def all_lines(self, width: int, height: int, note: str = "", *, long_log: bool = False) -> list[Line]:
        """Return the whole screen."""
        compact = height < COMPACT
        listed = 1 if compact else min(len(self.board.rows()), max(1, height // 6))
        keys = note_lines(note, width)
        # Heads, the three lines of the training, the name of the log and the keys; blank lines between the parts.
        room = height - listed - (7 if compact else 10) - len(keys)
        log_lines = max(room * 3 // 4, 1) if long_log else max(room // 3, 1)
        name, lines = self.board.log(log_lines)
        blank: list[Line] = [] if compact else [()]
        drawn = [
            ((head_line(self.board), "bold"),),
            *runs_lines(self.board, listed),
            *blank,
            *self.training(width),
            *blank,
            *self.ranks.lines(max(room - log_lines, 1), width),
            *blank,
            ((name or "no rank is shown", "bold"),),
            *(((escape_controls(line), ""),) for line in lines),
        ]
        drawn += [()] * (height - len(drawn) - len(keys)) + keys
        return [fitted(line, width, self.cut) for line in drawn]

    def training(self, width: int) -> list[Line]:
        """Return three lines about the training of the chosen run."""
        summary = self.board.summary
        if summary is None:
            problem = self.board.problem or "nothing is known of this run"
            return [((problem, "yellow"),), (), ()]
        key = (summary, width)
        if self._training[0] != key:
            self._training = (key, training_lines(summary, width, unicode=self.unicode))
        return self._training[1]


def screenful(board: Board, width: int, height: int, *, unicode: bool) -> Group:
    """Return one screen to be printed once, without keys."""
    lines = ScreenLines(board, unicode=unicode).all_lines(width, height, " ")
    texts = [Text.assemble(*line, no_wrap=True, overflow="crop") for line in lines]
    while texts and not texts[-1].plain.strip():
        texts.pop()
    return Group(*texts)


def head_line(board: Board) -> str:
    """Return the first line of the screen."""
    active = sum(row.phase in ("running", "restarting") for row in board.rows())
    return f"clusterctl top  {plural(len(board.runs), 'run')}, {active} active  {time.strftime('%H:%M:%S')}"


def note_lines(note: str, width: int) -> list[Line]:
    """Return the lines at the bottom: a note, else the keys."""
    if note:
        return [((line, "reverse"),) for line in note.split("\n")]
    keys = next((keys for keys in KEYS if len(keys) <= width), KEYS[-1])
    return [((keys, "dim"),)]


def help_text(width: int) -> str:
    """Return what the keys do."""
    return HELP if width >= WIDE else NARROW_HELP


def _widths(names: Sequence[str], rows: Iterable[Sequence[Span]], least: Sequence[int] = ()) -> list[int]:
    wanted = [len(name) for name in names]
    for row in rows:
        for at, (text, _) in enumerate(row):
            wanted[at] = max(wanted[at], width_of(text))
    return [max(pair) for pair in zip(wanted, least, strict=True)] if least else wanted


def runs_lines(board: Board, most: int) -> list[Line]:
    """Return a head and the runs around the chosen one, at most so many."""
    names, rows = ("", "RUN", "PHASE", "STEP", "LOSS"), board.rows()
    begin = max(0, min(board.chosen - most // 2, len(rows) - most))
    shown = list[list[Span]]()
    for index, row in list(enumerate(rows))[begin : begin + most]:
        step = "" if row.step is None else f"{row.step:,}"
        loss = "" if row.loss is None else number(row.loss)
        cursor = ">" if index == board.chosen else " "
        phase = (row.phase, PHASE_STYLE.get(row.phase, ""))
        shown.append([(cursor, ""), (row.run, ""), phase, (step, ""), (loss, "")])
    return _table(names, shown, _widths(names, shown))


def _table(names: Sequence[str], rows: Iterable[Sequence[Span]], widths: Sequence[int]) -> list[Line]:
    right = [name in TO_THE_RIGHT for name in names]
    head = columns([(name, "") for name in names], widths, right)
    text = "".join(text for text, _ in head)
    return [((text, "bold"),), *(columns(row, widths, right) for row in rows)]


def training_lines(summary: RunSummary, width: int, *, unicode: bool) -> list[Line]:
    """Return three lines about a training."""
    lines = [_joined(_progress(summary), width)]
    loss = "" if summary.last_loss is None else f"loss {number(summary.last_loss)}  "
    curve = sparkline(summary.curve, max(10, width - len(loss) - 1), unicode=unicode)
    lines.append(loss + curve if loss else _no_step(summary))
    facts = speed_text(summary.speed).split(", ")
    if summary.memory_bytes is not None:
        facts.append(f"memory {size(summary.memory_bytes)}")
    if summary.goodput is not None:
        facts.append(f"goodput {summary.goodput:.0%}")
    lines.append(_joined(facts, width))
    return [((escape_controls(line), ""),) for line in lines]


def _no_step(summary: RunSummary) -> str:
    if summary.trains:
        return "no step yet"
    return "no step lines in its output" + ("" if summary.is_final else " yet")


def _joined(parts: Iterable[str], width: int) -> str:
    """Return as many parts in one line as fit."""
    line = ""
    for part in filter(None, parts):
        longer = line + GAP + part if line else part
        if line and width_of(longer) > width:
            break
        line = longer
    return line


def _progress(summary: RunSummary) -> list[str]:
    parts = [summary.run, str(summary.phase), duration(summary.seconds)]
    if summary.steps_done is not None:
        of = f"/{summary.steps:,}" if summary.steps else ""
        share = f" ({summary.steps_done / summary.steps:.0%})" if summary.steps else ""
        parts.append(f"step {summary.steps_done:,}{of}{share}")
    if summary.tokens:
        parts.append(f"{count(summary.tokens)} tokens")
    if summary.restarts:
        parts.append(plural(summary.restarts, "restart"))
    return parts


class RankRows:
    """The table of the ranks: a row is composed again only if its rank has changed."""

    def __init__(self, board: Board, cut: str) -> None:
        self.board, self.cut = board, cut
        self.begin = 0
        """The position of the first rank that is shown."""
        self._rows: dict[int, tuple[object, list[Span]]] = {}
        self._shape: object = None
        self._widths: list[int] = []

    def lines(self, most: int, width: int) -> list[Line]:
        """Return a head and the ranks around the cursor, at most so many."""
        board = self.board
        ranks, late = board.ranks(), board.stragglers()
        names = rank_columns(width)
        at = [RANK_COLUMNS.index(name) for name in names]
        rows = [self._row(rank, late.get(rank.rank)) for rank in ranks]
        shape = (board.run.run_id, len(ranks), width)
        if shape != self._shape:
            self._shape, self._widths = shape, []
        shown = [[row[column] for column in at] for row in rows]
        # Columns only grow, so that the table does not jump.
        self._widths = _widths(names, shown, self._widths)
        self.begin = max(0, min(board.rank - most // 2, len(ranks) - most))
        for index in range(self.begin, min(self.begin + most, len(ranks))):
            shown[index][0] = (">" if index == board.rank else " ", "")
        visible = shown[self.begin : self.begin + most]
        drawn = _table(names, visible, self._widths)
        if len(ranks) > most:
            position = f"  {self.begin + 1}-{self.begin + len(visible)} of {len(ranks)}"
            drawn[0] = (*drawn[0], (position, "dim"))
        if board.text:
            drawn[0] = (*drawn[0], (f"  filter: {escape_controls(board.text)}", "bold"))
        if not ranks:
            empty = f"no rank matches {board.text}" if board.text else "no rank is known yet"
            drawn.append(((f"  {escape_controls(empty)}", "dim"),))
        else:
            cursor = 1 + min(board.rank, len(ranks) - 1) - self.begin
            drawn[cursor] = filled(fitted(drawn[cursor], width, self.cut), width, "reverse")
        return drawn

    def _row(self, rank: RankState, times: float | None) -> list[Span]:
        usage = self.board.usage.get(rank.rank)
        known = self._rows.get(rank.rank)
        key = (rank, times, usage)
        if known is None or known[0] != key:
            known = self._rows[rank.rank] = (key, rank_cells(rank, times, usage))
        return known[1]


def rank_columns(width: int) -> Sequence[str]:
    """Return the columns of the ranks that fit a width."""
    if width < WIDE:
        return ("", "RANK", "NODE", "STATE", "STEP")
    return RANK_COLUMNS if width >= WIDEST else RANK_COLUMNS[:8]


def rank_cells(rank: RankState, times: float | None, usage: DeviceUsage | None) -> list[Span]:
    """Return the cells of a rank in all columns; `times`: how many times as long as the others it takes."""
    state = state_of_rank(rank)
    style = "bold red" if times or state in ("failed", "hung") else PHASE_STYLE.get(state, "")
    return [
        ("", ""),
        (str(rank.rank), ""),
        (rank.node, ""),
        ("" if rank.device is None else str(rank.device), ""),
        (f"{state}, {times:.1f}x slower" if times else state, style),
        ("" if rank.step is None else f"{rank.step:,}", ""),
        ("" if rank.step_age is None else duration(rank.step_age), ""),
        (milliseconds(rank.step_seconds) if rank.step_seconds else "", ""),
        (f"{size(usage.used)}/{size(usage.total)}" if usage and usage.total else "", ""),
        (f"{usage.busy:.0%}" if usage and usage.busy is not None else "", ""),
    ]
