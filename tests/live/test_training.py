"""Trainings over real SSH nodes: both engines, a rank that dies, a resume that changes nothing."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from clusterctl.sandbox import demo
from tests.live.conftest import Shell
from tests.live.test_commands import marked

pytestmark = [pytest.mark.live, pytest.mark.timeout(300)]

JOB = """
name: small
data: {data}
grace: 20
collect: [checkpoints, profile]
train:
  model: {{layers: 1, hidden: 32, heads: 2, sequence: 32, vocab: 512}}
  data: {{prefix: "{{data}}/text_document", tokenizer: "{{data}}/tokenizer.json", split: "90,10,0"}}
  steps: {steps}
  micro_batch: 2
  global_batch: 8
  precision: fp32
  optimizer: {{lr: 1e-3, warmup_steps: 2}}
  eval: {{every: 0, batches: 2}}
  save: {{every: 4, keep: 3}}
"""


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("data")
    corpus = folder / "corpus.jsonl"
    demo.write_corpus(corpus)
    demo.train_tokenizer(corpus, folder / "d" / "tokenizer.json", 512)
    demo.build_data(corpus, folder / "d" / "tokenizer.json", folder / "d" / "text_document")
    return folder / "d"


def job_file(shell: Shell, data: Path, steps: int = 12, env: str = "") -> str:
    text = JOB.format(data=data, steps=steps) + (f"env: {{{env}}}\n" if env else "")
    (shell.folder / "job.yaml").write_text(text)
    return "job.yaml"


def last_run(shell: Shell) -> Path:
    return Path(json.loads(shell("runs", "--json").stdout)[0]["folder"])


def losses(run: Path) -> dict[int, float]:
    """The last loss of each step: after a resume some steps are there twice."""
    kept = run / "metrics.jsonl"
    metrics = map(json.loads, kept.read_text().split("\n")[:-1]) if kept.exists() else ()
    return {metric["step"]: metric["loss"] for metric in metrics if metric["event"] == "step"}


@pytest.mark.parametrize("engine", ["torch", "deepspeed"])
def test_a_killed_rank_is_the_cause_and_the_resumed_run_ends_like_an_uninterrupted_one(
    shell: Shell, data: Path, engine: str
) -> None:
    options = ["--set", f"train.engine={engine}", "--set", "train.zero=1"]
    whole = shell("launch", job_file(shell, data), *options, timeout=200)
    assert whole.returncode == 0, whole.stderr
    wanted = losses(last_run(shell))
    assert list(wanted) == list(range(1, 13))

    # The fault strikes in the first attempt only: at step 7, after the checkpoint of step 4.
    faulty = job_file(shell, data, env="CLUSTERCTL_FAULT: rank3:step7:kill9")
    broken = shell("launch", faulty, *options, timeout=200)
    assert broken.returncode == 5, broken.stderr
    assert "root cause: rank 3 on node2 (device 1) killed (SIGKILL)" in broken.stderr
    run = last_run(shell)
    assert not marked(run.name)
    record = json.loads((run / "run.json").read_text())
    record["job"]["env"] = {}
    (run / "run.json").write_text(json.dumps(record))
    resumed = shell("resume", run.name, timeout=200)
    assert resumed.returncode == 0, resumed.stderr
    assert "from step 4" in resumed.stderr
    # What the first attempt wrote is not shown again.
    assert resumed.stderr.count(" parameters, ") == 1
    assert losses(run) == wanted
    assert not marked(run.name)
    assert shell("checkpoint", "verify", run.name).returncode == 0


def test_stop_lets_the_trainer_save_and_finish_its_step(shell: Shell, data: Path) -> None:
    name = job_file(shell, data, steps=100000)
    traced = ["--set", "train.profile.repeat=1", "--set", "train.profile.ranks=[0, 3]"]
    started = shell("launch", "--detach", name, "--set", "train.save.every=0", *traced)
    assert started.returncode == 0, started.stderr
    run = started.stdout.strip()
    deadline = time.monotonic() + 60
    # The traced ones are over.
    while len(losses(shell.folder / "runs" / run)) < 6:
        assert time.monotonic() < deadline
        time.sleep(0.5)
    stopped = shell("stop", run)
    assert stopped.returncode == 0, stopped.stderr
    assert not marked(run)
    logs = shell("logs", "show", run).stdout
    events = [
        json.loads(line) for line in (shell.folder / "runs" / run / "metrics.jsonl").read_text().splitlines()
    ]
    saved = [event["step"] for event in events if event["event"] == "checkpoint"]
    steps = [event["step"] for event in events if event["event"] == "step"]
    assert saved[-1] == steps[-1], logs
    traces = (shell.folder / "runs" / run / "profile").glob("*/*.json.gz")
    assert sorted(trace.name.split(".")[0] for trace in traces) == ["rank-0", "rank-3"]


def test_a_bad_configuration_of_the_trainer_starts_nothing(shell: Shell, data: Path) -> None:
    done = shell("launch", job_file(shell, data), "--set", "train.global_batch=7")
    assert done.returncode == 2
    assert "global_batch" in done.stderr
    assert not (shell.folder / "runs").exists()


def test_a_training_outlives_a_launcher_that_is_killed(shell: Shell, data: Path) -> None:
    argv = [sys.executable, "-m", "clusterctl", "launch", job_file(shell, data, steps=300)]
    process = subprocess.Popen(argv, cwd=shell.folder, env=shell.env, stderr=subprocess.PIPE, text=True)
    assert process.stderr is not None
    while "start " not in process.stderr.readline():
        assert process.poll() is None
    process.send_signal(signal.SIGKILL)
    process.communicate()
    run = last_run(shell)
    assert marked(run.name)
    followed = shell("attach", run.name, timeout=200)
    assert followed.returncode == 0, followed.stderr
    assert list(losses(run)) == list(range(1, 301))
    assert not marked(run.name)
