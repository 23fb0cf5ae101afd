"""Measure the cost of an idle run: processor time and memory of all clusterctl processes.

    python -m bench.runs.idle [--seconds 60]

One node has eight ranks, which first sleep silently and then print a line per second each. Figures are shares of one
core.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from bench.field import Option, aligned, read_options
from bench.runs.field import (
    Ground,
    ground,
    on_node,
    records,
    wait_for,
)
from clusterctl.agent.records import read_json
from clusterctl.jobs.run_folder import RunDir
from clusterctl.sandbox import process

RANKS = 8
# Everything is loaded this many seconds after the start.
SETTLE = 3.0
# The limits for a supervisor: per cent of a core, and MB.
MOST_CPU, MOST_MEMORY = 0.5, 40.0
SUPERVISOR = "supervisor"
PROGRAMS = {
    "ranks asleep": "import time; time.sleep(100000)",
    "a line per second each": "import time\nfor n in range(100000): print('line', n, flush=True); time.sleep(1)",
}


@dataclass(frozen=True)
class Use:
    """The resources used by some processes: processor time in seconds so far, and memory now."""

    cpu: float
    resident: float
    """MB, including memory shared with others."""
    own: float
    """MB that would be free if these processes ended."""
    count: int


def main() -> int:
    options = read_options(__doc__, seconds=Option(60.0, "seconds of each measurement"))
    fit = True
    with ground(nodes=1, devices=RANKS) as site:
        for name, program in PROGRAMS.items():
            print(f"{name}, {options.seconds:g} s")
            costs = measure(site, program, options.seconds)
            rows: list[tuple[object, ...]] = [("", "processes", "% of a core", "resident MB", "own MB")]
            for who, (share, use) in costs.items():
                rows.append((who, use.count, f"{share:.2f}", f"{use.resident:.1f}", f"{use.own:.1f}"))
            print(aligned(rows), flush=True)
            share, use = costs[SUPERVISOR]
            fit = fit and share < MOST_CPU and use.resident < MOST_MEMORY
    reached = "reached" if fit else "not reached"
    print(f"a supervisor: under {MOST_CPU:g} % of a core and {MOST_MEMORY:g} MB: {reached}")
    return int(not fit)


def measure(site: Ground, program: str, seconds: float) -> dict[str, tuple[float, Use]]:
    """Return the per cent of a core that each process used during `seconds`, and its memory."""
    run = site.launch("--no-code", "--", "python3", "-c", program)
    attempt = on_node(run, "node1") / "attempts" / "1"
    wait_for("eight ranks", lambda: len(records(attempt)) == RANKS)
    time.sleep(SETTLE)
    who = background_processes(site, run)
    before, began = {name: use_of(pids) for name, pids in who.items()}, time.monotonic()
    time.sleep(seconds)
    after, took = {name: use_of(pids) for name, pids in who.items()}, time.monotonic() - began
    site.stop(run)
    return {name: (100 * (after[name].cpu - before[name].cpu) / took, after[name]) for name in who}


def background_processes(site: Ground, run: RunDir) -> dict[str, set[int]]:
    """Return all processes of clusterctl that stay for a run, except the run's ranks."""
    attempt = on_node(run, "node1") / "attempts" / "1"
    supervisor = int((read_json(str(attempt / "supervisor.json")) or {})["pid"])
    ranks = {entry["pid"] for entry in records(attempt)}
    sshd = {node.pid for node in site.made.status() if node.pid}
    watcher = below({supervisor}) - below(ranks) - {supervisor}
    controller = run.controller()
    return {
        SUPERVISOR: {supervisor},
        "the shell that ends ranks if it dies": watcher,
        "the agent that follows, with its sshd": below(sshd) - sshd - below(ranks) - watcher - {supervisor},
        "the controller, on the launching machine": {controller} if controller else set(),
    }


def below(pids: set[int]) -> set[int]:
    return set(process.below(pids))


def use_of(pids: Iterable[int]) -> Use:
    """Return the use of living processes; one that has ended no longer counts."""
    cpu = resident = own = 0.0
    count = 0
    for pid in pids:
        try:
            for thread in Path(f"/proc/{pid}/task").iterdir():
                cpu += int((thread / "schedstat").read_text().split()[0]) / 1e9
            memory = memory_of(Path(f"/proc/{pid}/smaps_rollup").read_text())
        except (FileNotFoundError, ProcessLookupError):
            continue
        count += 1
        resident, own = resident + memory["Rss"] / 1024, own + memory["Private"] / 1024
    return Use(cpu, resident, own, count)


def memory_of(rollup: str) -> dict[str, int]:
    """Return kB from /proc/PID/smaps_rollup: Rss, and the sum of the private parts."""
    sizes = {line.split(":")[0]: int(line.split()[1]) for line in rollup.splitlines()[1:]}
    return {"Rss": sizes["Rss"], "Private": sizes["Private_Clean"] + sizes["Private_Dirty"]}


if __name__ == "__main__":
    sys.exit(main())
