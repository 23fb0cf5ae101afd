"""A supervisor that does not respond, processes that ranks leave behind, secrets on nodes, locks of devices."""

from __future__ import annotations

import io
import json
import os
import shutil
import signal
import stat
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from clusterctl.agent.processes import is_alive, state_letter
from clusterctl.agent.ranks.device_locks import DeviceLocks
from clusterctl.agent.records import AttemptFiles
from clusterctl.cli.views.tables import plan_facts
from clusterctl.client import launcher
from clusterctl.client.run import Run
from clusterctl.jobs.phase import Phase
from clusterctl.jobs.plan import make_plan
from clusterctl.jobs.restarts import Restart
from clusterctl.jobs.run_folder import RunDir
from clusterctl.runs.causes.cause import read_cause
from clusterctl.runs.query import current_state
from clusterctl.runs.state import SUPERVISOR_SILENCE
from clusterctl.runs.stop import stop_run
from clusterctl.transport.fanout import Connections
from tests.clusterctl.runs.test_controller import controlled, said, wait_for
from tests.clusterctl.runs.test_run import connections as connections
from tests.clusterctl.runs.test_run import lab, launched, left_of, program
from tests.support.records import record_of

SLEEP = "import time; time.sleep(600)"


def files_of(run: RunDir, node: str) -> AttemptFiles:
    record = run.read_record()
    return AttemptFiles(record.run_dirs[node], record.attempt)


def supervisor_of(run: RunDir, node: str) -> dict[str, Any]:
    value = json.loads(Path(files_of(run, node).supervisor).read_text())
    assert isinstance(value, dict)
    return value


def halt(run: RunDir, node: str) -> int:
    pid = int(supervisor_of(run, node)["pid"])
    os.kill(pid, signal.SIGSTOP)
    wait_for(lambda: state_letter(pid) == "T")
    return pid


def test_a_run_whose_supervisor_was_stopped_by_a_signal_is_stopped_in_time(
    tmp_path: Path, connections: Connections
) -> None:
    run = launched(tmp_path, connections, program(SLEEP, grace=0.5))
    halt(run, "node1")
    began = time.monotonic()
    assert stop_run(run, connections) == {"node1": 0, "node2": 0}
    assert time.monotonic() - began < 15.0
    assert left_of(run) == 0
    node = json.loads(Path(files_of(run, "node1").node).read_text())
    assert node["unresponsive"]["process"] == "T"


