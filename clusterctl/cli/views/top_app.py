"""The screen of `top` with Textual: the same board as without it, with tables that scroll and a mouse."""

from __future__ import annotations

import asyncio
import signal
import time
from typing import TYPE_CHECKING, Any, ClassVar

from rich.console import Group
from rich.text import Text
from textual.app import App, ComposeResult
from textual.binding import Binding
from textual.coordinate import Coordinate
from textual.widgets import DataTable, Input, Static
from textual.widgets import Log as LogView

from clusterctl.cli import screen
from clusterctl.cli.live_board import REFRESH
from clusterctl.cli.views.live_screen import (
    HELP,
    KEYS,
    head_line,
    rank_cells,
    rank_columns,
    runs_table,
    training_lines,
)
from clusterctl.text import escape_controls

if TYPE_CHECKING:
    from clusterctl.cli.live_board import LiveBoard

# Seconds between two looks for something new to draw.
FRAME = 0.1
# Lines of a log that can be scrolled back to, and of the short log.
LOG_LINES, SHORT_LOG = 2000, 8


class TopApp(App[None]):
    """Draws what has changed, at most ten times a second."""

    CSS = """
    Screen { background: transparent; }
    #head { height: 1; text-style: bold; }
    #runs { height: auto; max-height: 6; }
    #training { height: 3; margin: 1 0; }
    #ranks { height: 2fr; background: transparent; }
    #name { height: 1; text-style: bold; margin: 1 0 0 0; }
    #log { height: 1fr; min-height: 3; background: transparent; }
    #filter { display: none; height: 1; border: none; padding: 0; }
    #keys { height: auto; max-height: 5; }
    .long #ranks { height: 1fr; }
    .long #log { height: 3fr; }
    .low #training, .low #name { margin: 0; }
    .low #runs { max-height: 2; }
    """
    ENABLE_COMMAND_PALETTE = False
    BINDINGS: ClassVar[list[Any]] = [
        Binding("j,down", "move(1)", priority=True),
        Binding("k,up", "move(-1)", priority=True),
        Binding("g,home", "move(-1000000)", priority=True),
        Binding("G,end", "move(1000000)", priority=True),
        Binding("n,right", "choose(1)", priority=True),
        Binding("p,left", "choose(-1)", priority=True),
        Binding("l,enter", "long_log", priority=True),
        Binding("slash", "filter", priority=True),
        Binding("s", "ask_stop", priority=True),
        Binding("y,Y", "confirm", priority=True),
        Binding("question_mark", "help", priority=True),
        Binding("escape", "leave", priority=True),
        Binding("q,ctrl+c,ctrl+d", "quit", priority=True),
    ]

    def __init__(self, live: LiveBoard) -> None:
        super().__init__(ansi_color=True)
        self.live, self.board = live, live.board
        self.asks_stop = False
        self.unicode = screen.has_unicode(screen.out_console())
        self._read = 0.0
        # What is on the screen, so that only changes are drawn.
        self._drawn: dict[str, object] = {}
        self._cells: list[list[str]] = []
        self._widths: list[int] = []

    def show(self) -> None:
        """Run until a key or a signal ends it; the terminal is then as it was."""
        self.live.start()
        try:
            self.run(mouse=True)
        finally:
            self.live.closed.set()

    def compose(self) -> ComposeResult:
        yield Static(id="head", markup=False)
        yield Static(id="runs")
        yield Static(id="training")
        yield DataTable(id="ranks", cursor_type="row", zebra_stripes=False)
        yield Static(id="name", markup=False)
        yield LogView(id="log", max_lines=LOG_LINES)
        yield Input(id="filter", placeholder="filter")
        yield Static(id="keys", markup=False)

    def on_mount(self) -> None:
        for number in (signal.SIGTERM, signal.SIGHUP):
            asyncio.get_running_loop().add_signal_handler(number, lambda: self.exit())
        self.query_one("#ranks", DataTable).focus()
        self.tick()
        self.set_interval(FRAME, self.tick)

    def on_resize(self) -> None:
        self._drawn.clear()
        self.tick()

    # -- drawing

    def tick(self) -> None:
        """Read what is due, and draw what has changed."""
        if time.monotonic() - self._read > REFRESH:
            self.board.refresh()
            self._read = time.monotonic()
            self._draw_log()
        width, height = self.size.width or 80, self.size.height or 24
        self.screen.set_class(height < 20, "low")
        self._update("#head", head_line(self.board), head_line(self.board))
        rows = tuple(self.board.rows())
        most = max(1, min(len(rows), 1 if height < 20 else 5))
        if self._changed("runs", (rows, self.board.chosen, most)):
            self.query_one("#runs", Static).update(runs_table(self.board, most))
        lines = training_lines(self.board, width, unicode=self.unicode)
        self._update("#training", "\n".join(line.plain for line in lines), Group(*lines))
        self._draw_ranks(width)
        note = self.live.note or KEYS
        self._update("#keys", note, Text(note, no_wrap=True, overflow="ellipsis"))

    def _changed(self, key: str, value: object) -> bool:
        if self._drawn.get(key) == value:
            return False
        self._drawn[key] = value
        return True

    def _update(self, name: str, value: str, content: Any) -> None:
        if self._changed(name, value):
            self.query_one(name, Static).update(content)

    def _draw_ranks(self, width: int) -> None:
        """Write the cells of the ranks that have changed; the whole table if its shape has."""
        if not self._changed(
            "ranks", (self.board.state(), tuple(self.board.usage.items()), self.board.text, width)
        ):
            return
        table = self.query_one("#ranks", DataTable)
        columns = rank_columns(width)
        late = self.board.stragglers()
        kept = [index for index, name in enumerate(rank_columns(1000)) if name in columns and name]
        rows = []
        for rank in self.board.ranks():
            cells = rank_cells(self.board, rank, late.get(rank.rank))
            rows.append([cells[index] for index in kept])
        widths = [
            max([len(columns[at + 1]), *(len(row[at].plain) for row in rows)]) for at in range(len(kept))
        ]
        if len(widths) == len(self._widths):
            # Columns only grow, so that the table does not jump.
            widths = [max(pair) for pair in zip(widths, self._widths, strict=True)]
        if self._changed("shape", (len(rows), widths)):
            self._widths = widths
            table.clear(columns=True)
            for name, space in zip(columns[1:], widths, strict=True):
                table.add_column(name, width=space)
            for row in rows:
                table.add_row(*row)
        else:
            for at, (row, before) in enumerate(zip(rows, self._cells, strict=True)):
                for column, (cell, old) in enumerate(zip(row, before, strict=True)):
                    if cell.plain != old:
                        table.update_cell_at(Coordinate(at, column), cell)
        self._cells = [[cell.plain for cell in row] for row in rows]
        table.move_cursor(row=min(self.board.rank, max(len(rows) - 1, 0)), animate=False)

    def _draw_log(self) -> None:
        long = self.screen.has_class("long")
        name, lines = self.board.log(LOG_LINES if long else max(self.size.height // 3, SHORT_LOG))
        self._update("#name", name or "no rank is shown", name or "no rank is shown")
        if self._changed("log", (name, len(lines), lines[-1:])):
            view = self.query_one("#log", LogView)
            view.clear()
            view.write_lines([escape_controls(line) for line in lines])

    # -- keys

    def check_action(self, action: str, parameters: tuple[object, ...]) -> bool | None:
        """While a filter is typed, its letters are no keys."""
        typing = self.focused is not None and self.focused.id == "filter"
        return not typing or action in ("leave",)

    def action_move(self, step: int) -> None:
        self.board.move(step)
        self._follow_cursor()

    def _follow_cursor(self) -> None:
        self._dismiss()
        self.query_one("#ranks", DataTable).move_cursor(row=self.board.rank, animate=False)
        self._draw_log()

    def on_data_table_row_highlighted(self, event: DataTable.RowHighlighted) -> None:
        """Follow a click into the table."""
        if event.cursor_row != self.board.rank and self._cells:
            self.board.rank = event.cursor_row
            self._draw_log()

    def action_choose(self, step: int) -> None:
        self._dismiss()
        self.board.choose(step)
        self._read = 0.0
        self.tick()

    def action_long_log(self) -> None:
        self.screen.toggle_class("long")
        self._drawn.pop("log", None)
        self._draw_log()

    def action_filter(self) -> None:
        field = self.query_one("#filter", Input)
        field.value = self.board.text
        field.styles.display = "block"
        field.focus()

    def on_input_changed(self, event: Input.Changed) -> None:
        self.board.text, self.board.rank = event.value, 0
        self.tick()

    def on_input_submitted(self) -> None:
        self._end_filter()

    def _end_filter(self) -> None:
        self.query_one("#filter", Input).styles.display = "none"
        self.query_one("#ranks", DataTable).focus()

    def action_leave(self) -> None:
        """Clear a filter, answer no, or quit."""
        if self.focused is not None and self.focused.id == "filter":
            self.query_one("#filter", Input).value = ""
            self._end_filter()
        elif self.asks_stop or self.live.note:
            self._dismiss()
        else:
            self.exit()

    def action_ask_stop(self) -> None:
        self.asks_stop = not self.board.run.phase().is_final
        name = self.board.run.run_id
        self.live.note = f"stop {name}? y/n" if self.asks_stop else f"{name} has ended"
        self.tick()

    def action_confirm(self) -> None:
        if self.asks_stop:
            self.asks_stop = False
            self.live.stop_run()
            self.tick()

    def action_help(self) -> None:
        self.live.note = "" if self.live.note else HELP
        self.tick()

    def _dismiss(self) -> None:
        """Take back a question; any other key is an answer of no."""
        self.asks_stop, self.live.note = False, ""

    def on_key(self, event: Any) -> None:
        """Treat a key without a meaning as a no."""
        if self.asks_stop and event.key not in ("s", "y", "Y"):
            self._dismiss()
