"""Stop runs while a node is cut off, the disk here is full, or `stop` itself is killed; count the ranks that are left.

    python -m bench.runs.stops [--count 200] [--faulty 50] [--nodes 64] [--seed 1] [--limit 3000]

Needs root: each node has a network namespace, the full disk is a tmpfs. Each stop immediately prints a line of JSON. A
stop is right if its exit code says what it did, `status` calls the run stopped, and none of its ranks lives two
minutes after the last link was restored.
"""

from __future__ import annotations

import argparse
import json
import random
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from itertools import cycle, islice
from pathlib import Path

from bench.field import sandbox, take_signals, user_environment, wait_for, within
from clusterctl.jobs.run_folder import RunDir
from clusterctl.sandbox.cluster import Sandbox

FAULTS = ("cut", "disk", "killed")
# The exit code of `stop` in each case; a killed one has none.
CODES = {"none": (0,), "cut": (3,), "disk": (0,), "killed": (-9, 0)}
# Seconds for the ranks to end, after the last link was restored; and for one command.
LEFT, LIMIT = 120.0, 300.0


def draw(count: int, faulty: int, seed: int) -> list[str]:
    """Return the fault of each stop; of the `faulty` ones, each fault has an equal share."""
    kinds = list(islice(cycle(FAULTS), faulty))
    kinds += ["none"] * (count - len(kinds))
    random.Random(seed).shuffle(kinds)
    return kinds


def living(run_id: str) -> int:
    """Return how many processes of a run live: all nodes share this machine's kernel."""
    mark, found = f"CLUSTERCTL_RUN_ID={run_id}".encode(), 0
    for entry in Path("/proc").iterdir():
        with suppress(OSError):
            found += entry.name.isdigit() and mark in (entry / "environ").read_bytes().split(b"\0")
    return found


@contextmanager
def small_disk(folder: Path) -> Iterator[Path]:
    """Yield a folder on a disk of its own."""
    folder.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=16m", "disk", str(folder)], check=True)
    try:
        yield folder
    finally:
        subprocess.run(["umount", "-l", str(folder)], check=True)


class Trial:
    """One run, and its stop."""

    def __init__(self, made: Sandbox, folder: Path, runs: Path) -> None:
        own = {"CLUSTERCTL_CLUSTER": str(made.cluster_file), "CLUSTERCTL_RUNS": str(runs), "NO_COLOR": "1"}
        self.made, self.folder, self.env = made, folder, user_environment(**own)
        done = self.start("launch", "--detach", "--no-code", "--", "sleep", "3600")
        out, err = done.communicate(timeout=LIMIT)
        if done.returncode:
            raise SystemExit(f"launch: {err}")
        self.run = RunDir(runs / out.strip())

    def start(self, *arguments: str) -> subprocess.Popen[str]:
        argv, pipe = [sys.executable, "-m", "clusterctl", *arguments], subprocess.PIPE
        return subprocess.Popen(argv, cwd=self.folder, env=self.env, stdout=pipe, stderr=pipe, text=True)

    def stop(self, fault: str, chance: random.Random) -> tuple[int, str]:
        """Stop the run with a fault, which is over when this returns; return the exit code and the errors."""
        node = chance.choice(self.made.nodes).name
        if fault == "cut":
            self.made.cut(node)
        if fault == "disk":
            with (self.run.root.parent / "ballast").open("wb", buffering=0) as file, suppress(OSError):
                while file.write(b"\0" * 4096):
                    pass
        try:
            process = self.start("stop", self.run.run_id)
            if fault == "killed":
                wait_for(self.run.stop_asked.exists, LIMIT)
                time.sleep(chance.uniform(0, 1))
                process.kill()
            errors = process.communicate(timeout=LIMIT)[1]
        finally:
            if fault == "cut":
                self.made.heal(node)
        return process.returncode, errors

    def play(self, fault: str, chance: random.Random) -> dict[str, object]:
        began = time.monotonic()
        code, errors = self.stop(fault, chance)
        stopped = time.monotonic()
        wait_for(lambda: not living(self.run.run_id), LEFT, 0.5)
        left, ended = living(self.run.run_id), time.monotonic()
        wait_for(lambda: self.run.controller() is None, 20.0)
        shown = self.start("status", self.run.run_id, "--json").communicate(timeout=LIMIT)[0]
        phase = json.loads(shown)["phase"] if shown else "not shown"
        facts = {"fault": fault, "code": code, "left": left, "phase": phase}
        right = code in CODES[fault] and not left and phase == "stopped"
        times = {"stop_s": round(stopped - began, 1), "ended_s": round(ended - stopped, 1)}
        return {**facts, "right": right, **times, **({} if right else {"errors": errors[-600:]})}


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--count", type=within(int, 1, 100_000), default=200)
    parser.add_argument(
        "--faulty", type=within(int, 0, 100_000), help="how many of them have a fault; default: one in four"
    )
    parser.add_argument("--nodes", type=within(int, 1, 1000), default=64)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument(
        "--limit",
        type=within(float, 1, 1e6),
        default=36_000.0,
        help="seconds after which no further run begins",
    )
    options = parser.parse_args()
    faulty = options.count // 4 if options.faulty is None else options.faulty
    if faulty > options.count:
        parser.error(f"--faulty {faulty}: more than --count {options.count}")
    take_signals()
    chance, sums = random.Random(options.seed), Counter[tuple[str, bool]]()
    left, end = 0, time.monotonic() + options.limit
    with sandbox("stops", options.nodes, mode="namespaces") as (made, folder):
        for number, fault in enumerate(draw(options.count, faulty, options.seed)):
            if time.monotonic() > end:
                break
            with small_disk(folder / f"runs-{number}") as runs:
                result = Trial(made, folder, runs).play(fault, chance)
            print(json.dumps(result), flush=True)
            sums[fault, bool(result["right"])] += 1
            left += int(str(result["left"]))
    for fault in ("none", *FAULTS):
        print(f"{fault}: {sums[fault, True]} of {sums[fault, True] + sums[fault, False]} right")
    print(
        f"all: {sum(count for (_, right), count in sums.items() if right)} of {sum(sums.values())}, {left} ranks left"
    )
    return 0 if sums and all(right for _, right in sums) else 1


if __name__ == "__main__":
    sys.exit(main())
