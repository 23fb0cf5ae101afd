"""Measure the time of `report` and the size of its page, for a run of 100,000 steps.

    python -m bench.cli.report [--steps N]

The run has a restart, 200 evaluations and checkpoints, steps of random length, and 2,000 log lines. Each report is
written by a process of its own; the shortest time of 5 is printed.
"""

from __future__ import annotations

import math
import random
import sys
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path

from bench.field import read_options, run
from clusterctl.environment import environment
from tests.support.run_folders import BEGAN, restarted_run, start_line, step_line, write_lines

TIMES = 5


def lines(steps: int) -> Iterator[Mapping[str, object]]:
    """Yield the metrics; after 60 % of the steps there is a restart that repeats a twentieth of them."""
    chance = random.Random(1)
    at, restart, back = BEGAN, steps * 6 // 10, steps * 55 // 100
    yield start_line(0, at, 1)
    for number in (*range(1, restart + 1), 0, *range(back + 1, steps + 1)):
        at += 0.5
        if not number:
            yield start_line(back, at, 2)
            continue
        seconds = 0.5 + chance.expovariate(60) + 3.0 * (chance.random() < 0.001)
        loss = 2.2 + 8.5 * math.exp(-12 * number / steps) + chance.gauss(0, 0.05)
        speed = {"step_seconds": seconds, "own_seconds": 0.8 * seconds, "tokens_per_second": 2048 / seconds}
        yield step_line(number, steps, at, loss=loss, grad_norm=chance.lognormvariate(0, 0.3), **speed)
        if number % max(steps // 200, 1) == 0:
            path = f"/nodes/node1/r/checkpoints/step-{number:08d}"
            yield {"event": "eval", "step": number, "loss": loss, "time": at}
            yield {"event": "checkpoint", "step": number, "path": path, "bytes": 3_000_000_000, "time": at}


def main() -> None:
    """Print the size of the report, and the time and processor time of the command."""
    steps = read_options(__doc__, steps=100_000).steps
    with tempfile.TemporaryDirectory() as name:
        made = restarted_run(Path(name) / "runs")
        write_lines(made.metrics, list(lines(steps)))
        log = made.log("node1", 0, "out", 2)
        log.parent.mkdir(parents=True, exist_ok=True)
        log.write_text("x" * 120 + "\n" + f"{'a line of the log ' * 6}\n" * 2000)
        command = [sys.executable, "-m", "clusterctl", "report", "tiny", "-o", "report.html"]
        rows = [run(command, cwd=name, env=environment()) for _ in range(TIMES)]
        size = (Path(name) / "report.html").stat().st_size
        print(f"{steps:,} steps  {made.metrics.stat().st_size / 1e6:.1f} MB of metrics")
        cpu = min(used.cpu for used in rows)
        print(f"report  {size / 1000:.0f} kB  {min(rows).wall:.2f} s  {cpu:.2f} s of processor")


if __name__ == "__main__":
    main()
