"""`doctor`, the checks of a launch, `status` and `runs prune`, typed at real SSH nodes."""

from __future__ import annotations

import json
import os
import re
import socket
import subprocess
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from tests.live.conftest import Shell

pytestmark = pytest.mark.live

SLEEP = ("--no-code", "--", "python3", "-c", "import time; time.sleep(600)")


@pytest.fixture
def npu_shell(shell: Shell, cluster_file: Path) -> Iterator[Shell]:
    """The same nodes with simulated NPUs: their simulated tools are run."""
    file = cluster_file.with_name("npu.yaml")
    file.write_text(re.sub(r'"kind": "cpu"', '"kind": "npu"', cluster_file.read_text()))
    answers = cluster_file.parent / "node1" / "etc" / "hccn_tool.answers"
    before = answers.read_text()
    yield Shell(shell.folder, {**shell.env, "CLUSTERCTL_CLUSTER": str(file)})
    answers.write_text(before)
    file.unlink()


def spoil(cluster_file: Path, *lines: str) -> None:
    """Have node1's tools answer otherwise: the last line of a key counts first."""
    answers = cluster_file.parent / "node1" / "etc" / "hccn_tool.answers"
    answers.write_text("\n".join(lines) + "\n" + answers.read_text())


def bad(shell: Shell, *words: str) -> tuple[int, dict[str, list[str]]]:
    """The exit code, and by check what was bad."""
    done = shell("doctor", "--json", *words)
    found: dict[str, list[str]] = {}
    for one in json.loads(done.stdout):
        if one["level"] == "bad":
            assert one["remedy"]
            found.setdefault(one["check"], []).append(f"{one['where']}: {one['what']}")
    return done.returncode, found


def test_sound_nodes_are_fit_and_what_is_wrong_ends_with_exit_code_1(shell: Shell) -> None:
    assert bad(shell) == (0, {})
    with socket.create_server(("", 0)) as door:
        code, found = bad(shell, "--master-port", str(door.getsockname()[1]))
    assert code == 1 and list(found) == ["master-port"]
    assert f"(pid {os.getpid()})" in found["master-port"][0]


@pytest.fixture
def mounted(tmp_path: Path) -> Iterator[Callable[[Path, str], None]]:
    """A function that mounts a disk of 64 kB, filled to the end, in place of a folder."""
    folders: list[Path] = []

    def mount(folder: Path, options: str) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        words = ["mount", "-t", "tmpfs", "-o", f"size=64k,mode=0700,{options}", "disk", str(folder)]
        done = subprocess.run(words, capture_output=True)
        if done.returncode:
            pytest.skip(f"no disk of one's own here: {done.stderr.decode()}")
        folders.append(folder)
        with suppress(OSError):
            (folder / "filler").write_bytes(bytes(1 << 17))

    yield mount
    for folder in reversed(folders):
        subprocess.run(["umount", "-l", str(folder)], check=True)


FREE, MOUNT = "free some space", "for writing"


@pytest.mark.parametrize(
    ("options", "checked", "refused", "remedy"),
    [
        ("rw", "0 B free for {runs}", "No space left on device: '{runs}", FREE),
        ("rw,nr_inodes=2", "0 files can still be made in {runs}", "No space left on device: '{runs}", FREE),
        ("ro", "{runs} cannot be written", "Read-only file system: '{runs}", MOUNT),
    ],
)
def test_a_disk_of_runs_that_can_not_be_written_is_named_before_and_at_the_start(
    shell: Shell,
    cluster_file: Path,
    mounted: Callable[[Path, str], None],
    options: str,
    checked: str,
    refused: str,
    remedy: str,
) -> None:
    assert shell("exec", "all", "--", "true").returncode == 0
    runs = cluster_file.parent / "node1" / "home" / ".clusterctl" / "runs"
    mounted(runs, options)
    for words, code, text in (((), 1, checked), (("--no-checks",), 4, refused)):
        done = shell("launch", *words, *SLEEP)
        assert done.returncode == code, done.stderr
        assert "node1: " in done.stderr and text.format(runs=runs) in done.stderr
        assert remedy in done.stderr


