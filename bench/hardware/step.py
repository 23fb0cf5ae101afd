"""Shared by the steps: rows on stdout, and parts of a step that fail alone."""

from __future__ import annotations

import contextlib
import json
import sys
import traceback
from collections.abc import Iterator


def emit(table: str, **row: object) -> None:
    """Print a row of a table; its keys are the columns."""
    cells = {key: round(value, 6) if isinstance(value, float) else value for key, value in row.items()}
    print(json.dumps({"table": table, **cells}), flush=True)


@contextlib.contextmanager
def part(table: str, **row: object) -> Iterator[None]:
    """Turn an error into a row with its message, and its traceback into the log; the step continues."""
    try:
        yield
    # A kernel that does not compile raises an error of its own kind; the next one may work.
    except Exception as error:
        report(table, error, **row)


def report(table: str, error: Exception, **row: object) -> None:
    """Print a row for a part that failed, and the traceback."""
    traceback.print_exception(error, file=sys.stderr)
    first = (str(error).strip() or "no message").splitlines()[0]
    emit(table, **row, failed=f"{type(error).__name__}: {first[:160]}")
