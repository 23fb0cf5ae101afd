"""Shared by measurements on nodes: sandbox nodes, a user's environment, and waiting."""

from __future__ import annotations

import argparse
import contextlib
import os
import shutil
import signal
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    from clusterctl.sandbox.cluster import Sandbox

# The checkout that is measured.
ROOT = Path(__file__).resolve().parents[1]
Answer = TypeVar("Answer")
Number = TypeVar("Number", int, float)


@contextlib.contextmanager
def sandbox(
    prefix: str, nodes: int, devices: int = 1, *, mode: str = "auto", with_slurm: bool = False
) -> Iterator[tuple[Sandbox, Path]]:
    """Yield running nodes and a folder that contains theirs; both are removed when the block ends."""
    # Import it only here, because measured programs import this module too.
    from clusterctl.sandbox import cluster

    folder = Path(tempfile.mkdtemp(prefix=f"{prefix}-"))
    try:
        made = cluster.up(folder / "nodes", nodes=nodes, devices=devices, mode=mode, with_slurm=with_slurm)
        try:
            yield made, folder
        finally:
            made.down()
    finally:
        shutil.rmtree(folder, ignore_errors=True)


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


def within(kind: type[Number], least: float, most: float) -> Callable[[str], Number]:
    """Return the reader of an option: a number of this kind, from `least` to `most`."""

    def read(text: str) -> Number:
        value = kind(text)
        if not least <= value <= most:
            raise argparse.ArgumentTypeError(f"{text} is not from {least:g} to {most:g}")
        return value

    read.__name__ = kind.__name__
    return read
