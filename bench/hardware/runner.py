"""Run the steps of a measurement as processes of their own, each with a limit; keep each line as soon as it is printed.

A step prints JSON objects, one per line. Each becomes a line of results.jsonl as soon as it arrives, so that nothing is
lost if the machine is taken away. How a step ended is a line too; a step that fails or takes too long stops no other.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from bench.field import ROOT

# The title of the table of how the steps ended.
STEPS = "steps"


@dataclass(frozen=True)
class Step:
    """One process: its name in the results, the module and its arguments."""

    name: str
    module: str
    arguments: tuple[str, ...] = ()
    share: float = 30.0
    """The seconds that it should have; its limit is this share of the time that is left."""


class Runner:
    """Runs steps within a number of seconds, and writes results.jsonl and log.txt."""

    def __init__(self, folder: Path, seconds: float, clock: Callable[[], float] = time.monotonic) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.folder, self.clock = folder, clock
        self.until = clock() + seconds
        self.rows: list[dict[str, object]] = []
        self.results = (folder / "results.jsonl").open("w", encoding="utf-8")
        self.log = (folder / "log.txt").open("w", encoding="utf-8")

    def run_all(self, steps: Sequence[Step]) -> None:
        """Run the steps in order. What a step does not use is left to the later ones."""
        for number, step in enumerate(steps):
            rest = sum(other.share for other in steps[number:])
            self.run(step, max(1.0, (self.until - self.clock()) * step.share / rest))

    def run(self, step: Step, limit: float) -> None:
        """Run a step for at most `limit` seconds."""
        print(f"{step.name}: at most {limit:.0f} s", file=sys.stderr, flush=True)
        self.log.write(f"\n== {step.name}\n")
        began = self.clock()
        # `-u`: a step that hangs has printed its results, and its last words come in their order.
        process = subprocess.Popen(
            [sys.executable, "-u", "-m", step.module, *step.arguments],
            env={**os.environ, "PYTHONPATH": f"{ROOT}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            start_new_session=True,
        )
        last: list[str] = []
        reader = threading.Thread(target=self._take, args=(step, process, last))
        reader.start()
        reader.join(limit)
        late = reader.is_alive()
        # What a step started and left behind belongs to its process group, and would disturb the next measurement.
        end_group(process)
        reader.join(10.0)
        code = process.wait()
        ended = f"over its limit of {limit:.0f} s" if late else "" if code == 0 else f"ended with {code}"
        row = {"table": STEPS, "step": step.name, "s": round(self.clock() - began, 1), "ended": ended or "ok"}
        self.add({**row, "last words": (last or [""])[0][:200] if ended else ""})

    def _take(self, step: Step, process: subprocess.Popen[str], last: list[str]) -> None:
        """Take a step's lines until its end; `last` gets the last one that is no result."""
        assert process.stdout is not None
        for line in process.stdout:
            row = row_of(line)
            if row is not None:
                self.add({"step": step.name, **row})
                continue
            self.log.write(line)
            if line.strip():
                last[:] = [line.strip()]
        process.wait()

    def add(self, row: Mapping[str, object]) -> None:
        """Add a row to the results."""
        self.rows.append(dict(row))
        self.results.write(json.dumps(row) + "\n")
        self.results.flush()
        self.log.flush()


def row_of(line: str) -> dict[str, object] | None:
    """Return the result in a line of output; None if it is other text."""
    if not line.startswith('{"table"'):
        return None
    try:
        return dict(json.loads(line))
    except ValueError:
        return None


def end_group(process: subprocess.Popen[str]) -> None:
    """End all processes of a step."""
    try:
        os.killpg(process.pid, signal.SIGKILL)
    except ProcessLookupError:
        return
