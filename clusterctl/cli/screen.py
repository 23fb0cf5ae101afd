"""Write results to stdout, and messages, progress and errors to stderr."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from functools import lru_cache
from typing import TYPE_CHECKING, Any

from clusterctl.errors import Fault, InputFaults

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rich.console import Console, RenderableType
    from rich.text import Text

    from clusterctl.errors import ClusterctlError

# The variable that makes rich use colours without a terminal.
FORCED = "FORCE_COLOR"
# Without a terminal lines are not wrapped.
PIPE_WIDTH = 500


@lru_cache(maxsize=1)
def out_console() -> Console:
    """Return the console for results."""
    from rich.console import Console

    return Console(width=None if sys.stdout.isatty() else PIPE_WIDTH, highlight=False, soft_wrap=False)


@lru_cache(maxsize=1)
def error_console() -> Console:
    """Return the console for messages and progress."""
    from rich.console import Console

    return Console(stderr=True, highlight=False, soft_wrap=True)


def has_unicode(console: Console) -> bool:
    """Return whether block characters can be written to a console."""
    return console.encoding.lower().startswith("utf")


def safe(text: str) -> Text:
    """Return untrusted text for the console, with control characters escaped and without markup."""
    from rich.text import Text

    return Text(_escaped(text))


def _escaped(text: str) -> str:
    from clusterctl.text import escape_controls

    return "\n".join(escape_controls(line) for line in text.split("\n"))


def show(*renderables: RenderableType) -> None:
    """Write a result for people to stdout."""
    console = out_console()
    if console.is_terminal:
        console.print(*renderables, sep="\n")
        return
    with console.capture() as captured:
        console.print(*renderables, sep="\n")
    write("".join(line.rstrip() + "\n" for line in captured.get().splitlines()))


def _json_text(value: Any, indent: int | None = None) -> str:
    from clusterctl.text import escape_in_json

    return escape_in_json(json.dumps(value, indent=indent, ensure_ascii=False))


def show_json(value: Any) -> None:
    """Write a result as one JSON document to stdout."""
    sys.stdout.write(_json_text(value, indent=2) + "\n")
    sys.stdout.flush()


def show_json_line(value: Any) -> None:
    """Write one element of a stream as a line of JSON to stdout."""
    sys.stdout.write(_json_text(value) + "\n")
    sys.stdout.flush()


def write(text: str) -> None:
    """Write text such as a hostfile to stdout unchanged."""
    sys.stdout.write(text)
    sys.stdout.flush()


def log(text: str, style: str = "") -> None:
    """Write a message to stderr."""
    from clusterctl.environment import environment

    if sys.stderr.isatty() or FORCED in environment():
        error_console().print(safe(text), style=style)
        return
    # rich would take 2 MB, which a controller then keeps.
    sys.stderr.write(_escaped(text).expandtabs() + "\n")
    sys.stderr.flush()


def on_terminal() -> bool:
    """Return whether a person is at the terminal: only then is anything animated or asked."""
    return sys.stdin.isatty() and sys.stderr.isatty() and not error_console().is_dumb_terminal


def ask_secret(prompt: str) -> str | None:
    """Read a secret without echo; return None without a terminal.

    The echo is restored even if the program ends meanwhile: the caller may be another thread than the main one.
    """
    if not on_terminal():
        return None
    import atexit
    import getpass
    import termios

    number = sys.stdin.fileno()
    before = termios.tcgetattr(number)
    atexit.register(termios.tcsetattr, number, termios.TCSAFLUSH, before)
    try:
        return getpass.getpass(safe(prompt).plain, stream=sys.stderr)
    except (EOFError, KeyboardInterrupt):
        return None
    finally:
        atexit.unregister(termios.tcsetattr)


def ask(question: str, *, yes: bool = False) -> bool:
    """Ask a yes-or-no question; return True for yes or if `yes` is set, and False without a terminal."""
    if yes:
        return True
    if not on_terminal():
        return False
    error_console().print(safe(question + " [y/N] "), end="")
    return sys.stdin.readline().strip().lower() in ("y", "yes")


def log_block(drawn: RenderableType) -> None:
    """Write a table or another block to stderr; without a terminal its lines are not wrapped."""
    console = error_console()
    if console.is_terminal:
        console.print(drawn, soft_wrap=False)
        return
    with console.capture() as captured:
        console.print(drawn, soft_wrap=False, width=PIPE_WIDTH)
    sys.stderr.write("".join(line.rstrip() + "\n" for line in captured.get().splitlines()))
    sys.stderr.flush()


# Commands that read the inventory; their hints name the file of the command line.
_READERS = r"clusterctl (?=(?:doctor|nodes|exec|push|pull|ranktable|launch|plan|ssh|hostfile build)\b)"
_inventory: list[str] = []


def hints_with(file: object | None) -> None:
    """Let hints name an inventory that is not the default, so that they can be pasted; None: the default."""
    _inventory[:] = [] if file is None else [str(file)]


def pasteable(hint: str) -> str:
    """Return a hint whose commands name the inventory of this command line."""
    import re
    import shlex

    if not _inventory or " -c " in hint:
        return hint
    return re.sub(_READERS, lambda _: f"clusterctl -c {shlex.quote(_inventory[0])} ", hint)


# Limit of errors of one input that are shown: a table of 10,000 servers can have 80,000, which take half a minute to
# print.
MOST_FAULTS = 50
# Limit of places with the same error that are shown one by one.
FEW_PLACES = 3


def _folded(faults: Sequence[Fault]) -> list[Fault]:
    """Return the errors; one that more than FEW_PLACES places have becomes one error that names the first of them."""
    groups: dict[tuple[str, str], list[Fault]] = {}
    for fault in faults:
        groups.setdefault((fault.what, fault.remedy), []).append(fault)
    found = list[Fault]()
    for same in groups.values():
        if len(same) <= FEW_PLACES:
            found += same
            continue
        also = ", ".join(fault.where for fault in same[1:FEW_PLACES])
        more = f"(also {also} and {len(same) - FEW_PLACES:,} more places)"
        found.append(replace(same[0], what=f"{same[0].what} {more}"))
    return found


def report_error(error: ClusterctlError, given: set[str] | None = None) -> None:
    """Write an error with its hints to stderr; hints that were `given` before are left out, and new ones added."""
    console = error_console()
    if isinstance(error, InputFaults):
        shown = _folded(error.faults)
        for fault in shown[:MOST_FAULTS]:
            console.print(safe(f"error: {fault.line}"), style="bold red", highlight=False)
            for line in fault.remedy.splitlines():
                console.print(safe(f"  try: {pasteable(line)}"), highlight=False)
        if len(shown) > MOST_FAULTS:
            console.print(f"error: and {len(shown) - MOST_FAULTS:,} more", style="bold red", highlight=False)
    else:
        console.print(safe(f"error: {error.message}"), style="bold red", highlight=False)
    for line in error.hint.splitlines():
        if given is not None:
            if line in given:
                continue
            given.add(line)
        console.print(safe(f"  try: {pasteable(line)}"), highlight=False)
