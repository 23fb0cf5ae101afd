"""The manifests of each kind: they pass the schema of their API, and say what the pods need."""

from __future__ import annotations

import itertools
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from clusterctl.backends.pods.detect import Surroundings, detect
from clusterctl.backends.pods.kinds import KINDS, manifests_of
from clusterctl.backends.pods.request import PodRequest, request_for
from clusterctl.errors import InputFaults
from clusterctl.jobs import job as jobs
from clusterctl.jobs.parts.platforms import KubernetesOptions
from clusterctl.wire import contract
from tests.support import schemas

JOB = """
name: gpt
command: [python, train.py]
code: code
env: {NCCL_DEBUG: INFO}
forward: [HF_TOKEN]
kubernetes:
  nodes: 2
  devices: 8
  kind: %s
  image: registry.example/train:1
  cpus: 64
  memory: 512Gi
  shared_memory: 64Gi
  secret: hub
  claims: {data: /data}
"""


def request(folder: Path, kind: str, device: str = "cuda", *changes: str) -> PodRequest:
    (folder / "code").mkdir(exist_ok=True)
    (folder / "code" / "train.py").write_text("print('hello')\n")
    (folder / "code" / "table.bin").write_bytes(b"\xff\x00")
    (folder / "job.yaml").write_text(JOB % device)
    return request_for(jobs.load(folder / "job.yaml", changes), kind)


