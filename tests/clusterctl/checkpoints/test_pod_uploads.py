"""Pods that keep their checkpoints in a store: each sends its own files, and node 0 completes them."""

from __future__ import annotations

import json
import shutil
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from clusterctl.backends.pods import backend as pod_runs
from clusterctl.backends.pods.pod import saved_name
from clusterctl.checkpoints import pod_uploads, uploads
from clusterctl.checkpoints.checkpoint import Health
from clusterctl.checkpoints.find import of_folder, of_nodes
from clusterctl.checkpoints.pod_uploads import PodUploader, bring_from_store, part_list, uploader_for
from clusterctl.checkpoints.stored import access_of
from clusterctl.errors import UsageError
from clusterctl.inventory.cluster import Cluster, Node
from clusterctl.jobs import plan as plans
from clusterctl.jobs.facts import Facts
from clusterctl.jobs.job import Job
from clusterctl.jobs.run_folder import NodeFiles, RunDir
from clusterctl.runs.start import record_attempt
from clusterctl.storage.client import LIST, here
from clusterctl.transport.fanout import Connections
from clusterctl.transport.local import LocalTransport
from clusterctl.wire import contract
from clusterctl.wire.saved import MANIFEST
from clusterctl.wire.typed_json import encode
from tests.clusterctl.conftest import Run
from tests.support import checkpoints as made
from tests.support.nodes import local_node
from tests.support.object_store import KEY, SECRET, ObjectStore, object_store

pytest.importorskip("boto3", reason="boto3 is not installed: the extra `storage`")
NAMES = ("pod0", "pod1")
STORED = "runs/gpt-1"


@pytest.fixture
def store(monkeypatch: pytest.MonkeyPatch) -> Iterator[ObjectStore]:
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", KEY)
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", SECRET)
    monkeypatch.setattr(pod_uploads, "POLL", 0.02)
    # A process for each order would import boto3 each time; the tests of the store start it.
    for module in (pod_uploads, uploads):
        monkeypatch.setattr(module, "on_node", lambda node, link, access: here(access))
    with object_store() as found:
        monkeypatch.setenv("AWS_ENDPOINT_URL", found.url)
        yield found


JOB = Job(name="gpt", train={"save": {"to": "s3://bucket/runs"}})


class Pods:
    """Two pods, each with a disk and a run of its own."""

    def __init__(self, folder: Path, connections: Connections) -> None:
        self.connections = connections
        self.nodes = [
            replace(local_node(folder / name, name), devices=(0,), address=f"127.0.0.{number}")
            for number, name in enumerate(NAMES, 1)
        ]
        self.runs = [RunDir(folder / name / "runs" / f"gpt-{name}") for name in NAMES]
        self.whole = [self._plan(run.run_id) for run in self.runs]
        for node, run, whole in zip(self.nodes, self.runs, self.whole, strict=True):
            run.root.mkdir(parents=True)
            own = tuple(part for part in whole.nodes if part.node == node)
            record_attempt(run, replace(whole, cluster=Cluster("lab", (node,)), nodes=own))

    def _plan(self, run_id: str) -> plans.Plan:
        workdirs = {node.name: node.workdir for node in self.nodes}
        facts = Facts(run_id=run_id, saved_as="gpt-1", parts=NAMES, workdirs=workdirs)
        return plans.make_plan(Cluster("lab", tuple(self.nodes)), JOB, facts)

    def folder(self, number: int) -> Path:
        node = self.nodes[number]
        (part,) = [part for part in self.whole[number].nodes if part.node == node]
        return Path(NodeFiles(part.run_dir).checkpoints)

    def save(self, step: int) -> None:
        made.save_with([self.folder(0), self.folder(1)], step)

    def uploaders(self) -> list[PodUploader]:
        found = [uploader_for(run, self.connections) for run in self.runs]
        assert all(isinstance(each, PodUploader) for each in found)
        return found  # type: ignore[return-value]


@pytest.fixture
def pods(tmp_path: Path) -> Iterator[Pods]:
    with Connections(LocalTransport(home=tmp_path)) as connections:
        yield Pods(tmp_path, connections)


def work(uploaders: list[PodUploader]) -> None:
    """Let all pods send their newest checkpoint at the same time."""
    threads = [threading.Thread(target=each._copy_newest) for each in uploaders]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
        assert not thread.is_alive()


def test_a_checkpoint_counts_once_every_pod_has_sent_its_files(pods: Pods, store: ObjectStore) -> None:
    first, second = pods.uploaders()
    pods.save(4)
    second._copy_newest()
    assert f"{STORED}/step-00000004/{LIST}" not in store.objects
    first._copy_newest()
    listed = json.loads(store.objects[f"{STORED}/step-00000004/{LIST}"])["files"]
    manifest = json.loads(store.objects[f"{STORED}/step-00000004/{MANIFEST}"])["files"]
    assert set(listed) == set(manifest) and len(listed) == 2
    assert json.loads(store.objects[f"{STORED}/latest"]) == {"name": "step-00000004"}
    # What is there is not sent again.
    sent = len(store.requests)
    work([first, second])
    assert len(store.requests) == sent


