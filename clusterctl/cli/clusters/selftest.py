"""`selftest`: try on the user's own nodes what a training needs, one command after the other, and write a report."""

from __future__ import annotations

import json
import os
import platform
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING

from clusterctl.cli import options, screen
from clusterctl.cli.declared import option
from clusterctl.environment import environment
from clusterctl.errors import ClusterctlError, FindingsError, UsageError, WorkFailed
from clusterctl.files import replace_file
from clusterctl.text import plural, size
from clusterctl.wire.contract import DEVICE_KIND, METRICS_FILE

if TYPE_CHECKING:
    from clusterctl.inventory.cluster import Node

# Steps of the trainings; the middle one is saved.
STEPS = 20
# By which the losses of two kinds of devices may differ in fp32.
LOSS_TOLERANCE = 1e-3
# Seconds for a command to end after Ctrl-C.
GRACE = 20.0
TOO_LATE = "it was ended: the time of the self-test (--seconds) is over"
# Lines of a failed command in the report.
MOST_LINES = 40
RANK_TABLE = "rank_table.json"
# Sends one request to the server on this machine's port, on a node; prints how many tokens came.
ASK = """
import json, sys, urllib.request
body = json.dumps({"prompt": "A class", "max_tokens": 8, "temperature": 0, "ignore_eos": True}).encode()
request = urllib.request.Request("http://127.0.0.1:%s/v1/completions" % sys.argv[1], body)
answer = json.load(urllib.request.urlopen(request, timeout=60))
print(answer["usage"]["completion_tokens"], "tokens:", repr(answer["choices"][0]["text"]))
"""
JOB = """\
# Written by `clusterctl selftest`.
name: {name}
data: ./data
collect: [checkpoints]
train:
  model: {{name: gpt-tiny, vocab: {vocabulary}}}
  data: {{prefix: "{{data}}/text", tokenizer: "{{data}}/tokenizer.json", split: "90,10,0"}}
  steps: {steps}
  micro_batch: 2
  global_batch: {batch}
  precision: {precision}
  optimizer: {{lr: 1e-3, min_lr: 1e-3, warmup_steps: 0, schedule: constant}}
  eval: {{batches: 0}}
  save: {{every: 10, keep: 2}}
"""


@dataclass(frozen=True)
class Check:
    """One check: the command that a user would type, and how it ended."""

    name: str
    command: str
    seconds: float
    problem: str
    """"" if it passed."""
    found: str


def selftest(
    directory: Path = option(
        "The folder of the report and the runs.",
        "--dir",
        default=Path("clusterctl-selftest"),
        metavar="FOLDER",
    ),
    seconds: float = option("End after so many seconds.", default=900.0, min=10.0, metavar="N"),
    *,
    selection: options.NodeOptions,
) -> None:
    """Check your own nodes and devices: doctor, the rank table of NPUs, a training and its resume, the same losses on
    a CPU, planned and measured memory and time, generated text, a request to a server. Writes report.txt and
    report.json, to read or to send: commands, versions, figures and errors."""
    from clusterctl.sandbox import demo as stages

    stages.ready()
    cluster = selection.chosen()
    ranks = sum(len(node.devices) for node in cluster.nodes)
    if not ranks:
        raise UsageError("no device is left to test", "name nodes with `devices`: -n NODES")
    directory = directory.resolve()
    try:
        directory.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UsageError(f"--dir {directory}: {error.strerror}", "name another folder") from None
    where = ["-c", str(Path(cluster.source).resolve()), "-n", ",".join(cluster.names)]
    tested = Selftest(directory, where, time.monotonic() + seconds, ranks, cluster.nodes[0])
    tested.run()
    failed = [check.name for check in tested.checks if check.problem]
    screen.write(f"report: {directory / 'report.txt'}\n")
    if failed:
        problem = f"{plural(len(failed), 'check')} failed: {', '.join(failed)}"
        raise FindingsError(problem, f"see {directory / 'report.txt'}")


