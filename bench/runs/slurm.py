"""Measure commands inside a Slurm allocation, and the way of a job from its submission to its first line.

    python -m bench.runs.slurm [--rounds 7]

A real Slurm over four nodes in network namespaces (root; packages slurm-wlm and munge). Medians of whole commands,
which take turns.
"""

from __future__ import annotations

import random
import sys
import time
from collections.abc import Callable, Sequence

from bench.field import in_turn, read_options, run, sandbox, spread, timed, user_environment, wait_for
from clusterctl.sandbox import cluster, namespaces, queue

NODES = 4
OURS = [sys.executable, "-m", "clusterctl"]
SRUN = ["srun", "--overlap", f"-N{NODES}", "--ntasks-per-node=1", "hostname"]
# Opens the agents of all nodes: by one step, or by one for each.
OPEN = """
import sys, time
from clusterctl.backends.slurm.allocation import described, named
from clusterctl.backends.slurm.programs import Srun
from clusterctl.backends.steps import StepTransport
from clusterctl.environment import environment
from clusterctl.transport.fanout import Connections
nodes = described(named(environment(), "cpu")).nodes
began = time.perf_counter()
with Connections(StepTransport(Srun(), nodes if sys.argv[1] == "one" else ())) as connections:
    assert all(outcome.ok for outcome in connections.on_each(nodes, lambda node, link: link.hello()))
    print(time.perf_counter() - began)
"""
JOB = """\
command: [/bin/echo, the first line]
slurm: {nodes: 2, time: 10, extra: [--exclusive], setup: [date +%s.%N > began]}
"""
# Seconds of rest before each submission. Slurm delays a batch job if it scheduled in the last 3 s, and the end of the
# job before makes it schedule up to 4 s later.
REST = 8.0
# Slurm starts batch jobs once a second; each submission falls at another point of that second.
PERIOD = 1.0
# Seconds until a first line counts as never come.
PATIENCE = 60.0


class Place:
    """A project on the disk of all nodes, and a login node."""

    def __init__(self, made: cluster.Sandbox) -> None:
        self.folder = made.directory / "shared"
        (self.folder / "home").mkdir(parents=True)
        (self.folder / "clusterctl.yaml").write_text("runs: runs\n")
        self.script = str(queue.login_script(made.layout))
        self.env = user_environment("SLURM_", HOME=str(self.folder / "home"))

    def __call__(self, words: Sequence[str]) -> str:
        return run([self.script, *words], cwd=self.folder, env=self.env).output

    def allocation(self, words: Sequence[str], job: str) -> str:
        """Run a command as inside the allocation of a job."""
        variables = f"SLURM_JOB_ID={job} SLURM_JOBID={job} SLURM_JOB_NODELIST=node[1-{NODES}]"
        return self(["env", *variables.split(), *words])


def main() -> int:
    rounds = read_options(__doc__, rounds=7).rounds
    if missing := queue.why_not() or namespaces.why_not():
        sys.exit(missing)
    with sandbox("slurm", NODES, 8, with_queue=True) as (made, _):
        place = Place(made)
        inside(place, rounds)
        submitted(place, rounds)
    return 0


def inside(place: Place, rounds: int) -> None:
    """Measure commands on all nodes of an allocation."""
    job = place(["sbatch", "--parsable", f"-N{NODES}", "--wrap=sleep 10000"]).strip()
    _wait(lambda: place(["squeue", "-h", "-j", job, "-o", "%T"]).strip() == "RUNNING")
    commands = {
        f"srun -N{NODES} hostname": SRUN,
        f"exec all -- hostname, {NODES} nodes": [*OURS, "exec", "all", "--", "hostname"],
        f"exec all --persist -- hostname, {NODES} nodes": [
            *(*OURS, "exec", "all", "--persist", "5m", "--", "hostname")
        ],
        "clusterctl nodes (contacts none)": [*OURS, "nodes"],
    }
    opened = {"open all agents, one step": "one", "open all agents, a step for each": "each"}
    ways: dict[str, Callable[[], float]] = {
        name: lambda words=words: timed(lambda: place.allocation(words, job))
        for name, words in commands.items()
    }
    for name, how in opened.items():
        ways[name] = lambda how=how: float(place.allocation([sys.executable, "-c", OPEN, how], job))
    show(ways, rounds)
    place.allocation([*OURS, "keeper", "stop"], job)
    place(["scancel", job])
    _wait(lambda: not place(["squeue", "-h"]).strip())


def submitted(place: Place, rounds: int) -> None:
    """Measure the seconds from typing a command to the first line of a program on two nodes."""
    (place.folder / "job.yaml").write_text(JOB)
    srun = ["srun", "-N2", "--exclusive", "/bin/echo", "the first line"]
    queued: list[float] = []
    ways: dict[str, Callable[[], float]] = {
        "srun -N2, to its first line": lambda: first_line(place, lambda: place(srun)),
        "sbatch of srun -N2, to its first line": lambda: batch_line(place),
        "submit slurm, to its first line": lambda: submit_line(place, queued, ()),
        "submit slurm --no-checks, to its first line": lambda: submit_line(place, queued, ("--no-checks",)),
    }
    show(ways, rounds)
    show_times("of both: until Slurm starts the batch file", queued[2:])


def first_line(place: Place, work: Callable[[], str]) -> float:
    _settle(place)
    return timed(work)


def batch_line(place: Place) -> float:
    _settle(place)
    out = place.folder / "batch.out"
    out.unlink(missing_ok=True)
    began = time.perf_counter()
    place(["sbatch", "-N2", "--exclusive", f"--output={out}", "--wrap=srun /bin/echo the first line"])
    _wait(lambda: out.exists() and "the first line" in out.read_text())
    return time.perf_counter() - began


def submit_line(place: Place, queued: list[float], more: Sequence[str]) -> float:
    """Submit the job; return when its first line has reached the folder of the run.

    The seconds until its batch file starts are added to `queued`.
    """
    _settle(place)
    typed, began = time.time(), time.perf_counter()
    submitted = place([*OURS, "submit", "slurm", "job.yaml", *more]).strip()
    folder = place.folder / "runs" / submitted
    _wait(
        lambda: any("the first line" in path.read_text() for path in folder.glob("attempts/1/logs/*/*.out"))
    )
    seconds = time.perf_counter() - began
    queued.append(float((place.folder / "began").read_text()) - typed)
    return seconds


def _settle(place: Place) -> None:
    """Wait until all nodes are idle, and Slurm has nothing left to schedule."""
    _wait(lambda: set(place(["sinfo", "-h", "-N", "-o", "%T"]).split()) == {"idle"})
    time.sleep(REST + random.uniform(0, PERIOD))


def _wait(ready: Callable[[], bool]) -> None:
    if not wait_for(ready, PATIENCE):
        sys.exit("it did not happen within a minute")


def show(ways: dict[str, Callable[[], float]], rounds: int) -> None:
    """Measure the ways in turn, after one round that does not count; print the median and the range of each."""
    for name, found in in_turn(ways, rounds, warm=1).items():
        show_times(name, found)


def show_times(name: str, found: Sequence[float]) -> None:
    print(f"{name:46} {spread(found, '6.3f')} s", flush=True)


if __name__ == "__main__":
    sys.exit(main())
