"""Batch systems that tell a job the names of its hosts: Grid Engine, PBS, LSF.

The job's part says which devices each host has. The controller on the first host reaches the others by the batch system
or over SSH; this machine reaches them over SSH, and `stop` asks the controller by a file of the run's folder.
"""

from __future__ import annotations

import os
import shlex
import shutil
import socket
import subprocess
import sys
import time
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from clusterctl.backends.backend import Ending, job_of
from clusterctl.backends.queue import Queue, Submission, imagined_nodes
from clusterctl.backends.steps import Starter, StepTransport
from clusterctl.environment import environment
from clusterctl.errors import UsageError, WorkFailed
from clusterctl.inventory.cluster import Cluster, Node
from clusterctl.jobs.parts.platforms import HostOptions, minutes_of
from clusterctl.jobs.phase import Phase
from clusterctl.jobs.run_folder import RunDir
from clusterctl.runs.stop import request_stop
from clusterctl.transport.fanout import Transport
from clusterctl.wire import contract

# Seconds for an answer of a batch system, which may be busy.
ANSWER_LIMIT = 60.0
# Seconds beyond the job's grace in which a controller ends its run.
PATIENCE = 60.0


class HostsQueue(Queue):
    """What Grid Engine, PBS and LSF share."""

    records_all = True
    deletes = "qdel"
    """The program that deletes a job."""
    starter: Starter | None = None
    """How tasks are started on the hosts of a job; None: over SSH."""

    @abstractmethod
    def hosts(self, variables: Mapping[str, str]) -> list[str]:
        """Return the hosts of the job around this process in order, each once."""

    @abstractmethod
    def job_here(self, variables: Mapping[str, str]) -> str:
        """Return the number of the job around this process; "" outside of a job."""

    def imagined(self, options: HostOptions) -> Cluster:
        return imagined_nodes(self.name, options.nodes, options.kind, options.devices)

    def preparation(self, options: Any) -> list[str]:
        """Return the shell lines that tell the controller the devices of each host, and where the job was submitted."""
        return [
            f"cd {shlex.quote(os.getcwd())}",
            f"export {contract.DEVICE_KIND}={options.kind} {contract.POD_DEVICES}={options.devices}",
        ]

    def saves_after(self, options: HostOptions) -> float | None:
        early = seconds(options.time) - options.signal if options.time and options.signal else 0
        return float(early) if early > 0 else None

    def allocated(self, variables: Mapping[str, str], kind: str) -> Cluster:
        job = self.job_here(variables)
        count = variables.get(contract.POD_DEVICES, "")
        devices = tuple(range(int(count) if count.isdecimal() else 1))
        nodes = [
            Node(
                name=host.partition(".")[0],
                host=host,
                address=host,
                server_id=host,
                kind=variables.get(contract.DEVICE_KIND) or kind,
                devices=devices,
                allocation=f"{self.name}:{job}",
                # The disk of homes and programs is the same on all hosts, so each has a folder of its own.
                python=sys.executable,
                workdir=f"~/.clusterctl/nodes/{host.partition('.')[0]}",
            )
            for host in self.hosts(variables)
        ]
        return Cluster(f"{self.name}-{job}", tuple(nodes), source=f"the hosts of {self.title} job {job}")

    def is_here(self, node: Node) -> bool:
        own = socket.gethostname().partition(".")[0]
        return node.host.partition(".")[0] == own and self.job_here(environment()) == job_of(node)

    def transport(self, nodes: Sequence[Node]) -> Transport | None:
        in_job = bool(nodes) and self.job_here(environment()) == job_of(nodes[0])
        return StepTransport(self.starter, nodes) if self.starter and in_job else None

    def ending(self, run: RunDir, grace: float | None) -> Ending | None:
        """Return how a run is ended: a running one by its controller, which is on a host of the job."""
        if run.phase() is Phase.PENDING or run.phase().is_final:
            return super().ending(run, grace)
        submitted = self.submission_of(run)
        if submitted is None:
            return None

        def end() -> tuple[str, None]:
            if problem := request_stop(run, grace):
                raise WorkFailed(problem)
            limit = run.read_record().job.grace if grace is None else grace
            deadline = time.monotonic() + limit + PATIENCE
            while not run.phase().is_final:
                if time.monotonic() > deadline:
                    self.cancel(submitted.job)
                    return (
                        f"its controller did not answer, so {self.title} job {submitted.job} was deleted",
                        None,
                    )
                time.sleep(0.5)
            return f"its controller in {self.title} job {submitted.job} has ended it", None

        return Ending(f"ask the controller in {self.title} job {submitted.job} to stop the run", end)

    def cancel(self, job: int) -> None:
        self.ask(self.deletes, str(job))

    def requeue(self, run: RunDir, job: str) -> int:
        """Submit the batch file again: only an operator may put a job of these back."""
        number = self.submit(run.batch_file.read_text(encoding="utf-8"))
        self.note_submission(run, Submission(number, time.time()))
        return 0

    def ask_for(self, kind: str) -> str:
        return f"kind: {kind}, devices, and resources"

    def ask(self, *words: str, text: str | None = None) -> str:
        """Return what one of the batch system's programs prints; raise WorkFailed with its message if it fails."""
        if shutil.which(words[0]) is None:
            raise UsageError(
                f"there is no `{words[0]}` here", f"use a login node of the {self.title} cluster"
            )
        try:
            done = subprocess.run(
                words, input=text, capture_output=True, text=True, check=False, timeout=ANSWER_LIMIT
            )
        except subprocess.TimeoutExpired:
            raise WorkFailed(f"{words[0]}: no answer within {ANSWER_LIMIT:g} s") from None
        if done.returncode:
            answer = " ".join((done.stderr or done.stdout).split()) or f"exit code {done.returncode}"
            raise WorkFailed(f"{words[0]}: {answer}")
        return done.stdout


def lines_of(variable: str, file: str) -> list[str]:
    """Return the lines of a file that a variable of the job names; raise a UsageError if it cannot be read."""
    try:
        return Path(file).read_text(encoding="utf-8").splitlines()
    except OSError as problem:
        raise UsageError(f"${variable}: {file}: {problem.strerror}") from None


def chosen(*options: tuple[str, str]) -> list[str]:
    """Return the options with a value, one per line."""
    return [f"{option} {value}" for option, value in options if value]


def seconds(time_limit: str) -> int:
    """Return the seconds of a job's time limit."""
    return round(minutes_of(time_limit) * 60)


def clock(time_limit: str) -> str:
    """Return a time limit as hours:minutes:seconds."""
    minutes, rest = divmod(seconds(time_limit), 60)
    return f"{minutes // 60:02}:{minutes % 60:02}:{rest:02}"


def job_name(name: str, most: int) -> str:
    """Return the name of a job as these batch systems take it: it begins with a letter."""
    return (name if name[:1].isalpha() else f"j{name}")[:most]
