"""Compare recovery with torchrun: seconds from the SIGKILL of a rank to a new step, and from launch to first step.

    python -m bench.runs.recover [--runs 5] [--stock]

Both start the same program with the same configuration, data and environment: `python -m trainer train`, a GPT of a
million parameters, four ranks on two nodes; it saves every ten steps and resumes from its newest checkpoint. Ours is
`clusterctl launch` of a job on sshd nodes; torchrun's two agents are started here at the same moment, without a login.
The tools take turns; results are medians. A step that was done before the kill is not a new step.

torchrun gets TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1. By default (torch 2.13) a new rank may find the address of a dead
one in the store that all rounds share, and fail; --stock also measures this default, as a third column.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from bench.field import Option, free_port, read_options
from bench.runs.field import (
    Ground,
    TooLate,
    ground,
    json_lines,
    on_node,
    records,
    wait_for,
)
from bench.runs.times import (
    Return,
    durations,
    first_step,
    middle,
    recovered,
    steps_of,
)
from clusterctl.agent.processes import marked

# Steps between checkpoints.
SAVE = 10
# The kill comes after this many steps: two checkpoints, and half of the way to the third.
KILL_AT = 25
# The rank that is killed; not rank 0, which hosts the store through which torch's ranks connect.
VICTIM = 3
# In the environment of our ranks.
SAME = (
    "OMP_NUM_THREADS",
    "MALLOC_",
    "TORCH_DEVICE",
    "PYTHONUNBUFFERED",
    "GLOO_",
)
# Of torchrun: each round of ranks has a new one.
OWN_STORE = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
# The time limit of a recovery, in seconds.
MOST = 10.0
TO_BEGIN = "until rank 0's new process begins"
TO_STEP = "its steps up to a new one"


@dataclass(frozen=True)
class Turn:
    """One turn of one tool, in seconds."""

    first_step: float
    back: float
    starts: int
    parts: dict[str, float]
    before: dict[str, float]
    """The parts of the time until the new processes started; only our side reports them."""


def main() -> int:
    options = read_options(
        __doc__, runs=Option(5, "of each tool"), stock=Option(False, "also torchrun with its defaults")
    )
    turns: dict[str, list[Turn]] = {"clusterctl": [], "torchrun": []}
    if options.stock:
        turns["torchrun, stock"] = []
    with ground() as site:
        job = site.job(restarts=100, save=SAVE)
        # From now on code and data are on the nodes and in the page cache.
        site.stop(site.launch(str(job)))
        for number in range(options.runs):
            turns["clusterctl"].append(ours(site, job))
            turns["torchrun"].append(theirs(site, f"bench-{number}", OWN_STORE))
            if options.stock:
                turns["torchrun, stock"] += stock(site, f"stock-{number}")
            print(f"turn {number + 1} of {options.runs}", file=sys.stderr, flush=True)
    print(report(turns))
    return int(middle([{"back": recovery.back} for recovery in turns["clusterctl"]])["back"] > MOST)


def ours(site: Ground, job: Path) -> Turn:
    """Launch, kill, wait, stop; return the times, which are in the files of the run."""
    began = time.time()
    run = site.launch(str(job))
    home = on_node(run, "node1")
    metrics = home / "metrics.jsonl"
    first = wait_for("the first step", lambda: first_step(json_lines(metrics)))
    wait_for("steps", lambda: len(steps_of(json_lines(metrics))) >= KILL_AT)
    attempts = [on_node(run, name) / "attempts" for name in ("node1", "node2")]
    victim = next(entry for entry in records(attempts[1] / "1") if entry["rank"] == VICTIM)
    killed = kill(victim["pid"])
    back = wait_for("a new step", lambda: recovered(json_lines(metrics), killed))
    ended = [entry["ended"] for node_attempts in attempts for entry in records(node_attempts / "1")]
    started = [entry["started"] for node_attempts in attempts for entry in records(node_attempts / "2")]
    restart = next(event.time for event in run.event_lines() if event.kind == "restart")
    own = next(entry["ended"] for entry in records(attempts[1] / "1") if entry["rank"] == VICTIM)
    moments = {"the death is noticed": own, "all ranks have ended": max(ended), "the restart begins": restart,
               "the last new rank is started": max(started)}  # fmt: skip
    site.stop(run)
    return turn(first - began, killed, back, durations(killed, moments))


def theirs(site: Ground, name: str, env: Mapping[str, str]) -> Turn:
    """Run torchrun's two agents with rendezvous c10d and unlimited restarts; return the times."""
    folder = site.folder / name
    folder.mkdir()
    metrics = folder / "metrics.jsonl"
    began = time.time()
    with agents(site, folder, name, env):
        first = wait_for("torchrun's first step", lambda: first_step(json_lines(metrics)))
        wait_for("torchrun's steps", lambda: len(steps_of(json_lines(metrics))) >= KILL_AT)
        names = {"TORCHELASTIC_RUN_ID": name, "RANK": str(VICTIM)}
        killed = kill(marked(names)[0])
        back = wait_for("torchrun's new step", lambda: recovered(json_lines(metrics), killed))
    return turn(first - began, killed, back, {})


