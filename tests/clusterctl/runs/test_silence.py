"""The silence of programs that tell no steps."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from clusterctl.jobs.job import Job
from clusterctl.jobs.run_folder import RunDir
from clusterctl.runs.causes.cause import read_cause
from clusterctl.runs.controller import Control
from clusterctl.runs.decide.attempt import Hang
from clusterctl.runs.state import RunState
from clusterctl.runs.watching import stall
from clusterctl.runs.watching.stall import LATER, Silence
from clusterctl.transport.fanout import Connections
from clusterctl.transport.local import LocalTransport
from tests.clusterctl.runs.test_controller import controlled, said
from tests.clusterctl.runs.test_run import launched, left_of, program
from tests.support.records import record_of


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def silence(clock: Clock, **job: Any) -> Silence:
    ranks = {"a": [0, 1], "b": [2, 3]}
    return Silence(record_of(ranks, job={"hang_after": 60.0, **job}), clock)


def test_silence_of_all_ranks_counts_and_the_last_that_spoke_stands_for_them() -> None:
    clock = Clock()
    one = silence(clock)
    one.broken_by("b", 3)
    clock.now += 60.0
    assert one.hang(()) is None
    clock.now += LATER + 1.0
    assert one.hang(()) == Hang("b", 3, 64.0)
    assert one.hang(("b",)) == Hang("a", 0, 64.0), "what has ended does not hang"
    assert one.hang(("a", "b")) is None
    one.broken_by("a", 0)
    assert one.hang(()) is None


def test_before_the_first_line_the_first_rank_stands_for_them() -> None:
    clock = Clock()
    one = silence(clock)
    clock.now += 64.0
    assert one.hang(()) == Hang("a", 0, 64.0)


@pytest.mark.parametrize("job", [{"hang_after": None}, {"hang_after": 0.0}, {"train": {"steps": 1}}])
def test_it_never_counts_unless_the_job_says_so_and_never_of_a_training(job: dict[str, Any]) -> None:
    clock = Clock()
    one = silence(clock, **job)
    clock.now += 1e6
    assert one.hang(()) is None


def test_a_program_with_a_heartbeat_may_be_silent() -> None:
    clock = Clock()
    one = silence(clock)
    one.has_heartbeats()
    clock.now += 1e6
    assert one.hang(()) is None


def test_a_long_silence_is_reported_once_and_another_one_again() -> None:
    clock = Clock()
    one = silence(clock, hang_after=None, command=("python",))
    assert one.notice(()) is None
    clock.now += 61.0
    assert (one.notice(()), one.last) == (61.0, "")
    assert one.notice(()) is None
    clock.now += 500.0
    assert one.notice(()) is None
    clock.now += 40.0
    assert one.notice(()) == 601.0
    one.broken_by("b", 3)
    assert (one.notice(()), one.last) == (None, " (rank 3 on b was the last)")
    clock.now += 60.0
    assert one.notice(("a", "b")) is None
    clock.now += 540.0
    assert one.notice(("a",)) == 600.0
    one.has_heartbeats()
    clock.now += 1e6
    assert one.notice(()) is None


def test_the_trainers_own_runs_may_be_silent() -> None:
    clock = Clock()
    one = silence(clock, hang_after=None)
    clock.now += 1e6
    assert one.notice(()) is None


# -- a run that falls silent -------------------------------------------------------------------------------

FALLS_SILENT = """
import os, time
if os.environ["RANK"] == "2":
    for number in range(4):
        print("line", number, flush=True)
        time.sleep(0.2)
def wait_for_ever():
    time.sleep(600)
wait_for_ever()
"""
PY_SPY = """#!/bin/sh
echo "$@" >>{told}
echo 'Thread 0x7F (idle): "MainThread"'
echo "    wait_for_ever (train.py:8)"
"""


@pytest.fixture
def connections() -> Iterator[Connections]:
    with Connections(LocalTransport()) as opened:
        yield opened


def hung(tmp_path: Path, connections: Connections, **env: str) -> tuple[RunDir, RunState]:
    job = program(FALLS_SILENT, hang_after=3.0, grace=1.0, env=env)
    run = launched(tmp_path, connections, job)
    return run, controlled(run, connections)


def test_a_program_that_falls_silent_is_ended_and_says_where_it_stood(
    tmp_path: Path, connections: Connections
) -> None:
    tool = tmp_path / "bin" / "py-spy"
    tool.parent.mkdir()
    tool.write_text(PY_SPY.format(told=tmp_path / "told"))
    tool.chmod(0o755)
    run, state = hung(tmp_path, connections, PATH=f"{tool.parent}:/usr/bin:/bin")
    assert state.phase == "failed"
    assert state.failure is not None
    assert (state.failure.rank, state.failure.node, state.failure.silent) == (2, "node2", True)
    assert [rank.rank for rank in state.ranks if rank.hang] == [2]
    assert "no rank has written anything for" in said(run)
    for node, rank in (("node1", 0), ("node2", 2), ("node2", 3)):
        log = run.log(node, rank, "err").read_text()
        assert 'by py-spy:\nThread 0x7F (idle): "MainThread"\n    wait_for_ever (train.py:8)\n' in log
    asked = (tmp_path / "told").read_text().splitlines()
    assert len(asked) == 4 and all(
        line.startswith("dump --nonblocking --full-filenames --pid ") for line in asked
    )
    cause = read_cause(run)
    assert cause is not None
    assert cause.title.startswith("hung for ")
    assert cause.title.endswith("4 of 4 ranks are in `wait_for_ever` at train.py:8: none stands out")
    assert cause.hint.startswith("its log ends with the stacks of its threads")
    assert left_of(run) == 0


def test_without_py_spy_python_programs_write_their_stacks_when_they_are_ended(
    tmp_path: Path, connections: Connections
) -> None:
    run, state = hung(tmp_path, connections, PATH="/usr/bin:/bin")
    if Path(sys.executable).with_name("py-spy").exists():
        pytest.skip("this Python has a py-spy beside it")
    assert state.phase == "failed"
    cause = read_cause(run)
    assert cause is not None and cause.title.endswith("are in `wait_for_ever` at <string>:8: none stands out")
    assert cause.hint.startswith("its log ends with the stacks of its threads")
    kept = json.loads(run.attempt_state(1).read_text())
    assert len(kept["ranks"]) == 4


def test_a_program_whose_stacks_nobody_can_see_is_not_said_to_have_written_them(
    tmp_path: Path, connections: Connections
) -> None:
    job = Job("job", ("sh", "-c", "sleep 600; true"), source="job.yaml", hang_after=3.0, grace=1.0)
    run = launched(tmp_path, connections, job)
    assert controlled(run, connections).phase == "failed"
    cause = read_cause(run)
    assert cause is not None and "stacks" not in cause.title + cause.hint
    assert cause.title.startswith("hung for ") and "none stands out" in cause.title
    assert "where it stands is not known (it is no Python program)" in cause.hint


def test_a_silent_program_is_left_alone_and_where_its_ranks_stand_is_told(
    tmp_path: Path, connections: Connections, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stall, "NOTICES", (2.0,))
    enough = tmp_path / "enough"
    text = f"import os, time\nwhile not os.path.exists({str(enough)!r}): time.sleep(0.1)"
    run = launched(tmp_path, connections, program(text))
    seen = []
    for update in Control(run, connections):
        if "no rank has written anything" in update.note:
            seen.append(update.note)
            enough.touch()
    assert run.phase() == "finished"
    assert len(seen) == 1 and re.fullmatch(r"no rank has written anything for \d s: 4 of 4 ranks .*", seen[0])