def test_node_0_leaves_a_checkpoint_that_another_pod_has_passed_over(pods: Pods, store: ObjectStore) -> None:
    first, second = pods.uploaders()
    pods.save(4)
    thread = threading.Thread(target=first._copy_newest)
    thread.start()
    while f"{STORED}/step-00000004/{part_list('pod0')}" not in store.objects:
        assert thread.is_alive()
    pods.save(8)
    thread.join(30)
    assert not thread.is_alive()
    assert f"{STORED}/step-00000004/{LIST}" not in store.objects
    work([first, second])
    assert json.loads(store.objects[f"{STORED}/latest"]) == {"name": "step-00000008"}


def test_new_pods_continue_from_the_store(pods: Pods, store: ObjectStore) -> None:
    pods.save(4)
    work(pods.uploaders())
    # A newer one, of which only one pod has sent its files, is never used.
    pods.save(8)
    pods.uploaders()[1]._copy_newest()
    access = access_of(JOB, "gpt-1")
    assert access is not None
    for number, node in enumerate(pods.nodes):
        shutil.rmtree(pods.folder(number))
        text = bring_from_store(access, pods.whole[number], node, pods.connections)
        assert "step-00000004: 1 file fetched from s3://bucket/runs/gpt-1" in text
    places: list[tuple[Node, str]] = [
        (node, str(pods.folder(number))) for number, node in enumerate(pods.nodes)
    ]
    (found,) = of_nodes(places, pods.connections).checkpoints
    assert (found.step, found.missing, found.copies) == (4, 0, 1)
    assert [step for step, _, _ in made.load_with([pods.folder(0), pods.folder(1)])] == [4, 4]


def test_the_submitting_machine_lists_and_pulls_what_pods_saved(
    pods: Pods, store: ObjectStore, tmp_path: Path, command_line: Run
) -> None:
    pods.save(4)
    work(pods.uploaders())
    store.objects[f"{STORED}/step-00000008/part-00000.safetensors"] = b"unfinished"
    run = RunDir(tmp_path / "runs" / "gpt-1")
    pod_runs.write_waiting(run, JOB, Cluster("pods", tuple(pods.nodes)), "submitted")
    submitted = pod_runs.PodJob("jobset", "default", "gpt", 1.0, "done")
    run.write_json(run.root / pod_runs.RECORD, encode(submitted))
    code, out, err = command_line("checkpoint", "list", "gpt-1", "--json")
    assert code == 0, err
    (entry,) = json.loads(out)["checkpoints"]
    assert (entry["step"], entry["health"], entry["on"]) == (4, "complete", {"store": "step-00000004"})
    here = tmp_path / "here"
    code, out, err = command_line("checkpoint", "pull", "gpt-1", "-o", str(here))
    assert (code, "from store" in out) == (0, True), err
    assert of_folder(here).checkpoints[0].health is Health.COMPLETE
    code, out, err = command_line("checkpoint", "verify", "gpt-1")
    assert code == 1 and "is in an object store" in out
    # The file of a pod is damaged in the store.
    key = f"{STORED}/step-00000004/part-00001.safetensors"
    store.objects[key] = store.objects[key][:-1] + b"~"
    code, _, err = command_line("checkpoint", "pull", "gpt-1", "-o", str(tmp_path / "again"))
    assert code == 4 and "differ from their hash" in err
    assert not (tmp_path / "again").exists()


def test_a_run_in_pods_without_a_store_says_what_it_lacks(
    pods: Pods, tmp_path: Path, command_line: Run
) -> None:
    run = RunDir(tmp_path / "runs" / "gpt-1")
    pod_runs.write_waiting(run, replace(JOB, train={}), Cluster("pods", tuple(pods.nodes)), "submitted")
    run.write_json(run.root / pod_runs.RECORD, encode(pod_runs.PodJob("job", "default", "gpt", 1.0, "done")))
    code, _, err = command_line("checkpoint", "list", "gpt-1")
    assert code == 2 and "train: {save: {to: s3://BUCKET/FOLDER}}" in err


def test_pods_that_save_together_need_a_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(contract.SAVED_AS, raising=False)
    assert saved_name(JOB, 1) == ""
    with pytest.raises(UsageError, match="under which name they save together") as refused:
        saved_name(JOB, 2)
    assert "set CLUSTERCTL_SAVED_AS" in refused.value.hint
    for wrong in ("../other", "a/b", "x" * 101):
        monkeypatch.setenv(contract.SAVED_AS, wrong)
        with pytest.raises(UsageError, match="cannot name a folder"):
            saved_name(JOB, 2)
    monkeypatch.setenv(contract.SAVED_AS, "gpt-1")
    assert saved_name(JOB, 2) == "gpt-1"
