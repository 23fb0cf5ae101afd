"""Runs that survive, on real SSH nodes: a dead rank, a dead node, a dead terminal, a dead controller."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from clusterctl.jobs.run_folder import RunDir
from clusterctl.sandbox import cluster, namespaces
from tests.live.conftest import Shell, clean_environment
from tests.live.test_commands import marked
from tests.live.test_training import data as data
from tests.live.test_training import job_file, losses

pytestmark = [pytest.mark.live, pytest.mark.timeout(300)]

TICKS = "import time\nfor n in range({count}):\n    print(n, flush=True)\n    time.sleep(0.1)"

UNTIL = """
import itertools, os, time
for n in itertools.takewhile(lambda n: n < 9 or not os.path.exists({path!r}), itertools.count()):
    print(n, flush=True)
    time.sleep(0.1)
"""


def wait_for(truth: Callable[[], object], seconds: float = 60.0) -> None:
    deadline = time.monotonic() + seconds
    while not truth():
        assert time.monotonic() < deadline, "it never came"
        time.sleep(0.1)


def last_run(shell: Shell) -> RunDir:
    return RunDir(Path(json.loads(shell("runs", "--json").stdout)[0]["folder"]))


def detached(shell: Shell, code: str, *options: str) -> RunDir:
    done = shell("launch", "--detach", "--no-code", *options, "--", "python3", "-c", code)
    assert done.returncode == 0, done.stderr
    return RunDir(shell.folder / "runs" / done.stdout.strip())


def test_a_training_whose_rank_is_killed_goes_on_by_itself_from_its_newest_checkpoint(
    shell: Shell, data: Path
) -> None:
    name = job_file(shell, data, env="CLUSTERCTL_FAULT: rank3:step7:kill9")
    text = (shell.folder / name).read_text()
    (shell.folder / name).write_text(text + "restart: {max: 1, backoff: 0.2s}\n")
    done = shell("launch", name, timeout=250)
    # The arranged fault strikes at step 7 of every attempt.
    assert done.returncode == 5, done.stderr
    assert "restart 1 of 1 now: rank 3 on node2 (device 1) killed" in done.stderr
    assert "not restarted: the only restart is used" in done.stderr
    run = last_run(shell)
    assert sorted(losses(run.root)) == list(range(1, 7))
    started = [metric for metric in run.metric_lines() if metric.kind == "start"]
    assert [metric.step for metric in started] == [0, 4]
    assert not marked(run.run_id)


def test_a_training_that_hangs_says_where_it_stands_and_goes_on(shell: Shell, data: Path) -> None:
    name = job_file(shell, data, steps=400)
    text = (shell.folder / name).read_text()
    (shell.folder / name).write_text(text + "hang_after: 4s\nrestart: {max: 1, backoff: 0.2s}\n")
    started = shell("launch", "--detach", name)
    assert started.returncode == 0, started.stderr
    run = RunDir(shell.folder / "runs" / started.stdout.strip())
    wait_for(lambda: run.metrics.exists() and sum(1 for _ in run.metric_lines()) > 10)
    state = json.loads(shell("status", run.run_id, "--json").stdout)
    pids = {rank["rank"]: rank["pid"] for rank in state["ranks"]}
    os.kill(pids[2], signal.SIGSTOP)
    followed = shell("attach", run.run_id, timeout=200)
    assert followed.returncode == 0, followed.stderr
    # In the events: on a busy machine `attach` may begin after the failure.
    texts = [str(event.facts.get("text")) for event in run.event_lines()]
    cause = "rank 2 on node2 (device 0) was stopped by a signal (SIGSTOP)"
    assert any(cause in text for text in texts), texts
    assert run.read_record().attempt == 2
    said = run.log("node1", 0, "err", 1).read_text()
    assert "Current thread" in said
    assert "trainer/train/loop.py" in said
    assert losses(run.root).keys() == set(range(1, 401))


def test_the_rank_of_a_training_that_the_others_wait_for_is_the_cause(shell: Shell, data: Path) -> None:
    name = job_file(shell, data, steps=400, env="CLUSTERCTL_FAULT: rank1:step150:hang")
    with (shell.folder / name).open("a") as file:
        file.write("hang_after: 4s\n")
    done = shell("launch", name, timeout=300)
    assert done.returncode == 5
    run = last_run(shell)
    cause = json.loads(run.cause.read_text())
    assert (cause["rank"], cause["node"], cause["device"]) == (1, "node1", 1)
    assert re.search(
        r"3 of 4 ranks wait in \S+ at \S+/\S+\.py:\d+, rank 1 \(node1, device 1\) is in ", cause["title"]
    )
    assert "`_hang` at train/observers.py:" in cause["title"]
    roll = json.loads(run.roll_call(1).read_text())["ranks"]
    counts = {seen["rank"]: seen["calls"]["0,1,2,3"] for seen in roll}
    assert counts[1] == min(counts.values()) < counts[0]
    assert {seen["step"] for seen in roll} == {149}


def test_a_rank_that_holds_up_the_others_is_named_and_left_alone(shell: Shell, data: Path) -> None:
    name = job_file(shell, data, steps=100_000, env="CLUSTERCTL_FAULT: rank3:step2:slow1500")
    started = shell("launch", "--detach", name)
    assert started.returncode == 0, started.stderr
    run = RunDir(shell.folder / "runs" / started.stdout.strip())

    # On a busy machine another rank may be slow too.
    def stragglers() -> list[dict[str, Any]]:
        return [
            event for event in run.event_lines() if event.kind == "straggler" and event.facts["rank"] == 3
        ]

    wait_for(lambda: bool(stragglers()), seconds=200.0)
    event = stragglers()[0]
    assert (event.facts["node"], event.facts["device"]) == ("node2", 1)
    assert event.facts["times"] > 1.3
    assert "straggler: rank 3 on node2 (device 1) takes" in shell("status", run.run_id).stdout
    # It sleeps for most of the time of a step.
    where = re.compile(r"straggler: rank 3 is in `__call__` at train/observers.py:\d+ in [2345] of 5 samples")
    wait_for(
        lambda: any(where.search(str(event.facts.get("text"))) for event in run.event_lines()), seconds=60.0
    )
    seen = json.loads(shell("status", run.run_id, "--json").stdout)
    assert "3" in seen["overview"]["slow"]
    assert seen["phase"] == "running"
    assert shell("stop", run.run_id, "--grace", "1").returncode == 0


def test_a_killed_terminal_changes_nothing_for_the_run(shell: Shell) -> None:
    argv = [
        sys.executable,
        "-m",
        "clusterctl",
        "launch",
        "--no-code",
        "--",
        "python3",
        "-c",
        TICKS.format(count=30),
    ]
    process = subprocess.Popen(argv, cwd=shell.folder, env=shell.env, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stdout.readline() == "node1:0 0\n"
    process.send_signal(signal.SIGKILL)
    process.communicate()
    run = last_run(shell)
    wait_for(lambda: run.phase() == "finished")
    assert run.log("node2", 3, "out").read_text().split() == [str(n) for n in range(30)]
    wait_for(lambda: not run.is_watched())


def test_a_dead_controller_is_told_and_another_takes_over_without_a_restart(shell: Shell) -> None:
    enough = shell.folder / "enough"
    run = detached(shell, UNTIL.format(path=str(enough)))
    controller = run.controller()
    assert controller is not None
    assert json.loads(shell("status", run.run_id, "--json").stdout)["controller"] == controller
    os.kill(controller, signal.SIGKILL)
    wait_for(lambda: run.controller() is None)
    state = json.loads(shell("status", run.run_id, "--json").stdout)
    assert (state["phase"], state["controller"]) == ("running", None)
    enough.touch()
    followed = shell("attach", "--take-over", run.run_id)
    assert followed.returncode == 0, followed.stderr
    assert run.read_record().attempt == 1
    for node, rank in (("node1", 1), ("node2", 3)):
        lines = run.log(node, rank, "out").read_text().split()
        assert lines == [str(n) for n in range(len(lines))]
        assert len(lines) > 5


def test_a_terminal_that_follows_puts_a_new_controller_in_the_place_of_a_dead_one(shell: Shell) -> None:
    enough = shell.folder / "enough"
    run = detached(shell, UNTIL.format(path=str(enough)))
    controller = run.controller()
    assert controller is not None
    argv = [sys.executable, "-m", "clusterctl", "attach", run.run_id]
    both = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    process = subprocess.Popen(argv, cwd=shell.folder, env=shell.env, text=True, **both)
    assert process.stdout is not None and process.stderr is not None
    # It follows now.
    assert process.stdout.readline() == "node1:0 0\n"
    os.kill(controller, signal.SIGKILL)
    assert "is gone; starting a new one" in process.stderr.readline()
    wait_for(run.is_watched)
    enough.touch()
    rest = process.communicate(timeout=100)[1]
    assert process.returncode == 0 and "finished " in rest
    assert run.read_record().attempt == 1
    lines = run.log("node2", 3, "out").read_text().split()
    assert lines == [str(n) for n in range(len(lines))]


def test_ctrl_c_ends_only_the_command_that_follows(shell: Shell) -> None:
    run = detached(shell, TICKS.format(count=600))
    argv = [sys.executable, "-m", "clusterctl", "attach", run.run_id]
    both = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    process = subprocess.Popen(argv, cwd=shell.folder, env=shell.env, text=True, **both)
    assert process.stdout is not None and process.stdout.readline()
    process.send_signal(signal.SIGINT)
    text = process.communicate(timeout=100)[1]
    assert process.returncode == 130 and "interrupted" not in text and "the run continues" in text
    assert run.is_watched() and shell("stop", run.run_id).returncode == 0


def test_a_stop_without_a_controller_brings_the_last_lines_home(shell: Shell) -> None:
    ends = "signal.signal(signal.SIGTERM, lambda *_: sys.exit(print('the last line', flush=True)))\n"
    run = detached(shell, "import signal, sys\n" + ends + TICKS.format(count=600))
    printed = run.log("node2", 3, "out")
    wait_for(lambda: printed.exists() and printed.read_text())
    controller = run.controller()
    assert controller is not None
    os.kill(controller, signal.SIGKILL)
    wait_for(lambda: run.controller() is None)
    stopped = shell("stop", run.run_id)
    assert stopped.returncode == 0, stopped.stderr
    assert "is stopped; 0 processes left" in stopped.stderr
    for node, rank in (("node1", 0), ("node2", 3)):
        assert run.log(node, rank, "out").read_text().endswith("\nthe last line\n")


def test_a_controller_that_stands_still_is_replaced(shell: Shell) -> None:
    run = detached(shell, TICKS.format(count=50))
    stopped = run.controller()
    assert stopped is not None
    os.kill(stopped, signal.SIGSTOP)
    followed = shell("attach", "--take-over", run.run_id)
    assert followed.returncode == 0, followed.stderr
    assert run.phase() == "finished"
    assert not Path(f"/proc/{stopped}").exists() or "Z" in Path(f"/proc/{stopped}/stat").read_text()


def test_an_interrupt_right_after_the_start_leaves_nothing(shell: Shell) -> None:
    argv = [sys.executable, "-m", "clusterctl", "launch", "--no-code", "--", "sleep", "600"]
    process = subprocess.Popen(argv, cwd=shell.folder, env=shell.env, stderr=subprocess.PIPE, text=True)
    assert process.stderr is not None
    while "start " not in process.stderr.readline():
        assert process.poll() is None
    process.send_signal(signal.SIGINT)
    rest = process.communicate(timeout=100)[1]
    assert process.returncode == 130, rest
    run = last_run(shell)
    assert not marked(run.run_id)
    assert run.phase() == "stopped"
    assert run.controller() is None


# -- a node that is gone -----------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def three_nodes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[cluster.Sandbox]:
    why = namespaces.why_not()
    if why:
        pytest.skip(why)
    directory = tmp_path_factory.mktemp("three") / "sandbox"
    yield cluster.up(directory, nodes=3, devices=1, mode="namespaces")
    cluster.down(directory)


def end_clearer(run: RunDir) -> None:
    """End the process that waits for a node which never comes back."""
    wait_for(run.clearer)
    os.kill(run.clearer() or 0, signal.SIGKILL)


def test_a_spare_takes_the_place_of_the_first_node_and_its_checkpoints(
    tmp_path: Path, data: Path, three_nodes: cluster.Sandbox
) -> None:
    shell = Shell(tmp_path, {**clean_environment(), "CLUSTERCTL_CLUSTER": str(three_nodes.cluster_file)})
    name = job_file(shell, data, steps=100)
    with (tmp_path / name).open("a") as file:
        file.write("restart: {max: 2, backoff: 0.1, spare_nodes: node3}\n")
    done = shell("launch", "--detach", name)
    assert done.returncode == 0, done.stderr
    run = RunDir(tmp_path / "runs" / done.stdout.strip())
    assert list(run.read_record().ranks) == ["node1", "node2"]
    wait_for(lambda: sum(1 for _ in run.checkpoints.glob("step-*/manifest.json")))
    began = time.time()
    three_nodes.kill("node1")
    followed = shell("attach", run.run_id, timeout=200)
    assert followed.returncode == 0, followed.stderr
    assert run.read_record().ranks == {"node3": (0,), "node2": (1,)}
    lost = next(event for event in run.event_lines() if event.kind == "node_ended")
    assert (lost.facts["node"], lost.facts["state"]) == ("node1", "lost")
    # 15 s, on a machine that has the time.
    assert lost.time - began < 30
    starts = [metric.step for metric in run.metric_lines() if metric.kind == "start"]
    assert len(starts) == 2
    assert starts[1] >= 4
    assert losses(run.root).keys() == set(range(1, 101))
    end_clearer(run)
