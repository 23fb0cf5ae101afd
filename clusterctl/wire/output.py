"""Standard output that accepts no more, such as one on a full disk."""

from __future__ import annotations

import os
import sys


def output_fault(problem: OSError) -> tuple[str, str] | None:
    """Return what is wrong and a remedy if standard output accepts no more, and drop the rest of it."""
    if problem.filename is not None:
        return None
    try:
        # What could not be written may be lost already.
        sys.stdout.write("\n")
        sys.stdout.flush()
    except OSError as again:
        nowhere = os.open(os.devnull, os.O_WRONLY)
        # The flush at exit must not fail too.
        os.dup2(nowhere, sys.stdout.fileno())
        os.close(nowhere)
        remedy = "free some space where it is written (see `df -h`), or write it to another place"
        return f"cannot write the output: {again.strerror}", remedy
    return None