def pods_of(found: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return every pod specification within manifests."""
    texts: list[dict[str, Any]] = []

    def walk(value: Any) -> None:
        if isinstance(value, dict):
            if "containers" in value and "volumes" in value:
                texts.append(value)
            for part in value.values():
                walk(part)
        elif isinstance(value, list):
            for part in value:
                walk(part)

    walk(found)
    return texts


@pytest.mark.parametrize("kind, device", list(itertools.product(KINDS, ("cpu", "cuda", "npu"))))
def test_every_manifest_passes_the_schema_of_its_api(tmp_path: Path, kind: str, device: str) -> None:
    judges = schemas.judges()
    found = manifests_of(request(tmp_path, kind, device))
    for manifest in found:
        assert judges.problems(manifest) == [], json.dumps(manifest, indent=1)
    assert found[-1]["apiVersion"] == f"{KINDS[kind].group}/{KINDS[kind].version}"


def test_the_judges_refuse_unknown_keys_and_wrong_types(tmp_path: Path) -> None:
    judges = schemas.judges()
    for kind, key, value in (
        ("jobset", "replicas", 1),
        ("job", "paralelism", 2),
        ("acjob", "successPolicy", 7),
    ):
        manifest = manifests_of(request(tmp_path, kind))[-1]
        manifest["spec"][key] = value
        assert judges.problems(manifest)


@pytest.mark.parametrize("kind", KINDS)
def test_pods_get_shared_memory_the_job_its_code_and_a_grace_period(tmp_path: Path, kind: str) -> None:
    found = manifests_of(request(tmp_path, kind, "npu"))
    text = json.dumps(found)
    (pod, *_) = pods_of(found)
    by_name = {volume["name"]: volume for volume in pod["volumes"]}
    assert by_name["shm"]["emptyDir"] == {"medium": "Memory", "sizeLimit": "64Gi"}
    assert pod["terminationGracePeriodSeconds"] == 60
    config = next(each for each in found if each["kind"] == "ConfigMap")
    kept = json.loads(config["data"]["job.yaml"])
    assert kept["command"] == ["python", "train.py"] and "kubernetes" not in kept
    paths = {item["path"] for item in by_name["job"]["configMap"]["items"]}
    assert paths == {"job.yaml", "code/train.py", "code/table.bin"}
    assert "print('hello')\n" in config["data"].values() and "/wA=" in config["binaryData"].values()
    assert '"secretKeyRef": {"name": "hub", "key": "HF_TOKEN"}' in text
    assert '"huawei.com/Ascend910": "8"' in text


def environment_of(found: list[dict[str, Any]]) -> dict[str, str]:
    lists = [
        value
        for manifest in found
        for value in _lists_named("env", manifest)
        if any(entry["name"] == contract.POD_COUNT for entry in value)
    ]
    return {entry["name"]: entry["value"] for entry in lists[0] if "value" in entry}


def _lists_named(key: str, value: Any) -> list[Any]:
    if isinstance(value, list):
        return [found for part in value for found in _lists_named(key, part)]
    if not isinstance(value, dict):
        return []
    own = [value[key]] if isinstance(value.get(key), list) else []
    return own + [found for part in value.values() for found in _lists_named(key, part)]


# What each platform adds to the manifest's own variables in the second pod.
PLATFORM = {
    "job": {"JOB_COMPLETION_INDEX": "1"},
    "jobset": {"JOB_COMPLETION_INDEX": "1"},
    "trainjob": {"PET_NNODES": "2", "PET_NODE_RANK": "1", "PET_MASTER_ADDR": "gpt-node-0-0.gpt",
                 "PET_NPROC_PER_NODE": "8", "PET_MASTER_PORT": "29400", "JOB_COMPLETION_INDEX": "1"},
    "vcjob": {"VC_WORKER_HOSTS": "gpt-worker-0.gpt,gpt-worker-1.gpt", "VC_TASK_INDEX": "1"},
    "acjob": {"MASTER_ADDR": "gpt-master-0", "MASTER_PORT": "2222", "RANK": "1", "ASCEND_VISIBLE_DEVICES": "0,1"},
}  # fmt: skip


@pytest.mark.parametrize("kind", KINDS)
def test_a_pod_of_each_manifest_finds_its_place(tmp_path: Path, kind: str) -> None:
    variables = {**environment_of(manifests_of(request(tmp_path, kind, "npu"))), **PLATFORM[kind]}
    place = detect(Surroundings(variables))
    assert place is not None
    assert (place.platform.name, place.index, place.count, place.devices, place.kind) == (
        kind,
        1,
        2,
        8,
        "npu",
    )


def test_an_ascend_job_mounts_the_table_that_its_operator_fills(tmp_path: Path) -> None:
    found = manifests_of(request(tmp_path, "acjob", "npu", "kubernetes.chip=a3"))
    table = next(each for each in found if each["metadata"]["name"] == "rings-config-gpt")
    assert json.loads(table["data"]["hccl.json"]) == {"status": "initializing"}
    job = found[-1]
    assert job["metadata"]["annotations"] == {"sp-block": "16"}
    replicas = job["spec"]["replicaSpecs"]
    assert [replicas[name]["replicas"] for name in ("Master", "Worker")] == [1, 1]
    template = replicas["Master"]["template"]
    (holder,) = template["spec"]["containers"]
    mounted = {mount["name"]: mount["mountPath"] for mount in holder["volumeMounts"]}
    assert holder["name"] == "ascend" and mounted["rank-table"] == "/user/serverid/devindex/config"
    assert (
        table["metadata"]["labels"]["ring-controller.atlas"]
        == template["metadata"]["labels"]["ring-controller.atlas"]
    )
    assert template["spec"]["nodeSelector"] == {"accelerator-type": "module-a3-16-super-pod"}


@pytest.mark.parametrize(
    "kind, changes, message",
    [
        ("jobset", ["name=" + "a" * 41, "kubernetes.nodes=10000"], None),
        ("job", ["name=Tiny_1"], None),
        ("job", ["grace=100", "kubernetes.grace=60"], "60 s end the pod before the job's grace of 100 s"),
        ("job", ["kubernetes.image="], "no image is given"),
        ("job", ["kubernetes.retries=2"], "starts single pods again"),
        ("job", ["kubernetes.secret="], "the values of HF_TOKEN would have to be in the manifest"),
        ("job", ["env={WANDB_API_KEY: abc}"], "WANDB_API_KEY looks like a credential"),
        ("job", ["data=code"], "which no pod has"),
    ],
)
def test_what_kubernetes_would_refuse_is_refused_before(
    tmp_path: Path, kind: str, changes: list[str], message: str | None
) -> None:
    if message is None:
        assert request(tmp_path, kind, "cpu", *changes)
        return
    with pytest.raises(InputFaults, match=message) as caught:
        request(tmp_path, kind, "cpu", *changes)
    assert "abc" not in str(caught.value)


def test_names_that_are_too_long_and_slow_uploads_are_refused_with_the_limit(tmp_path: Path) -> None:
    job = jobs.load(request(tmp_path, "job") and tmp_path / "job.yaml")
    with pytest.raises(InputFaults, match="at most 48 characters"):
        request_for(job, "jobset", name="a" * 49)
    assert request_for(job, "job", upload_seconds=100.0).grace == 30 + 150 + 30
    short = replace(job, kubernetes=KubernetesOptions(grace=60))
    with pytest.raises(InputFaults, match="60 s end the pod before the job's grace of 30 s and the upload"):
        request_for(short, "job", upload_seconds=95.0)


def test_code_that_is_too_large_for_a_config_map_is_refused(tmp_path: Path) -> None:
    request(tmp_path, "job")
    (tmp_path / "code" / "big.txt").write_bytes(b"x" * 950_000)
    with pytest.raises(InputFaults, match="a ConfigMap holds 1 MiB"):
        request_for(jobs.load(tmp_path / "job.yaml"), "job")
    assert not request(tmp_path, "job", "cpu", "kubernetes.code=image").code


@pytest.mark.parametrize("kind", KINDS)
def test_pods_that_save_to_a_store_share_a_name(tmp_path: Path, kind: str) -> None:
    made = request(tmp_path, kind, "cpu")
    assert contract.SAVED_AS not in environment_of(manifests_of(made))
    text = (JOB % "cpu").replace("command: [python, train.py]", "train: {save: {to: s3://bucket/runs}}")
    (tmp_path / "job.yaml").write_text(text)
    named = request_for(jobs.load(tmp_path / "job.yaml"), kind)
    assert environment_of(manifests_of(named))[contract.SAVED_AS] == named.saved_as
    assert named.saved_as.startswith("gpt-")


def test_a_file_of_keys_is_refused_for_pods(tmp_path: Path) -> None:
    with pytest.raises(InputFaults, match="forward: \\[AWS_ACCESS_KEY_ID"):
        request(tmp_path, "jobset", "cpu", "storage.credentials=keys.ini")
