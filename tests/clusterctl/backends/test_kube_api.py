"""Submit, follow and delete jobs with the official client, against a stand-in of the API server."""

from __future__ import annotations

import re
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from clusterctl import api as api_of_programs
from clusterctl.backends.pods.kinds import KINDS
from clusterctl.cli.main import run
from tests.support.kube_server import TOKEN, Cluster, Stage, node, pod, serving

pytest.importorskip("kubernetes")

JOB = """
name: gpt
command: [python, train.py]
code: code
kubernetes: {nodes: 2, devices: 8, kind: npu, image: "registry.example/train:1"}
"""
RUNNING = {"running": {}}
ENDED = {"terminated": {"exitCode": 0, "reason": "Completed"}}


@pytest.fixture
def api(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Cluster]:
    (tmp_path / "code").mkdir()
    (tmp_path / "code" / "train.py").write_text("print('hello')\n")
    (tmp_path / "job.yaml").write_text(JOB)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("clusterctl.backends.pods.kube_api.POLL", 0.01)
    with serving(tmp_path) as (cluster, config):
        monkeypatch.setenv("KUBECONFIG", str(config))
        cluster.nodes = [node(f"n{number}", huawei_com__Ascend910="8") for number in range(3)]
        yield cluster


def submit(capfd: pytest.CaptureFixture[str], *words: str) -> tuple[int, str, str]:
    code = run(["submit", "k8s", "job.yaml", *words])
    out, err = capfd.readouterr()
    assert TOKEN not in out + err
    return code, out, err


@pytest.mark.parametrize("kind", KINDS)
def test_a_job_is_submitted_and_deleted(api: Cluster, capfd: pytest.CaptureFixture[str], kind: str) -> None:
    code, out, err = submit(capfd, "--kind", kind, "--detach")
    assert (code, out) == (0, "gpt\n"), err
    plural = KINDS[kind].plural
    assert {("configmaps", "gpt-job"), (plural, "gpt")} <= set(api.objects)
    # The job comes last: its pods find everything that they mount.
    assert [entry for entry in api.requests if entry.startswith("POST")][-1].endswith(f"/{plural}")
    assert TOKEN not in str(api.objects)
    code, _, err = submit(capfd, "--kind", kind, "--delete")
    assert code == 0 and not api.objects, err


def test_a_job_is_followed_to_its_end(api: Cluster, capfd: pytest.CaptureFixture[str]) -> None:
    waiting = pod("gpt-0-x", "Pending")
    waiting["status"]["conditions"] = [
        {"type": "PodScheduled", "status": "False", "message": "0/3 nodes are available"}
    ]
    log = "2026-01-01T00:00:01Z step 1\n2026-01-01T00:00:02Z step 2\n"
    api.stages = [
        Stage([waiting]),
        Stage([pod("gpt-0-x", "Running", RUNNING), pod("gpt-1-x", "Running", RUNNING)], log[:28]),
        Stage([pod("gpt-0-x", "Running", RUNNING), pod("gpt-1-x", "Running", RUNNING)], log),
        Stage(
            [pod("gpt-0-x", "Succeeded", ENDED), pod("gpt-1-x", "Succeeded", ENDED)],
            log,
            {"conditions": [{"type": "Complete", "status": "True"}]},
        ),
    ]
    code, out, err = submit(capfd)
    assert code == 0, err
    assert "gpt-0-x: Pending (0/3 nodes are available)" in out
    assert [line for line in out.splitlines() if " | " in line] == ["gpt-0-x | step 1", "gpt-0-x | step 2"]
    assert "gpt-1-x: Succeeded" in out


def test_the_first_pod_with_an_exit_code_of_its_own_is_the_cause(
    api: Cluster, capfd: pytest.CaptureFixture[str]
) -> None:
    ended = {"terminated": {"exitCode": 143, "reason": "Error"}}
    killed = {"terminated": {"exitCode": 137, "reason": "OOMKilled"}}
    api.stages = [
        Stage(
            [pod("gpt-0-x", "Failed", ended), pod("gpt-1-x", "Failed", killed)],
            "",
            {"conditions": [{"type": "Failed", "status": "True", "reason": "BackoffLimitExceeded"}]},
        )
    ]
    code, _, err = submit(capfd)
    assert code == 5 and "gpt-1-x: Failed, exit code 137 (OOMKilled)" in err


