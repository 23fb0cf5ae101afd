"""`top`: a live screen of runs and ranks."""

from __future__ import annotations

import importlib.util
import os
import select
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from clusterctl.cli import options, screen
from clusterctl.cli.declared import argument, flag
from clusterctl.cli.runs.live_board import FRAME, LiveBoard
from clusterctl.errors import UsageError

if TYPE_CHECKING:
    from clusterctl.report.board import Board

ARROWS = {"\x1b[A": "k", "\x1b[B": "j", "\x1b[C": "n", "\x1b[D": "p", "\x1b[H": "g", "\x1b[F": "G"}


def top(
    run: str = argument(
        "The run to begin with.", default="last", metavar="RUN", autocompletion=options.complete_runs
    ),
    *,
    once: bool = flag("Print one screen and end."),
    plain: bool = flag("Use the simple screen even if Textual is installed."),
) -> None:
    """Watch runs and ranks on a live screen: phase, step, loss, speed, stragglers, and the log of a rank. Press ? there
    for the keys. Without a terminal one screen is printed."""
    from clusterctl.jobs.run_folder import all_runs
    from clusterctl.report.board import Board

    found = options.run_named(run)
    runs = all_runs(options.runs_folder())
    if found not in runs:
        runs.insert(0, found)
    board = Board(runs, runs.index(found))
    if once or not (sys.stdin.isatty() and sys.stdout.isatty()) or screen.out_console().is_dumb_terminal:
        print_once(board)
    elif plain or importlib.util.find_spec("textual") is None:
        LiveScreen(board).run()
    else:
        from clusterctl.cli.views.top_app import TopApp

        TopApp(LiveBoard(board)).show()


def print_once(board: Board) -> None:
    """Print one screen."""
    from clusterctl.cli.views.live_screen import screenful

    console = screen.out_console()
    board.refresh()
    width = min(console.width, 120)
    screen.show(screenful(board, width, 50, unicode=screen.has_unicode(console)))


class LiveScreen:
    """Redraws the board and handles keys; restores the terminal at the end."""

    def __init__(self, board: Board) -> None:
        self.board, self.live = board, LiveBoard(board)
        self.typing, self.asks_stop, self.long_log = False, False, False
        self.closed = self.live.closed

    @property
    def note(self) -> str:
        """Return the line at the bottom."""
        return self.live.note

    @note.setter
    def note(self, text: str) -> None:
        self.live.note = text

    def run(self) -> None:
        """Show the screen until a key ends it."""
        from clusterctl.cli.views.live_lines import LineWriter
        from clusterctl.cli.views.live_screen import ScreenLines

        self.live.start()
        console = screen.out_console()
        lines, writer = ScreenLines(self.board, unicode=screen.has_unicode(console)), LineWriter(console)
        with _single_keys(), console.screen(hide_cursor=True):
            try:
                while not self.closed.is_set():
                    self.live.read_files()
                    width, height = console.size
                    note = f"filter: {self.board.text}_" if self.typing else self.note
                    writer.draw(lines.all_lines(width, height, note, long_log=self.long_log), width, height)
                    key = _next_key(FRAME)
                    if key:
                        self.press(key)
            finally:
                self.closed.set()
                # tmux mixes this screen into the one below if the terminal was resized.
                console.clear()

    def press(self, key: str) -> None:
        """Act on a key."""
        if self.typing:
            self._type(key)
        elif self.asks_stop:
            self.asks_stop = False
            self.note = ""
            if key in ("y", "Y"):
                self.live.stop_run()
        elif key in ("q", "\x1b", "\x03", "\x04"):
            self.closed.set()
        elif key in ("j", "k"):
            self.board.move(1 if key == "j" else -1)
        elif key in ("g", "G"):
            self.board.move(-(10**9) if key == "g" else 10**9)
        elif key in ("n", "p"):
            self.board.choose(1 if key == "n" else -1)
            self.board.refresh()
        elif key == "l":
            self.long_log = not self.long_log
        elif key == "/":
            self.typing = True
        elif key == "s":
            self.asks_stop = not self.board.run.phase().is_final
            question = f"stop {self.board.run.run_id}? y/n"
            self.note = question if self.asks_stop else f"{self.board.run.run_id} has ended"
        elif key == "?":
            from clusterctl.cli.views.live_screen import help_text

            self.note = "" if self.note else help_text(screen.out_console().width)
        else:
            self.note = ""

    def _type(self, key: str) -> None:
        if key in ("\r", "\n"):
            self.typing = False
        elif key == "\x1b":
            self.typing, self.board.text = False, ""
        elif key in ("\x7f", "\b"):
            self.board.text = self.board.text[:-1]
        elif key.isprintable():
            self.board.text += key
        self.board.rank = 0


@contextmanager
def _single_keys() -> Iterator[None]:
    """Let the terminal pass on each key immediately and without echo; restore it at the end."""
    import termios
    import tty

    number = sys.stdin.fileno()
    try:
        before = termios.tcgetattr(number)
    except termios.error:
        raise UsageError("this terminal cannot be switched to single keys", "clusterctl top --once") from None
    try:
        tty.setcbreak(number)
        yield
    finally:
        termios.tcsetattr(number, termios.TCSAFLUSH, before)


def _next_key(seconds: float) -> str:
    """Return the next key within some seconds, "" if none was pressed; an arrow counts as its letter."""
    number = sys.stdin.fileno()
    if not select.select([number], [], [], seconds)[0]:
        return ""
    pressed = os.read(number, 16).decode("utf-8", "replace")
    # The terminal is gone.
    return ARROWS.get(pressed, pressed[:1]) if pressed else "q"
