"""Checkpoints of runs on real SSH nodes: copies that outlive a node, a shared disk, commands that ask the nodes."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from clusterctl.jobs.run_folder import RunDir
from clusterctl.sandbox import cluster, namespaces
from tests.live.conftest import Shell, clean_environment
from tests.live.test_restarts_live import end_clearer, wait_for
from tests.live.test_training import data as data
from tests.live.test_training import job_file, losses

pytestmark = [pytest.mark.live, pytest.mark.timeout(400)]


@pytest.fixture
def three_nodes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[cluster.Sandbox]:
    why = namespaces.why_not()
    if why:
        pytest.skip(why)
    directory = tmp_path_factory.mktemp("three") / "sandbox"
    yield cluster.up(directory, nodes=3, devices=1, mode="namespaces", isolated=True)
    cluster.down(directory)


def listed(shell: Shell, run: RunDir) -> list[dict[str, Any]]:
    done = shell("checkpoint", "list", run.run_id, "--json")
    assert done.returncode == 0, done.stderr
    rows: list[dict[str, Any]] = json.loads(done.stdout)["checkpoints"]
    return rows


def copied(run: RunDir) -> list[int]:
    return [event.facts["step"] for event in run.event_lines() if event.kind == "copied"]


def test_a_node_is_lost_with_its_disk_and_the_run_goes_on_from_the_newest_copied_step(
    tmp_path: Path, data: Path, three_nodes: cluster.Sandbox
) -> None:
    shell = Shell(tmp_path, {**clean_environment(), "CLUSTERCTL_CLUSTER": str(three_nodes.cluster_file)})
    name = job_file(shell, data, steps=240)
    with (tmp_path / name).open("a") as file:
        file.write("restart: {max: 2, backoff: 0.1, spare_nodes: node3}\n")
    options = ["--set", "train.save.copies=2", "--set", "train.save.every=20", "--set", "collect=[]"]
    done = shell("launch", "--detach", name, *options)
    assert done.returncode == 0, done.stderr
    run = RunDir(tmp_path / "runs" / done.stdout.strip())
    wait_for(lambda: copied(run), seconds=120)
    three_nodes.kill("node1")
    safe = copied(run)[-1]
    shutil.rmtree(three_nodes.directory / "node1" / "home" / ".clusterctl")
    followed = shell("attach", run.run_id, timeout=300)
    assert followed.returncode == 0, followed.stderr
    end_clearer(run)
    assert run.read_record().ranks == {"node3": (0,), "node2": (1,)}
    starts = [metric.step for metric in run.metric_lines() if metric.kind == "start"]
    assert len(starts) == 2
    assert starts[1] >= safe
    texts = [str(event.facts.get("text")) for event in run.event_lines()]
    moved = [text for text in texts if "moved to node3" in text]
    assert f"step-{starts[1]:08d}: the newest checkpoint that the living nodes have" in moved[0], texts
    assert losses(run.root).keys() == set(range(1, 241))
    # Nothing was copied to this machine, and the last checkpoint has its copies too.
    assert not run.checkpoints.exists()
    newest = listed(shell, run)[0]
    assert (newest["step"], newest["health"], newest["copies"]) == (240, "complete", 2)
    assert sorted(newest["on"]) == ["node2", "node3"]
    verified = shell("checkpoint", "verify", run.run_id, "--all")
    assert verified.returncode == 0, verified.stderr


def test_a_run_is_resumed_on_other_nodes_which_get_only_what_they_lack(
    tmp_path: Path, data: Path, three_nodes: cluster.Sandbox
) -> None:
    shell = Shell(tmp_path, {**clean_environment(), "CLUSTERCTL_CLUSTER": str(three_nodes.cluster_file)})
    name = job_file(shell, data, steps=100_000)
    done = shell("launch", "--detach", name, "--nodes", "node[1-2]", "--set", "collect=[]")
    assert done.returncode == 0, done.stderr
    run = RunDir(tmp_path / "runs" / done.stdout.strip())
    wait_for(lambda: any(metric.kind == "checkpoint" for metric in run.metric_lines()), seconds=120)
    assert shell("stop", run.run_id).returncode == 0
    newest = listed(shell, run)[0]
    assert sorted(newest["on"]) == ["node1", "node2"]
    resumed = shell("resume", run.run_id, "--nodes", "node[2-3]", "--detach")
    assert resumed.returncode == 0, resumed.stderr
    # Rank 0 is on node2 now and rank 1 on node3.
    assert f"{newest['name']}: the newest checkpoint that the living nodes have" in resumed.stderr
    assert "2 files" in resumed.stderr
    assert "moved to node[2-3]" in resumed.stderr
    assert run.read_record().ranks == {"node2": (0,), "node3": (1,)}
    assert [node.name for node in run.read_record().spares] == ["node1"]
    wait_for(lambda: sum(metric.kind == "start" for metric in run.metric_lines()) == 2, seconds=120)
    starts = [metric.step for metric in run.metric_lines() if metric.kind == "start"]
    assert starts[1] == newest["step"]
    assert shell("stop", run.run_id, "--grace", "1").returncode == 0


def test_a_shared_folder_is_written_once_and_found_there(shell: Shell, data: Path, tmp_path: Path) -> None:
    shared = tmp_path / "shared"
    name = job_file(shell, data)
    folder = ["--set", f"train.save.dir={shared}", "--set", "collect=[]"]
    missing = shell("launch", name, *folder)
    assert missing.returncode == 4
    assert f"node1: {shared}: no such folder" in missing.stderr
    shared.mkdir()
    shared.chmod(0o777)
    assert "every user of this machine can change" in shell("launch", name, *folder).stderr
    shared.chmod(0o755)
    done = shell("launch", name, *folder, timeout=200)
    assert done.returncode == 0, done.stderr
    assert f"{shared} is shared by node[1-2]" in done.stderr
    run = RunDir(Path(json.loads(shell("runs", "--json").stdout)[0]["folder"]))
    (own,) = (path for path in shared.iterdir() if not path.name.startswith("."))
    assert own.name == run.run_id
    rows = listed(shell, run)
    assert [row["step"] for row in rows] == [12, 8, 4]
    assert [row["health"] for row in rows] == ["complete"] * 3
    assert rows[0]["on"] == {"node1": str(own / "step-00000012")}
    assert not list(run.root.parent.parent.glob("**/node2/checkpoints/step-*"))
    manifest, part = own / "step-00000012" / "manifest.json", next((own / "step-00000008").glob("part-*"))
    manifest.write_bytes(manifest.read_bytes()[:-100])
    content = bytearray(part.read_bytes())
    content[len(content) // 2] ^= 1
    part.write_bytes(content)
    resumed = shell("resume", run.run_id, "--set", "train.steps=16", timeout=200)
    assert resumed.returncode == 0, resumed.stderr
    assert "from step 4" in resumed.stderr
    assert f"passed over: node1: {manifest}: damaged: not JSON" in resumed.stderr
    assert f"checkpoint passed over a checkpoint: {part}: damaged" in resumed.stderr


def test_a_folder_that_nodes_do_not_share_is_refused(shell: Shell, data: Path, cluster_file: Path) -> None:
    for node in ("node1", "node2"):
        (cluster_file.parent / node / "home" / "own").mkdir(exist_ok=True)
    name = job_file(shell, data)
    done = shell("launch", name, "--set", "train.save.dir=~/own")
    assert done.returncode == 4
    assert "node2: ~/own is another folder than on node1" in done.stderr


def test_more_copies_than_nodes_are_refused(shell: Shell, data: Path) -> None:
    done = shell("plan", job_file(shell, data), "--set", "train.save.copies=3")
    assert done.returncode == 2
    assert "3 copies need as many nodes, and the run has 2" in done.stderr


def test_a_damaged_file_on_a_node_is_found_there(shell: Shell, data: Path) -> None:
    done = shell("launch", job_file(shell, data), "--set", "collect=[]", timeout=200)
    assert done.returncode == 0, done.stderr
    run = RunDir(Path(json.loads(shell("runs", "--json").stdout)[0]["folder"]))
    assert shell("checkpoint", "verify", run.run_id).returncode == 0
    step = Path(listed(shell, run)[0]["on"]["node2"])
    part = next(step.glob("part-*"))
    content = bytearray(part.read_bytes())
    content[-1] ^= 1
    part.write_bytes(content)
    found = shell("checkpoint", "verify", run.run_id)
    assert found.returncode == 1
    assert f"node2: {part}: damaged" in found.stdout
    assert "(tensor " in found.stdout


def test_a_resume_brings_the_copy_here_back_to_nodes_with_damaged_manifests(shell: Shell, data: Path) -> None:
    done = shell("launch", "--detach", job_file(shell, data, steps=100_000))
    assert done.returncode == 0, done.stderr
    run = RunDir(shell.folder / "runs" / done.stdout.strip())
    wait_for(lambda: any(metric.kind == "checkpoint" for metric in run.metric_lines()), seconds=120)
    assert shell("stop", run.run_id).returncode == 0
    newest = listed(shell, run)[0]
    assert sorted(newest["on"]) == ["here", "node1", "node2"]
    for node in ("node1", "node2"):
        Path(newest["on"][node], "manifest.json").write_text("")
    assert "damaged on node[1-2]" in shell("checkpoint", "list", run.run_id).stdout
    resumed = shell("resume", run.run_id, "--detach")
    assert f"{newest['name']}: the newest checkpoint" in resumed.stderr
    assert "complete on here" in resumed.stderr and "manifest.json: damaged" in resumed.stderr
    wait_for(lambda: sum(metric.kind == "start" for metric in run.metric_lines()) == 2, seconds=120)
    starts = [metric.step for metric in run.metric_lines() if metric.kind == "start"]
    assert starts[1] == newest["step"]
    assert shell("stop", run.run_id, "--grace", "1").returncode == 0


def test_pull_diff_and_prune_of_a_run_ask_its_nodes(shell: Shell, data: Path) -> None:
    done = shell("launch", job_file(shell, data), "--set", "collect=[]", timeout=200)
    assert done.returncode == 0, done.stderr
    run = RunDir(Path(json.loads(shell("runs", "--json").stdout)[0]["folder"]))
    equal = shell("checkpoint", "diff", run.run_id, f"{run.run_id}:12")
    assert equal.returncode == 0, equal.stderr
    differ = shell("checkpoint", "diff", f"{run.run_id}:8", f"{run.run_id}:12", "--json")
    assert differ.returncode == 1
    assert any(entry["different"] for entry in json.loads(differ.stdout)["tensors"].values())
    pulled = shell("checkpoint", "pull", run.run_id, "--step", "8")
    assert pulled.returncode == 0, pulled.stderr
    folder = run.checkpoints / "step-00000008"
    assert shell("checkpoint", "verify", str(folder)).returncode == 0
    assert shell("checkpoint", "diff", str(folder), f"{run.run_id}:8").returncode == 0
    pruned = shell("checkpoint", "prune", run.run_id, "--keep-last", "1", "--yes")
    assert pruned.returncode == 0, pruned.stderr
    assert [row["step"] for row in listed(shell, run)] == [12]
    assert not folder.exists()
