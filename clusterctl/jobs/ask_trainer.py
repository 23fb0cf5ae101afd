"""Run a command of the trainer on this machine and read its answer."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar

from clusterctl import extras
from clusterctl.errors import ClusterctlError, Fault, InputFaults
from clusterctl.settings import environment
from clusterctl.wire.contract import INSTALL
from clusterctl.wire.typed_json import BadValue

T = TypeVar("T")
# Limit in seconds: comparing two checkpoints of a terabyte takes an hour.
ANSWER_LIMIT = 4 * 3600.0


def trainer_start(arguments: Sequence[str]) -> tuple[list[str], dict[str, str]]:
    """Return the command line and the environment of a command of the trainer on this machine.

    From Python 3.11 on it imports nothing from the current folder: a user's random.py would replace Python's own.
    """
    variables = {**environment(), INSTALL: extras.command("{extra}")}
    if not hasattr(sys.flags, "safe_path"):
        return [sys.executable, "-m", "trainer", *arguments], variables
    root = Path(__file__).resolve().parents[2]
    # Without an installation, the trainer is next to this package.
    if root.name not in ("site-packages", "dist-packages"):
        variables["PYTHONPATH"] = os.pathsep.join(filter(None, [str(root), variables.get("PYTHONPATH", "")]))
    return [sys.executable, "-P", "-m", "trainer", *arguments], variables


def ask_trainer(
    read: Callable[[dict[str, Any]], T], arguments: Sequence[str], question: str = "", called: str = ""
) -> T:
    """Run a command of the trainer, which prints one JSON object; return the result of `read` for it.

    `called` is the user's command, such as `clusterctl data build`, if the arguments are the user's own.
    """
    argv, variables = trainer_start([*(["--called", called] if called else []), *arguments])
    try:
        done = subprocess.run(
            argv, input=question, capture_output=True, text=True, env=variables, timeout=ANSWER_LIMIT
        )
    except subprocess.TimeoutExpired:
        raise ClusterctlError(
            f"the trainer's {arguments[0]}: no answer within {ANSWER_LIMIT:g} s",
            "check for a hung disk with `dmesg`",
        ) from None
    try:
        answer = json.loads(done.stdout)
        assert isinstance(answer, dict)
    except (ValueError, AssertionError):
        raise _failed(arguments[0], done, called) from None
    try:
        return read(answer)
    except BadValue as problem:
        raise ClusterctlError(f"the trainer's {arguments[0]}: its answer is wrong: {problem}") from None


def _failed(command: str, done: subprocess.CompletedProcess[str], called: str) -> ClusterctlError:
    """Return the error with all messages of the trainer, or else with the last line of its output."""
    lines = (done.stderr.strip() or done.stdout.strip() or f"exit code {done.returncode}").splitlines()
    found = [line.removeprefix("error: ") for line in lines if line.startswith("error: ")] or lines[-1:]
    hints = [line.removeprefix("  try: ") for line in lines if line.startswith("  try: ")]
    where, hint = "" if called else f"the trainer's {command}", "\n".join(hints)
    if done.returncode == 2:
        return InputFaults([Fault(where, message) for message in found], hint)
    return ClusterctlError("\n".join(Fault(where, message).line for message in found), hint)