@pytest.mark.parametrize(
    "state, message",
    [
        ({"waiting": {"reason": "ErrImagePull", "message": "not found"}}, "ErrImagePull: not found"),
        (
            {"waiting": {"reason": "CreateContainerError", "message": 'exec: "clusterctl": not found'}},
            "clusterctl",
        ),
    ],
)
def test_an_image_without_the_needed_parts_is_named_at_once(
    api: Cluster, capfd: pytest.CaptureFixture[str], state: dict[str, object], message: str
) -> None:
    api.stages = [Stage([pod("gpt-0-x", "Pending", state)])]
    code, _, err = submit(capfd)
    assert code == 5 and message in err and "the image needs Python" in err


def test_a_job_larger_than_the_cluster_is_refused_before_anything_is_created(
    api: Cluster, capfd: pytest.CaptureFixture[str]
) -> None:
    api.nodes[0]["status"]["allocatable"]["huawei.com/Ascend910"] = "4"
    api.nodes[1]["spec"]["unschedulable"] = True
    code, _, err = submit(capfd)
    assert code == 2 and "2 nodes with 8 huawei.com/Ascend910, and 1 of 3 nodes can be used" in err
    assert not api.objects


def test_a_refused_job_leaves_nothing_behind(api: Cluster, capfd: pytest.CaptureFixture[str]) -> None:
    api.refuse = "jobs"
    code, _, err = submit(capfd)
    assert code == 3 and "jobs is forbidden" in err and "role" in err
    assert not api.objects
    api.refuse = ""
    assert submit(capfd, "--detach")[0] == 0
    objects = dict(api.objects)
    code, _, err = submit(capfd, "--detach")
    assert code == 3 and "already exists" in err and "--delete" in err
    # What the first submission created is still there.
    assert api.objects == objects


