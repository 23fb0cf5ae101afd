"""Observations of an injected fault: logs that differ, lines shown wrongly, when the failure was known."""

from __future__ import annotations

import re
from typing import Any

from clusterctl.jobs.run_folder import RunDir
from native.compiled import library
from tests.faults.draw import AWAY, NODES, Fault
from tests.faults.field import WALL_AHEAD, Desk, Lane, words_of


def differing(lane: Lane, fault: Fault, run: RunDir, attempts: int) -> list[str]:
    """Return logs that were not copied byte for byte; of an abandoned node only the received part counts."""
    found = []
    for attempt in range(1, attempts + 1):
        for node in (member.name for member in lane.box.nodes if lane.is_up(member.name)):
            logs = lane.run_dir(node, run.run_id) / "attempts" / str(attempt) / "logs"
            for path in sorted(logs.glob("*")):
                home = run.logs(attempt) / node / path.name
                remote, local = path.read_bytes(), home.read_bytes() if home.exists() else b""
                given_up = node == fault.node and fault.kind in AWAY and attempt < attempts
                if local != remote and not (given_up and remote.startswith(local)):
                    found.append(
                        f"{node}/{path.name} of attempt {attempt}: {len(local)} of {len(remote)} bytes"
                    )
    return found


def shown(desk: Desk, fault: Fault, run: RunDir, *, whole: bool) -> list[str]:
    """Return lines of rank 0 that the launch showed twice, or never, if it followed to the end (`whole`)."""
    if fault.real:
        return []
    shown = re.findall(
        r"^node\d:0 (step \d+ of attempt \d+)$", (desk.folder / "launch.out").read_text(), re.M
    )
    twice = [line for line in set(shown) if shown.count(line) > 1]
    logs = sorted((run.root / "attempts").glob("*/logs/*/rank-0.out"))
    written = [line for log in logs for line in log.read_text(errors="replace").splitlines()]
    never = [line for line in written if whole and line.startswith("step ") and line not in shown]
    return [f"shown twice: {line}" for line in twice] + [f"never shown: {line}" for line in never]


def last_lines(lane: Lane, desk: Desk, run: RunDir | None) -> list[str]:
    """Return the last line of the user's command and of each rank's output on its node, for an error message."""
    logs = sorted(desk.folder.glob("*.err"))
    if run is not None:
        for node in NODES:
            logs += sorted(lane.run_dir(node, run.run_id).glob("attempts/*/logs/rank-*"))
    ends = [(path.name, path.read_text(errors="replace").splitlines()[-1:]) for path in logs]
    return [f"{name}: {line[:200]}" for name, end in ends for line in end]


# The command line of a C++ compiler.
COMPILER = re.compile(r"\S*(g\+\+|clang\+\+|c\+\+|cc1plus)(-\d+)?(\s|\Z)")


def compiling(lane: Lane, seconds: float) -> str:
    """Return the message for a rank that still compiles the trainer's library after a wait; "" if none does."""
    for node in filter(lane.is_up, NODES):
        if any(COMPILER.match(words_of(pid)) for pid in lane.pids(node).values()):
            return f"a rank on {node} has compiled for {seconds:.0f} s: {library.BUILD_HINT}"
    return ""


def known_after(events: list[dict[str, Any]], struck: float) -> float | None:
    """Return the seconds from a fault until the run's history has the failure; None if it is not there."""
    for event in events:
        bad = event["event"] == "failed" or (
            event["event"] == "node_ended" and event["state"] in ("failed", "lost")
        )
        if bad and struck and event["time"] >= struck - 0.05:
            return max(0.0, float(event["time"]) - struck)
    return None


def struck_from_within(fault: Fault, run: RunDir) -> float:
    """Return when a fault caused by the program itself struck, according to its output; 0 if it is not there."""
    log = run.log(fault.node, fault.rank, "err")
    found = re.search(r"drill: \S+ at ([\d.]+)", log.read_text(errors="replace")) if log.exists() else None
    return float(found[1]) if found else 0.0


def noticed_after(lane: Lane, fault: Fault, run: RunDir, struck: float) -> float | None:
    """Return the seconds from the fault until its node's supervisor had recorded the failure of a rank."""
    failure = lane.record(fault.node, run.run_id, 1, "node.json").get("first_failure") or {}
    return (
        max(0.0, float(failure["ended"]) - ahead(fault, fault.node) - struck) if failure and struck else None
    )


def stopped_after(lane: Lane, fault: Fault, run: RunDir, known: float) -> float | None:
    """Return the seconds from a known failure until the attempt's last rank had ended."""
    ends = []
    for node in NODES:
        for rank in range(4):
            ended = lane.record(node, run.run_id, 1, f"ranks/{rank}.json").get("ended")
            ends += [float(ended) - ahead(fault, node)] if ended else []
    return max(0.0, max(ends) - known) if ends else None


def ahead(fault: Fault, node: str) -> float:
    """Return by how many seconds a node's wall clock is ahead."""
    return WALL_AHEAD if fault.kind == "clock skewed" and node == fault.node else 0.0
