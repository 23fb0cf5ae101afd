"""`clusterctl demo` whole, twice, interrupted, and in every mode of its sandbox."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.conftest import Cases
from tests.live.conftest import Shell, clean_environment
from tests.support.leftovers import listening, processes_of

pytestmark = [pytest.mark.live, pytest.mark.timeout(400)]


@pytest.fixture
def demo(tmp_path: Path) -> Shell:
    """A folder to type in, with a folder for temporary files that must stay empty."""
    for name in ("here", "tmp"):
        (tmp_path / name).mkdir()
    return Shell(tmp_path / "here", {**clean_environment(), "TMPDIR": str(tmp_path / "tmp")})


def nothing_left(shell: Shell, said: str) -> None:
    # This sandbox's own.
    nodes = set(re.findall(r"127\.\d+\.\d+\.\d+", said)) - {"127.0.0.1"}
    assert not [one for one in listening() if one[0] in nodes]
    assert processes_of(shell.folder) == []
    assert sorted(path.name for path in shell.folder.iterdir()) in ([], ["clusterctl-demo"])
    assert not (shell.folder / "clusterctl-demo" / "sandbox").exists()
    assert os.listdir(shell.env["TMPDIR"]) == []


@pytest.mark.root
def test_the_demo_shows_the_whole_product_and_works_a_second_time(demo: Shell) -> None:
    done = demo("demo", "--steps", "30", timeout=200)
    assert done.returncode == 0, done.stdout + done.stderr
    for part in (
        "2 nodes are up",
        "node2",
        "192.168.20.2",
        "slots=2",
        "unigram entropy",
        "4 ranks on 2 nodes",
        "validation loss",
        "generated from the checkpoint",
        "try next",
    ):
        assert part in done.stdout, done.stdout
    assert "\x1b" not in done.stdout + done.stderr
    assert re.search(r"step 30/30  loss \d\.\d+", done.stderr)
    nothing_left(demo, done.stdout)
    folder = demo.folder / "clusterctl-demo"
    run = next((folder / "runs").iterdir())
    metrics = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    evals = [metric["loss"] for metric in metrics if metric["event"] == "eval"]
    assert evals[-1] < evals[0] - 0.5
    assert {path.name for path in (run / "attempts/1/logs").rglob("*.out")} == {
        f"rank-{n}.out" for n in range(4)
    }
    inside = Shell(folder, demo.env)
    assert inside("checkpoint", "verify", "last").returncode == 0
    made = json.loads(inside("generate", "last", "--prompt", "A class", "--max-tokens", "5", "--json").stdout)
    assert made["text"].startswith("A class")
    assert inside("ranktable", "check", "rank_table.json").returncode == 0
    assert inside("hostfile", "check", "hostfile").returncode == 0
    again = demo("demo", "--steps", "3", "--mode", "embedded", timeout=200)
    assert again.returncode == 0, again.stdout + again.stderr
    assert "(mode embedded)" in again.stdout
    assert len(list((folder / "runs").iterdir())) == 2
    nothing_left(demo, again.stdout)


@pytest.mark.parametrize("part", range(4))
def test_ctrl_c_at_a_random_moment_leaves_nothing(demo: Shell, part: int, cases: Cases) -> None:
    """The moments are in the first 12 s, and with `--cases 3` and more in the first 36 s too."""
    argv = [sys.executable, "-m", "clusterctl", "demo", "--steps", "500"]
    for number, chance in cases(1):
        process = subprocess.Popen(
            argv, cwd=demo.folder, env=demo.env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )
        time.sleep(chance.uniform(0.3, 3.3) + 3 * part + 12 * (number % 3))
        began = time.monotonic()
        process.send_signal(signal.SIGINT)
        said = process.communicate(timeout=90)[0]
        assert process.returncode == 130, said
        assert time.monotonic() - began < 30, said
        nothing_left(demo, said)
