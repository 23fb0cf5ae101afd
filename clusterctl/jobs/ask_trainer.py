"""Run a command of the trainer on this machine and read its answer."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from clusterctl.errors import ClusterctlError, UsageError
from clusterctl.settings import environment
from clusterctl.typed_json import BadValue

T = TypeVar("T")


def ask_trainer(read: Callable[[dict[str, Any]], T], arguments: Sequence[str], question: str = "") -> T:
    """Run a command of the trainer, which answers with one JSON object; return what `read` makes of it."""
    argv = [sys.executable, "-m", "trainer", *arguments]
    done = subprocess.run(argv, input=question, capture_output=True, text=True, env=environment())
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
    """Return the trainer's own error, or the last line of what it wrote."""
    last = (done.stderr.strip() or done.stdout.strip() or f"exit code {done.returncode}").splitlines()
    message = next((line for line in last if line.startswith("error: ")), last[-1]).removeprefix("error: ")
    hint = next((line.removeprefix("  try: ") for line in last if line.startswith("  try: ")), "")
    kind = UsageError if done.returncode == 2 else ClusterctlError
    return kind(f"the trainer's {command}: {message}", hint)
