"""Measure goodput with faults: the fraction of a training's time, from launch to stop, spent in steps that counted.

    python -m bench.runs.goodput [--minutes 20] [--every 60] [--seed 1]

A GPT of a million parameters trains on two nodes with four ranks, with a checkpoint every 100 steps. At a random moment
of each interval there is a fault: a rank is killed, a rank gets a segmentation fault, or the supervisor of a node is
killed. After a fault the steps since the newest checkpoint are repeated; a step counts once, the last time it is done.
"""

from __future__ import annotations

import contextlib
import os
import random
import signal
import statistics
import sys
import time
from dataclasses import dataclass
from typing import Any

from bench.field import Option, aligned, read_options
from bench.runs.field import (
    ground,
    json_lines,
    on_node,
    records,
    wait_for,
)
from bench.runs.times import Goodput, goodput, recovered
from clusterctl.agent.records import read_json
from clusterctl.jobs.run_folder import RunDir

# Steps between checkpoints.
SAVE = 100
KINDS = ("rank killed", "rank segfaulted", "supervisor killed")
# The target for the goodput.
LEAST = 0.70


@dataclass(frozen=True)
class Fault:
    kind: str
    place: str
    when: float


def main() -> int:
    options = read_options(
        __doc__, minutes=20.0, every=Option(60.0, "seconds; one fault in each such interval"), seed=1
    )
    chance = random.Random(options.seed)
    with ground() as site:
        job = site.job(restarts=10_000, save=SAVE)
        began = time.time()
        run = site.launch(str(job))
        faults = []
        for moment in moments(chance, options.minutes * 60, options.every):
            time.sleep(max(0.0, began + moment - time.time()))
            faults += strike(run, chance)
            print(f"{moment:7.0f} s  {faults[-1].kind}, {faults[-1].place}", file=sys.stderr, flush=True)
        time.sleep(max(0.0, began + options.minutes * 60 - time.time()))
        ended = time.time()
        metrics = json_lines(on_node(run, "node1") / "metrics.jsonl")
        restarts = sum(event.kind == "restart" for event in run.event_lines())
        site.stop(run)
    found = goodput(metrics, began, ended)
    print(report(found, faults, metrics, restarts))
    return int(found.share < LEAST)


def moments(chance: random.Random, whole: float, every: float) -> list[float]:
    """Return a random moment in each interval, except during the first start and at the end of the last interval."""
    return [
        start + chance.uniform(0.1, 0.9) * every
        for start in map(every.__mul__, range(max(1, int(whole // every))))
    ]


def strike(run: RunDir, chance: random.Random) -> list[Fault]:
    """Inject one fault into the current attempt; between attempts, wait for the next one."""
    kind, node = chance.choice(KINDS), chance.choice(("node1", "node2"))

    def struck() -> list[Fault]:
        attempt = on_node(run, node) / "attempts" / str(run.read_record().attempt)
        pids = {entry["rank"]: entry["pid"] for entry in records(attempt) if entry.get("state") == "running"}
        supervisor: dict[str, Any] = read_json(str(attempt / "supervisor.json")) or {}
        if not pids or not supervisor:
            # There is no attempt at the moment.
            return []
        rank = chance.choice(sorted(pids))
        pid = supervisor["pid"] if kind == "supervisor killed" else pids[rank]
        where = f"on {node}" if kind == "supervisor killed" else f"rank {rank} on {node}"
        with contextlib.suppress(ProcessLookupError):
            now = time.time()
            os.kill(pid, signal.SIGSEGV if kind == "rank segfaulted" else signal.SIGKILL)
            return [Fault(kind, where, now)]
        return []

    found: list[Fault] = wait_for("a rank to strike at", struck)
    return found


def report(found: Goodput, faults: list[Fault], metrics: list[dict[str, Any]], restarts: int) -> str:
    """Return how the time was spent, and how long recovery from each kind of fault took."""
    lines = [f"{found.wall:.0f} s, {len(faults)} faults, {restarts} restarts, {found.steps} steps"]
    shares = (
        ("steps that counted", found.counted),
        ("repeated steps", found.again),
        ("checkpoints", found.saving),
        ("starts, restarts, waits", found.idle),
    )
    lines += [
        f"  {name:<28}{seconds:>9.1f} s{100 * seconds / found.wall:>8.1f} %" for name, seconds in shares
    ]
    table: list[tuple[object, ...]] = [
        ("fault", "count", "back", "to a new step: median", "worst", "starts, worst")
    ]
    for kind in KINDS:
        these = [fault for fault in faults if fault.kind == kind]
        backs = [(back, fault.when) for fault in these if (back := recovered(metrics, fault.when))]
        took = [back.new_step - when for back, when in backs]
        times = (f"{statistics.median(took):.1f} s", f"{max(took):.1f} s") if took else ("", "")
        starts = max(back.starts for back, _ in backs) if backs else ""
        table.append((kind, len(these), len(took), *times, starts))
    lines.append(aligned(table))
    reached = "reached" if found.share >= LEAST else "not reached"
    return "\n".join([*lines, f"goodput {100 * found.share:.1f} %; at least {100 * LEAST:.0f} %: {reached}"])


if __name__ == "__main__":
    sys.exit(main())
