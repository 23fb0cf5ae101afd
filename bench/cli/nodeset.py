"""Compare node sets with ClusterShell's `nodeset`: expand and fold the same names.

    python -m bench.cli.nodeset

The rows `process` time whole commands, as a user runs them; the rows `inside` time only the work of each library in a
Python process. A ratio below 1 means that clusterctl is faster. Medians of alternating runs; the answers are compared
first.
"""

from __future__ import annotations

import json
import shutil
import statistics
import sys
from collections.abc import Callable
from pathlib import Path

from bench.field import in_turn, run

RUNS = 5
SIZES = (1_000, 10_000, 100_000)
OURS = str(Path(sys.executable).with_name("clusterctl"))
SETS: dict[str, Callable[[int], str]] = {
    "one range": lambda size: f"node[1-{size}]",
    "every other": lambda size: "node[" + ",".join(str(number) for number in range(1, 2 * size, 2)) + "]",
    "racks x nodes": lambda size: f"r[1-{size // 50}]n[01-50]",
}
INSIDE = """
import json, sys, time
kind, expression, names = json.load(sys.stdin)
if kind == "theirs":
    from ClusterShell.NodeSet import NodeSet
    expand, fold = (lambda: list(NodeSet(expression))), (lambda: str(NodeSet.fromlist(names)))
else:
    from clusterctl.inventory import nodeset
    expand, fold = (lambda: nodeset.expand(expression)), (lambda: nodeset.fold(names))
for work in (expand, fold):
    began = time.process_time()
    work()
    print(time.process_time() - began)
"""


def side_by_side(ours: list[str], theirs: list[str], sent: str) -> tuple[float, float]:
    """Return the seconds of each side; exit if their answers differ."""
    ways = {"ours": lambda: run(ours, input=sent), "theirs": lambda: run(theirs, input=sent)}
    mine, peer = in_turn(ways, RUNS).values()
    assert len({used.output.strip() for used in (*mine, *peer)}) == 1, f"{theirs[0]} gives another answer"
    return statistics.median(used.wall for used in mine), statistics.median(used.wall for used in peer)


def inside(python: str, kind: str, expression: str, names: list[str]) -> list[float]:
    sent = json.dumps([kind, expression, names])
    runs = [run([python, "-c", INSIDE], input=sent).output.split() for _ in range(RUNS)]
    return [statistics.median(float(run[index]) for run in runs) for index in (0, 1)]


def line(label: str, mine: float, peer: float) -> None:
    print(f"{label:<44} {mine * 1000:8.0f} ms {peer * 1000:8.0f} ms   {mine / peer:5.2f}")


def main() -> int:
    peer = shutil.which("nodeset")
    if peer is None:
        print("nodeset is not installed: apt install clustershell", file=sys.stderr)
        return 1
    python = Path(peer).read_bytes().split(b"\n")[0].decode().removeprefix("#!").split()[-1]
    print(f"{'':<44} {'clusterctl':>11} {'nodeset':>11}   ratio")
    for label, make in SETS.items():
        for size in SIZES:
            # Without a final line break `nodeset` drops the last character.
            expression = make(size) + "\n"
            names = run([peer, "-e", "-"], input=expression).output.split()
            for verb, sent in (("expand", expression), ("fold", "\n".join(names) + "\n")):
                sides = side_by_side([OURS, "nodes", verb, "-"], [peer, f"-{verb[0]}", "-"], sent)
                line(f"process: {verb} {size:,}, {label}", *sides)
            sides = ((sys.executable, "ours"), (python, "theirs"))
            mine, theirs = (inside(*side, expression, names) for side in sides)
            line(f"inside:  expand {size:,}, {label}", mine[0], theirs[0])
            line(f"inside:  fold {size:,}, {label}", mine[1], theirs[1])
    return 0


if __name__ == "__main__":
    sys.exit(main())
