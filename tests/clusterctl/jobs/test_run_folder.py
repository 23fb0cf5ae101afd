"""A run's files: written whole, found by a beginning, never by half."""

from __future__ import annotations

import errno
import os
import time
from pathlib import Path

import pytest

from clusterctl.errors import UsageError
from clusterctl.files import replace_file
from clusterctl.jobs.run_folder import RunDir, find_run


def make(folder: Path, name: str) -> RunDir:
    run = RunDir(folder / name)
    run.write_json(run.record, {"run": name})
    return run


def test_a_replaced_file_is_old_or_new_and_leaves_nothing_beside_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "f"
    replace_file(path, "old")

    def fail(*_: object) -> None:
        raise OSError(errno.ENOSPC, "disk")

    monkeypatch.setattr(os, "fsync", fail)
    with pytest.raises(OSError, match="disk"):
        replace_file(path, "new")
    assert path.read_text() == "old"
    assert os.listdir(tmp_path) == ["f"]


def test_a_run_is_found_by_id_unique_beginning_or_last(tmp_path: Path) -> None:
    make(tmp_path, "demo-1")
    time.sleep(0.02)
    make(tmp_path, "tiny-2")
    assert find_run(tmp_path, "last").run_id == "tiny-2"
    assert find_run(tmp_path, "demo").run_id == "demo-1"
    make(tmp_path, "demo-3")
    with pytest.raises(UsageError, match="begins 2 runs"):
        find_run(tmp_path, "demo")
    with pytest.raises(UsageError, match="no run"):
        find_run(tmp_path, "zzz")
    with pytest.raises(UsageError, match="no runs in"):
        find_run(tmp_path / "empty", "last")


def test_metrics_with_half_a_last_line_are_read_up_to_it(tmp_path: Path) -> None:
    run = make(tmp_path, "r")
    run.metrics.write_bytes(b'{"step": 1}\n{"st')
    assert [metric.as_json() for metric in run.metric_lines()] == [{"step": 1}]


def test_an_event_after_half_a_line_is_a_line_of_its_own(tmp_path: Path) -> None:
    run = RunDir(tmp_path / "run")
    run.add_event("started", ranks=3)
    with run.events.open("ab") as file:
        file.write(b'{"time": 12.5, "event": "nod')
    run.add_event("ended", phase="finished")
    history = run.read_events()
    assert [event.kind for event in history.events] == ["started", "ended"]
    assert history.damaged == 1