@pytest.mark.parametrize(("options", "remedy"), [("rw", FREE), ("rw,nr_inodes=2", FREE), ("ro", MOUNT)])
def test_a_work_folder_that_can_not_be_written_gets_its_own_remedy(
    shell: Shell,
    cluster_file: Path,
    mounted: Callable[[Path, str], None],
    tmp_path: Path,
    options: str,
    remedy: str,
) -> None:
    full = tmp_path / "full"
    mounted(full, options)
    file = tmp_path / "full.yaml"
    text = cluster_file.read_text().replace("./", f"{cluster_file.parent}/")
    file.write_text(re.sub(r'"workdir": "[^"]*node1/[^"]*"', f'"workdir": "{full}"', text))
    done = shell("exec", "node1", "--", "true", CLUSTERCTL_CLUSTER=str(file))
    assert done.returncode == 0, "a command needs no agent"
    done = shell("push", str(file), "/tmp/x", CLUSTERCTL_CLUSTER=str(file))
    assert f"node1: the agent can't be installed: {full}" in done.stderr
    assert remedy in done.stderr and "alone" not in done.stderr


def test_nodes_tell_the_devices_that_the_inventory_leaves_out(shell: Shell, cluster_file: Path) -> None:
    text = re.sub(r', "devices": \d+, "kind": "cpu"', "", cluster_file.read_text())
    for name, given, planned in (("any", "", 0), ("npu", ', "kind": "npu"', 2)):
        file = cluster_file.with_name(f"{name}.yaml")
        file.write_text(re.sub(r"(defaults: \{[^}]*)\}", rf"\1{given}}}", text))
        here = Shell(shell.folder, {**shell.env, "CLUSTERCTL_CLUSTER": str(file)})
        assert here("plan", "--no-code", "--", "true").returncode == planned
        program = 'import os; print(os.environ["RANK"], "of", os.environ["WORLD_SIZE"], "ranks")'
        done = here("launch", "--no-code", "--", "python3", "-c", program)
        assert done.returncode == 0 and "0 of 4 ranks" in done.stdout, done.stderr
        assert "node1   " in here("nodes").stdout and "? " in here("nodes").stdout
        file.unlink()


def test_this_machine_alone_is_a_cluster_in_one_line(shell: Shell) -> None:
    (shell.folder / "cluster.yaml").write_text("nodes: {g1: {host: local}}\n")
    env = {name: value for name, value in shell.env.items() if name != "CLUSTERCTL_CLUSTER"}
    here = Shell(shell.folder, {**env, "CLUSTERCTL_KIND": "cpu"})
    assert bad(here) == (0, {})
    done = here("launch", "--no-code", "--", "sh", "-c", "echo at $MASTER_ADDR")
    assert done.returncode == 0 and "at 127.0.0.1" in done.stdout, done.stderr


def test_an_ill_a_busy_an_unlinked_and_an_unreachable_device_are_found(
    npu_shell: Shell, cluster_file: Path
) -> None:
    spoil(cluster_file, "health_1=Alarm", "process_0=4711 python 512", "link_0=DOWN", "ping_1=no answer")
    code, found = bad(npu_shell)
    assert code == 1
    assert found == {
        "devices": ["node1: device 1: health is Alarm"],
        "devices-busy": ["node1: device 0 is in use: python (pid 4711)"],
        "device-link": ["node1: device 0: its network link is DOWN"],
        "device-ping": [
            f"node1: device 1 can't reach device 1 of node2 ({_address(cluster_file)}): no answer"
        ],
    }
    hints = npu_shell("doctor", "--fix-hints").stdout
    assert "$ clusterctl exec node1 -- sh -c 'npu-smi info'" in hints and "\nok " not in hints


