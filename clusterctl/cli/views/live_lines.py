"""Lines of the live screen as plain strings with styles: cheap to compose, to compare and to write."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import TYPE_CHECKING

from rich.cells import cell_len, set_cell_size
from rich.console import COLOR_SYSTEMS
from rich.style import Style

if TYPE_CHECKING:
    from rich.console import Console

# A part of a line: its text and its style, "" for none.
Span = tuple[str, str]
Line = tuple[Span, ...]

CUT, PLAIN_CUT = "\u2026", "~"
# A pause between two columns.
GAP = "  "


def width_of(text: str) -> int:
    """Return how many cells of a terminal a text takes."""
    return len(text) if text.isascii() else cell_len(text)


def fitted(line: Line, width: int, cut: str = CUT) -> Line:
    """Return the line with at most `width` cells; `cut` stands where a text ends early."""
    spans, room = list[Span](), width
    for text, style in line:
        size = width_of(text)
        if size > room:
            spans.append((set_cell_size(text, max(room - 1, 0)) + cut[: max(room, 0)], style))
            break
        spans.append((text, style))
        room -= size
    return tuple(spans)


def filled(line: Line, width: int, style: str) -> Line:
    """Return the line in one more style over its whole width, as a cursor shows it."""
    text = "".join(text for text, _ in line)
    spans = ((part, f"{own} {style}".strip()) for part, own in line)
    return (*spans, (" " * max(width - width_of(text), 0), style))


def columns(cells: Sequence[Span], widths: Sequence[int], right: Sequence[bool]) -> Line:
    """Return cells side by side; neighbours without a style become one part."""
    spans, plain = list[Span](), ""
    for at, ((text, style), width, to_right) in enumerate(zip(cells, widths, right, strict=True)):
        space = " " * (width - width_of(text))
        plain += (GAP if at else "") + (space if to_right else "")
        if style:
            spans += [(plain, ""), (text, style)]
            plain = ""
        else:
            plain += text
        plain += "" if to_right else space
    return (*spans, (plain.rstrip(), ""))


@lru_cache(maxsize=256)
def style_of(name: str, colour: bool = True) -> Style:
    """Return the style of a name, without its colours if they are not wanted."""
    style = Style.parse(name)
    return style if colour else style.without_color


class LineWriter:
    """Writes a screen to a terminal: the lines that have changed, with one write."""

    def __init__(self, console: Console) -> None:
        self.console = console
        self._drawn: list[Line] = []
        self._size = (0, 0)

    def draw(self, lines: Sequence[Line], width: int, height: int) -> None:
        """Show the lines; after a change of the size, all of them."""
        output = ""
        if (width, height) != self._size:
            self._size, self._drawn = (width, height), []
            output = "\x1b[2J"
        shown = list(lines[:height])
        for at in range(max(len(shown), len(self._drawn))):
            line = shown[at] if at < len(shown) else ()
            if at >= len(self._drawn) or self._drawn[at] != line:
                output += f"\x1b[{at + 1};1H{self._coded(line)}\x1b[K"
        self._drawn = shown
        if output:
            self.console.file.write(output)
            self.console.file.flush()

    def _coded(self, line: Line) -> str:
        """Return a line with the terminal's codes for its styles."""
        system = COLOR_SYSTEMS.get(self.console.color_system or "")
        colour = not self.console.no_color
        return "".join(style_of(style, colour).render(text, color_system=system) for text, style in line)
