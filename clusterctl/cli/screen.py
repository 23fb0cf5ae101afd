"""What a command says: results on stdout, the rest on stderr."""

from __future__ import annotations

import json
import sys
from functools import lru_cache
from typing import TYPE_CHECKING, Any

from clusterctl.errors import InputFaults

if TYPE_CHECKING:
    from rich.console import Console, RenderableType
    from rich.text import Text

    from clusterctl.errors import ClusterctlError

# Off a terminal nothing is folded; tables stay whole.
PIPE_WIDTH = 500


@lru_cache(maxsize=1)
def out_console() -> Console:
    """The console of results."""
    from rich.console import Console

    return Console(width=None if sys.stdout.isatty() else PIPE_WIDTH, highlight=False, soft_wrap=False)


@lru_cache(maxsize=1)
def error_console() -> Console:
    """The console of messages and progress."""
    from rich.console import Console

    return Console(stderr=True, highlight=False, soft_wrap=True)


def safe(text: str) -> Text:
    """Text from anywhere, with nothing in it taken as markup or as control."""
    from rich.text import Text

    from clusterctl.text import escape_controls

    return Text("\n".join(escape_controls(line) for line in text.split("\n")))


def show(*renderables: RenderableType) -> None:
    """A result for a person."""
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
    """A result for a program: one document."""
    sys.stdout.write(_json_text(value, indent=2) + "\n")
    sys.stdout.flush()


def show_json_line(value: Any) -> None:
    """One element of a stream for a program."""
    sys.stdout.write(_json_text(value) + "\n")
    sys.stdout.flush()


def write(text: str) -> None:
    """A result that is a text as it stands, such as a hostfile."""
    sys.stdout.write(text)
    sys.stdout.flush()


def log(text: str, style: str = "") -> None:
    """Write a message to stderr."""
    error_console().print(safe(text), style=style)


def on_terminal() -> bool:
    """Whether a person watches: only then is anything animated or asked."""
    return sys.stdin.isatty() and sys.stderr.isatty() and not error_console().is_dumb_terminal


def ask_secret(prompt: str) -> str | None:
    """Something typed that is not shown; None without a terminal. The terminal shows again what is typed also
    where the program ends in the middle: another thread than the main one may be asking."""
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


def ask(question: str, yes: bool = False) -> bool:
    """A yes or no; without a terminal nothing is asked and the answer is no, unless `--yes` said it."""
    if yes:
        return True
    if not on_terminal():
        return False
    error_console().print(safe(question + " [y/N] "), end="")
    return sys.stdin.readline().strip().lower() in ("y", "yes")


def report_error(error: ClusterctlError) -> None:
    """Write an error to stderr: what and where, then what to try."""
    console = error_console()
    if isinstance(error, InputFaults):
        for fault in error.faults:
            console.print(safe(f"error: {fault.where}: {fault.what}"), style="bold red", highlight=False)
            if fault.remedy:
                console.print(safe(f"  try: {fault.remedy}"), highlight=False)
    else:
        console.print(safe(f"error: {error.message}"), style="bold red", highlight=False)
    for line in error.hint.splitlines():
        console.print(safe(f"  try: {line}"), highlight=False)
