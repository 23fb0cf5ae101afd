"""Shared by all measurements: options, commands and what they take, turns, medians, tables, sandbox nodes, waiting."""

from __future__ import annotations

import argparse
import contextlib
import os
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

if TYPE_CHECKING:
    from clusterctl.sandbox.cluster import Sandbox

# The checkout that is measured.
ROOT = Path(__file__).resolve().parents[1]
Answer = TypeVar("Answer")
Number = TypeVar("Number", int, float)


@contextlib.contextmanager
def scratch(prefix: str, parent: Path | None = None) -> Iterator[Path]:
    """Yield a new folder, which is removed when the block ends."""
    with tempfile.TemporaryDirectory(prefix=f"{prefix}-", dir=parent, ignore_cleanup_errors=True) as name:
        yield Path(name)


@contextlib.contextmanager
def sandbox(
    prefix: str, nodes: int, devices: int = 1, *, mode: str = "auto", with_queue: bool = False
) -> Iterator[tuple[Sandbox, Path]]:
    """Yield running nodes and a folder that contains theirs; both are removed when the block ends."""
    # Import it only here, because measured programs import this module too.
    from clusterctl.sandbox import cluster

    with scratch(prefix) as folder:
        made = cluster.up(folder / "nodes", nodes=nodes, devices=devices, mode=mode, with_queue=with_queue)
        try:
            yield made, folder
        finally:
            made.down()


def user_environment(*without: str, **own: str) -> dict[str, str]:
    """Return this process's environment without the launcher's variables, for the launcher of this checkout.

    Variables that begin with one of `without` are removed too; `own` are added. Modules are compiled once, as in an
    installed program.
    """
    left_out = ("CLUSTERCTL_", "PYTHONDONTWRITEBYTECODE", *without)
    inherited = {name: value for name, value in os.environ.items() if not name.startswith(left_out)}
    return {**inherited, "PYTHONPATH": str(ROOT), **own}


def take_signals() -> None:
    """Let programs that are started from here receive a terminal's signals even if our caller ignores them.

    `command &` in a script ignores SIGINT and SIGQUIT, `nohup` ignores SIGHUP, and every child inherits that.
    """
    for number in (signal.SIGINT, signal.SIGQUIT, signal.SIGHUP):
        if signal.getsignal(number) is signal.SIG_IGN:
            default = number == signal.SIGINT
            signal.signal(number, signal.default_int_handler if default else lambda number, frame: None)


def wait_for(truth: Callable[[], Answer], seconds: float, pause: float = 0.01) -> Answer:
    """Return the first true value of `truth()` within `seconds`, else its last false value."""
    deadline = time.monotonic() + seconds
    while not (answer := truth()) and time.monotonic() < deadline:
        time.sleep(pause)
    return answer


