"""Show long results in a pager, as git does: only on a terminal, and only what is longer than it.

`$PAGER` names the program (default: less); an empty one, `cat`, `$NO_PAGER` or `--no-pager` turn it off.
"""

from __future__ import annotations

import contextlib
import io
import os
import shlex
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

from typer.core import TyperOption

from clusterctl.environment import environment, inherited

# Commands whose results may be longer than a screen, and that ask nothing.
PAGED = (
    "logs show",
    "runs",
    "compare",
    "ranktable show",
    "ranktable diff",
    "ranktable check",
    "schema",
    "nodes list",
)
# Options of less, as git sets them: exit if everything fits on one screen, keep colours, leave the text on the screen.
LESS = {"LESS": "FRX", "LV": "-c"}


class _ToPager(io.TextIOWrapper):
    """Standard output while a pager shows it: `isatty` still returns True."""

    def isatty(self) -> bool:
        return True


class WithPager:
    """Adds `--no-pager` to a command with long results, and runs it with its output in the pager."""

    key = ""

    def __init__(self, *args: Any, **more: Any) -> None:
        super().__init__(*args, **more)
        if self.key in PAGED:
            option = TyperOption(
                param_decls=["--no-pager"],
                is_flag=True,
                default=False,
                help="Show long results without a pager.",
            )
            self.params = [*self.params, option]  # type: ignore[has-type]

    def invoke(self, ctx: Any) -> Any:
        """Run the command."""
        unpaged = ctx.params.pop("no_pager", True)
        words = [] if unpaged or getattr(ctx, "invoked_subcommand", None) else pager()
        if not words:
            return super().invoke(ctx)  # type: ignore[misc]
        with paged(words):
            return super().invoke(ctx)  # type: ignore[misc]


def pager() -> list[str]:
    """Return the words that start the pager; [] without a terminal, or if there is none."""
    if not (sys.stdin.isatty() and sys.stdout.isatty()):
        return []
    given = inherited(("PAGER", "NO_PAGER", "TERM"))
    if given.get("NO_PAGER") or given.get("TERM") == "dumb":
        return []
    words = shlex.split(given.get("PAGER", "less"))
    return words if words and words != ["cat"] and shutil.which(words[0]) else []


@contextlib.contextmanager
def paged(words: list[str]) -> Iterator[None]:
    """Send standard output to a pager until the end of the block; wait for the pager."""
    variables = environment()
    process = subprocess.Popen(words, stdin=subprocess.PIPE, env={**LESS, **variables})
    assert process.stdin is not None
    before, output = sys.stdout, _ToPager(process.stdin, encoding="utf-8", errors="backslashreplace")
    sys.stdout = output
    try:
        yield
    except BrokenPipeError:
        # The user quit the pager before the end.
        pass
    finally:
        sys.stdout = before
        # The pager handles Ctrl-C.
        handler = signal.signal(signal.SIGINT, signal.SIG_IGN)
        with contextlib.suppress(BrokenPipeError):
            output.close()
        if not output.closed:
            os.close(output.fileno())
        process.wait()
        signal.signal(signal.SIGINT, handler)
