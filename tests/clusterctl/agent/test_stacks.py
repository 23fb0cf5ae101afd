"""Stack traces of ranks, written by the ranks themselves if they can, without ending any."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from clusterctl.agent.processes import state_letter
from clusterctl.agent.ranks import stacks
from clusterctl.agent.ranks.frames import frames_in
from clusterctl.agent.ranks.stacks import Process, catches, tool_of
from clusterctl.agent.records import AttemptFiles

TRAINS = """
import faulthandler, signal, sys, time
if sys.argv[1] == "registered":
    faulthandler.register(signal.SIGUSR1)
print("ready", flush=True)
time.sleep(600)
"""


@pytest.fixture
def program(tmp_path: Path) -> Iterator[list[subprocess.Popen[bytes]]]:
    """One that answers the signal, one that would die of it; each in a process group of its own."""
    script = tmp_path / "train.py"
    script.write_text(TRAINS)
    started = []
    for number, how in enumerate(("registered", "bare")):
        argv = [sys.executable, str(script), how]
        log = (tmp_path / f"{number}.err").open("wb")
        started.append(subprocess.Popen(argv, stdout=subprocess.PIPE, stderr=log, start_new_session=True))
    for one in started:
        assert one.stdout and one.stdout.readline() == b"ready\n"
        # On a busy machine it is not asleep yet.
        while state_letter(one.pid) != "S":
            time.sleep(0.01)
    yield started
    for one in started:
        one.kill()
        one.communicate()


def attempt(tmp_path: Path) -> AttemptFiles:
    """Return the files of an attempt; rank 0 and rank 1 write heartbeats."""
    files = AttemptFiles(str(tmp_path / "run"), 1)
    for folder in (files.logs, files.heartbeats):
        Path(folder).mkdir(parents=True)
    for rank in (0, 1):
        Path(files.heartbeats, f"rank-{rank}").write_text("7\n")
    return files


def test_a_rank_with_a_handler_tells_where_it_stands_and_one_without_lives_on(
    tmp_path: Path, program: list[subprocess.Popen[bytes]]
) -> None:
    assert [catches(one.pid, signal.SIGUSR1) for one in program] == [True, False]
    found = [Process(rank, rank, one.pid, "train", str(tmp_path)) for rank, one in enumerate(program)]
    stacks.collect(attempt(tmp_path), found, save=True)
    if tool_of(found[0]) is None:
        assert [process.unseen for process in found] == ["", stacks.NO_TOOL]
    assert [frame.function for frame in found[0].frames] == ["<module>"]
    assert found[0].frames[0].text() == "time.sleep(600)"
    assert "most recent call first" in (tmp_path / "0.err").read_text()
    assert (tmp_path / "1.err").read_text() == ""
    assert program[1].poll() is None


def test_nothing_is_written_unless_it_is_wanted(
    tmp_path: Path, program: list[subprocess.Popen[bytes]]
) -> None:
    found = [Process(rank, rank, one.pid, "train", str(tmp_path)) for rank, one in enumerate(program)]
    files = attempt(tmp_path)
    stacks.collect(files, found)
    assert (tmp_path / "0.err").read_text() == ""
    assert not list(Path(files.logs).iterdir())


def test_a_program_with_a_fault_handler_writes_its_stacks_when_it_is_aborted(tmp_path: Path) -> None:
    bare = "print('ready', flush=True); import time; time.sleep(600)"
    waits = f"import signal; signal.signal(signal.SIGTERM, print); {bare}"
    started = []
    for name, text, variables in (("handler", bare, "1"), ("none", bare, ""), ("waits", waits, "1")):
        env = {"PYTHONFAULTHANDLER": variables}
        with (tmp_path / name).open("wb") as log:
            argv = [sys.executable, "-c", text]
            started.append(subprocess.Popen(argv, stdout=subprocess.PIPE, stderr=log, env=env, cwd=tmp_path))
    try:
        for one in started:
            assert one.stdout and one.stdout.readline() == b"ready\n"
        # On a busy machine it is not asleep yet.
        while state_letter(one.pid) != "S":
            time.sleep(0.01)
        stacks.abort(attempt(tmp_path), [Process(0, 0, one.pid, "python", "") for one in started])
        assert started[0].wait(60) == -signal.SIGABRT
        assert [frame.line for frame in frames_in((tmp_path / "handler").read_text())] == [1]
        # SIGTERM lets one of the others save a checkpoint first, and SIGABRT would tell nothing of the other.
        assert [one.poll() for one in started[1:]] == [None, None]
        assert not list(tmp_path.glob("core*"))
    finally:
        for one in started:
            one.kill()
            one.communicate()


def test_py_spy_is_taken_from_beside_the_ranks_python_before_the_path(tmp_path: Path) -> None:
    for name in ("venv", "path"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "py-spy").write_text("#!/bin/sh\n")
        (tmp_path / name / "py-spy").chmod(0o755)

    def tool(program: str, path: str) -> str | None:
        return tool_of(Process(0, 0, 0, program, path))

    assert tool(str(tmp_path / "venv/python"), str(tmp_path / "path")) == str(tmp_path / "venv/py-spy")
    assert tool("bash", str(tmp_path / "path")) == str(tmp_path / "path/py-spy")
    assert tool("bash", "/nowhere") is None


def test_a_tool_that_never_ends_is_not_waited_for(
    tmp_path: Path, program: list[subprocess.Popen[bytes]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stacks, "PATIENCE", 0.5)
    (tmp_path / "py-spy").write_text("#!/bin/sh\nexec sleep 600\n")
    (tmp_path / "py-spy").chmod(0o755)
    files = attempt(tmp_path)
    found = [Process(1, 1, program[1].pid, str(tmp_path / "train"), "")]
    stacks.collect(files, found, save=True)
    assert found[0].unseen == "py-spy: py-spy did not end in time"
    assert "did not end in time" in Path(files.log(1, "err")).read_text()
