"""The command lines of the container runtimes, for each kind of device."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from clusterctl.errors import InputFaults
from clusterctl.inventory.cluster import Node
from clusterctl.inventory.container import ContainerOptions
from clusterctl.jobs import job as jobs
from clusterctl.jobs.parts.container import RankContainer

OPTIONS = ContainerOptions("team/train:1", mounts=("/scratch:/scratch",), options=("--cap-add=SYS_PTRACE",))


def rank(runtime: str, kind: str) -> RankContainer:
    node = Node("node1", "node1", "10.0.0.1", kind=kind, devices=(0, 1))
    return RankContainer(
        replace(OPTIONS, runtime=runtime), node, "clusterctl-r-1-node1-0", "r", ("/home/u/.clusterctl",), ("/data",),
        "/home/u/.clusterctl/store/code/c",
    )  # fmt: skip


DOCKER = (
    "run --rm --init --name=clusterctl-r-1-node1-0 --label=clusterctl.run=r --network=host --ipc=host "
    "--workdir=/home/u/.clusterctl/store/code/c {devices}--volume=/home/u/.clusterctl:/home/u/.clusterctl "
    "--volume=/data:/data:ro {files}--volume=/scratch:/scratch --env=CLUSTERCTL_RUN_DIR --env=CLUSTERCTL_SUPERVISED "
    "--env=RANK --env=SECRET --cap-add=SYS_PTRACE team/train:1 python3 train.py"
)
ASCEND = (
    "--ulimit=memlock=-1 --device=/dev/davinci0 --device=/dev/davinci1 --device=/dev/davinci_manager "
    "--device=/dev/devmm_svm --device=/dev/hisi_hdc "
)
DRIVER = " ".join(
    f"--volume={path}:{path}:ro"
    for path in (
        "/usr/local/Ascend/driver", "/usr/local/dcmi", "/usr/local/bin/npu-smi", "/etc/ascend_install.info",
        "/etc/hccn.conf",
    )
)  # fmt: skip
APPTAINER = (
    "apptainer exec --no-home --pwd=/home/u/.clusterctl/store/code/c {devices}"
    "--bind=/home/u/.clusterctl:/home/u/.clusterctl --bind=/data:/data:ro {files}--bind=/scratch:/scratch "
    "--cap-add=SYS_PTRACE docker://team/train:1 python3 train.py"
)
LINES = {
    ("docker", "cpu"): "docker " + DOCKER.format(devices="", files=""),
    ("docker", "cuda"): "docker " + DOCKER.format(devices="--ulimit=memlock=-1 --gpus=all ", files=""),
    ("docker", "npu"): "docker " + DOCKER.format(devices=ASCEND, files=f"{DRIVER} "),
    ("podman", "cpu"): "podman " + DOCKER.format(devices="", files=""),
    ("podman", "cuda"): "podman "
    + DOCKER.format(devices="--ulimit=memlock=-1 --device=nvidia.com/gpu=all ", files=""),
    ("podman", "npu"): "podman " + DOCKER.format(devices=ASCEND, files=f"{DRIVER} "),
    ("apptainer", "cpu"): APPTAINER.format(devices="", files=""),
    ("apptainer", "cuda"): APPTAINER.format(devices="--nv ", files=""),
    ("apptainer", "npu"): APPTAINER.format(devices="", files=DRIVER.replace("volume", "bind") + " "),
}


@pytest.mark.parametrize("runtime, kind", LINES)
def test_the_command_line_of_each_runtime(runtime: str, kind: str) -> None:
    found = rank(runtime, kind)
    assert " ".join(found.command(["python3", "train.py"], ["RANK", "SECRET"])) == LINES[runtime, kind]
    removal = () if runtime == "apptainer" else (runtime, "rm", "--force", "clusterctl-r-1-node1-0")
    assert found.removal() == removal


def test_wrong_keys_of_a_container_are_reported_together(tmp_path: Path) -> None:
    (tmp_path / "job.yaml").write_text(
        "command: [python, train.py]\n"
        "container: {image: '-v /:/host', runtime: dokcer, mounts: [data], options: ['--name=x', rm], size: 1}\n"
    )
    with pytest.raises(InputFaults) as caught:
        jobs.load(tmp_path / "job.yaml")
    text = str(caught.value)
    for part in ("'-v /:/host' is not an image", "did you mean 'docker'?", "'data' is not a mount", "--name is set",
                 "'rm' is not an option", "unknown key 'size'"):  # fmt: skip
        assert part in text
    assert "job.yaml:2" in text
