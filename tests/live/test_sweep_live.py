"""Sweeps on real nodes: one after another, side by side, interrupted, resumed."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.live.conftest import Shell

pytestmark = pytest.mark.live

PROGRAM = """
import os, sys, time
from pathlib import Path
rate = float(os.environ["RATE"])
if rate > 0.5 and not Path(os.environ["MARK"]).exists():
    sys.exit("ValueError: the rate is too large")
for step in range(1, 4):
    print(f"step {step}/3 loss {4 * (1 - rate) ** step:.4f}", flush=True)
    time.sleep(float(os.environ.get("PAUSE", "0.02")))
"""
JOB = """
command: [python, p.py]
code: code
nodes: node1
env: {RATE: 0.1, MARK: MARKER}
progress: 'step (?P<step>\\d+)/(?P<steps>\\d+) loss (?P<loss>\\S+)'
"""


@pytest.fixture
def job(shell: Shell) -> Path:
    (shell.folder / "code").mkdir()
    (shell.folder / "code" / "p.py").write_text(PROGRAM)
    path = shell.folder / "job.yaml"
    path.write_text(JOB.replace("MARKER", str(shell.folder / "mark")))
    return path


def last_json(text: str) -> dict[str, object]:
    value = json.loads(text.strip().splitlines()[-1])
    assert isinstance(value, dict)
    return value


def phases(answer: dict[str, object]) -> list[str]:
    variants = answer["variants"]
    assert isinstance(variants, list)
    return [variant["phase"] for variant in variants]


def test_a_failed_variant_is_reported_the_others_go_on_and_a_resume_completes_it(
    shell: Shell, job: Path
) -> None:
    done = shell("launch", str(job), "--sweep", "env.RATE=0.9,0.2", "--no-checks", "--json")
    assert done.returncode == 5, done.stderr
    answer = last_json(done.stdout)
    assert phases(answer) == ["failed", "finished"]
    assert "1 of 2 variants finished" in done.stderr and f"clusterctl resume {answer['sweep']}" in done.stderr
    (shell.folder / "mark").touch()
    done = shell("resume", str(answer["sweep"]))
    assert done.returncode == 0, done.stderr
    # The one with the lowest loss is marked; the one that had finished was not started again.
    assert "best" in next(line for line in done.stdout.splitlines() if line.startswith("RATE=0.9"))
    assert "variant 1 of 2" in done.stderr and "variant 2 of 2" not in done.stderr


def test_variants_side_by_side_are_all_stopped_by_ctrl_c_and_resumed(shell: Shell, job: Path) -> None:
    words = ["launch", str(job), "--sweep", "env.RATE=0.1,0.2,0.3", "--each", "devices=1", "--no-checks"]
    running = subprocess.Popen(
        [sys.executable, "-m", "clusterctl", *words, "--set", "env.PAUSE=100"],
        cwd=shell.folder,
        env=shell.env,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    folder = shell.folder / "runs"
    deadline = time.monotonic() + 60
    while len(list(folder.glob("job-*/steps.jsonl"))) < 2 and time.monotonic() < deadline:
        time.sleep(0.05)
    running.send_signal(signal.SIGINT)
    _, words_of_it = running.communicate(timeout=60)
    assert running.returncode == 130, words_of_it
    assert "variant 2 of 3" in words_of_it and "variant 3 of 3" not in words_of_it
    sweep = next(folder.glob("sweep-*")).name
    variants = json.loads((folder / sweep / "sweep.json").read_text())["variants"]
    assert [(variant["phase"], variant["place"]) for variant in variants] == [
        ("stopped", 0),
        ("stopped", 1),
        ("waiting", None),
    ]
