"""A login node of a sandbox's Slurm: clusterctl and Slurm's programs, in a project on the disk of all nodes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from clusterctl.sandbox import cluster, queue
from clusterctl.sandbox.layout import Layout

ROOT = Path(__file__).resolve().parents[2]


class Login:
    """Runs commands where Slurm's programs work; HOME and the project are folders that the nodes see too."""

    def __init__(self, made: cluster.Sandbox) -> None:
        self.made = made
        self.folder = made.directory / "shared"
        (self.folder / "home").mkdir(parents=True, exist_ok=True)
        # The inventory of the sandbox is above this folder, so a project of its own begins here.
        (self.folder / "clusterctl.yaml").write_text("runs: runs\n")
        # PYTHONDONTWRITEBYTECODE would let every process compile its modules.
        named = ("CLUSTERCTL_", "SLURM_", "PYTHON")
        kept = {name: text for name, text in os.environ.items() if not name.startswith(named)}
        own = {"HOME": str(self.folder / "home"), "PYTHONPATH": str(ROOT), "NO_COLOR": "1", "COLUMNS": "200"}
        self.env = {**kept, **own, "C": f"{sys.executable} -m clusterctl"}

    def __call__(self, *words: str, timeout: float = 100, **env: str) -> subprocess.CompletedProcess[str]:
        """Run a command."""
        return subprocess.run(
            [str(queue.login_script(self.made.layout)), *words],
            capture_output=True,
            text=True,
            timeout=timeout,
            cwd=self.folder,
            env={**self.env, **env},
            stdin=subprocess.DEVNULL,
        )

    def clusterctl(self, *words: str, timeout: float = 100, **env: str) -> subprocess.CompletedProcess[str]:
        return self(sys.executable, "-m", "clusterctl", *words, timeout=timeout, **env)

    def inside(self, *lines: str, nodes: int = 2) -> subprocess.CompletedProcess[str]:
        """Run shell lines inside an allocation of all devices, where $C is clusterctl."""
        script = "\n".join(["set -e", *lines])
        return self("salloc", "--quiet", f"-N{nodes}", "--gres=npu:8", "bash", "-c", script)

    def submit(self, text: str, *more: str) -> tuple[str, int]:
        """Submit a job; return its run and its number in Slurm."""
        (self.folder / "job.yaml").write_text(text)
        done = self.clusterctl("submit", "slurm", "job.yaml", "--json", *more)
        assert done.returncode == 0, done.stdout + done.stderr
        found = json.loads(done.stdout)
        return found["run"], found["job"]

    def state(self, run: str) -> dict[str, Any]:
        """Return what `status` says of a run."""
        done = self.clusterctl("status", run, "--json")
        assert done.returncode == 0, done.stdout + done.stderr
        found: dict[str, Any] = json.loads(done.stdout)
        return found

    def wait(self, run: str, good: Callable[[Mapping[str, Any]], bool], seconds: float) -> dict[str, Any]:
        """Wait until a run's state is good, and return it."""
        deadline = time.monotonic() + seconds
        while not good(state := self.state(run)):
            log = self.folder / "runs" / run / "slurm.log"
            text = log.read_text() if log.exists() else ""
            assert time.monotonic() < deadline, f"{state}\n{text}"
            time.sleep(0.5)
        return state

    def ended(self, run: str, seconds: float) -> dict[str, Any]:
        final = ("finished", "failed", "stopped", "lost")
        return self.wait(run, lambda state: state["phase"] in final, seconds)

    def finished(self, run: str, seconds: float) -> None:
        """Wait until a run has ended, and require that it finished."""
        state = self.ended(run, seconds)
        log = (self.folder / "runs" / run / "slurm.log").read_text()
        assert state["phase"] == "finished", f"{state['phase']}: {state['verdict']}\n{log}"

    def steps(self, run: str) -> list[dict[str, Any]]:
        """Return the steps of a training in the order in which they were written."""
        file = self.folder / "runs" / run / "metrics.jsonl"
        lines = file.read_text().splitlines() if file.exists() else []
        return [step for step in map(json.loads, lines) if step.get("event") == "step"]

    def wait_for_steps(self, run: str, count: int, seconds: float) -> None:
        deadline = time.monotonic() + seconds
        while len(self.steps(run)) < count:
            assert time.monotonic() < deadline, self.state(run)
            time.sleep(0.2)

    def start_now(self, job: int, seconds: float = 20) -> None:
        """Let a requeued job start as soon as it has left its nodes; Slurm makes it wait for two minutes."""
        deadline = time.monotonic() + seconds
        while self("squeue", "-h", "-j", str(job), "-o", "%T").stdout.strip() != "PENDING":
            assert time.monotonic() < deadline
            time.sleep(0.2)
        # A node refuses a job that starts in the second in which its last start ended: "already killed".
        time.sleep(1.1)
        assert self("scontrol", "update", f"JobId={job}", "StartTime=now").returncode == 0


# Job memory is a cgroup's limit, and the partition `urgent` takes the nodes of other jobs, which wait again.
LIMITED = (
    "TaskPlugin=task/cgroup",
    "SelectTypeParameters=CR_Core_Memory",
    "DefMemPerNode=900",
    "PreemptType=preempt/partition_prio",
    "PreemptMode=REQUEUE",
    "PartitionName=urgent Nodes=ALL PriorityTier=10 MaxTime=UNLIMITED State=UP",
)
CGROUPS = "CgroupPlugin=cgroup/v1\nCgroupMountpoint=/sys/fs/cgroup\nConstrainRAMSpace=yes\n"


@contextmanager
def login_of(folder: Path, nodes: int, config: Sequence[str] = ()) -> Iterator[Login]:
    """Yield the login node of a sandbox with a Slurm, and take the sandbox down.

    `config` replaces lines of slurm.conf.
    """
    keys = tuple(f"{line.partition('=')[0]}=" for line in config)
    lines = (*(line for line in queue.FIXED if not line.startswith(keys)), *config)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(queue, "FIXED", lines)
        if config:
            patch.setattr(queue, "_start_munged", _with_cgroups(queue._start_munged))
        made = cluster.up(folder, nodes=nodes, devices=8, with_queue=True)
    try:
        yield Login(made)
    finally:
        made.down()


def _with_cgroups(start: Callable[[Layout], None]) -> Callable[[Layout], None]:
    """Return the first step of Slurm's start that also writes cgroup.conf next to slurm.conf."""

    def started(layout: Layout) -> None:
        (queue.folder(layout) / "cgroup.conf").write_text(CGROUPS)
        start(layout)

    return started
