"""Signals to recorded processes: one that has ended, and a stranger with its pid."""

from __future__ import annotations

import itertools
import os
import signal
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest

from clusterctl.agent import processes
from clusterctl.agent.processes import end_all, identity, signal_recorded
from clusterctl.agent.ranks import attempts
from clusterctl.agent.reaper import Watcher
from clusterctl.agent.records import AttemptFiles, read_json, write_json
from clusterctl.agent.request import Request


@pytest.mark.parametrize("pidfds", [True, False])
def test_an_ended_process_and_a_stranger_with_its_pid_get_no_signal(
    pidfds: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not pidfds:
        monkeypatch.delattr(os, "pidfd_open")
    process = subprocess.Popen(["sleep", "600"])
    record: dict[str, Any] = identity(process.pid)
    stranger = {**record, "start_time": record["start_time"] - 1}
    assert not signal_recorded(stranger, signal.SIGKILL) and process.poll() is None
    assert signal_recorded(record, signal.SIGSTOP, signal.SIGKILL)
    assert process.wait(10) == -signal.SIGKILL
    assert not signal_recorded(record, signal.SIGKILL)


def test_a_process_that_ends_between_look_and_signal_is_a_success(monkeypatch: pytest.MonkeyPatch) -> None:
    process = subprocess.Popen(["sleep", "600"])
    record = identity(process.pid)

    def look_and_end(entry: object) -> bool:
        process.kill()
        process.wait()
        return True

    monkeypatch.setattr(processes, "is_alive", look_and_end)
    assert not signal_recorded(record, signal.SIGTERM)


def test_a_stop_goes_on_when_the_supervisor_ends_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    process = subprocess.Popen(["sleep", "600"])
    record = identity(process.pid)
    process.kill()
    process.wait()
    looks = iter([True])
    monkeypatch.setattr(attempts, "is_alive", lambda entry: next(looks, False))
    files = AttemptFiles(str(tmp_path), 1)
    os.makedirs(files.root)
    write_json(files.spec, {"run_id": "r", "attempt": 1, "node": "n", "ranks": [], "job": {}})
    write_json(files.supervisor, record)
    params = {"run_dir": str(tmp_path), "attempt": 1, "grace": 0.0}
    request = Request(1, "stop", params, workdir=str(tmp_path), watcher=Watcher(), send_frame=lambda _: None)
    assert attempts.stop(request) == {"left": 0, "state": "stopped"}
    assert read_json(files.stop) is not None


def test_a_process_is_killed_though_the_machine_was_suspended_until_after_the_limit() -> None:
    ignores = "trap '' TERM; echo ready; while :; do sleep 600; done"
    process = subprocess.Popen(["sh", "-c", ignores], stdout=subprocess.PIPE, start_new_session=True)
    assert process.stdout and process.stdout.readline() == b"ready\n"
    looks = itertools.count()

    def suspended() -> None:
        time.sleep(1.0 if next(looks) == 1 else 0.0)
        process.poll()

    assert end_all([process.pid], {}, grace=0.3, limit=0.5, between=suspended) == set()
    assert process.wait(10) == -signal.SIGKILL
