"""A run's logs of all attempts, laid out a folder a node."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from clusterctl.errors import UsageError
from clusterctl.inventory.cluster import Cluster, Node
from clusterctl.jobs.job import Job
from clusterctl.jobs.run_folder import RunDir
from clusterctl.logs import pull
from clusterctl.runs import start as runs
from clusterctl.runs.finish import finish
from clusterctl.runs.watching.watch import RunWatcher
from clusterctl.transport.fanout import Connections
from clusterctl.transport.local import LocalTransport

CODE = """
import os, sys, time
print("attempt", os.environ["CLUSTERCTL_ATTEMPT"], "rank", os.environ["RANK"], end="")
print("a word of trouble", file=sys.stderr)
logs = os.environ["ASCEND_PROCESS_LOG_PATH"] + "/debug/plog"
os.makedirs(logs, exist_ok=True)
for pid in (os.getpid(), 1):
    open(f"{logs}/plog-{pid}_20260101000000000.log", "w").write(str(pid))
sys.stdout.flush()
said = os.environ["ASCEND_PROCESS_LOG_PATH"] + ".said-" + os.environ["CLUSTERCTL_ATTEMPT"] + "-"
open(said + os.environ["RANK"], "w").close()
while not all(os.path.exists(said + rank) for rank in "01"):  # the first that fails ends the other
    time.sleep(0.02)
sys.exit(int(os.environ["CLUSTERCTL_ATTEMPT"] == "1"))
"""


@pytest.fixture
def connections() -> Iterator[Connections]:
    with Connections(LocalTransport()) as opened:
        yield opened


@pytest.fixture
def two_attempts(tmp_path: Path, connections: Connections) -> RunDir:
    node = Node(
        "node1", "local", "127.0.0.1", devices=(0, 1), python=sys.executable, workdir=str(tmp_path / "n1")
    )
    env = {"ASCEND_PROCESS_LOG_PATH": str(tmp_path / "plogs")}
    job = Job(name="job", command=("python", "-c", CODE), source="job.yaml", env=env)
    run = runs.launch(
        Cluster("lab", (node,), source="x"), job, connections, tmp_path / "runs", lambda *_: None
    )
    watched(run, connections)
    runs.resume(run, connections, lambda *_: None)
    watched(run, connections)
    return run


def watched(run: RunDir, connections: Connections) -> None:
    for _ in RunWatcher(run, connections):
        pass
    finish(run, connections)


def test_every_attempt_is_there_and_what_nobody_brought_home_is_fetched(
    tmp_path: Path, connections: Connections, two_attempts: RunDir
) -> None:
    cut = two_attempts.log("node1", 0, "out", 1)
    cut.write_bytes(cut.read_bytes()[:5])
    two_attempts.log("node1", 1, "err", 1).unlink()
    dry = pull.pull_run(two_attempts, connections, tmp_path / "dry", dry_run=True)
    assert not (tmp_path / "dry").exists()
    assert cut.stat().st_size == 5
    pulled = pull.pull_run(two_attempts, connections, tmp_path / "out")
    assert pulled.files == dry.files
    assert pulled.notes == []
    for attempt in (1, 2):
        place = tmp_path / "out" / f"attempt-{attempt}" / "node1"
        for rank in (0, 1):
            text = f"attempt {attempt} rank {rank}\na word of trouble\n"
            assert (place / f"rank-{rank}.txt").read_text() == text
        plogs = [path.name for path in (place / "process_log/debug/plog").iterdir()]
        assert len(plogs) == 2
        assert not any(name.startswith("plog-1_") for name in plogs)


WRAPPED = """
import os, subprocess, sys
write = "import os; open(os.environ['ASCEND_PROCESS_LOG_PATH'] + '/debug/plog/plog-%d_1.log' % os.getpid(), 'w')"
os.makedirs(os.environ["ASCEND_PROCESS_LOG_PATH"] + "/debug/plog", exist_ok=True)
subprocess.run([sys.executable, "-c", write], check=True)
sys.exit(int(os.environ["CLUSTERCTL_ATTEMPT"] == "1"))
"""


def test_what_cann_says_of_a_wrappers_children_comes_home_by_attempt(
    tmp_path: Path, connections: Connections
) -> None:
    node = Node(
        "node1", "local", "127.0.0.1", devices=(0,), kind="npu", python=sys.executable, workdir=str(tmp_path)
    )
    job = Job(name="job", command=("python", "-c", WRAPPED), source="job.yaml", rank_table="never")
    run = runs.launch(
        Cluster("lab", (node,), source="x"), job, connections, tmp_path / "runs", lambda *_: None
    )
    watched(run, connections)
    runs.resume(run, connections, lambda *_: None)
    watched(run, connections)
    pulled = pull.pull_run(run, connections, tmp_path / "out")
    plogs = [name for name in pulled.files if "plog-" in name]
    assert [name.split("/plog-")[0] for name in plogs] == [
        f"attempt-{attempt}/node1/process_log/debug/plog" for attempt in (1, 2)
    ]


def test_what_npu_smi_said_before_lies_beside_what_it_says_now(
    tmp_path: Path, connections: Connections, monkeypatch: pytest.MonkeyPatch
) -> None:
    tool = tmp_path / "bin" / "npu-smi"
    tool.parent.mkdir()
    tool.write_text(
        f"#!/bin/sh\n[ $1 = info ] && echo looked >>{tmp_path}/count && wc -l <{tmp_path}/count\n"
    )
    tool.chmod(0o755)
    monkeypatch.setattr("clusterctl.transport.local.LOGIN_PATH", f"{tool.parent}:/usr/bin:/bin")
    node = Node(
        "node1", "local", "127.0.0.1", devices=(0,), kind="npu", python=sys.executable, workdir=str(tmp_path)
    )
    waits = f"""
import os, time
for _ in range(600):
    time.sleep(0.05 if not os.path.exists({str(tmp_path / "count")!r}) else 0)
time.sleep(1)
"""
    job = Job(name="job", command=("python", "-c", waits), source="job.yaml", rank_table="never")
    with Connections(LocalTransport()) as fresh:
        run = runs.launch(Cluster("lab", (node,), source="x"), job, fresh, tmp_path / "runs", lambda *_: None)
        watched(run, fresh)
        pull.pull_run(run, fresh, tmp_path / "out")
    place = tmp_path / "out" / "attempt-1" / "node1" / "environment_check"
    said = [(place / f"npu_info_{when}.txt").read_text().strip() for when in ("before", "after")]
    assert said == ["1", "2"]


def test_a_node_that_does_not_answer_is_a_note_and_the_rest_is_laid_out(
    tmp_path: Path, two_attempts: RunDir
) -> None:
    os.rename(tmp_path / "n1", tmp_path / "away")
    (tmp_path / "n1").write_text("a file where the work folder should be")
    with Connections(LocalTransport()) as connections:
        pulled = pull.pull_run(two_attempts, connections, tmp_path / "out")
    assert len(pulled.notes) == 1
    assert "node1" in pulled.notes[0]
    assert sum(name.endswith(".txt") for name in pulled.files) == 4


def test_a_folder_with_something_in_it_is_refused_and_our_own_is_emptied(tmp_path: Path) -> None:
    (tmp_path / "a" / "b").mkdir(parents=True)
    with pytest.raises(UsageError, match="exists already"):
        pull.claim(tmp_path / "a", replace=False)
    pull.claim(tmp_path / "a", replace=True)
    assert not (tmp_path / "a").exists()
    pull.claim(tmp_path / "a", replace=False)
