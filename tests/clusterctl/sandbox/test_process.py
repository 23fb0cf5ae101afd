"""A sandbox's processes are recorded before they are anything else, and ended whole."""

from __future__ import annotations

import os
import signal
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest

from clusterctl.errors import ClusterctlError
from clusterctl.sandbox import process

linux = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
ENV = {"PATH": "/usr/bin:/bin"}


# The first process reaps; of the others each forks and leaves after a millisecond, 5,000 times at most.
CHAIN = """
import os, time
if os.fork():
    while True:
        try:
            os.wait()
        except OSError:
            time.sleep(9)
for _ in range(5000):
    if os.fork():
        os._exit(0)
    time.sleep(0.001)
"""


def start(folder: Path, *command: str, env: dict[str, str] | None = None) -> process.Started:
    record = folder / "one.json"
    process.start(record, "one", list(command), {**ENV, **(env or {})}, folder / "one.log")
    found = process.read_record(record)
    assert found is not None
    return found


def wait_for(path: Path) -> str:
    deadline = time.monotonic() + 10
    while not (path.exists() and path.read_text().endswith("\n")):
        assert time.monotonic() < deadline, f"{path} never came"
        time.sleep(0.01)
    return path.read_text()


def test_a_started_process_is_recorded_and_is_the_command(tmp_path: Path) -> None:
    started = start(tmp_path, "/bin/sleep", "60")
    try:
        assert started.alive
        assert started.argv == ("/bin/sleep", "60")
        # Out of this terminal's reach.
        assert os.getsid(started.pid) == started.pid
    finally:
        assert process.end(lambda: {started.pid}) == 1
    assert not started.alive


def test_another_process_with_the_same_pid_is_not_taken_for_it(tmp_path: Path) -> None:
    started = start(tmp_path, "/bin/sleep", "60")
    try:
        assert not replace(started, start_time=started.start_time + "1").alive
        assert not replace(started, boot_id="another boot").alive
    finally:
        process.end(lambda: {started.pid})


def test_a_command_that_can_not_start_says_so_in_its_log(tmp_path: Path) -> None:
    started = start(tmp_path, "/no/such/program")
    deadline = time.monotonic() + 5
    while started.alive and time.monotonic() < deadline:
        time.sleep(0.01)
    assert not started.alive
    assert "/no/such/program: No such file" in process.tail(tmp_path / "one.log")


def test_a_process_that_can_not_be_recorded_never_becomes_the_command(tmp_path: Path) -> None:
    ran = tmp_path / "ran"
    record = tmp_path / "removed meanwhile" / "one.json"
    process.start(record, "one", ["/bin/sh", "-c", f"echo > '{ran}'"], ENV, tmp_path / "one.log")
    assert "FileNotFoundError" in (tmp_path / "one.log").read_text()
    assert not ran.exists()


@linux
def test_ending_reaches_a_child_detached_twice_with_its_environment_emptied(tmp_path: Path) -> None:
    pid_file = tmp_path / "pid"
    detach = f"(setsid env -i /bin/sh -c 'echo $$ > {pid_file}; exec sleep 60' &) & exec sleep 60"
    started = start(tmp_path, "/bin/sh", "-c", detach)
    orphan = int(wait_for(pid_file))
    assert process.end(lambda: {started.pid} if started.alive else set()) == 2
    assert orphan not in process.table()


@linux
def test_ending_outruns_a_process_that_forks_and_leaves_all_the_time(tmp_path: Path) -> None:
    started = start(tmp_path, sys.executable, "-I", "-S", "-c", CHAIN)
    time.sleep(0.1)
    assert len(process.below({started.pid})) >= 1
    process.end(lambda: {started.pid} if started.alive else set())
    assert not started.alive
    assert started.pid not in {row.group for row in process.table().values()}


@linux
def test_a_mark_is_one_node_s_or_a_whole_sandbox_s(tmp_path: Path) -> None:
    started = start(tmp_path, "/bin/sleep", "60", env={process.MARKER: "abc/node11"})
    try:
        assert process.marked("abc/node11") == {started.pid}
        assert process.marked("abc/") == {started.pid}
        assert not process.marked("abc/node1")
    finally:
        process.end(lambda: {started.pid})


def test_only_the_first_signal_interrupts_and_the_clean_up_is_left_alone() -> None:
    before = signal.getsignal(signal.SIGINT)
    cleaned = False
    with pytest.raises(KeyboardInterrupt), process.one_interrupt():
        try:
            os.kill(os.getpid(), signal.SIGINT)
            time.sleep(1)
        finally:
            os.kill(os.getpid(), signal.SIGINT)
            time.sleep(0.01)
            cleaned = True
    assert cleaned
    assert signal.getsignal(signal.SIGINT) is before


def test_a_process_that_no_signal_ends_is_told_of(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(process, "GONE_WITHIN", 0.05)
    monkeypatch.setattr(process, "_send", lambda pid, number: None)
    started = start(tmp_path, "/bin/sleep", "300")
    with pytest.raises(ClusterctlError, match=str(started.pid)):
        process.end(lambda: {started.pid})
    monkeypatch.undo()
    process.end(lambda: {started.pid})
