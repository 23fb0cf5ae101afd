"""Sandbox nodes, a small corpus and a small GPT job, for all measurements of runs.

The nodes share this machine's kernel, clock and disk, so the files that an active run writes on a node are read
directly.
"""

from __future__ import annotations

import contextlib
import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from bench import field
from bench.field import run, sandbox, user_environment
from clusterctl.jobs.run_folder import RunDir
from clusterctl.sandbox import demo
from clusterctl.sandbox.cluster import Sandbox

# Seconds to wait for any condition.
LIMIT = 180.0

JOB = """\
name: bench
data: {data}
grace: 10
restart: {{max: {restarts}}}
train:
  model: {{name: gpt-tiny, vocab: 1024}}
  data: {{prefix: "{{data}}/text", tokenizer: "{{data}}/tokenizer.json", split: "90,10,0"}}
  steps: 100000
  micro_batch: 1
  precision: fp32
  eval: {{batches: 0}}
  save: {{every: {save}, keep: 2}}
"""


class TooLate(SystemExit):
    """A condition was not met in time; ends the benchmark."""


class Ground:
    """Running nodes, and the launcher as users call it."""

    def __init__(self, made: Sandbox, folder: Path) -> None:
        self.made, self.folder = made, folder
        self.env = user_environment(CLUSTERCTL_CLUSTER=str(made.cluster_file), NO_COLOR="1")

    @property
    def data(self) -> Path:
        """Return the folder with tokens and tokenizer, which is made at the first call."""
        data, corpus = self.folder / "data", self.folder / "corpus.jsonl"
        if not corpus.exists():
            demo.write_corpus(corpus)
            demo.train_tokenizer(corpus, data / "tokenizer.json")
            demo.build_data(corpus, data / "tokenizer.json", data / "text")
        return data

    def job(self, restarts: int, save: int) -> Path:
        """Write a job that trains until it is stopped, with a checkpoint every `save` steps; return its file."""
        path = self.folder / "job.yaml"
        path.write_text(JOB.format(data=self.data, restarts=restarts, save=save))
        return path

    def clusterctl(self, *arguments: str) -> str:
        """Run the launcher and return its output; a failure ends the benchmark."""
        argv = [sys.executable, "-m", "clusterctl", *arguments]
        return run(argv, cwd=self.folder, env=self.env, timeout=LIMIT).output

    def launch(self, *arguments: str) -> RunDir:
        """Start a run that continues in the background."""
        return RunDir(self.folder / "runs" / self.clusterctl("launch", "--detach", *arguments).strip())

    def stop(self, run: RunDir) -> None:
        self.clusterctl("stop", run.run_id)


@contextlib.contextmanager
def ground(nodes: int = 2, devices: int = 2) -> Iterator[Ground]:
    """Yield running nodes; when the block ends, they and all runs on them are stopped."""
    field.end_by_signal()
    with sandbox("runs", nodes, devices) as (made, folder):
        site = Ground(made, folder)
        try:
            yield site
        finally:
            for run in (folder / "runs").glob("*/run.json"):
                if RunDir(run.parent).is_watched():
                    with contextlib.suppress(SystemExit):
                        site.stop(RunDir(run.parent))


def on_node(run: RunDir, node: str) -> Path:
    """Return the folder of a run on a node."""
    return Path(run.read_record().run_dirs[node])


def json_lines(path: Path) -> list[dict[str, Any]]:
    """Return the complete lines of a file that may be growing or missing."""
    try:
        data = path.read_bytes()
    except FileNotFoundError:
        return []
    return [json.loads(line) for line in data.split(b"\n")[:-1]]


def records(attempt: Path) -> list[dict[str, Any]]:
    """Return what the supervisor recorded about its ranks in an attempt's folder on a node."""
    return [json.loads(path.read_text()) for path in sorted(attempt.glob("ranks/*.json"))]


def wait_for(awaited: str, truth: Callable[[], Any], limit: float = LIMIT) -> Any:
    """Wait for the first true answer and return it; raise TooLate if there is none."""
    if not (answer := field.wait_for(truth, limit)):
        raise TooLate(f"{awaited}: not within {limit:g} s")
    return answer