def stock(site: Ground, name: str) -> list[Turn]:
    """Run torchrun with its defaults; return its turn in a list, or [] if it did not recover."""
    try:
        return [theirs(site, name, {})]
    except TooLate as late:
        print(f"torchrun, stock: {late}", file=sys.stderr, flush=True)
        return []


def turn(first: float, killed: float, back: Return, before: dict[str, float]) -> Turn:
    begun = back.began + sum(back.parts.values())
    parts = {TO_BEGIN: back.began - killed, **back.parts, TO_STEP: back.new_step - begun}
    return Turn(first, back.new_step - killed, back.starts, parts, before)


def kill(pid: int) -> float:
    """Kill a process and return the time."""
    now = time.time()
    os.kill(pid, signal.SIGKILL)
    return now


@contextlib.contextmanager
def agents(site: Ground, folder: Path, name: str, more: Mapping[str, str]) -> Iterator[None]:
    """Run one torchrun per node with the configuration and environment of our last run."""
    last = max((site.folder / "runs").iterdir(), key=lambda path: path.stat().st_mtime)
    home = Path(json.loads((last / "run.json").read_text())["run_dirs"]["node1"])
    env = json.loads((home / "attempts" / "1" / "spec.json").read_text())["ranks"][0]["env"]
    same = {key: value for key, value in env.items() if key.startswith(SAME)}
    env = {**site.env, **same, **more, "TMPDIR": str(folder)}
    argv = [sys.executable, "-m", "torch.distributed.run", "--nnodes", "2", "--nproc-per-node", "2"]
    argv += ["--rdzv-backend", "c10d", "--rdzv-endpoint", f"127.0.0.1:{free_port()}", "--rdzv-id", name]
    argv += ["--local-addr", "127.0.0.1", "--max-restarts", "100"]
    argv += ["-m", "trainer", "train", str(home / "train.json"), "--run-dir", str(folder)]
    with (folder / "said.txt").open("wb") as output:
        silent = {"stdin": subprocess.DEVNULL, "stdout": output, "stderr": output}
        both = [subprocess.Popen(argv, cwd=folder, env=env, **silent) for _ in range(2)]
    try:
        yield
    finally:
        for process in both:
            process.terminate()
        for process in both:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(20)
            process.kill()
            process.wait()
        for pid in marked({"TORCHELASTIC_RUN_ID": name}):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


def report(turns: dict[str, list[Turn]]) -> str:
    """Return the table: medians, their range, and ours as a fraction of torchrun's."""
    turns = {tool: several for tool, several in turns.items() if several}
    lines = [f"{'seconds, medians':<44}" + "".join(f"{tool:>22}" for tool in turns) + f"{'ratio':>8}"]
    for name, field in (("launch to the first step", "first_step"), ("death to the next new step", "back")):
        values = [sorted(getattr(turn, field) for turn in several) for several in turns.values()]
        lines.append(row(name, values))
    parts = [middle([turn.parts for turn in several]) for several in turns.values()]
    before = middle([turn.before for turn in turns["clusterctl"]])
    for name in parts[0]:
        lines.append(row(f"  {name}", [[part_times.get(name, 0.0)] for part_times in parts]))
        if name == TO_BEGIN:
            lines += [row(f"    {part}", [[seconds]]) for part, seconds in before.items()]
    starts = [sorted(float(turn.starts) for turn in several) for several in turns.values()]
    lines.append(row("starts of the ranks, one death", starts, "g"))
    return "\n".join(lines)


def row(name: str, values: list[list[float]], form: str = ".2f") -> str:
    shown, middles = "", []
    for several in values:
        middles.append(several[len(several) // 2])
        spread = f" ({several[0]:{form}}-{several[-1]:{form}})" if len(several) > 1 else ""
        shown += f"{f'{middles[-1]:{form}}{spread}':>22}"
    ratio = f"{middles[0] / middles[1]:>8.2f}" if len(middles) > 1 and middles[1] > 0 else ""
    return f"{name:<44}{shown}{ratio}"


if __name__ == "__main__":
    sys.exit(main())
