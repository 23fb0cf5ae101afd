"""A toy batch system, with everything that clusterctl needs to know about a new one. Each job starts here immediately.

`register` puts it next to the real ones, as a folder of `clusterctl/backends/` and a row of `KNOWN` would.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar

from clusterctl.backends import backend as backends
from clusterctl.backends.queue import Entry, Queue, imagined_nodes
from clusterctl.inventory.cluster import Cluster, Node
from clusterctl.jobs.parts.platforms import QueueOptions
from clusterctl.jobs.run_folder import RunDir

# The folder with a file for each job that has ended: its exit code.
FOLDER = "TOY_FOLDER"


class Toy(Queue):
    """Runs that a toy job starts."""

    name = "toy"
    part = QueueOptions
    waiting = ("waiting",)
    active = ("active",)
    ends: ClassVar[Mapping[str, str]] = {"failed": "the batch file of the toy job failed"}
    choose_nodes = "there is one node"
    cancelled = "cancelled"
    failed = "failed"

    def imagined(self, options: Any) -> Cluster:
        return imagined_nodes(self.name, options.nodes, "cpu", 2)

    def header(self, name: str, options: Any, log: str) -> list[str]:
        return [f"exec >> '{log}' 2>&1", f"export TOY_NAME={name}"]

    def submit(self, batch_file: str) -> int:
        shell = 'export TOY_JOB=$$; sh -s; echo $? > "$TOY_FOLDER/$$"'
        job = subprocess.Popen(
            ["sh", "-c", shell],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        assert job.stdin is not None
        with job.stdin as stdin:
            stdin.write(batch_file.encode())
        return job.pid

    def entries(self) -> Mapping[int, Entry]:
        return {}

    def ended(self, job: int) -> Entry:
        with contextlib.suppress(OSError, ValueError):
            code = int((Path(os.environ[FOLDER]) / str(job)).read_text())
            return Entry("failed" if code else "done")
        return Entry("active")

    def cancel(self, job: int) -> None:
        os.killpg(job, signal.SIGTERM)

    def requeue(self, run: RunDir, job: str) -> int:
        return 0

    def allocated(self, variables: Mapping[str, str], kind: str) -> Cluster:
        job = f"{self.name}:{variables['TOY_JOB']}"
        node = Node(
            "toy1",
            host="local",
            address="127.0.0.1",
            kind=kind,
            devices=(0, 1),
            python=sys.executable,
            workdir=os.environ[FOLDER] + "/node",
            allocation=job,
        )
        return Cluster("toy", (node,), source="the toy job")


BACKEND = Toy()


def register() -> None:
    """Make the batch system known to this process."""
    row = backends.Known("Toy", "toy.json", ("TOY_JOB",), example="grace=5")
    backends.KNOWN["toy"] = backends.QUEUES["toy"] = row
    sys.modules["clusterctl.backends.toy.backend"] = sys.modules[__name__]
