"""Measure how long a user waits at a terminal, with 8 nodes on this machine: python -m bench.cli.waits [--nodes 8].

For `doctor`, and for launches of a program that prints a line per second, it measures the time to the first output, the
longest time without output, and the total time. It also measures how much time a setup adds to the first and to a
later launch.
"""

from __future__ import annotations

import itertools
import os
import pty
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

from bench.field import read_options, sandbox
from clusterctl.environment import environment

PROGRAM = "import os, time\nfor step in range(3):\n    print('step', step, flush=True)\n    time.sleep(1)"
JOB = """
command: [python, -c, {program!r}]
devices: [0]
"""


@dataclass(frozen=True)
class Watched:
    """The output of a command, with the times at which a user sees it."""

    first: float
    longest: float
    whole: float
    text: str


def watched(folder: Path, *words: str) -> Watched:
    """Run a command on a terminal of its own and record when it writes."""
    ours, theirs = pty.openpty()
    began = time.monotonic()
    process = subprocess.Popen(
        [sys.executable, "-m", "clusterctl", *words],
        cwd=folder,
        env={**environment(), "TERM": "xterm", "NO_PAGER": "1"},
        stdin=theirs,
        stdout=theirs,
        stderr=theirs,
    )
    os.close(theirs)
    times, shown = [began], b""
    while True:
        try:
            data = os.read(ours, 1 << 16)
        except OSError:
            break
        if not data:
            break
        times.append(time.monotonic())
        shown += data
    os.close(ours)
    process.wait()
    times.append(time.monotonic())
    gaps = [after - before for before, after in itertools.pairwise(times)]
    return Watched(times[1] - began, max(gaps), times[-1] - began, shown.decode(errors="replace"))


def main() -> None:
    """Print one line per command."""
    nodes = read_options(__doc__, nodes=8).nodes
    with sandbox("waits", nodes) as (made, folder):
        _measure(folder, made.cluster_file)


def _measure(folder: Path, cluster_file: Path) -> None:
    (folder / "job.yaml").write_text(JOB.format(program=PROGRAM))
    slow = JOB + "setup: ['sleep 1', 'export PREPARED=1']\n"
    (folder / "setup.yaml").write_text(slow.format(program=PROGRAM))
    rows = [("doctor", ("doctor",)), ("doctor again", ("doctor",)), ("launch", ("launch", "job.yaml"))]
    rows += [("launch again", ("launch", "job.yaml"))]
    rows += [(f"launch with a setup, {time_}", ("launch", "setup.yaml")) for time_ in ("first", "second")]
    for title, words in rows:
        seen = watched(folder, "-c", str(cluster_file), *words)
        figures = f"first output {seen.first:5.2f} s  longest silence {seen.longest:5.2f} s"
        print(f"{title:<28} {figures}  whole {seen.whole:6.2f} s", flush=True)
        for line in seen.text.splitlines():
            # Skip the code that erases the progress line.
            text = line.rpartition("\x1b[2K")[2].strip()
            if text.startswith(("setup ", "start ")):
                print(f"    {text}")


if __name__ == "__main__":
    main()
