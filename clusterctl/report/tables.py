"""Tables and texts of an HTML page; every value is escaped here."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape

from clusterctl.text import escape_controls


def _cell(value: object) -> str:
    return escape(escape_controls(str(value)), quote=True)


def table(names: Sequence[str], rows: Sequence[Sequence[object]], right: Sequence[str] = ()) -> str:
    """Return a table; "" without rows."""
    if not rows:
        return ""
    numeric = [' class="n"' if name in right else "" for name in names]
    head = "".join(f"<th{kind}>{_cell(name)}</th>" for name, kind in zip(names, numeric, strict=True))
    body = "".join(
        "<tr>"
        + "".join(f"<td{kind}>{_cell(value)}</td>" for value, kind in zip(row, numeric, strict=True))
        + "</tr>"
        for row in rows
    )
    return f'<div class="scroll"><table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>'


def newest(
    names: Sequence[str], rows: Sequence[Sequence[object]], right: Sequence[str] = (), most: int = 12
) -> str:
    """Return a table of the last `most` rows, with the rows before them folded; "" without rows."""
    earlier, shown = rows[:-most], rows[-most:]
    folded = details(f"{len(earlier):,} earlier", table(names, earlier, right), "earlier") if earlier else ""
    return folded + table(names, shown, right)


def facts(rows: Iterable[tuple[str, str]]) -> str:
    """Return a table of names and values without a head."""
    body = "".join(f"<tr><th>{_cell(name)}</th><td>{_cell(value)}</td></tr>" for name, value in rows)
    return f'<div class="scroll"><table><tbody>{body}</tbody></table></div>'


def pre(text: str) -> str:
    """Return text with its line breaks."""
    return "<pre>" + "\n".join(_cell(line) for line in text.split("\n")) + "</pre>"


def details(title: str, body: str, kind: str = "") -> str:
    """Return a part that is folded until a reader opens it; `kind` is its CSS class."""
    marked = f' class="{kind}"' if kind else ""
    return f"<details{marked}><summary>{_cell(title)}</summary>{body}</details>"
