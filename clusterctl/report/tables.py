"""Tables and texts of an HTML page; every value is escaped here."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape

from clusterctl.text import escape_controls


def safe(text: object) -> str:
    """Return text for HTML, with control and invisible characters written out."""
    return escape(escape_controls(str(text)), quote=True)


def table(names: Sequence[str], rows: Sequence[Sequence[object]], right: Sequence[str] = ()) -> str:
    """Return a table; "" without rows."""
    if not rows:
        return ""
    numeric = [' class="n"' if name in right else "" for name in names]
    head = "".join(f"<th{kind}>{safe(name)}</th>" for name, kind in zip(names, numeric, strict=True))
    body = "".join(
        "<tr>"
        + "".join(f"<td{kind}>{safe(value)}</td>" for value, kind in zip(row, numeric, strict=True))
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
    body = "".join(f"<tr><th>{safe(name)}</th><td>{safe(value)}</td></tr>" for name, value in rows)
    return f'<div class="scroll"><table><tbody>{body}</tbody></table></div>'


def pre(text: str) -> str:
    """Return text with its line breaks."""
    return "<pre>" + "\n".join(safe(line) for line in text.split("\n")) + "</pre>"


def details(title: str, body: str, kind: str = "") -> str:
    """Return a part that is folded until a reader opens it; `kind` is its CSS class."""
    marked = f' class="{kind}"' if kind else ""
    return f"<details{marked}><summary>{safe(title)}</summary>{body}</details>"