def _address(cluster_file: Path) -> str:
    conf = (cluster_file.parent / "node2" / "etc" / "hccn.conf").read_text()
    return next(line.partition("=")[2] for line in conf.splitlines() if line.startswith("address_1="))


def test_a_busy_device_refuses_a_launch_unless_it_is_asked_for(npu_shell: Shell, cluster_file: Path) -> None:
    spoil(cluster_file, "process_0=4711 python 512")
    words = ("--no-code", "--", "python3", "-c", "print('hi')")
    refused = npu_shell("launch", *words)
    assert refused.returncode == 1 and "device 0 is in use: python (pid 4711)" in refused.stderr
    assert "nothing was started" in refused.stderr and "--no-checks" in refused.stderr
    assert not (npu_shell.folder / "runs").exists() or not list((npu_shell.folder / "runs").iterdir())
    other = npu_shell("launch", "--devices", "[1,2)", *words)
    assert other.returncode == 0, other.stderr
    insisted = npu_shell("launch", "--no-checks", *words)
    assert insisted.returncode == 0, insisted.stderr


def test_status_watches_until_the_end_and_prune_takes_only_what_has_ended(
    shell: Shell, cluster_file: Path
) -> None:
    ended = shell("launch", "--no-code", "--", "python3", "-c", "print(1)")
    assert ended.returncode == 0, ended.stderr
    old = Path(ended.stderr.split()[-1]).name
    broken = shell.folder / "runs" / "broken-1" / "run.json"
    broken.parent.mkdir()
    broken.write_text("{")
    alive = shell("launch", "-d", *SLEEP).stdout.strip()
    try:
        seen = json.loads(shell("status", alive, "--json").stdout)
        assert (seen["phase"], seen["overview"]["attempt"], seen["overview"]["restarts"]) == ("running", 1, 0)
        assert [node["ranks"] for node in seen["overview"]["nodes"]] == [{"running": 2}] * 2
        assert "would delete" in shell("runs", "prune", "--keep", "0", "--dry-run").stdout
        assert shell("runs", "prune", "--keep", "0").returncode == 2, "without a yes nothing goes"
        pruned = shell("runs", "prune", "--keep", "0", "--yes")
        assert pruned.returncode == 0 and f"kept {alive}" in pruned.stdout, pruned.stderr
        assert "kept broken-1: its record can't be read" in pruned.stdout
        listed = {one["run"]: one["phase"] for one in json.loads(shell("runs", "--json").stdout)}
        assert listed == {alive: "running", "broken-1": "damaged"}
        left = [path.name for n in (1, 2) for path in (cluster_file.parent / f"node{n}").rglob("runs/*")]
        assert alive in left and old not in left
    finally:
        stopped = shell("stop", alive)
    assert stopped.returncode == 0, stopped.stderr
    watched = shell("status", alive, "--watch", "--every", "0.2")
    assert watched.returncode == 0 and f"{alive}  stopped" in watched.stdout.splitlines()[-1]


def test_processes_that_no_supervisor_owns_are_named_with_the_way_to_end_them(
    shell: Shell, cluster_file: Path
) -> None:
    nodes = json.loads(shell("nodes", "list", "--json").stdout)["nodes"]
    workdir = next(one["workdir"] for one in nodes if one["name"] == "node1")
    marks = {"CLUSTERCTL_RUN_ID": "old-1", "CLUSTERCTL_ATTEMPT": "1", "CLUSTERCTL_NODE": "node1"}
    left = subprocess.Popen(
        ["sleep", "600"], env={**marks, "CLUSTERCTL_RUN_DIR": f"{workdir}/runs/old-1/node1"}
    )
    try:
        findings = json.loads(shell("doctor", "--json").stdout)
    finally:
        left.kill()
        left.wait()
    found = [one for one in findings if one["check"] == "left-over"]
    assert [(one["where"], one["fix"]) for one in found] == [("node1", f"kill {left.pid}")]
    assert "1 process left of old-1" in found[0]["what"] and "clusterctl stop old-1" in found[0]["remedy"]
