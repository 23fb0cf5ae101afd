"""Drill hangs: runs in which one rank hangs in a known way, and whether the cause names that rank and its line.

    python -m bench.runs.hangs [--count 200] [--seed 1] [--hang-after 8] [--limit 3000] [--slow]

Four ranks on two sshd nodes; the way, the rank, the step, the program (our trainer, or one that knows nothing of
clusterctl) and its layout are drawn. Each run immediately prints a line of JSON. The table at the end has a row
per way: runs, how often the rank was right, how often the frame, and the ranks that were named instead. With
`--slow`, a rank is slow instead, and named as a straggler; without py-spy the frame of a foreign program is not
known.
"""

from __future__ import annotations

import argparse
import json
import random
import shutil
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Collection
from dataclasses import asdict, dataclass
from itertools import cycle
from pathlib import Path

from bench.field import wait_for, within
from bench.runs import hang_ways
from bench.runs.field import Ground, ground
from clusterctl.jobs.run_lines import Event

OWN = {
    "data": {},
    "sharded": {"zero": 2},
    "tensor": {"parallel": {"tensor": 2}},
    "pipeline": {"parallel": {"pipeline": 2}},
    "both": {"parallel": {"tensor": 2, "pipeline": 2}},
    "context": {"parallel": {"context": 2}},
}
FOREIGN = ("data", "sharded", "tensor", "pipeline", "both", "barrier")
# What a cause must contain besides the rank, where that is not the name of the way's function.
FRAMES = {
    "gc": "`__del__`",
    "stopped": "SIGSTOP",
    "exit": "with code 0",
    "order": "broadcast",
    "shape": "hang_ways.py:",
    "link": "not acknowledge",
    "slow": "is in `__call__` at train/observers.py",
}
SLOW = "slow"
# Imported by every Python on the nodes. It writes while torch is imported, in silence. Our trainer's drill calls
# time.sleep(60), and then hangs in another way.
HOOK = """
import os, threading, time
rest = time.sleep
def wait():
    for _ in range(30):
        if "DRILL_BEGUN" in os.environ:
            break
        print("begins", flush=True)
        rest(1)
if os.environ.get("RANK"):
    threading.Thread(target=wait, daemon=True).start()
if os.environ.get("DRILL_WAY"):
    import hang_ways
    time.sleep = lambda seconds: hang_ways.WAYS[os.environ["DRILL_WAY"]]() if seconds == 60 else rest(seconds)
"""
# Seconds for one run.
LIMIT = 280.0


@dataclass(frozen=True)
class Drill:
    """One run of the drills."""

    way: str
    program: str
    layout: str
    rank: int
    step: int


@dataclass(frozen=True)
class Outcome:
    """What the cause of a run named."""

    drill: Drill
    rank: int | None
    title: str
    seconds: float

    @property
    def has_rank(self) -> bool:
        return self.rank == self.drill.rank

    @property
    def has_frame(self) -> bool:
        wanted = FRAMES.get(self.drill.way, f"hang_{self.drill.way}")
        return self.has_rank and wanted in self.title.rpartition(f"rank {self.drill.rank} ")[2]

    def line(self) -> str:
        """Return the outcome as a line of JSON."""
        facts = {"named": self.rank, "rank_right": self.has_rank, "frame_right": self.has_frame}
        return json.dumps(
            {**asdict(self.drill), **facts, "title": self.title, "seconds": round(self.seconds, 1)}
        )