class Selftest:
    """The checks in their order. One that fails does not stop the others, except those that need its result."""

    def __init__(self, folder: Path, where: Sequence[str], deadline: float, ranks: int, first: Node) -> None:
        self.checks: list[Check] = []
        self._first = first
        self._folder, self._where, self._deadline, self._ranks = folder, where, deadline, ranks
        # Of this test alone: an earlier one in the same folder must not be compared with.
        self._runs = folder / f"runs-{time.strftime('%Y%m%d-%H%M%S')}"
        self._environment = environment() | {"CLUSTERCTL_RUNS": str(self._runs)}

    def run(self) -> None:
        """Run all checks; the report is written after each."""
        from clusterctl.sandbox import demo as stages

        corpus, data = self._folder / "corpus.jsonl", self._folder / "data"
        stages.write_corpus(corpus)
        stages.train_tokenizer(corpus, data / "tokenizer.json")
        stages.build_data(corpus, data / "tokenizer.json", data / "text")
        whole, half = self._job("whole", STEPS), self._job("half", STEPS // 2)
        self._check("nodes and devices", ["doctor", *self._where])
        if self._first.kind == "npu":
            words = ["ranktable", "build", *self._where, "-o", RANK_TABLE]
            self._check(
                "rank table", words, lambda printed: self._own("ranktable", "check", RANK_TABLE).strip()
            )
        self._check("training in fp32", ["launch", whole, *self._where])
        self._check("half of it", ["launch", half, *self._where])
        words = ["resume", self._newest("half").name, "--set", f"train.steps={STEPS}", *self._where]
        self._check("the other half", words, self._same_bits)
        self._check("the same on a CPU", [], self._on_a_cpu)
        self._check("plan and measurement", ["plan", whole, *self._where, "--json"], self._planned)
        self._check("training in bf16", ["launch", self._job("mixed", STEPS, "bf16"), *self._where])
        words = ["generate", self._newest("whole").name, "--prompt", "A class", "--max-tokens", "16"]
        self._check("text", [*words, "--temperature", "0", *self._where[:2], "--on", self._where[-1]])
        words = ["serve", self._newest("whole").name, *self._where[:2], "--on", self._first.name]
        self._check("a server", [*words, "--detach", "--port", "0", "--json"], self._served)

    def _job(self, name: str, steps: int, precision: str = "fp32") -> str:
        """Write a job and return its file's name."""
        from clusterctl.sandbox.demo import VOCABULARY

        facts = {"vocabulary": VOCABULARY, "batch": 2 * self._ranks, "precision": precision, "steps": steps}
        replace_file(self._folder / f"{name}.yaml", JOB.format(name=f"selftest-{name}", **facts))
        return f"{name}.yaml"

    def _newest(self, name: str) -> Path:
        """Return the folder of a job's newest run; it does not exist if the run did not start."""
        found = sorted(self._runs.glob(f"selftest-{name}-*"))
        return found[-1] if found else self._runs / f"selftest-{name}"

    def _check(
        self, name: str, words: Sequence[str], judge: Callable[[str], str] = lambda printed: ""
    ) -> None:
        """Run a command of clusterctl, and let `judge` return what its output shows; then write the report."""
        command, began = " ".join(("clusterctl", *words)) if words else "", time.monotonic()
        screen.log(f"{name}: {command}" if command else name)
        found = problem = ""
        try:
            found = judge(self._own(*words) if words else "")
        except ClusterctlError as error:
            problem = error.message
        except (OSError, ValueError, LookupError) as error:
            # What a check before this one did not leave.
            problem = f"there is no result to compare: {error}"
        taken = round(time.monotonic() - began, 1)
        self.checks.append(Check(name, command, taken, problem, found))
        lines = problem.splitlines()
        summary = next((line for line in lines if line.startswith("error: ")), "".join(lines[-1:]))
        screen.log(f"{name}: {summary or found or 'passed'} ({taken:g} s)")
        self._write()

    def _own(self, *words: str) -> str:
        """Run a command of clusterctl."""
        return self._ran([sys.executable, "-m", "clusterctl", *words])

    def _ran(self, argv: Sequence[str], **more: str) -> str:
        """Run a program and return its output; raise WorkFailed with its last lines if it fails or the time is over."""
        left = self._deadline - time.monotonic()
        if left <= 0:
            raise WorkFailed(TOO_LATE)
        process = subprocess.Popen(
            argv,
            cwd=self._folder,
            env=self._environment | more,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            # Ctrl-C here ends the whole group below.
            start_new_session=True,
        )
        try:
            printed, logged = process.communicate(timeout=left)
        except BaseException as error:
            self._end(process, argv)
            if isinstance(error, subprocess.TimeoutExpired):
                raise WorkFailed(TOO_LATE) from None
            raise
        if process.returncode:
            lines = f"{printed}\n{logged}".strip().splitlines()
            raise WorkFailed("\n".join(lines[-MOST_LINES:]) or f"it ended with {process.returncode}")
        return printed

    def _end(self, process: subprocess.Popen[str], argv: Sequence[str]) -> None:
        """End a command and all its processes, and stop the run that it started."""
        for signum in (signal.SIGINT, signal.SIGKILL):
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signum)
            with suppress(subprocess.TimeoutExpired):
                process.communicate(timeout=GRACE)
                break
        if argv[3] in ("launch", "resume"):
            words = [*argv[:3], "stop", "last"]
            with suppress(subprocess.TimeoutExpired):
                subprocess.run(
                    words, cwd=self._folder, env=self._environment, capture_output=True, timeout=120
                )

    def _losses(self, folder: Path) -> dict[int, float]:
        """Return the loss of each step of a run's folder."""
        lines = (folder / METRICS_FILE).read_text().splitlines()
        records = [record for record in map(json.loads, lines) if record["event"] == "step"]
        return {int(record["step"]): float(record["loss"]) for record in records}

    def _same_bits(self, printed: str) -> str:
        whole, resumed = (self._losses(self._newest(name)) for name in ("whole", "half"))
        if whole != resumed or len(whole) != STEPS:
            step = next((step for step in whole if whole[step] != resumed.get(step)), STEPS)
            raise WorkFailed(f"at step {step} the resumed losses are no longer those of one piece", "")
        return f"the losses of {STEPS} steps are equal to the last bit"

    def _on_a_cpu(self, printed: str) -> str:
        """Train the same job on this machine's CPU and compare the losses."""
        from clusterctl.jobs import job as jobs

        train: dict[str, object] = jobs.load(self._folder / "whole.yaml").train or {}
        others = self._losses(self._newest("whole"))
        folder, text = self._runs / "cpu", json.dumps(train).replace("{data}", str(self._folder / "data"))
        replace_file(folder / "train.json", text)
        words = ["trainer", "train", str(folder / "train.json"), "--run-dir", str(folder)]
        self._ran([sys.executable, "-m", *words], **{DEVICE_KIND: "cpu", "OMP_NUM_THREADS": "1"})
        own = self._losses(folder)
        worst = max(abs(own[step] - others[step]) for step in own)
        if worst > LOSS_TOLERANCE or len(own) != len(others):
            raise WorkFailed(f"the losses differ by up to {worst:.2g}", "")
        return f"the losses differ by at most {worst:.1g}"

    def _planned(self, printed: str) -> str:
        """Return planned and measured memory and time; the model is too small to judge a plan by."""
        lines = (self._newest("whole") / METRICS_FILE).read_text().splitlines()
        records = [json.loads(line) for line in lines]
        highest = max(max(record["bytes"]) for record in records if record["event"] == "memory")
        taken = median(record["step_seconds"] for record in records if record["event"] == "step")
        summary = json.loads(printed)["summary"]
        planned, seconds = summary["memory_per_device_bytes"]["total"], summary["time"]["seconds"]
        return (
            f"memory of a device: planned {size(planned)}, measured {size(highest)} ({highest / planned:.2f} of it); "
            f"a step: planned {1000 * seconds:.1f} ms, measured {1000 * taken:.1f} ms ({taken / seconds:.1f} times)"
        )

    def _served(self, printed: str) -> str:
        """Send one request to the server from its own node, and stop it."""
        run = json.loads(printed)["run"]
        try:
            while not (
                port := re.search(r"serving \S+ at http://127\.0\.0\.1:(\d+)", self._own("logs", "show", run))
            ):
                if json.loads(self._own("status", run, "--json"))["phase"] != "running":
                    raise WorkFailed(self._own("logs", "show", run).strip()[-MOST_LINES * 100 :])
            argv = [self._first.python, "-c", ASK, port[1]]
            printed = self._own("exec", *self._where[:2], self._first.name, "--", *argv)
        finally:
            self._own("stop", run)
        return f"it answered {printed.strip().partition(': ')[2]}"

    def _write(self) -> None:
        """Write the report."""
        packages = ("clusterctl", "torch", "torch_npu", "triton", "numpy")
        here = {"python": platform.python_version(), "machine": platform.platform(), "ranks": self._ranks}
        here |= {name: version(name) for name in packages if find_spec(name) is not None}
        replace_file(
            self._folder / "report.json",
            json.dumps({"here": here, "checks": [asdict(check) for check in self.checks]}, indent=1),
        )
        lines = [", ".join(f"{name} {value}" for name, value in here.items())]
        for check in self.checks:
            lines += ["", f"{'FAILED' if check.problem else 'passed'}  {check.name}  ({check.seconds:g} s)"]
            lines += [
                f"    {text}" for text in (check.command, check.found, *check.problem.splitlines()) if text
            ]
        replace_file(self._folder / "report.txt", "\n".join(lines) + "\n")
