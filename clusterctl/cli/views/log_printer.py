"""Print log lines; chunks of plain text are written whole."""

from __future__ import annotations

import sys
from collections.abc import Iterable

from clusterctl.cli import screen
from clusterctl.cli.views.tables import log_prefix, log_text
from clusterctl.logs.fold import Folded, ranks_text
from clusterctl.logs.lines import LogChunk, LogLine
from clusterctl.logs.select import LogFilter, Selection
from clusterctl.logs.times import shown_time
from clusterctl.text import escape_controls

# Bytes that a terminal shows unchanged.
PLAIN = bytes(range(0x20, 0x7F)) + b"\t\n"


class LogPrinter:
    """Writes log lines to stdout: with the prefix `node:rank`, without it, with the time, or as JSON.

    rich takes 150 us per line; here a chunk of plain text takes one replacement and one write.
    """

    def __init__(self, *, prefix: bool = True, as_json: bool = False, times: bool = False) -> None:
        self.prefix, self.as_json, self.times = prefix, as_json, times
        self._selection: Selection | None = None
        self._prefixes: dict[tuple[str, int], str] = {}
        self.coloured = screen.out_console().is_terminal and not screen.out_console().no_color

    def chunk(self, chunk: LogChunk, wanted: LogFilter) -> None:
        """Print the wanted lines of a chunk."""
        if wanted.wants_none(chunk):
            return
        whole = wanted.wants_all(chunk)
        if whole and self._is_plain(chunk):
            self._write_plain(chunk)
        elif whole:
            self.lines(chunk.lines())
        else:
            # It remembers the lines before.
            if self._selection is None or self._selection.wanted != wanted:
                self._selection = Selection(wanted)
            self.lines(self._selection.of(chunk.lines()))

    def lines(self, lines: Iterable[LogLine]) -> None:
        """Print lines without filtering."""
        for line in lines:
            if self.as_json:
                about = {"node": line.node, "rank": line.rank, "stream": line.stream}
                screen.show_json_line({**about, "time": round(line.at, 3) or None, "text": line.text})
            else:
                text = escape_controls(line.text)
                if self.coloured and line.stream == "err" and line.is_error:
                    text = self._drawn(log_text(line))
                sys.stdout.write(f"{self._prefix(line.node, line.rank, line.at)}{text}\n")
        sys.stdout.flush()

    def folded(self, lines: Iterable[Folded]) -> None:
        """Print folded lines with their ranks, and their count if a rank wrote one more than once."""
        for line in lines:
            if self.as_json:
                ranks = {"ranks": sorted(line.ranks), "nodes": sorted(line.nodes)}
                screen.show_json_line({**ranks, "times": line.times, "text": line.text})
                continue
            prefix = f"[{ranks_text(line.ranks)}] " if self.prefix else ""
            times = f"  (x{line.times})" if line.times > len(line.ranks) else ""
            sys.stdout.write(f"{prefix}{escape_controls(line.text)}{times}\n")
        sys.stdout.flush()

    def _is_plain(self, chunk: LogChunk) -> bool:
        """Return whether a chunk needs no escaping, decoding, colouring or shortening."""
        if self.as_json or chunk.data.translate(None, PLAIN) or chunk.may_hold_long_lines():
            return False
        return not (self.coloured and chunk.stream == "err" and chunk.may_hold_errors())

    def _write_plain(self, chunk: LogChunk) -> None:
        text = chunk.data.decode("ascii")
        if prefix := self._prefix(chunk.node, chunk.rank, chunk.at):
            text = prefix + text[:-1].replace("\n", "\n" + prefix) + "\n"
        sys.stdout.write(text)
        sys.stdout.flush()

    def _prefix(self, node: str, rank: int, at: float) -> str:
        time = f"{shown_time(at)} " if self.times else ""
        if not self.prefix:
            return time
        if (node, rank) not in self._prefixes:
            self._prefixes[node, rank] = self._drawn(log_prefix(node, rank))
        return time + self._prefixes[node, rank]

    @staticmethod
    def _drawn(text: object) -> str:
        """Return a renderable as text for stdout, with colours if it supports them."""
        console = screen.out_console()
        with console.capture() as captured:
            console.print(text, end="", soft_wrap=True)
        return captured.get()
