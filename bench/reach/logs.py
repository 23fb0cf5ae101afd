"""Measure how fast the lines of 16 ranks reach one file each and the screen: clusterctl, pdsh and clush.

    python -m bench.reach.logs [--lines 100000] [--runs 3]

Each tool starts `seq` on 16 sshd nodes and shows every line with its node as prefix. The peers' lines go through tee
into one file; clusterctl writes a file per rank. The time is from the first process to the last line. clusterctl needs
two commands, `launch` and `logs tail -f`, and its time includes the supervision of a run. The column `cpu` counts these
processes but not clusterctl's controller, which continues after them: compare only wall times.
"""

from __future__ import annotations

import argparse
import shlex
import shutil
import signal
import statistics
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from bench.reach.field import (
    SETTINGS,
    Field,
    Sample,
    field,
)

OURS = "clusterctl"
RANKS = 16
MARK = b" of what a program prints"


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--lines", type=int, default=100_000, help="of each rank")
    parser.add_argument("--runs", type=int, default=3, help="of each tool")
    options = parser.parse_args()
    # Turn SIGTERM into an exit, so that the nodes are stopped with this process.
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(143))
    with field(RANKS) as site:
        samples: dict[str, list[Sample]] = {}
        for turn in range(options.runs):
            for name, way in ways(site, options.lines).items():
                samples.setdefault(name, []).append(way())
            print(f"turn {turn + 1} of {options.runs}", file=sys.stderr, flush=True)
    print(table(samples, RANKS * options.lines))
    verdict, fast = judged(samples)
    print(verdict)
    return int(not fast)


def table(samples: Mapping[str, Sequence[Sample]], lines: int) -> str:
    """Return a table of medians, ranges and failures."""
    rows = [f"{'tool':<32}{'wall s':>9}{'spread':>15}{'cpu s':>8}{'lines/s':>12}{'failed':>8}"]
    for name, all_of_it in samples.items():
        walls = sorted(sample.wall for sample in all_of_it)
        wall, cpu = statistics.median(walls), statistics.median(sample.cpu for sample in all_of_it)
        spread, failed = f"{walls[0]:.2f}-{walls[-1]:.2f}", sum(sample.failed for sample in all_of_it)
        rows.append(f"{name:<32}{wall:>9.2f}{spread:>15}{cpu:>8.2f}{lines / wall:>12,.0f}{failed:>8}")
    return "\n".join(rows)


def judged(samples: Mapping[str, Sequence[Sample]]) -> tuple[str, bool]:
    """Return a text that compares clusterctl with each peer that lost no line, and whether clusterctl is the fastest.

    The second value is False if clusterctl lost lines.
    """
    middle = {name: statistics.median(sample.wall for sample in several) for name, several in samples.items()}
    lost = sum(sample.failed for sample in samples[OURS])
    if lost:
        return f"{OURS}: lines were lost or repeated in {lost} of {len(samples[OURS])} turns", False
    rivals = sorted(
        (wall, name)
        for name, wall in middle.items()
        if name != OURS and not any(sample.failed for sample in samples[name])
    )
    if not rivals:
        return (
            f"{OURS}: no peer here delivered every line; install the packages pdsh and clush",
            False,
        )
    lines = [f"{OURS} took {middle[OURS] / wall:.2f} of {name}" for wall, name in rivals]
    fast = middle[OURS] < rivals[0][0]
    return "\n".join([*lines, f"faster than all peers: {'reached' if fast else 'not reached'}"]), fast


def ways(site: Field, lines: int) -> dict[str, Callable[[], Sample]]:
    """Return a function for each tool that runs it once; peers that are not installed are left out."""
    program = ["seq", "-f", f"line %.0f{MARK.decode()}", "1", str(lines)]
    found: dict[str, Callable[[], Sample]] = {OURS: lambda: ours(site, program, lines)}
    quoted = shlex.join(program)
    for setting in tuple(SETTINGS)[:2]:
        options = " ".join(site.ssh_options(setting))
        peers = {
            "pdsh": ["pdsh", "-R", "ssh", "-f", str(RANKS), "-w", site.addresses(RANKS), quoted],
            "clush": ["clush", "-o", options, "-f", str(RANKS), "-w", site.addresses(RANKS), quoted],
        }
        for name, argv in peers.items():
            if shutil.which(name):
                found[f"{name}, {setting}"] = lambda argv=argv, options=options: peer(
                    site, argv, options, lines
                )
    return found


def ours(site: Field, program: list[str], lines: int) -> Sample:
    """Launch and follow a run; count the lines on the screen and in the run's log files."""
    launch = site.clusterctl("launch", "-n", site.names(RANKS), "--no-code", "--detach", "--", *program)
    tail = [launch[0], "logs", "tail", "last", "-f", "-n", str(lines), "--rank", f"0-{RANKS - 1}"]
    screen = site.folder / "screen.txt"
    sample = site.run(["sh", "-c", f"{shlex.join(launch)} && {shlex.join(tail)}"], output=screen)
    good = counted(screen) == RANKS * lines
    copies = sorted((site.folder / "runs").glob("*/attempts/1/logs/*/rank-*.out"))
    good = good and len(copies) == RANKS and all(counted(path) == lines for path in copies)
    shutil.rmtree(site.folder / "runs", ignore_errors=True)
    return Sample(sample.wall, sample.cpu, 0 if good else 1)


def peer(site: Field, argv: list[str], options: str, lines: int) -> Sample:
    """Run the peer through tee, which writes a file and the screen."""
    screen, copies = site.folder / "screen.txt", site.folder / "kept.txt"
    script = f"{shlex.join(argv)} | tee {shlex.quote(str(copies))}"
    sample = site.run(["sh", "-c", script], output=screen, PDSH_SSH_ARGS_APPEND=options)
    return Sample(sample.wall, sample.cpu, 0 if counted(screen) == counted(copies) == RANKS * lines else 1)


def counted(path: Path) -> int:
    with path.open("rb") as file:
        return sum(1 for line in file if MARK in line)


if __name__ == "__main__":
    sys.exit(main())
