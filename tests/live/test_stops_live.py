"""A stop of a run ends every rank, though a node, the disk here or the command itself is missing at that moment."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from clusterctl.jobs.run_folder import RunDir
from clusterctl.sandbox import cluster, namespaces
from clusterctl.sandbox.cluster import Sandbox
from tests.live.conftest import Shell

pytestmark = [pytest.mark.live, pytest.mark.timeout(400)]


@pytest.fixture(scope="module")
def box(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Sandbox]:
    """Two nodes with a network of their own, whose links can be cut."""
    if missing := namespaces.why_not():
        pytest.skip(missing)
    directory = tmp_path_factory.mktemp("stops") / "sandbox"
    yield cluster.up(directory, nodes=2, devices=1, mode="namespaces")
    cluster.down(directory)


@pytest.fixture
def cluster_file(box: Sandbox) -> Path:
    return box.cluster_file


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    """A disk of two megabytes and few inodes."""
    folder = tmp_path / "disk"
    folder.mkdir()
    limits = "size=2m,nr_inodes=200"
    done = subprocess.run(["mount", "-t", "tmpfs", "-o", limits, "disk", str(folder)], capture_output=True)
    if done.returncode:
        pytest.skip(f"no disk of one's own here: {done.stderr.decode()}")
    yield folder
    subprocess.run(["umount", "-l", str(folder)], check=True)


def wait_for(truth: Callable[[], object], seconds: float = 60.0) -> None:
    deadline = time.monotonic() + seconds
    while not truth():
        assert time.monotonic() < deadline, "it did not come true in time"
        time.sleep(0.1)


def detached(shell: Shell, runs: Path) -> RunDir:
    """A run of a rank on each node that ends only when it is stopped."""
    done = shell("launch", "--detach", "--no-code", "--", "sleep", "3600", CLUSTERCTL_RUNS=str(runs))
    assert done.returncode == 0, done.stderr
    return RunDir(runs / done.stdout.strip())


def living(run: RunDir) -> list[str]:
    """The nodes on which a process of the run lives, as the kernel of this machine sees them."""
    found = []
    mark = f"CLUSTERCTL_RUN_ID={run.run_id}".encode()
    for entry in Path("/proc").iterdir():
        try:
            values = (entry / "environ").read_bytes().split(b"\0") if entry.name.isdigit() else []
        except OSError:
            continue
        if mark in values:
            found += [
                value.partition(b"=")[2].decode() for value in values if value.startswith(b"CLUSTERCTL_NODE=")
            ]
    return sorted(set(found))


def test_a_node_that_a_stop_did_not_reach_is_stopped_when_it_answers_again(
    shell: Shell, box: Sandbox, tmp_path: Path
) -> None:
    run = detached(shell, tmp_path / "runs")
    box.cut("node2")
    try:
        done = shell("stop", run.run_id, CLUSTERCTL_RUNS=str(tmp_path / "runs"))
    finally:
        box.heal("node2")
    assert done.returncode == 3
    assert "rank 1 on node2 may still run" in done.stderr
    assert (
        f"process {run.controller()} here, which controls the run, stops them when node2 answers again"
        in " ".join(done.stderr.split())
    )
    wait_for(lambda: not living(run))
    wait_for(lambda: run.phase() == "stopped")


def test_a_controller_obeys_a_stop_whose_command_was_killed(shell: Shell, tmp_path: Path) -> None:
    run = detached(shell, tmp_path / "runs")
    run.write_json(run.stop_asked, {"asked": time.time(), "grace": 0.5})
    wait_for(lambda: not living(run))
    wait_for(lambda: run.phase() == "stopped")


def test_a_stop_without_a_controller_starts_one_for_the_node_that_is_away(
    shell: Shell, box: Sandbox, tmp_path: Path
) -> None:
    run = detached(shell, tmp_path / "runs")
    controller = run.controller()
    assert controller is not None
    os.kill(controller, signal.SIGKILL)
    wait_for(lambda: run.controller() is None)
    box.cut("node2")
    try:
        done = shell("stop", run.run_id, CLUSTERCTL_RUNS=str(tmp_path / "runs"))
        assert done.returncode == 3
        assert "rank 1 on node2 may still run" in done.stderr
        assert run.controller() is not None
    finally:
        box.heal("node2")
    wait_for(lambda: not living(run))
    wait_for(lambda: run.phase() == "stopped")


@pytest.mark.parametrize("what", ["blocks", "inodes"])
def test_a_run_is_stopped_and_its_logs_are_shown_on_a_full_disk_here(
    shell: Shell, disk: Path, what: str
) -> None:
    run = detached(shell, disk)
    wait_for(lambda: run.log("node2", 1, "out").exists())
    run.log("node2", 1, "out").write_text("copied before\n")
    if what == "blocks":
        with (disk / "ballast").open("wb", buffering=0) as file, pytest.raises(OSError, match="No space"):
            while True:
                file.write(b"\0" * 4096)
    else:
        with pytest.raises(OSError, match="No space"):
            for number in range(1000):
                (disk / f"ballast-{number}").touch()
    shown = shell("logs", "show", run.run_id, "--rank", "1", CLUSTERCTL_RUNS=str(disk))
    assert (shown.returncode, "copied before" in shown.stdout) == (0, True), shown.stderr
    done = shell("stop", run.run_id, CLUSTERCTL_RUNS=str(disk))
    assert done.returncode == 0, done.stderr
    assert not living(run)
    assert "0 processes left" in done.stderr
    again = shell("status", run.run_id, "--json", CLUSTERCTL_RUNS=str(disk))
    assert json.loads(again.stdout)["phase"] == "stopped", again.stderr


def lost(shell: Shell, box: Sandbox, runs: Path) -> RunDir:
    """A run whose second node was cut off for so long that the run ended."""
    (shell.folder / "job.yaml").write_text(
        "name: away\ncommand: [sleep, '3600']\nrestart: {max: 0, node_lost_after: 11s}\n"
    )
    done = shell("launch", "--detach", "job.yaml", CLUSTERCTL_RUNS=str(runs))
    assert done.returncode == 0, done.stderr
    run = RunDir(runs / done.stdout.strip())
    box.cut("node2")
    wait_for(lambda: run.phase() == "lost", 120)
    wait_for(lambda: run.clearer() is not None)
    assert living(run) == ["node2"]
    return run


def test_what_a_lost_node_still_runs_is_named_and_ended_when_it_answers_again(
    shell: Shell, box: Sandbox, tmp_path: Path
) -> None:
    try:
        run = lost(shell, box, tmp_path / "runs")
        shown = " ".join(shell("status", run.run_id, CLUSTERCTL_RUNS=str(tmp_path / "runs")).stdout.split())
        assert f"over; rank 1 on node2 may be left; process {run.clearer()} here ends it" in shown
    finally:
        box.heal("node2")
    wait_for(lambda: not living(run))
    wait_for(lambda: run.clearer() is None)
    assert "node2 answers again; what ran there was ended" in run.events.read_text()
    assert run.read_record().abandoned == ()
    assert run.phase() == "lost"


def test_a_lost_nodes_rank_that_nobody_ends_does_not_make_the_run_active_again(
    shell: Shell, box: Sandbox, tmp_path: Path
) -> None:
    runs = str(tmp_path / "runs")
    try:
        run = lost(shell, box, tmp_path / "runs")
        clearer = run.clearer()
        assert clearer is not None
        os.kill(clearer, signal.SIGKILL)
    finally:
        box.heal("node2")
    state = json.loads(shell("status", run.run_id, "--json", CLUSTERCTL_RUNS=runs).stdout)
    assert (state["phase"], state["left"]) == ("lost", {"node2": ["rank 1"]})
    assert state["overview"]["left_behind"] == (
        f"over; rank 1 on node2 is left; end it: clusterctl stop {run.run_id}"
    )
    done = shell("stop", run.run_id, CLUSTERCTL_RUNS=runs)
    assert done.returncode == 0, done.stderr
    assert not living(run)
    assert "stop_asked" not in run.events.read_text()
