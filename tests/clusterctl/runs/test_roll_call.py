"""Programs that hang: the rank that the others wait for is named, with the line where it stands."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from clusterctl.jobs.job import Job
from clusterctl.jobs.run_folder import RunDir
from clusterctl.runs import start
from clusterctl.runs.causes.cause import Cause, read_cause
from clusterctl.runs.causes.roll_call import read_roll
from clusterctl.runs.state import RunState
from clusterctl.transport.fanout import Connections
from clusterctl.transport.local import LocalTransport
from tests.clusterctl.runs.test_controller import controlled
from tests.clusterctl.runs.test_run import lab, left_of

# Ranks that meet at a barrier of files; rank 3 does not come to the second one.
HANGS = """
import os, signal, sys, threading, time
from pathlib import Path
RANK, FOLDER = int(os.environ["RANK"]), Path({folder!r})
def barrier(name):
    (FOLDER / f"{{name}}-{{RANK}}").touch()
    while sum(1 for _ in FOLDER.glob(f"{{name}}-*")) < 4:
        time.sleep(1)
def hang():
    {how}
barrier("first")
print("first", flush=True)
if RANK == 3:
    hang()
barrier("second")
"""
WAYS = {
    "loader": ("time.sleep(600)", "is in `hang` at "),
    "lock": ("lock = threading.Lock(); lock.acquire(); lock.acquire()", "is in `hang` at "),
    "loop": ("\n    while True: pass", "is in `hang` at "),
    "exit": ("os._exit(0)", "has ended with code 0"),
    "stopped": ("os.kill(os.getpid(), signal.SIGSTOP)", "was stopped by a signal (SIGSTOP)"),
    "pipe": ("os.write(os.pipe()[1], bytes(1 << 20))", "is in `hang` at "),
}


@pytest.fixture
def connections() -> Iterator[Connections]:
    with Connections(LocalTransport()) as opened:
        yield opened


def hung(tmp_path: Path, connections: Connections, how: str) -> tuple[RunDir, RunState, Cause]:
    """Return a run on nodes whose Python has no py-spy, after it hung."""
    python = tmp_path / "bin" / "python"
    python.parent.mkdir()
    python.symlink_to(os.path.realpath(sys.executable))
    (tmp_path / "meet").mkdir()
    (tmp_path / "train.py").write_text(HANGS.format(folder=str(tmp_path / "meet"), how=how))
    env = {"PATH": "/usr/bin:/bin"}
    job = Job(
        "job", ("python", str(tmp_path / "train.py")), source="job.yaml", hang_after=3.0, grace=1.0, env=env
    )
    cluster = lab(tmp_path)
    cluster = replace(cluster, nodes=tuple(replace(node, python=str(python)) for node in cluster.nodes))
    run = start.launch(cluster, job, connections, tmp_path / "runs", lambda phase, text: None)
    state, cause = controlled(run, connections), read_cause(run)
    assert cause is not None and left_of(run) == 0
    return run, state, cause


@pytest.mark.parametrize("way", WAYS)
def test_the_rank_that_the_others_wait_for_is_named(
    tmp_path: Path, connections: Connections, way: str
) -> None:
    how, words = WAYS[way]
    run, state, cause = hung(tmp_path, connections, how)
    assert (cause.rank, cause.node, cause.device) == (3, "node2", 1)
    assert words in cause.title
    assert state.failure is not None and state.failure.rank == 3
    assert [rank.rank for rank in state.ranks if rank.hang] == [3]
    if way != "stopped":
        assert "3 of 4 ranks are in `barrier` at " in cause.title
    roll = read_roll(run, 1)
    assert roll is not None and [seen.rank for seen in roll.ranks] == [0, 1, 2, 3]
    # No py-spy was there: the ranks wrote their stacks themselves when they were aborted.
    assert "Fatal Python error: Aborted" in run.log("node1", 0, "err").read_text()
    assert "clusterctl: where process" not in run.log("node1", 0, "err").read_text()
    assert not list(tmp_path.rglob("core*"))
