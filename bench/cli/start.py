"""Measure how long the command line takes to answer, as whole processes: medians of 15 alternating runs.

python -m bench.cli.start
"""

from __future__ import annotations

import statistics
import subprocess
import sys
import time
from pathlib import Path

RUNS = 15
PROGRAM = Path(sys.executable).with_name("clusterctl")
COMMANDS = {
    "python -c pass": [sys.executable, "-c", "pass"],
    "python -c 'import typer'": [sys.executable, "-c", "import typer"],
    "clusterctl --version": [str(PROGRAM), "--version"],
    "clusterctl --help": [str(PROGRAM), "--help"],
    "clusterctl nodes expand node[1-64]": [str(PROGRAM), "nodes", "expand", "node[1-64]"],
}


def main() -> None:
    times: dict[str, list[float]] = {name: [] for name in COMMANDS}
    for turn in range(RUNS + 1):
        for name, argv in COMMANDS.items():
            began = time.perf_counter()
            subprocess.run(argv, stdout=subprocess.DEVNULL, check=True)
            # The first round warms the disk's cache.
            if turn:
                times[name].append(time.perf_counter() - began)
    floor = statistics.median(times["python -c pass"])
    for name, found in times.items():
        middle = statistics.median(found)
        spread = f"{min(found) * 1000:.0f} to {max(found) * 1000:.0f}; {middle / floor:.1f} x bare python"
        print(f"{name:<36} {middle * 1000:6.0f} ms  ({spread})")


if __name__ == "__main__":
    main()
