"""`resume` of a training that is finished: nothing is left to do, unless its steps are raised."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import cast

import pytest

from clusterctl.client.attempts import Resume
from clusterctl.errors import UsageError
from clusterctl.jobs.phase import Phase
from clusterctl.runs import query
from clusterctl.runs.state import RunState
from clusterctl.text import epochs, short_time
from clusterctl.transport.fanout import Connections
from tests.clusterctl.conftest import Run
from tests.support.run_folders import end_run, restarted_run


def test_a_finished_training_starts_nothing_and_says_how_to_go_on(tmp_path: Path, command_line: Run) -> None:
    run = restarted_run(tmp_path / "runs")
    before = run.events.read_bytes()
    for more in ((), ("--set", "train.steps=40"), ("--dry-run",)):
        code, out, err = command_line("resume", "tiny", *more)
        assert (code, out) == (0, ""), err
        assert "nothing is left to do: all 40 steps of tiny-1122-100000-abcd are done" in err
        assert "clusterctl resume tiny-1122-100000-abcd --set train.steps=80" in err
    assert run.events.read_bytes() == before
    code, out, _ = command_line("resume", "tiny", "--json")
    assert code == 0 and '"phase": "finished"' in out


def test_a_stopped_training_is_not_finished(tmp_path: Path, command_line: Run) -> None:
    end_run(restarted_run(tmp_path / "runs"), Phase.STOPPED)
    assert "nothing is left" not in command_line("resume", "tiny", "--dry-run")[2]


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("train.steps=39", "40 steps of tiny-1122-100000-abcd are done"),
        ("nodes=node1", "only keys of `train`"),
        ("train.steps", "KEY=VALUE"),
    ],
)
def test_other_changes_are_refused(tmp_path: Path, command_line: Run, text: str, problem: str) -> None:
    restarted_run(tmp_path / "runs")
    code, _, err = command_line("resume", "tiny", "--set", text)
    assert code == 2 and f"--set {text}" in err and problem in err and "  try: " in err


@pytest.mark.parametrize("more", [(), ("--dry-run",), ("--detach",), ("--set", "train.steps=80")])
def test_a_command_of_notify_that_does_not_exist_here_is_refused(
    tmp_path: Path, command_line: Run, more: tuple[str, ...]
) -> None:
    run = restarted_run(tmp_path / "runs", job={"notify": "./nosuch.sh"})
    end_run(run, Phase.STOPPED)
    before = run.events.read_bytes()
    code, _, err = command_line("resume", "tiny", *more)
    assert code == 2, err
    assert "tiny-1122-100000-abcd: notify: ./nosuch.sh: no such file in " in err
    assert "put the program back, or resume in the folder and with the PATH of the launch" in err
    assert run.events.read_bytes() == before


def test_a_new_controller_for_an_active_run_needs_no_command_of_notify(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = restarted_run(tmp_path / "runs", job={"notify": "./nosuch.sh"})
    told: list[str] = []
    nowhere = cast(Connections, None)
    state = RunState(Phase.RUNNING, {})
    monkeypatch.setattr(query, "current_state", lambda run, connections: state)
    assert Resume(run).start(nowhere, lambda phase, text: told.append(text)) is False
    assert told == [f"{run.run_id} is running without a controller; starting a new one"]
    state = RunState(Phase.STOPPED, {})
    with pytest.raises(UsageError, match=r"nosuch\.sh: no such file"):
        Resume(run).start(nowhere, lambda phase, text: None)


def test_the_training_of_a_job_is_changed_and_nothing_else(tmp_path: Path) -> None:
    run = restarted_run(tmp_path / "runs", job={"train": {"steps": 40, "save": {"every": 5}}})
    before = run.read_record().job
    after = Resume.of(run, ["train.steps=80", "train.save.every=8"]).next_job
    assert after == replace(before, train={"steps": 80, "save": {"every": 8}})
    assert run.read_record().job == before
    program = restarted_run(tmp_path / "others", job={"train": None, "command": ["true"]})
    with pytest.raises(UsageError, match="keeps its job"):
        Resume.of(program, ["train.steps=80"])


def test_numbers_of_a_plan_are_readable() -> None:
    assert [epochs(n) for n in (1.0, 0.25, 1.02, 19298.16)] == [
        "1 epoch",
        "0.25 epochs",
        "1 epoch",
        "19298 epochs",
    ]
    assert [short_time(n) for n in (0.0, 0.035, 1.02, 9.994, 9.996, 185.0)] == [
        "0 ms", "35 ms", "1.02 s", "9.99 s", "10s", "3m05s",
    ]  # fmt: skip