def draw(runs: int, seed: int, of: Collection[str] = hang_ways.WAYS.keys()) -> list[Drill]:
    """Return drills in which each way comes equally often, with both programs."""
    chance, ways = random.Random(seed), cycle(of)
    drills = []
    for number in range(runs):
        # An even number of ways gets the other programs in the next round.
        program = ("own", "foreign")[(number + number // len(of) * (len(of) % 2 == 0)) % 2]
        layout = chance.choice(list(OWN) if program == "own" else FOREIGN)
        drills.append(Drill(next(ways), program, layout, chance.randrange(4), chance.randrange(40, 60)))
    return drills


def write_job(site: Ground, drill: Drill, hang_after: float) -> Path:
    """Write the job of a drill, and the folder with its code."""
    code = site.folder / "code"
    shutil.rmtree(code, ignore_errors=True)
    code.mkdir()
    here = Path(__file__).parent
    shutil.copy(here / "hang_ways.py", code)
    job: dict[str, object] = {"name": "drill", "code": str(code), "hang_after": hang_after, "grace": 2}
    (code / "sitecustomize.py").write_text(HOOK)
    if drill.program == "own":
        train = {
            "model": {"name": "gpt-tiny", "vocab": 1024},
            "data": {
                "prefix": str(site.data / "text"),
                "tokenizer": str(site.data / "tokenizer.json"),
                "split": "90,10,0",
            },
            **{"steps": 100_000, "micro_batch": 1, "precision": "fp32", "eval": {"batches": 0}},
            **{"save": {"every": 100_000}, **OWN[drill.layout]},
        }
        (code / "train.json").write_text(json.dumps(train))
        how = "slow400" if drill.way == SLOW else "hang"
        fault = f"rank{drill.rank}:step{drill.step}:{how}"
        # As a command, so that the hook is imported.
        job |= {"command": ["python", "-u", "-m", "trainer", "train", "train.json"]}
        way = {} if drill.way == SLOW else {"DRILL_WAY": drill.way}
        job |= {"env": {"CLUSTERCTL_FAULT": fault, **way}}
    else:
        shutil.copy(here / "hang_program.py", code / "train.py")
        words = ["python", "train.py", drill.layout, str(drill.step), str(drill.rank), drill.way]
        job |= {"command": words}
    path = site.folder / "job.yaml"
    path.write_text(json.dumps(job))
    return path


def play(site: Ground, drill: Drill, hang_after: float) -> Outcome:
    """Run one drill to its end."""
    path = write_job(site, drill, hang_after)
    began = time.monotonic()
    argv = [sys.executable, "-m", "clusterctl", "launch", str(path)]
    try:
        errors = subprocess.run(
            argv, cwd=site.folder, env=site.env, capture_output=True, text=True, timeout=LIMIT
        ).stderr
    except subprocess.TimeoutExpired:
        errors = f"it did not end in {LIMIT:.0f} s"
    cause = max(
        (site.folder / "runs").glob("*/cause.json"), key=lambda found: found.stat().st_mtime, default=None
    )
    seconds = time.monotonic() - began
    if cause is None or cause.stat().st_mtime < time.time() - seconds:
        return Outcome(drill, None, f"no cause: {errors[-300:]}", seconds)
    value = json.loads(cause.read_text())
    return Outcome(drill, value["rank"], value["title"], seconds)


def play_slow(site: Ground, drill: Drill) -> Outcome:
    """Run one drill until a straggler is named, and where it is seen."""
    began = time.monotonic()
    run = site.launch(str(write_job(site, drill, 600.0)))

    def notes() -> list[Event]:
        texts = [event for event in run.event_lines() if "straggler" in str(event.facts.get("text"))]
        # A note of where it is seen follows each, except of a foreign program.
        named = sum(event.kind == "straggler" for event in texts)
        return texts if named and (drill.program == "foreign" or len(texts) == 2 * named) else []

    found = wait_for(notes, 150.0, 0.5) or list(notes())
    site.stop(run)
    held = " ".join(str(event.facts["text"]) for event in found if "holds it up" in str(event.facts["text"]))
    named = [event.facts["rank"] for event in found if event.kind == "straggler"]
    rank = next((each for each in named if f"rank {each} waits" not in held), None)
    title = "; ".join(str(event.facts["text"]) for event in found)
    return Outcome(drill, rank, title, time.monotonic() - began)


def table(outcomes: list[Outcome]) -> str:
    """Return the confusion table."""
    lines = [f"{'way':<12}{'runs':>5}{'rank':>6}{'frame':>7}  named instead"]
    for way in (*hang_ways.WAYS, SLOW):
        some = [outcome for outcome in outcomes if outcome.drill.way == way]
        wrong = Counter(
            "nobody" if each.rank is None else f"rank {each.rank}" for each in some if not each.has_rank
        )
        names = ", ".join(f"{name} {count}" for name, count in wrong.items())
        ranks, frames = (
            (sum(values) for values in zip(*((each.has_rank, each.has_frame) for each in some), strict=True))
            if some
            else (0, 0)
        )
        lines.append(f"{way:<12}{len(some):>5}{ranks:>6}{frames:>7}  {names}".rstrip())
    total = (len(outcomes), sum(each.has_rank for each in outcomes), sum(each.has_frame for each in outcomes))
    return "\n".join([*lines, f"{'all':<12}{total[0]:>5}{total[1]:>6}{total[2]:>7}"])


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--count", type=within(int, 1, 100_000), default=200)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--ways", nargs="+", choices=list(hang_ways.WAYS), default=list(hang_ways.WAYS))
    parser.add_argument("--hang-after", type=within(float, 1, 3600), default=8.0)
    parser.add_argument(
        "--limit",
        type=within(float, 1, 1e6),
        default=36_000.0,
        help="seconds after which no further run begins",
    )
    parser.add_argument("--slow", action="store_true", help="a rank is slow instead")
    options = parser.parse_args()
    ways = [SLOW] if options.slow else options.ways
    outcomes: list[Outcome] = []
    end = time.monotonic() + options.limit
    try:
        with ground(nodes=2, devices=2) as site:
            for drill in draw(options.count, options.seed, ways):
                if time.monotonic() < end:
                    slow = drill.way == SLOW
                    outcomes.append(play_slow(site, drill) if slow else play(site, drill, options.hang_after))
                    print(outcomes[-1].line(), flush=True)
    finally:
        print(table(outcomes))
    return 0 if outcomes and all(outcome.has_rank for outcome in outcomes) else 1


if __name__ == "__main__":
    sys.exit(main())
