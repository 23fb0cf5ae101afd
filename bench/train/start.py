"""The row `start` of bench/train: seconds from a launch to the first step, compared with torchrun.

Both start `python -m trainer train` with the same configuration, data and environment, in turn, with four ranks on two
nodes. Ours is `clusterctl launch --detach` on sshd nodes that already have the code and data. torchrun's two agents are
started on this machine at the same moment, without a login.
"""

from __future__ import annotations

import statistics
import time
from pathlib import Path
from typing import Any

from bench.runs.field import (
    Ground,
    ground,
    json_lines,
    on_node,
    wait_for,
)
from bench.runs.recover import OWN_STORE, agents
from bench.runs.times import first_step

TURNS = 5


def start_row(turns: int, log: Any) -> dict[str, Any]:
    """Return the seconds of each turn, and the parts of the ranks' own start."""
    ours: list[float] = []
    theirs: list[float] = []
    parts: dict[str, list[dict[str, float]]] = {"clusterctl": [], "torchrun": []}
    with ground() as site:
        job = site.job(restarts=0, save=0)
        # From now on code and data are on the nodes and in the page cache.
        site.stop(site.launch(str(job)))
        for number in range(turns):
            log(f"turn {number + 1} of {turns}")
            seconds, part = launched(site, job)
            ours.append(seconds)
            parts["clusterctl"].append(part)
            seconds, part = torchrun(site, f"start-{number}")
            theirs.append(seconds)
            parts["torchrun"].append(part)
    return {"row": "start", "clusterctl": ours, "torchrun": theirs, "parts": parts}


def launched(site: Ground, job: Path) -> tuple[float, dict[str, float]]:
    began = time.time()
    run = site.launch(str(job))
    found = first(on_node(run, "node1") / "metrics.jsonl")
    site.stop(run)
    return found[0] - began, found[1]


def torchrun(site: Ground, name: str) -> tuple[float, dict[str, float]]:
    folder = site.folder / name
    folder.mkdir()
    began = time.time()
    with agents(site, folder, name, OWN_STORE):
        found = first(folder / "metrics.jsonl")
    return found[0] - began, found[1]


def first(metrics: Path) -> tuple[float, dict[str, float]]:
    """Return when the first step was done, and the parts of rank 0's start."""
    done = wait_for("the first step", lambda: first_step(json_lines(metrics)))
    start = next(record for record in json_lines(metrics) if record["event"] == "start")
    return done, dict(start["startup"])


def start_table(found: dict[str, Any]) -> str:
    ours, theirs = (statistics.median(found[tool]) for tool in ("clusterctl", "torchrun"))
    lines = ["start: from the command to the first step, 4 ranks on 2 nodes, seconds (least-most)"]
    for tool in ("clusterctl", "torchrun"):
        several = sorted(found[tool])
        own = [sum(part.values()) for part in found["parts"][tool]]
        text = f"  {tool:<12}{statistics.median(several):>7.2f} ({several[0]:.2f}-{several[-1]:.2f})"
        lines.append(f"{text}, of it rank 0's own start {statistics.median(own):.2f}")
    lines.append(f"  ours takes {ours / theirs:.2f} of torchrun's time")
    return "\n".join(lines)
