"""Find the rank table of a job (`rank_table: FILE`), and check it against the job's nodes and devices."""

from __future__ import annotations

from pathlib import Path

from clusterctl.document import Section
from clusterctl.errors import did_you_mean

CHOICES = ("auto", "always", "never")


def take_rank_table(top: Section, path: Path) -> str:
    """Return one of the choices, or the path of a table; a relative one is next to the job file."""
    value = top.take_text("rank_table", "auto")
    if value in CHOICES:
        return value
    if not ("/" in value or value.endswith(".json")):
        remedy = did_you_mean(value, CHOICES) or f"one of {', '.join(CHOICES)}, or a file: ./table.json"
        top.fault("rank_table", f"unknown {value!r}", remedy)
        return "auto"
    file = Path(value).expanduser()
    file = file if file.is_absolute() else path.parent / file
    if not file.is_file():
        top.fault("rank_table", f"no file {file}", "a path is relative to the job file; auto builds a table")
        return "auto"
    restart = top.value.get("restart")
    moves = [key for key in ("spare_nodes", "min_nodes") if isinstance(restart, dict) and restart.get(key)]
    if moves:
        problem = f"restart.{moves[0]} changes the nodes, and the table of a file names fixed ones"
        top.fault("rank_table", problem, "rank_table: auto builds one for each attempt")
    return str(file.resolve())


def file_of(choice: str) -> Path | None:
    """Return the file of a job's `rank_table`; None for the other choices."""
    return None if choice in CHOICES else Path(choice)
