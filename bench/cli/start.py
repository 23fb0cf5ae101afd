"""Measure how long the command line takes to answer, as whole processes: medians of alternating runs.

python -m bench.cli.start [--rounds 15]
"""

from __future__ import annotations

import statistics
import sys
from pathlib import Path

from bench.field import in_turn, read_options, run

PROGRAM = str(Path(sys.executable).with_name("clusterctl"))
COMMANDS = {
    "python -c pass": [sys.executable, "-c", "pass"],
    "python -c 'import typer'": [sys.executable, "-c", "import typer"],
    "clusterctl --version": [PROGRAM, "--version"],
    "clusterctl --help": [PROGRAM, "--help"],
    "clusterctl nodes expand node[1-64]": [PROGRAM, "nodes", "expand", "node[1-64]"],
}


def main() -> None:
    rounds = read_options(__doc__, rounds=15).rounds
    # The first round warms the disk's cache.
    times = in_turn({name: lambda a=argv: run(a).wall for name, argv in COMMANDS.items()}, rounds, warm=1)
    floor = statistics.median(times["python -c pass"])
    for name, found in times.items():
        middle = statistics.median(found)
        spread = f"{min(found) * 1000:.0f} to {max(found) * 1000:.0f}; {middle / floor:.1f} x bare python"
        print(f"{name:<36} {middle * 1000:6.0f} ms  ({spread})")


if __name__ == "__main__":
    main()
