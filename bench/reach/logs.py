"""Lines of 16 ranks through to a file each and to the screen: clusterctl beside pdsh and clush, which print the same.

python -m bench.reach.logs [--lines 100000] [--runs 3]

Each tool starts `seq` on 16 sshd nodes and shows every line with its node in front; the peers' lines go through tee
into a file, clusterctl keeps a file a rank. The whole is measured, from the first process to the last line. A launch
is followed by `logs tail -f`, so ours holds two commands, and what a supervised run costs beside its output. The cpu
column holds what these processes used; our controller outlives them and is not in it, so that only walls compare.
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
    # So that the nodes go down with us.
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(143))
    with field(RANKS) as laid:
        samples: dict[str, list[Sample]] = {}
        for turn in range(options.runs):
            for name, way in ways(laid, options.lines).items():
                samples.setdefault(name, []).append(way())
            print(f"turn {turn + 1} of {options.runs}", file=sys.stderr, flush=True)
    print(table(samples, RANKS * options.lines))
    verdict, fast = judged(samples)
    print(verdict)
    return int(not fast)


def table(samples: Mapping[str, Sequence[Sample]], lines: int) -> str:
    """Medians, how far they spread, and what did not come whole."""
    rows = [f"{'tool':<32}{'wall s':>9}{'spread':>15}{'cpu s':>8}{'lines/s':>12}{'failed':>8}"]
    for name, all_of_it in samples.items():
        walls = sorted(sample.wall for sample in all_of_it)
        wall, cpu = statistics.median(walls), statistics.median(sample.cpu for sample in all_of_it)
        spread, failed = f"{walls[0]:.2f}-{walls[-1]:.2f}", sum(sample.failed for sample in all_of_it)
        rows.append(f"{name:<32}{wall:>9.2f}{spread:>15}{cpu:>8.2f}{lines / wall:>12,.0f}{failed:>8}")
    return "\n".join(rows)


def judged(samples: Mapping[str, Sequence[Sample]]) -> tuple[str, bool]:
    """Ours against each peer that brought every line, and whether it is whole and faster than the best of them."""
    middle = {name: statistics.median(sample.wall for sample in several) for name, several in samples.items()}
    lost = sum(sample.failed for sample in samples[OURS])
    if lost:
        return f"{OURS}: lines were lost or doubled in {lost} of {len(samples[OURS])} turns", False
    rivals = sorted(
        (wall, name)
        for name, wall in middle.items()
        if name != OURS and not any(sample.failed for sample in samples[name])
    )
    if not rivals:
        return (
            f"{OURS}: no peer here that brought every line: pdsh and clush are packages of those names",
            False,
        )
    lines = [f"{OURS} took {middle[OURS] / wall:.2f} of {name}" for wall, name in rivals]
    fast = middle[OURS] < rivals[0][0]
    return "\n".join([*lines, f"faster than all of them: {'reached' if fast else 'not reached'}"]), fast


def ways(laid: Field, lines: int) -> dict[str, Callable[[], Sample]]:
    """Each tool's way; a peer that is not installed is left out."""
    program = ["seq", "-f", f"line %.0f{MARK.decode()}", "1", str(lines)]
    found: dict[str, Callable[[], Sample]] = {OURS: lambda: ours(laid, program, lines)}
    quoted = shlex.join(program)
    for setting in tuple(SETTINGS)[:2]:
        options = " ".join(laid.ssh_options(setting))
        peers = {
            "pdsh": ["pdsh", "-R", "ssh", "-f", str(RANKS), "-w", laid.addresses(RANKS), quoted],
            "clush": ["clush", "-o", options, "-f", str(RANKS), "-w", laid.addresses(RANKS), quoted],
        }
        for name, argv in peers.items():
            if shutil.which(name):
                found[f"{name}, {setting}"] = lambda argv=argv, options=options: peer(
                    laid, argv, options, lines
                )
    return found


def ours(laid: Field, program: list[str], lines: int) -> Sample:
    """Launch and follow; counted are the lines on the screen and the bytes in the run's files."""
    launch = laid.clusterctl("launch", "-n", laid.names(RANKS), "--no-code", "--detach", "--", *program)
    tail = [launch[0], "logs", "tail", "last", "-f", "-n", str(lines), "--rank", f"0-{RANKS - 1}"]
    screen = laid.folder / "screen.txt"
    sample = laid.run(["sh", "-c", f"{shlex.join(launch)} && {shlex.join(tail)}"], output=screen)
    good = counted(screen) == RANKS * lines
    kept = sorted((laid.folder / "runs").glob("*/attempts/1/logs/*/rank-*.out"))
    good = good and len(kept) == RANKS and all(counted(path) == lines for path in kept)
    shutil.rmtree(laid.folder / "runs", ignore_errors=True)
    return Sample(sample.wall, sample.cpu, 0 if good else 1)


def peer(laid: Field, argv: list[str], options: str, lines: int) -> Sample:
    """The peer through tee: a file and the screen."""
    screen, kept = laid.folder / "screen.txt", laid.folder / "kept.txt"
    script = f"{shlex.join(argv)} | tee {shlex.quote(str(kept))}"
    sample = laid.run(["sh", "-c", script], output=screen, PDSH_SSH_ARGS_APPEND=options)
    return Sample(sample.wall, sample.cpu, 0 if counted(screen) == counted(kept) == RANKS * lines else 1)


def counted(path: Path) -> int:
    with path.open("rb") as file:
        return sum(1 for line in file if MARK in line)


if __name__ == "__main__":
    sys.exit(main())
