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
from clusterctl.runs.causes.roll_call import call_roll, read_roll
from clusterctl.runs.state import RunState
from clusterctl.transport.fanout import Connections
from clusterctl.transport.local import LocalTransport
from tests.clusterctl.runs.test_controller import controlled
from tests.clusterctl.runs.test_run import lab, left_of
from tests.support.records import record_of
from tests.support.scripted import ScriptedTransport

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
# Ranks that all wait at one line, with the file of a flight recorder.
RECORDED = """
import os, pickle, time
rank = int(os.environ["RANK"])
entry = {{"process_group": ("0", "default_pg"), "collective_seq_id": 7, "profiling_name": "nccl:all_reduce"}}
entry["input_sizes"] = [[2 if rank == 1 else 4]]
value = {{"entries": [entry], "pg_config": {{"0": {{"ranks": "[0, 1, 2, 3]"}}}}}}
with open(os.environ["TORCH_FR_DUMP_TEMP_FILE"] + str(rank), "wb") as file:
    pickle.dump(value, file)
print("begins", flush=True)
def all_reduce():
    while True:
        time.sleep(1)
all_reduce()
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


def hung(
    tmp_path: Path, connections: Connections, how: str, program: str = HANGS
) -> tuple[RunDir, RunState, Cause]:
    """Return a run on nodes whose Python has no py-spy, after it hung."""
    python = tmp_path / "bin" / "python"
    python.parent.mkdir()
    python.symlink_to(os.path.realpath(sys.executable))
    (tmp_path / "meet").mkdir()
    (tmp_path / "train.py").write_text(program.format(folder=str(tmp_path / "meet"), how=how))
    env = {"PATH": "/usr/bin:/bin", "TORCH_FR_DUMP_TEMP_FILE": str(tmp_path / "trace-")}
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


def test_of_ranks_at_one_line_a_flight_recorder_shows_the_one_with_another_size(
    tmp_path: Path, connections: Connections
) -> None:
    _, _, cause = hung(tmp_path, connections, "", RECORDED)
    assert (cause.rank, cause.node) == (1, "node1")
    assert (
        "; collective 7 of a group is all_reduce [[4]] on 3 of 4 ranks, all_reduce [[2]] on 1 of 4 ranks"
        in cause.title
    )


@pytest.mark.parametrize(("unheard", "kept"), [([], ()), (["a:2"], ("a:1",))])
def test_connections_are_kept_if_one_of_them_is_dead(unheard: list[str], kept: tuple[str, ...]) -> None:
    record = record_of({"a": [0], "b": [1]})
    answers = {
        "a": {"ranks": [{"rank": 0, "pid": 7, "ends": ["a:1"]}]},
        "b": {"ranks": [{"rank": 1, "pid": 7, "ends": ["b:1"], "unheard": unheard}]},
    }
    table = {(node, "roll_call"): answer for node, answer in answers.items()}
    with Connections(ScriptedTransport(table)) as opened:
        roll = call_roll(opened, record, record.cluster.nodes, 9.0)
    assert [seen.ends for seen in roll.ranks] == [kept, ("b:1",) if kept else ()]