def free_port() -> int:
    """Return a port that nothing listens on."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


# -- options


def within(kind: type[Number], least: float, most: float) -> Callable[[str], Number]:
    """Return the reader of an option: a number of this kind, from `least` to `most`."""

    def read(text: str) -> Number:
        value = kind(text)
        if not least <= value <= most:
            raise argparse.ArgumentTypeError(f"{text} is not from {least:g} to {most:g}")
        return value

    read.__name__ = kind.__name__
    return read


class Option(NamedTuple):
    """An option with a help: its default, or the type of an option without one."""

    default: Any
    help: str = ""
    choices: Sequence[str] | None = None


def read_options(doc: str | None, **declared: Any) -> argparse.Namespace:
    """Read the options of the command line: each keyword is a name with its default, or with an Option.

    A flag has the default False, and a list a tuple. A type stands for an option that is None by default. Numbers must
    be positive where their default is.
    """
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, given in declared.items():
        default, text, choices = given if isinstance(given, Option) else Option(given)
        flag = f"--{name.replace('_', '-')}"
        if default is False:
            parser.add_argument(flag, action="store_true", help=text)
            continue
        some = default[0] if isinstance(default, tuple) and default else default
        kind = some if isinstance(some, type) else str if some == () else type(some)
        default = None if default is kind else default
        shown = text + (f"; {default}" if text and default not in (None, "", ()) else f"{default or ''}")
        if kind in (int, float) and (some is kind or some > 0):
            kind = within(kind, 1 if kind is int else 1e-9, 1e12)
        several = "+" if isinstance(default, tuple) else None
        parser.add_argument(flag, type=kind, default=default, nargs=several, choices=choices, help=shown)
    return parser.parse_args()


# -- measuring


class Used(NamedTuple):
    """What a command took: seconds by the clock, and of processors with its children; and what it wrote."""

    wall: float
    cpu: float
    output: str


def run(
    argv: Sequence[str],
    input: str | None = None,
    timeout: float | None = None,
    *,
    started: Callable[[int], object] = lambda pid: None,
    **more: Any,
) -> Used:
    """Run a command that must succeed; `started` gets its pid, and `more` goes to `subprocess.Popen`."""
    before, began, pipe = os.times(), time.perf_counter(), subprocess.PIPE
    given = subprocess.DEVNULL if input is None else pipe
    pipes = {"stdin": given, "stdout": pipe, "stderr": pipe, "text": True}
    with subprocess.Popen(argv, **{**pipes, **more}) as process:
        started(process.pid)
        try:
            out, err = process.communicate(input, timeout)
        except BaseException:
            process.kill()
            raise
    wall, after = time.perf_counter() - began, os.times()
    if process.returncode:
        raise SystemExit(f"{' '.join(argv[:8])} ended with {process.returncode}: {(err or '')[-2000:]}")
    cpu = after.children_user + after.children_system - before.children_user - before.children_system
    return Used(wall, cpu, out or "")


def timed(work: Callable[[], object], clock: Callable[[], float] = time.perf_counter) -> float:
    """Return the seconds of a call."""
    began = clock()
    work()
    return clock() - began


def in_turn(ways: Mapping[str, Callable[[], Answer]], rounds: int, warm: int = 0) -> dict[str, list[Answer]]:
    """Call each way once in every round, so that a slow minute affects all; `warm` rounds before do not count."""
    found: dict[str, list[Answer]] = {name: [] for name in ways}
    for number in range(-warm, rounds):
        for name, way in ways.items():
            answer = way()
            if number >= 0:
                found[name].append(answer)
    return found


def spread(values: Sequence[float], form: str = ".2f") -> str:
    """Return the median of some values, with the least and the most."""
    return f"{statistics.median(values):{form}} ({min(values):{form}} to {max(values):{form}})"


def aligned(rows: Sequence[Sequence[object]]) -> str:
    """Return rows as lines with columns: the first at the left, the others at the right."""
    texts = [[str(cell) for cell in row] for row in rows]
    widths = [max(map(len, column)) for column in zip(*texts, strict=True)]
    lines = [[row[0].ljust(widths[0]), *map(str.rjust, row[1:], widths[1:])] for row in texts]
    return "\n".join("  ".join(line).rstrip() for line in lines)


def log(text: str) -> None:
    """Print a line on the screen, beside the results."""
    print(text, file=sys.stderr, flush=True)


# -- processes


def end_by_signal() -> None:
    """Turn SIGTERM into an exit, so that all that this process started is ended, and its folders are deleted."""
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(143))


def cpu_of(pid: int, children: bool = False) -> float:
    """Return the processor time of a process in seconds; `children`: with those that have ended."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return sum(map(int, fields[11 : 15 if children else 13])) / os.sysconf("SC_CLK_TCK")


def status_of(pid: int | str, key: str) -> int:
    """Return a number of /proc/PID/status, such as VmRSS in kB; 0 if the process has ended."""
    with contextlib.suppress(OSError):
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
        return next((int(line.split()[1]) for line in lines if line.startswith(f"{key}:")), 0)
    return 0
