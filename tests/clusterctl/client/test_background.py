from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from clusterctl.client.background import deliver_signals, start_in_background
from clusterctl.client.handover import Starter
from clusterctl.errors import Fault, InputFaults, LinkLost, NodesFailed, Unreachable, WorkFailed
from tests.support.nodes import wait_for


@pytest.fixture(autouse=True)
def open_to_signals() -> Iterator[None]:
    """Let signals reach this process again, and the programs that later tests start."""
    yield
    deliver_signals()


def test_the_work_continues_in_its_own_process_after_it_has_started(tmp_path: Path) -> None:
    def work(starter: Starter) -> None:
        starter.started((os.getpid(), os.getsid(0)), tmp_path / "log")
        time.sleep(0.2)
        (tmp_path / "later").write_text("done")
        raise WorkFailed("an error of a controller")

    pid, session = start_in_background(work)
    assert pid == session != os.getpid()
    assert not (tmp_path / "later").exists()
    wait_for(lambda: "an error of a controller" in (tmp_path / "log").read_text())
    assert (tmp_path / "later").read_text() == "done"
    assert (tmp_path / "log").stat().st_mode & 0o777 == 0o600, "a log of a run is its owner's alone"


@pytest.mark.parametrize(
    "error",
    [
        WorkFailed("it failed", "try again"),
        Unreachable("node1", "no answer", "look at it"),
        NodesFailed([LinkLost("node1", "cut"), LinkLost("node2", "cut")]),
        InputFaults([Fault("job.yaml:1", "wrong")]),
        SystemExit(143),
        KeyboardInterrupt(),
    ],
)
def test_an_error_before_the_start_is_raised_as_it_was(error: BaseException) -> None:
    def work(starter: Starter) -> None:
        raise error

    with pytest.raises(type(error)) as raised:
        start_in_background(work)
    assert str(raised.value) == str(error)
    assert {key: str(value) for key, value in vars(raised.value).items()} == {
        key: str(value) for key, value in vars(error).items()
    }


def test_a_bug_keeps_its_traceback() -> None:
    class Local(Exception):
        """No other process can read it."""

    def work(starter: Starter) -> None:
        raise Local("a bug")

    with pytest.raises(RuntimeError, match=r"(?s)Traceback.*in work.*a bug"):
        start_in_background(work)


SIGNALS = """
import os, signal, sys, time
from pathlib import Path
from clusterctl.client import background
from clusterctl.client.background import deliver_signals, start_in_background

parent = os.getpid()
forwarding = background._forwarding_signals

def late(*given):
    # The signal comes before the terminal's process has set its handlers.
    time.sleep(0.3)
    return forwarding(*given)

background._forwarding_signals = late

def work(starter):
    received = []
    signal.signal(signal.SIGTERM, lambda number, _: received.append(int(number)))
    os.kill(parent, signal.SIGTERM)
    while not received:
        time.sleep(0.01)
    time.sleep(0.1)
    starter.started(received, Path(sys.argv[1]))

received = []
signal.signal(signal.SIGTERM, lambda number, _: received.append(int(number)))
print(start_in_background(work), received)
deliver_signals()
print(received)
"""


def test_signals_reach_the_work_once_and_a_killed_one_is_reported(tmp_path: Path) -> None:
    # In a process with one thread, like the launcher: a signal of this process could reach another thread of pytest.
    command = [sys.executable, "-c", SIGNALS, str(tmp_path / "log")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    # The new process has handled the signal; the terminal's process acts on it too, but later.
    assert done.stdout == "[15] []\n[15]\n"
    with pytest.raises(WorkFailed, match="was killed"):
        start_in_background(lambda starter: os.kill(os.getpid(), signal.SIGKILL))


def test_a_caller_of_the_terminals_process_does_not_wait_for_the_controller(tmp_path: Path) -> None:
    reading, writing = os.pipe()
    os.set_inheritable(writing, True)
    pid = start_in_background(lambda s: (s.started(os.getpid(), tmp_path / "log"), time.sleep(30)))  # type: ignore[arg-type, return-value]
    os.close(writing)
    assert os.read(reading, 1) == b""
    os.kill(pid, signal.SIGKILL)


def test_an_object_that_is_collected_later_closes_no_file_of_the_work(tmp_path: Path) -> None:
    stale = (tmp_path / "stale").open("wb", buffering=0)

    def work(starter: Starter) -> None:
        # As many as fit into every number that was in use before.
        files = [os.open(tmp_path / "mine", os.O_WRONLY | os.O_CREAT) for _ in range(20)]
        stale.close()
        starter.started([os.write(file, b"x") for file in files], tmp_path / "log")

    assert start_in_background(work) == [1] * 20
    stale.close()
