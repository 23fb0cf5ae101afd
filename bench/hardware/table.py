"""Show the results as tables, with the shares of the device's ceilings."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

Row = Mapping[str, object]


def tables(rows: Sequence[Row]) -> str:
    """Return Markdown tables, one for each title, in the order of their first rows; how the steps ended comes first."""
    facts = {str(row["fact"]): row.get("value") for row in rows if row["table"] == "facts"}
    titles = sorted(dict.fromkeys(str(row["table"]) for row in rows), key=lambda title: title != "steps")
    return "\n\n".join(
        "\n".join([f"## {title}", "", *table([shares(row, facts) for row in rows if row["table"] == title])])
        for title in titles
    )


def table(rows: Sequence[Row]) -> list[str]:
    """Return the lines of one table; its columns are the keys of its rows."""
    keys = list(dict.fromkeys(key for row in rows for key in row if key != "table"))
    if len(rows) > 1 and len({row.get("step") for row in rows}) == 1:
        keys = [key for key in keys if key != "step"]
    # A column without a value on this device says nothing.
    keys = [key for key in keys if any(row.get(key) not in (None, "") for row in rows)]
    lines = [keys, *([text(row.get(key)) for key in keys] for row in rows)]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    drawn = [
        "| " + " | ".join(cell.ljust(w) for cell, w in zip(line, widths, strict=True)) + " |"
        for line in lines
    ]
    return [drawn[0], "|" + "|".join("-" * (width + 2) for width in widths) + "|", *drawn[1:]]


def text(value: object) -> str:
    """Return a value as a cell: at most four digits of a number."""
    if isinstance(value, bool):
        return "yes" if value else "NO"
    if isinstance(value, float):
        return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"
    return "" if value is None else str(value).replace("|", "/")


def shares(row: Row, facts: Mapping[str, object]) -> Row:
    """Return the row with its rates as shares of the device's ceilings."""
    found = dict(row)
    tflops, moved = found.get("TFLOP/s"), found.pop("GB moved", None)
    for name, fact in (("of GEMM", "GEMM bf16, TFLOP/s"), ("MFU", "peak bf16, TFLOP/s")):
        ceiling = facts.get(fact)
        if isinstance(tflops, float) and isinstance(ceiling, float) and ceiling:
            found[name] = f"{tflops / ceiling:.0%}"
    ms, copied = found.get("ms a token"), facts.get("copy, GB/s")
    if isinstance(moved, float) and isinstance(ms, float) and isinstance(copied, float):
        found["of memory roofline"] = f"{moved / copied / (ms / 1e3):.1%}"
    return found
