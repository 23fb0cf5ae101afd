"""Runs on real SSH nodes whose data come from an object store, and whose checkpoints go there."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from clusterctl.jobs.run_folder import RunDir
from clusterctl.storage.address import parse_address
from clusterctl.storage.client import LIST
from tests.live.conftest import Shell
from tests.live.test_training import data as data
from tests.live.test_training import job_file, losses
from tests.support.object_store import KEY, SECRET, ObjectStore, object_store

pytestmark = [pytest.mark.live, pytest.mark.timeout(400)]
pytest.importorskip("boto3", reason="boto3 is not installed: the extra `storage`")
KEYS = {"AWS_ACCESS_KEY_ID": KEY, "AWS_SECRET_ACCESS_KEY": SECRET}


@pytest.fixture
def store() -> Iterator[ObjectStore]:
    with object_store() as found:
        yield found


def fill(store: ObjectStore, folder: Path) -> None:
    for path in folder.iterdir():
        store.objects[f"data/{path.name}"] = path.read_bytes()


@pytest.mark.skipif(not os.environ.get("LONG_TESTS"), reason="two trainings: set LONG_TESTS=1")
def test_a_run_resumes_after_the_disks_of_all_nodes_were_wiped(
    shell: Shell, data: Path, cluster_file: Path, store: ObjectStore, tmp_path: Path
) -> None:
    fill(store, data)
    name = job_file(shell, data, steps=30)
    job = tmp_path / name
    job.write_text(job.read_text().replace(f"data: {data}", "data: s3://bucket/data"))
    assert "s3://bucket/data" in job.read_text()
    options = ["--set", f"storage.endpoint={store.url}", "--set", "train.save.to=s3://bucket/runs"]
    options += ["--set", "train.save.every=10", "--set", "collect=[]", "--devices", "[0,1)"]

    refused = shell("launch", name, *options, AWS_ACCESS_KEY_ID="WRONG", AWS_SECRET_ACCESS_KEY=SECRET)
    assert refused.returncode == 4 and "InvalidAccessKeyId" in refused.stderr, refused.stderr
    assert "try: the store does not know this key" in refused.stderr

    # The last checkpoint before the fault is that of step 20.
    done = shell("launch", name, *options, "--set", "env.CLUSTERCTL_FAULT=rank1:step25:kill9", **KEYS)
    assert done.returncode == 5, done.stderr
    run = RunDir(next(path for path in (tmp_path / "runs").iterdir() if (path / "run.json").exists()))
    stored = f"runs/{run.run_id}"
    assert json.loads(store.objects[f"{stored}/latest"]) == {"name": "step-00000020"}
    assert len(json.loads(store.objects[f"{stored}/step-00000020/{LIST}"])["files"]) == 3
    # A part of a newer one: without its list it is never used.
    store.objects[f"{stored}/step-00000030/part-00000.safetensors"] = b"half"
    for node in ("node1", "node2"):
        shutil.rmtree(cluster_file.parent / node / "home" / ".clusterctl")
    before = losses(run.root)
    assert before.keys() >= set(range(1, 24))
    record = json.loads(run.record.read_text())
    record["job"]["env"] = {}
    run.record.write_text(json.dumps(record))
    resumed = shell("resume", run.run_id, **KEYS)
    assert resumed.returncode == 0, resumed.stderr
    assert f"fetched from s3://bucket/runs/{run.run_id}" in resumed.stderr, resumed.stderr
    starts = [metric.step for metric in run.metric_lines() if metric.kind == "start"]
    assert starts == [0, 20]
    after = losses(run.root)
    assert after.keys() == set(range(1, 31)) and {step: after[step] for step in before} == before
    assert json.loads(store.objects[f"{stored}/latest"]) == {"name": "step-00000030"}

    # The keys are nowhere in the run's files, here or on the nodes.
    for folder in (run.root, cluster_file.parent):
        found = subprocess.run(
            ["grep", "-rlE", f"{SECRET}|{KEY}", str(folder)], capture_output=True, text=True
        )
        assert found.stdout == ""


def test_the_address_is_checked_with_the_job(shell: Shell, data: Path, tmp_path: Path) -> None:
    name = job_file(shell, data)
    wrong = ["--set", "train.save.to=s3://key:secret@bucket/x", "--set", "storage.endpoint=ftp://x"]
    planned = shell("plan", name, *wrong, "--set", "data=s3://B")
    assert planned.returncode == 2, planned.stdout
    assert "an address holds no credentials" in planned.stderr and "secret@" not in planned.stderr
    assert (
        "'B' is not the name of a bucket" in planned.stderr
        and "is not an http or https URL" in planned.stderr
    )
    assert str(parse_address("s3://bucket/x/") / "y") == "s3://bucket/x/y"
