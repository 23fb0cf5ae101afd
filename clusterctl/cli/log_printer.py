"""Log lines on the screen: whole chunks at once where nothing in them has to be looked at."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from typing import TYPE_CHECKING

from clusterctl.cli import screen
from clusterctl.cli.views import log_prefix, log_text
from clusterctl.logs.fold import ranks_text
from clusterctl.text import escape_controls

if TYPE_CHECKING:
    from clusterctl.logs.fold import Folded
    from clusterctl.logs.lines import LogChunk, LogLine
    from clusterctl.logs.store import LogFilter

# What a terminal shows as it stands.
PLAIN = bytes(range(0x20, 0x7F)) + b"\t\n"


class LogPrinter:
    """Writes lines to stdout as they are asked for: with `node:rank` in front, bare, or as JSON.

    rich takes 150 us a line; here a chunk of plain text is one replacement and one write.
    """

    def __init__(self, prefix: bool = True, as_json: bool = False) -> None:
        self.prefix, self.as_json = prefix, as_json
        self._prefixes: dict[tuple[str, int], str] = {}
        self.coloured = screen.out_console().is_terminal and not screen.out_console().no_color

    def chunk(self, chunk: LogChunk, wanted: LogFilter) -> None:
        """The lines of a chunk that are wanted."""
        if wanted.wants_none(chunk):
            return
        whole = wanted.wants_all(chunk)
        if whole and self._is_plain(chunk):
            self._write_plain(chunk)
        else:
            self.lines(line for line in chunk.lines() if whole or wanted.wants(line))

    def lines(self, lines: Iterable[LogLine]) -> None:
        """Lines that were chosen already."""
        for line in lines:
            if self.as_json:
                about = {"node": line.node, "rank": line.rank, "stream": line.stream, "text": line.text}
                screen.show_json_line(about)
            else:
                text = escape_controls(line.text)
                if self.coloured and line.stream == "err" and line.is_error:
                    text = self._drawn(log_text(line))
                sys.stdout.write(f"{self._prefix(line.node, line.rank)}{text}\n")
        sys.stdout.flush()

    def folded(self, lines: Iterable[Folded]) -> None:
        """Lines that were folded: the ranks that said each, and how often where that was more than once each."""
        for one in lines:
            if self.as_json:
                about = {"ranks": sorted(one.ranks), "nodes": sorted(one.nodes)}
                screen.show_json_line({**about, "times": one.times, "text": one.text})
                continue
            prefix = f"[{ranks_text(one.ranks)}] " if self.prefix else ""
            again = f"  (x{one.times})" if one.times > len(one.ranks) else ""
            sys.stdout.write(f"{prefix}{escape_controls(one.text)}{again}\n")
        sys.stdout.flush()

    def _is_plain(self, chunk: LogChunk) -> bool:
        """Nothing in it to escape, to decode or to colour, and no line too long to show."""
        if self.as_json or chunk.data.translate(None, PLAIN) or chunk.may_hold_long_lines():
            return False
        return not (self.coloured and chunk.stream == "err" and chunk.may_hold_errors())

    def _write_plain(self, chunk: LogChunk) -> None:
        text = chunk.data.decode("ascii")
        if prefix := self._prefix(chunk.node, chunk.rank):
            text = prefix + text[:-1].replace("\n", "\n" + prefix) + "\n"
        sys.stdout.write(text)
        sys.stdout.flush()

    def _prefix(self, node: str, rank: int) -> str:
        if not self.prefix:
            return ""
        if (node, rank) not in self._prefixes:
            self._prefixes[node, rank] = self._drawn(log_prefix(node, rank))
        return self._prefixes[node, rank]

    @staticmethod
    def _drawn(text: object) -> str:
        """A renderable as this stdout takes it, with colours or without."""
        console = screen.out_console()
        with console.capture() as captured:
            console.print(text, end="", soft_wrap=True)
        return captured.get()
