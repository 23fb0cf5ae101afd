"""Run a command of the trainer on this machine and read its answer."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar

from clusterctl.errors import ClusterctlError, UsageError
from clusterctl.settings import environment
from clusterctl.typed_json import BadValue

T = TypeVar("T")
# Limit in seconds: comparing two checkpoints of a terabyte takes an hour.
ANSWER_LIMIT = 4 * 3600.0


def trainer_start(arguments: Sequence[str]) -> tuple[list[str], dict[str, str]]:
    """Return the command line and the environment of a command of the trainer on this machine.

    From Python 3.11 on it imports nothing from the current folder: a user's random.py would replace Python's own.
    """
    variables = dict(environment())
    if not hasattr(sys.flags, "safe_path"):
        return [sys.executable, "-m", "trainer", *arguments], variables
    root = Path(__file__).resolve().parents[2]
    # Without an installation, the trainer is next to this package.
    if root.name not in ("site-packages", "dist-packages"):
        variables["PYTHONPATH"] = os.pathsep.join(filter(None, [str(root), variables.get("PYTHONPATH", "")]))
    return [sys.executable, "-P", "-m", "trainer", *arguments], variables


def ask_trainer(read: Callable[[dict[str, Any]], T], arguments: Sequence[str], question: str = "") -> T:
    """Run a command of the trainer, which prints one JSON object; return the result of `read` for it."""
    argv, variables = trainer_start(arguments)
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
        raise _failed(arguments[0], done) from None
    try:
        return read(answer)
    except BadValue as problem:
        raise ClusterctlError(f"the trainer's {arguments[0]}: its answer is wrong: {problem}") from None


def _failed(command: str, done: subprocess.CompletedProcess[str]) -> ClusterctlError:
    """Return the error that the trainer reported, else one with the last line of its output."""
    last = (done.stderr.strip() or done.stdout.strip() or f"exit code {done.returncode}").splitlines()
    message = next((line for line in last if line.startswith("error: ")), last[-1]).removeprefix("error: ")
    hint = next((line.removeprefix("  try: ") for line in last if line.startswith("  try: ")), "")
    kind = UsageError if done.returncode == 2 else ClusterctlError
    return kind(f"the trainer's {command}: {message}", hint)