def test_a_cluster_that_cannot_be_reached_is_named(
    api: Cluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("KUBECONFIG", str(tmp_path / "none"))
    code, _, err = submit(capfd)
    assert code == 2 and "KUBECONFIG" in err
    monkeypatch.delenv("KUBECONFIG")
    monkeypatch.setenv("HOME", str(tmp_path))
    code, out, err = submit(capfd)
    assert (code, out) == (2, "") and "there is no ~/.kube/config" in err and "--print" in err


def test_a_server_that_never_answers_is_named(
    api: Cluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("clusterctl.backends.pods.kube_api.ANSWER_LIMIT", 0.3)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        config = (tmp_path / "kubeconfig").read_text()
        (tmp_path / "kubeconfig").write_text(
            re.sub(r"127\.0\.0\.1:\d+", f"127.0.0.1:{silent.getsockname()[1]}", config)
        )
        code, _, err = submit(capfd)
    assert code == 3 and "the API server does not answer" in err and "kubectl get nodes" in err


def test_the_manifest_is_printed_without_a_cluster(
    api: Cluster, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv("KUBECONFIG")
    code, out, err = submit(capfd, "--kind", "acjob", "--print")
    assert code == 0 and "kind: AscendJob" in out and not api.requests, err


def test_modelarts_gets_its_request(api: Cluster, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    import json

    part = (
        "modelarts: {flavor: modelarts.bm.npu.arm.8snt9b.d, nodes: 2, image: group/train:1, "
        "code: obs://bucket/code/, inputs: {/data: obs://bucket/data/}, log: obs://bucket/log/}\n"
    )
    text = "name: gpt\ncommand: [python, train.py]\ncode: code\n" + part
    (tmp_path / "job.yaml").write_text(text)
    assert run(["submit", "modelarts", "job.yaml", "--print"]) == 0
    body = json.loads(capfd.readouterr()[0])
    assert body["spec"]["resource"] == {"flavor_id": "modelarts.bm.npu.arm.8snt9b.d", "node_count": 2}
    assert body["algorithm"]["code_dir"] == "/bucket/code/"
    assert (
        body["algorithm"]["command"] == "clusterctl launch /home/ma-user/modelarts/user-job-dir/code/job.yaml"
    )
    (tmp_path / "job.yaml").write_text(text + "env: {MA_X: 1}\nforward: [HF_TOKEN]\n")
    assert run(["submit", "modelarts", "job.yaml", "--print"]) == 2
    err = capfd.readouterr()[1]
    assert "MA_X: ModelArts sets" in err and "HF_TOKEN would be in the request" in err


def test_a_submitted_job_is_a_run_with_state_logs_and_an_end(
    api: Cluster, capfd: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    waiting = pod("gpt-0-x", "Pending")
    waiting["status"]["conditions"] = [
        {"type": "PodScheduled", "status": "False", "message": "0/3 nodes are available"}
    ]
    both = [pod("gpt-0-x", "Running", RUNNING), pod("gpt-1-x", "Running", RUNNING)]
    log = "2026-01-01T00:00:01Z step 1\n2026-01-01T00:00:02Z step 2\n"
    api.stages = [Stage([waiting])]
    assert submit(capfd, "--kind", "jobset", "--detach")[0] == 0

    def shown(*words: str) -> str:
        assert run([*words]) == 0
        out, err = capfd.readouterr()
        return out + err

    assert "jobset gpt in namespace default is pending: gpt-0-x: Pending (0/3 nodes" in shown("status")
    assert "pending" in shown("runs")
    api.stages = [Stage(both, log)]
    assert "running  pod0 running, pod1 running" in shown("status", "last")
    assert "pod0:0 step 1\npod0:0 step 2\n" in shown("logs", "show", "last")
    # SSH would look for a host called pod0.
    assert run(["checkpoint", "list", "last"]) == 2
    assert "runs in pods, whose disks are not reached from here" in capfd.readouterr().err
    failed = pod("gpt-1-x", "Failed", {"terminated": {"exitCode": 7, "reason": "Error"}})
    ended = {"conditions": [{"type": "Failed", "status": "True", "message": "too many"}]}
    api.stages = [Stage(both, log), Stage([both[0], failed], log + "2026-01-01T00:00:03Z step 3\n", ended)]
    assert "step 3" in shown("logs", "tail", "-f", "last")
    assert "failed" in shown("status") and "gpt-1-x: Failed, exit code 7" in shown("runs")
    # The logs stay when the objects are gone.
    assert "deleted jobset gpt" in shown("stop", "last") and not api.objects
    assert "step 3" in shown("logs", "show", "last") and "failed" in shown("status")


def test_a_program_submits_a_job_as_pods(api: Cluster) -> None:
    run = api_of_programs.submit("job.yaml", "kubernetes", kind="jobset", name="other", image="train:2")
    assert ("jobsets", "other") in api.objects and "train:2" in str(api.objects["jobsets", "other"])
    assert (run.phase, api_of_programs.find_run(run.id).id) == ("pending", run.id)
    run.stop()
    assert run.phase == "stopped" and not api.objects
    with pytest.raises(api_of_programs.UsageError, match="no batch system") as refused:
        api_of_programs.submit("job.yaml", "kubernets")
    assert refused.value.hint == "did you mean 'kubernetes'?"


def test_a_run_in_pods_is_stopped_and_one_that_others_delete_is_noticed(
    api: Cluster, capfd: pytest.CaptureFixture[str]
) -> None:
    api.stages = [Stage([pod("gpt-0-x", "Running", RUNNING)])]
    assert submit(capfd, "--detach")[0] == 0
    assert run(["stop", "last"]) == 0 and not api.objects
    assert run(["status", "last"]) == 0
    assert "stopped" in capfd.readouterr().out
    assert submit(capfd, "--detach")[0] == 0
    api.objects.clear()
    assert run(["status", "last"]) == 0
    assert "it was deleted in the cluster" in capfd.readouterr().out
