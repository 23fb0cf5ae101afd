"""A scheduler that only its own module knows: every verb on its runs works by the interface of a backend."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.toy_scheduler import FOLDER

ROOT = Path(__file__).resolve().parents[3]
JOB = """
command: [sh, -c, 'echo rank $RANK; test $RANK = 1 || exec sleep 600']
grace: 1
"""


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a project whose Python programs know the scheduler."""
    register = "from tests.support import toy_scheduler\ntoy_scheduler.register()\n"
    (tmp_path / "sitecustomize.py").write_text(register)
    (tmp_path / "toy").mkdir()
    (tmp_path / "job.yaml").write_text(JOB)
    for name, value in (("PYTHONPATH", f"{tmp_path}:{ROOT}"), ("HOME", tmp_path), (FOLDER, tmp_path / "toy")):
        monkeypatch.setenv(name, str(value))
    monkeypatch.chdir(tmp_path)
    return tmp_path


def python(*argv: str) -> str:
    done = subprocess.run([sys.executable, *argv], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return done.stdout


def clusterctl(*words: str) -> str:
    return python("-m", "clusterctl", *words)


def test_a_run_of_a_new_scheduler_is_submitted_followed_stopped_and_resumed(project: Path) -> None:
    assert "Submit a job to Toy" in clusterctl("submit", "--help")
    printed = clusterctl("submit", "toy", "job.yaml", "--print")
    assert "export TOY_NAME=job" in printed and "submit start" in printed
    first = json.loads(clusterctl("submit", "toy", "job.yaml", "--json"))
    run = first["run"]
    follow = [sys.executable, "-m", "clusterctl", "logs", "tail", "-f", run, "--rank", "0,1"]
    with subprocess.Popen(follow, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as follower:
        assert follower.stdout is not None
        assert {follower.stdout.readline().split()[-1] for _ in range(2)} == {"0", "1"}
        clusterctl("stop", run)
        assert follower.wait(60) == 0
    status = json.loads(clusterctl("status", run, "--json"))
    assert (status["phase"], list(status["nodes"])) == ("stopped", ["toy1"])
    again = json.loads(clusterctl("resume", run, "--json"))
    assert again["run"] == run and again["job"] != first["job"]
    clusterctl("stop", run)
    assert run in clusterctl("runs")


def test_a_program_submits_a_job_waits_for_it_and_resumes_it(project: Path) -> None:
    code = """
from clusterctl import api
run = api.submit("job.yaml", "toy", overrides={"command": "[sh, -c, 'echo rank $RANK']"}).wait(100)
assert run.phase == "finished", run
assert sorted(line.text for line in run.logs()) == ["rank 0", "rank 1"]
api.resume(run).wait(100)
print(run.state().phase, len(api.list_runs()))
try:
    api.submit("job.yaml", "toi")
except api.UsageError as error:
    print(error.message, error.hint)
"""
    assert python("-c", code) == "finished 1\n'toi' is no batch system did you mean 'toy'?\n"
