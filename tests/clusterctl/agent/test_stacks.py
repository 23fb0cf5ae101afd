"""Stack traces of ranks, written by the ranks themselves if they can, without ending any."""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from clusterctl.agent.ranks import stacks
from clusterctl.agent.ranks.stacks import catches, tool_of
from tests.support.nodes import wait_for

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
    yield started
    for one in started:
        one.kill()
        one.communicate()


def test_a_rank_with_a_handler_tells_where_it_stands_and_one_without_lives_on(
    tmp_path: Path, program: list[subprocess.Popen[bytes]]
) -> None:
    assert [catches(one.pid, signal.SIGUSR1) for one in program] == [True, False]
    spec = [{"rank": number, "argv": ["train"], "env": {"PATH": str(tmp_path)}} for number in (0, 1)]
    pids = [process.pid for process in program]
    where = [(one, pid, str(tmp_path / f"{one['rank']}.err")) for one, pid in zip(spec, pids, strict=True)]
    stacks.save(where, beating=[0, 1])
    wait_for(lambda: "train.py" in (tmp_path / "0.err").read_text())
    assert "most recent call first" in (tmp_path / "0.err").read_text()
    assert (tmp_path / "1.err").read_text() == ""
    assert program[1].poll() is None


def test_py_spy_is_taken_from_beside_the_ranks_python_before_the_path(tmp_path: Path) -> None:
    for name in ("venv", "path"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "py-spy").write_text("#!/bin/sh\n")
        (tmp_path / name / "py-spy").chmod(0o755)
    env = {"PATH": str(tmp_path / "path")}
    assert tool_of({"argv": [str(tmp_path / "venv/python")], "env": env}) == str(tmp_path / "venv/py-spy")
    assert tool_of({"argv": ["bash"], "env": env}) == str(tmp_path / "path/py-spy")
    assert tool_of({"argv": ["bash"], "env": {"PATH": "/nowhere"}}) is None


def test_a_tool_that_never_ends_is_not_waited_for(
    tmp_path: Path, program: list[subprocess.Popen[bytes]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stacks, "PATIENCE", 0.5)
    (tmp_path / "py-spy").write_text("#!/bin/sh\nexec sleep 600\n")
    (tmp_path / "py-spy").chmod(0o755)
    spec = {"rank": 1, "argv": ["train"], "env": {"PATH": str(tmp_path)}}
    stacks.save([(spec, program[1].pid, str(tmp_path / "1.err"))], beating=[])
    assert "did not end in time" in (tmp_path / "1.err").read_text()
