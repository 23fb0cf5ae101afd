"""Measure the start of a run whose folder has many unchanged files, next to one with a single file.

    python -m bench.runs.code [--files 10000] [--rounds 7] [--nodes 2]

The nodes have the files already; each run gets a working folder of its own there. Medians until the ranks have started,
in turn. Launcher and nodes share the cores of this machine: with one node and two cores each has its own, as in a
cluster.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time

from bench.field import within
from bench.runs.field import Ground, ground

# Seconds of each run: a node makes the working folder of the next one 5 s after a start.
LASTS = 12.0
# Seconds that the unchanged files may add to a start.
MOST = 0.1


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--files", type=within(int, 1, 1_000_000), default=10_000)
    parser.add_argument("--rounds", type=within(int, 1, 1000), default=7)
    parser.add_argument("--nodes", type=within(int, 1, 64), default=2)
    options = parser.parse_args()
    times: dict[int, list[float]] = {1: [], options.files: []}
    with ground(options.nodes, devices=1) as site:
        for files in times:
            write(site, files)
            # From now on the nodes have the files.
            seconds(site, files)
        for _ in range(options.rounds):
            for files, found in times.items():
                found.append(seconds(site, files))
    for files, found in times.items():
        print(f"{files:>9,} files  {statistics.median(found):.2f} s  ({min(found):.2f} to {max(found):.2f})")
    more = statistics.median(times[options.files]) - statistics.median(times[1])
    print(f"the unchanged files add {more:.2f} s; wanted: at most {MOST}")
    return int(more > MOST)


def write(site: Ground, files: int) -> None:
    """Write a folder with so many small files."""
    for number in range(files):
        path = site.folder / f"code-{files}" / f"d{number // 100:04}" / f"f{number:06}.py"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"number = {number}\n" * 20)


def seconds(site: Ground, files: int) -> float:
    """Return the seconds until the ranks of a run have started; then let it last until the next one is prepared."""
    began = time.monotonic()
    run = site.launch("--code", f"code-{files}", "--", "sleep", "600")
    taken = time.monotonic() - began
    time.sleep(LASTS)
    site.stop(run)
    return taken


if __name__ == "__main__":
    sys.exit(main())
