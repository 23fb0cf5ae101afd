"""Measure seconds per step, and bytes that a rank sends per step and parameter, with ZeRO 0 and 1 over loopback.

    unshare -rn python -m bench.train.zero [--ranks 2 4] [--rounds 3] [--precision bf16]

`unshare` gives the ranks a loopback device of their own, so that only their bytes are counted. The levels are trained
in turn. The fastest median of a round counts, because other load on the machine only makes a step slower.
"""

from __future__ import annotations

import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

from bench.field import read_options
from bench.train.ranks import train

MODEL = {"layers": 6, "hidden": 768, "heads": 12, "sequence": 128, "vocab": 8192}
PARAMETERS = (12 * 6 * 768 + 8192 + 128) * 768
SHORT, LONG = 2, 8


def sent() -> int:
    """Return the bytes that this network namespace has sent over loopback."""
    lines = Path("/proc/net/dev").read_text().splitlines()
    return sum(int(line.split()[9]) for line in lines if line.lstrip().startswith("lo:"))


def measure(ranks: int, zero: int, precision: str) -> tuple[float, float]:
    """Return the median seconds of a step, and the bytes per step, rank and parameter."""
    found: list[tuple[int, list[Any]]] = []
    for steps in (SHORT, LONG):
        part = {"model": MODEL, "steps": steps, "micro_batch": 1, "global_batch": 2 * ranks, "zero": zero}
        before = sent()
        lines = train({**part, "precision": precision, "eval": {"batches": 0}}, ranks)
        found.append((sent() - before, [line["step_seconds"] for line in lines]))
    bytes_sent = (found[1][0] - found[0][0]) / (LONG - SHORT) / ranks / PARAMETERS
    return statistics.median(found[1][1][1:]), bytes_sent


def main() -> int:
    options = read_options(__doc__, ranks=(2, 4), rounds=3, precision="bf16")
    # A new namespace has its loopback device down.
    subprocess.run(["ip", "link", "set", "lo", "up"], check=False)
    for ranks in options.ranks:
        rounds = [[measure(ranks, zero, options.precision) for zero in (0, 1)] for _ in range(options.rounds)]
        for zero, measured in enumerate(zip(*rounds, strict=True)):
            seconds, sizes = zip(*measured, strict=True)
            print(f"{ranks} ranks, ZeRO {zero}: {min(seconds):.3f} s, {min(sizes):.2f} bytes", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
