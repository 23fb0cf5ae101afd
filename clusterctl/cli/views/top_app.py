"""The screen of `top` with Textual: the same lines as without it, with a mouse and a log that scrolls."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, ClassVar

from rich.segment import Segment
from textual.app import App, ComposeResult
from textual.binding import Binding
from textual.geometry import Region
from textual.strip import Strip
from textual.widget import Widget
from textual.widgets import Input
from textual.widgets import Log as LogView

from clusterctl.cli import screen
from clusterctl.cli.runs.live_board import FRAME, LiveBoard
from clusterctl.cli.views.live_lines import Line, fitted, style_of
from clusterctl.cli.views.live_screen import (
    COMPACT,
    ScreenLines,
    head_line,
    help_text,
    note_lines,
    runs_lines,
)
from clusterctl.text import escape_controls

if TYPE_CHECKING:
    from textual.events import Click, MouseScrollDown, MouseScrollUp

# Lines of a log that can be scrolled back to, and of the short log.
LOG_LINES, SHORT_LOG = 2000, 8
# Ranks by which one turn of the mouse wheel moves.
WHEEL = 3
# Seconds after a change of the size until everything is drawn once more.
SETTLED = 0.5


class Lines(Widget):
    """Shows lines, and draws again only those that have changed."""

    DEFAULT_CSS = "Lines { height: 1; }"

    def __init__(self, name: str, cut: str) -> None:
        super().__init__(id=name)
        self.lines: list[Line] = []
        self._cut = cut

    def show(self, lines: Sequence[Line]) -> None:
        """Replace the lines."""
        if self.lines == lines:
            return
        before, self.lines = self.lines, list(lines)
        changed = [at for at, line in enumerate(self.lines) if at >= len(before) or before[at] != line]
        if len(before) == len(self.lines) and len(changed) * 2 < len(before):
            self.refresh(*[Region(0, at, self.size.width, 1) for at in changed])
        else:
            self.refresh()

    def show_all(self, lines: Sequence[Line]) -> None:
        """Replace the lines and take as many rows of the screen."""
        if len(lines) != len(self.lines):
            self.styles.height = len(lines)
        self.show(lines)

    def render_line(self, y: int) -> Strip:
        """Return one row of the widget."""
        width = self.size.width
        line = fitted(self.lines[y], width, self._cut) if y < len(self.lines) else ()
        strip = Strip([Segment(text, style_of(style) if style else None) for text, style in line])
        return strip.adjust_cell_length(width)


class RankLines(Lines):
    """The table of the ranks, with a mouse."""

    app: TopApp

    def on_click(self, event: Click) -> None:
        """Choose the rank under the pointer; the first row is the head."""
        if event.y > 0:
            self.app.move_to(self.app.lines.ranks.begin + event.y - 1)

    def on_mouse_scroll_down(self, event: MouseScrollDown) -> None:
        """Move down."""
        self.app.move_to(self.app.board.rank + WHEEL)

    def on_mouse_scroll_up(self, event: MouseScrollUp) -> None:
        """Move up."""
        self.app.move_to(self.app.board.rank - WHEEL)


class TopApp(App[None]):
    """Draws what has changed, at most ten times a second."""

    CSS = """
    Screen { background: transparent; }
    #training { height: 3; margin: 1 0; }
    #ranks { height: 2fr; }
    #name { margin: 1 0 0 0; }
    #log { height: 1fr; min-height: 3; background: transparent; }
    #filter { display: none; height: 1; border: none; padding: 0; }
    .long #ranks { height: 1fr; }
    .long #log { height: 3fr; }
    .low #training, .low #name { margin: 0; }
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
        self.lines = ScreenLines(self.board, unicode=screen.has_unicode(screen.out_console()))
        # What is in the log, so that only changes are drawn.
        self._shown_log: object = None
        self._has_log = False

    def show(self) -> None:
        """Run until a key or a signal ends it; the terminal is then as it was."""
        self.live.start()
        try:
            self.run(mouse=True)
        finally:
            self.live.closed.set()

    def compose(self) -> ComposeResult:
        for name in ("head", "runs", "training"):
            yield Lines(name, self.lines.cut)
        ranks = RankLines("ranks", self.lines.cut)
        ranks.can_focus = True
        yield ranks
        yield Lines("name", self.lines.cut)
        yield LogView(id="log", max_lines=LOG_LINES)
        yield Input(id="filter", placeholder="filter")
        yield Lines("keys", self.lines.cut)

    def on_mount(self) -> None:
        for number in (signal.SIGTERM, signal.SIGHUP):
            asyncio.get_running_loop().add_signal_handler(number, lambda: self.exit())
        self._parts = {part.id: part for part in self.query(Lines)}
        self.query_one("#ranks").focus()
        self.tick()
        self.set_interval(FRAME, self.tick)

    def on_unmount(self) -> None:
        """Clear this screen before it is left: tmux mixes it into the one below if the terminal was resized."""
        if self._driver is not None:
            self._driver.write("\x1b[H\x1b[2J")
            self._driver.flush()

    def on_resize(self) -> None:
        self.call_after_refresh(self.tick)
        # A terminal that was still changing its size may have lost a part of the first frame.
        self.set_timer(SETTLED, lambda: self.refresh(layout=True))

    # -- drawing

    def tick(self) -> None:
        """Read what is due, and draw what has changed."""
        # The files may be read seldom, and the nodes answer after the first time.
        if self.live.read_files() or (not self._has_log and self.board.ranks()):
            self._draw_log()
        width, height = self.size.width or 80, self.size.height or 24
        compact = height < COMPACT
        self.screen.set_class(compact, "low")
        parts = self._parts
        parts["head"].show([((head_line(self.board), "bold"),)])
        listed = 1 if compact else min(len(self.board.rows()), max(1, height // 6))
        parts["runs"].show_all(runs_lines(self.board, listed))
        parts["training"].show(self.lines.training(width))
        ranks = parts["ranks"]
        ranks.show(self.lines.ranks.lines(max(ranks.size.height - 1, 1), width))
        parts["keys"].show_all(note_lines(self.live.note, width))

    def _draw_log(self) -> None:
        long = self.screen.has_class("long")
        name, lines = self.board.log(LOG_LINES if long else max(self.size.height // 3, SHORT_LOG))
        self._parts["name"].show([((name or "no rank is shown", "bold"),)])
        self._has_log = bool(name)
        shown = (name, len(lines), lines[-1:])
        if self._shown_log != shown:
            self._shown_log = shown
            view = self.query_one("#log", LogView)
            view.clear()
            view.write_lines([escape_controls(line) for line in lines])
            # Its height is known after the next layout.
            self.call_after_refresh(view.scroll_end, animate=False)

    # -- keys

    def check_action(self, action: str, parameters: tuple[object, ...]) -> bool | None:
        """While a filter is typed, its letters are no keys."""
        typing = self.focused is not None and self.focused.id == "filter"
        return not typing or action in ("leave",)

    def action_move(self, step: int) -> None:
        self.move_to(self.board.rank + step)

    def move_to(self, position: int) -> None:
        """Choose the rank at a position of the table, and show its log."""
        self._dismiss()
        self.board.move(position - self.board.rank)
        self.tick()
        self._draw_log()

    def action_choose(self, step: int) -> None:
        self._dismiss()
        self.board.choose(step)
        self.tick()
        self._draw_log()

    def action_long_log(self) -> None:
        self.screen.toggle_class("long")
        self._shown_log = None
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
        self.query_one("#ranks").focus()

    def action_leave(self) -> None:
        """Answer no, shorten a long log, clear a filter, or quit: the first of these that there is."""
        if self.focused is not None and self.focused.id == "filter":
            self.query_one("#filter", Input).value = ""
            self._end_filter()
        elif self.asks_stop or self.live.note:
            self._dismiss()
        elif self.screen.has_class("long"):
            self.action_long_log()
        elif self.board.text:
            self.board.text, self.board.rank = "", 0
            self.tick()
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
        self.live.note = "" if self.live.note else help_text(self.size.width)
        self.tick()

    def _dismiss(self) -> None:
        """Take back a question; any other key is an answer of no."""
        self.asks_stop, self.live.note = False, ""

    def on_key(self, event: Any) -> None:
        """Treat a key without a meaning as a no."""
        if self.asks_stop and event.key not in ("s", "y", "Y"):
            self._dismiss()
