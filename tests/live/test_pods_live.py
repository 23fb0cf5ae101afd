"""Two processes with the variables of two pods: each starts its own ranks, and they train together."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from clusterctl.wire import contract
from tests.live.conftest import clean_environment
from tests.live.test_training import JOB
from tests.live.test_training import data as data
from tests.support.object_store import KEY, SECRET, object_store
from tests.support.ports import free_port

pytestmark = [pytest.mark.live, pytest.mark.timeout(200)]

# Two loopback addresses stand for two pods' names.
HOSTS = ("127.0.0.1", "127.0.0.2")
MODELARTS = {"MA_NUM_HOSTS": "2", "VC_WORKER_HOSTS": ",".join(HOSTS), "MA_NUM_GPUS": "1"}
INDEXED = {contract.POD_COUNT: "2", contract.POD_PEERS: ",".join(HOSTS), contract.POD_DEVICES: "1"}


def start_pod(folder: Path, index: int, variables: dict[str, str], *words: str) -> subprocess.Popen[str]:
    """Start one pod's `clusterctl launch` in a home of its own."""
    home = folder / f"pod{index}"
    home.mkdir(exist_ok=True)
    return subprocess.Popen(
        [sys.executable, "-m", "clusterctl", "launch", *words],
        cwd=home,
        env={**clean_environment(), "HOME": str(home), **variables},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        stdin=subprocess.DEVNULL,
        text=True,
    )


def outputs_of(pods: list[subprocess.Popen[str]]) -> list[tuple[str, str]]:
    """Wait for all pods; once one has failed, end the others, as a platform does."""
    deadline = time.monotonic() + 100
    while any(pod.poll() is None for pod in pods):
        if any(pod.poll() for pod in pods) or time.monotonic() > deadline:
            for pod in pods:
                pod.terminate()
            break
        time.sleep(0.1)
    return [pod.communicate(timeout=40) for pod in pods]


def test_two_pods_train_together(tmp_path: Path, data: Path) -> None:
    (tmp_path / "job.yaml").write_text(JOB.format(data=data, steps=3) + f"master_port: {free_port()}\n")
    pods = [
        start_pod(tmp_path, number, {**MODELARTS, "VC_TASK_INDEX": str(number)}, str(tmp_path / "job.yaml"))
        for number in range(2)
    ]
    outputs = outputs_of(pods)
    assert [pod.returncode for pod in pods] == [0, 0], outputs
    plans = [json.loads(path.read_text()) for path in sorted(tmp_path.glob("pod*/runs/*/plan.json"))]
    ranks = [process["rank"] for plan in plans for node in plan["nodes"] for process in node["processes"]]
    sizes = {
        process["env"]["WORLD_SIZE"]
        for plan in plans
        for node in plan["nodes"]
        for process in node["processes"]
    }
    assert (ranks, sizes) == ([0, 1], {"2"})
    (metrics,) = tmp_path.glob("pod0/runs/*/metrics.jsonl")
    steps = [json.loads(line) for line in metrics.read_text().splitlines()]
    assert [step["step"] for step in steps if step["event"] == "step"] == [1, 2, 3]


def test_sigterm_to_a_pod_reaches_its_ranks_and_ends_it(tmp_path: Path) -> None:
    code = "import os,time;print('PID',os.getpid(),os.environ['SECRET'],flush=True);time.sleep(99)"
    variables = {**INDEXED, "JOB_COMPLETION_INDEX": "1", "SECRET": "only-for-ranks"}
    pod = start_pod(tmp_path, 1, variables, "--no-code", "--", sys.executable, "-c", code)
    deadline = time.monotonic() + 60
    logs: list[Path] = []
    while not logs and time.monotonic() < deadline:
        time.sleep(0.1)
        logs = [
            path for path in (tmp_path / "pod1").rglob("rank-*") if "PID" in path.read_text(errors="replace")
        ]
    assert logs, pod.communicate(timeout=20)
    # A container's variable reaches its ranks; no record of the run shows its value.
    words = next(line.split() for line in logs[0].read_text().splitlines() if "PID" in line)
    assert "only-for-ranks" in words
    pid = int(words[words.index("PID") + 1])
    # The supervisor removes it from its specification as soon as the ranks have started, perhaps after the first line.
    records, deadline = ["unread"], time.monotonic() + 20
    while records and time.monotonic() < deadline:
        records = [
            str(path) for path in (tmp_path / "pod1").rglob("*.json") if "only-for-ranks" in path.read_text()
        ]
    assert not records
    pod.send_signal(signal.SIGTERM)
    assert pod.wait(30) == 143
    assert not Path(f"/proc/{pid}").exists(), pod.communicate(timeout=20)


def test_a_rank_of_torchrun_is_refused(tmp_path: Path) -> None:
    variables = {"TORCHELASTIC_RUN_ID": "none", "LOCAL_RANK": "0", "GROUP_RANK": "0", "GROUP_WORLD_SIZE": "1"}
    pod = start_pod(tmp_path, 0, variables, "--no-code", "--", "true")
    _, error = pod.communicate(timeout=30)
    assert pod.returncode == 2 and "which has started the ranks already" in error


@pytest.mark.skipif(not os.environ.get("LONG_TESTS"), reason="two trainings: set LONG_TESTS=1")
def test_pods_resume_from_the_store_after_all_disks_were_wiped(tmp_path: Path, data: Path) -> None:
    pytest.importorskip("boto3", reason="boto3 is not installed: the extra `storage`")
    with object_store() as store:
        keys = {"AWS_ACCESS_KEY_ID": KEY, "AWS_SECRET_ACCESS_KEY": SECRET, contract.SAVED_AS: "gpt-1"}
        options = ["--set", f"storage.endpoint={store.url}", "--set", "train.save.to=s3://bucket/runs"]
        runs: list[list[tuple[str, int]]] = []
        for fault in ("env: {CLUSTERCTL_FAULT: rank1:step7:kill9}\n", ""):
            text = JOB.format(data=data, steps=10) + f"master_port: {free_port()}\n{fault}"
            (tmp_path / "job.yaml").write_text(text)
            pods = [
                start_pod(
                    tmp_path,
                    number,
                    {**MODELARTS, **keys, "VC_TASK_INDEX": str(number)},
                    str(tmp_path / "job.yaml"),
                    *options,
                )
                for number in range(2)
            ]
            outputs = outputs_of(pods)
            assert [pod.returncode == 0 for pod in pods] == [not fault] * 2, outputs
            (metrics,) = tmp_path.glob("pod0/runs/*/metrics.jsonl")
            events = [json.loads(line) for line in metrics.read_text().splitlines()]
            runs.append(
                [(event["event"], event["step"]) for event in events if event["event"] in ("start", "step")]
            )
            for number in range(2):
                shutil.rmtree(tmp_path / f"pod{number}")
        assert runs[0][0] == ("start", 0) and runs[1][:2] == [("start", 4), ("step", 5)], runs
        assert runs[1][-1] == ("step", 10)
        assert json.loads(store.objects["runs/gpt-1/latest"]) == {"name": "step-00000010"}
        assert "fetched from s3://bucket/runs/gpt-1" in outputs[1][1]