def test_a_stopped_supervisor_is_noticed_by_its_silence_and_named(
    tmp_path: Path, connections: Connections, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("clusterctl.runs.watching.watch.SUPERVISOR_SILENCE", 3.0)
    run = launched(tmp_path, connections, program(SLEEP, grace=0.5))
    halt(run, "node2")
    state = controlled(run, connections)
    assert state.phase is Phase.LOST
    cause = read_cause(run)
    assert cause is not None
    assert cause.title.startswith(
        "the supervisor on node2 did not respond: stopped by a signal (SIGSTOP) for "
    )
    assert "node2: the supervisor does not respond" in said(run)
    assert left_of(run) == 0
    # Who looks later finds the same end.
    assert current_state(run, connections).phase is Phase.LOST and run.phase() is Phase.LOST
    assert SUPERVISOR_SILENCE > 3.0, "the limit of this test is not the real one"


def test_a_supervisor_that_takes_no_signal_is_killed_and_its_ranks_are_found_by_their_marker(
    tmp_path: Path, connections: Connections, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = launched(tmp_path, connections, program(SLEEP, grace=0.5))
    supervisor = supervisor_of(run, "node1")
    # A debugger that holds it stands for a kernel that does: neither lets SIGTERM or SIGCONT through.
    tracer = subprocess.Popen([sys.executable, "-c", HOLD, str(supervisor["pid"])], stdout=subprocess.PIPE)
    assert tracer.stdout is not None
    try:
        if tracer.stdout.readline() != b"held\n":
            pytest.skip("this system allows no tracing")
        assert stop_run(run, connections) == {"node1": 0, "node2": 0}
        assert left_of(run) == 0
    finally:
        tracer.kill()
        tracer.wait()
        tracer.stdout.close()
    wait_for(lambda: not is_alive(supervisor))
    node = json.loads(Path(files_of(run, "node1").node).read_text())
    assert node["supervisor_lost"] and node["unresponsive"]


HOLD = """
import ctypes, os, sys, time
libc = ctypes.CDLL(None, use_errno=True)
pid = int(sys.argv[1])
ATTACH = 16
print("held" if libc.ptrace(ATTACH, pid, None, None) == 0 else "refused", flush=True)
time.sleep(600)
"""

DAEMON = """
import os, sys, time
if os.environ["RANK"] == "0":
    if os.fork() == 0:
        os.setsid()
        if os.fork() == 0:
            os.execve(sys.executable, [sys.executable, "-c", "import time; time.sleep(600)", MARK], {})
        os._exit(0)
    os.wait()
    time.sleep(1.5)
else:
    time.sleep(1.5)
"""


def unmarked_sleepers(mark: str) -> set[int]:
    """Return the processes that a rank of this test left behind: no other test gives its sleepers this mark."""
    found = set()
    for entry in os.listdir("/proc"):
        if entry.isdigit():
            try:
                words = Path(f"/proc/{entry}/cmdline").read_bytes()
            except OSError:
                continue
            if mark.encode() in words.split(b"\0") and state_letter(int(entry)) not in ("Z", ""):
                found.add(int(entry))
    return found


def test_a_daemon_that_dropped_its_environment_ends_with_its_run(
    tmp_path: Path, connections: Connections
) -> None:
    mark = f"left by {tmp_path}"
    run = launched(tmp_path, connections, program(DAEMON.replace("MARK", repr(mark))))
    wait_for(lambda: bool(unmarked_sleepers(mark)))
    assert controlled(run, connections).phase is Phase.FINISHED
    assert not unmarked_sleepers(mark)
    assert "node1: 1 detached process of the ranks ended with them" in said(run)


def test_a_forwarded_secret_is_blanked_on_the_nodes(
    tmp_path: Path, connections: Connections, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MY_TOKEN", "hunter2")
    text = "import os, time; print(os.environ['MY_TOKEN'], flush=True); time.sleep(600)"
    run = launched(tmp_path, connections, program(text, forward=("MY_TOKEN",), grace=0.5))
    spec = Path(files_of(run, "node1").spec)
    wait_for(lambda: "hunter2" not in spec.read_text())
    assert json.loads(spec.read_text())["ranks"][0]["env"]["MY_TOKEN"] == "***"
    for path in run.root.rglob("*"):
        assert path.is_dir() or "hunter2" not in path.read_text(), path
    assert stop_run(run, connections) == {"node1": 0, "node2": 0}


def test_a_controller_without_a_forwarded_variable_says_so_and_spends_no_restart(
    tmp_path: Path, connections: Connections, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MY_TOKEN", "hunter2")
    text = "import sys, time; time.sleep(1.0); sys.exit(7)"
    job = program(text, forward=("MY_TOKEN",), restart=Restart(max=3, backoff=0.05))
    run = launched(tmp_path, connections, job)
    monkeypatch.delenv("MY_TOKEN")
    state = controlled(run, connections)
    events = [event.kind for event in run.event_lines()]
    first = next(event for event in run.event_lines() if event.kind == "note")
    assert first.facts["text"].startswith("MY_TOKEN is not set where the controller runs")
    assert "restart" not in events
    assert state.phase is Phase.FAILED and "not restarted: MY_TOKEN is not set" in state.verdict
    assert run.read_record().attempt == 1


def test_a_take_over_from_a_shell_without_a_forwarded_variable_is_warned_about(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv("MY_TOKEN", raising=False)
    run = RunDir(tmp_path / "r")
    forwarded = {"forward": ("MY_TOKEN",), "restart": Restart()}
    run.write_record(record_of({"a": [0]}, job=forwarded))
    monkeypatch.setattr(launcher, "start", lambda run, reach: None)
    told: list[str] = []
    assert Run(run).start_controller(told.append) == ""
    assert told == ["not set in this shell: MY_TOKEN; the run cannot be restarted from here"]
    monkeypatch.setenv("MY_TOKEN", "x")
    assert Run(run).start_controller(told.append) == ""
    assert len(told) == 1


def test_a_plan_names_the_forwarded_variables_and_not_their_values(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MY_TOKEN", "hunter2")
    plan = make_plan(lab(tmp_path), program(SLEEP, forward=("MY_TOKEN",)))
    assert plan.as_json()["forward"] == ["MY_TOKEN"]
    console = Console(file=io.StringIO(), width=120)
    console.print(plan_facts(plan, None))
    shown = console.file.getvalue()  # type: ignore[attr-defined]
    assert "MY_TOKEN (values from this shell)" in shown and "hunter2" not in shown


def test_the_folder_of_a_run_belongs_to_its_owner_alone(tmp_path: Path, connections: Connections) -> None:
    before = os.umask(0)
    try:
        run = launched(tmp_path, connections, program("print('x')"))
        controlled(run, connections)
    finally:
        os.umask(before)
    assert run.root.stat().st_mode & 0o777 == 0o700
    wide = [path for path in run.root.rglob("*") if path.is_file() and path.stat().st_mode & 0o077]
    assert not wide


# -- locks of devices --------------------------------------------------------------------------------------


def locks(tmp_path: Path, devices: list[int], **more: Any) -> DeviceLocks:
    folder = tmp_path / "shared"
    folder.mkdir(exist_ok=True)
    folder.chmod(0o1777)
    for device in range(4):
        (tmp_path / f"device{device}").touch()
    spec = {"kind": "npu", "devices": devices, "run_id": f"run-{devices}", **more}
    return DeviceLocks(spec, [str(tmp_path / "none"), str(folder)], {"npu": str(tmp_path / "device{}")})


def test_a_device_is_locked_until_its_run_ends(tmp_path: Path) -> None:
    first, second = locks(tmp_path, [0, 1]), locks(tmp_path, [1, 2])
    assert first.take() == [] and first.note == ""
    assert second.take() == [f"device 1 is in use by run-[0, 1] of user {os.geteuid()}"]
    third = locks(tmp_path, [2])
    assert third.take() == [], "a refused start holds no lock"
    third.release()
    assert locks(tmp_path, [1], share_devices=True).take() == []
    first.release()
    assert second.take() == []
    second.release()


@pytest.mark.parametrize("kind", ["pipe", "hard link", "socket", "symbolic link"])
def test_something_else_in_the_place_of_a_lock_is_left_alone(tmp_path: Path, kind: str) -> None:
    locks(tmp_path, [0]).take()
    (path,) = (tmp_path / "shared").iterdir()
    path.unlink()
    own = tmp_path / "own file"
    own.write_text("kept")
    if kind == "pipe":
        os.mkfifo(path)
    elif kind == "hard link":
        os.link(own, path)
    elif kind == "socket":
        os.mknod(path, 0o666 | stat.S_IFSOCK)
    else:
        path.symlink_to(own)
    found = locks(tmp_path, [0, 1])
    assert found.take() == []
    assert found.note.startswith(f"device 0 is not locked against other users: {path}: ")
    assert own.read_text() == "kept"
    assert locks(tmp_path, [1]).take() == [f"device 1 is in use by run-[0, 1] of user {os.geteuid()}"]
    found.release()


def test_the_kernel_names_the_holder_whatever_the_file_says(tmp_path: Path) -> None:
    held = locks(tmp_path, [0])
    assert held.take() == []
    (path,) = (tmp_path / "shared").iterdir()
    for content in ('{"run": "theirs", "user": 1, "pid": 1}', "", "[" * 3000):
        path.write_text(content)
        assert locks(tmp_path, [0]).take() == [
            f"device 0 is in use by process {os.getpid()} of user {os.geteuid()}"
        ]
    held.release()


def test_devices_without_a_device_file_are_not_locked(tmp_path: Path) -> None:
    first = locks(tmp_path, [7])
    assert first.take() == locks(tmp_path, [7]).take() == [] and first.note == ""
    assert DeviceLocks({"kind": "cpu", "devices": [0]}).take() == []


def test_it_is_said_where_no_folder_is_shared_by_all_users(tmp_path: Path) -> None:
    (tmp_path / "device0").touch()
    private = tmp_path / "private"
    private.mkdir(mode=0o700)
    spec = {"kind": "npu", "devices": [0]}
    found = DeviceLocks(spec, [str(private)], {"npu": str(tmp_path / "device{}")})
    assert found.take() == []
    assert found.note.startswith("devices are not locked against other users")


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can act as another user")
def test_another_user_sees_the_lock() -> None:
    folder = Path(tempfile.mkdtemp())
    try:
        folder.chmod(0o755)
        held = locks(folder, [0])
        assert held.take() == []
        reading, writing = os.pipe()
        child = os.fork()
        if child == 0:
            os.setgroups([])
            os.setgid(65534)
            os.setuid(65534)
            os.write(writing, json.dumps(locks_seen_by_another(folder)).encode())
            os._exit(0)
        os.close(writing)
        with open(reading, "rb") as answer:
            assert json.loads(answer.read(4096)) == ["device 0 is in use by run-[0] of user 0"]
        os.waitpid(child, 0)
        held.release()
    finally:
        shutil.rmtree(folder)


def locks_seen_by_another(folder: Path) -> list[str]:
    spec = {"kind": "npu", "devices": [0], "run_id": "theirs"}
    return DeviceLocks(spec, [str(folder / "shared")], {"npu": str(folder / "device{}")}).take()
