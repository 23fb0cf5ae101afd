"""Which platform runs us, which node this is and which others there are: from the variables that each platform sets."""

from __future__ import annotations

import pytest

from clusterctl.backends.pods.detect import PLATFORMS, STARTERS, Place, Surroundings, detect, with_count
from clusterctl.errors import InputFaults
from clusterctl.wire import contract

OURS = {contract.POD_COUNT: "2", contract.POD_PEERS: "gpt-0.gpt,gpt-1.gpt", contract.POD_DEVICES: "8"}
# What each platform sets on the second of two nodes, as its documents and sources say.
CASES = {
    "modelarts": {
        "MA_NUM_HOSTS": "2", "VC_TASK_INDEX": "1", "VC_WORKER_NUM": "2", "MA_NUM_GPUS": "8",
        "VC_WORKER_HOSTS": "modelarts-job-a1-worker-0.modelarts-job-a1,modelarts-job-a1-worker-1.modelarts-job-a1",
        "MA_CURRENT_IP": "172.16.0.8", "MA_TASK_NAME": "worker", "MA_JOB_DIR": "/home/ma-user/modelarts/user-job-dir",
    },
    "volcengine": {
        "MLP_WORKER_NUM": "2", "MLP_ROLE_INDEX": "1", "MLP_WORKER_0_HOST": "10.0.0.1", "MLP_WORKER_0_PORT": "2222",
        "MLP_WORKER_ALL_HOSTS": "10.0.0.1,10.0.0.2", "MLP_WORKER_GPU": "8",
    },
    "pai": {
        "MASTER_ADDR": "dlc1-master-0", "MASTER_PORT": "23456", "WORLD_SIZE": "2", "RANK": "1", "NPROC_PER_NODE": "8",
        "KUBERNETES_SERVICE_HOST": "10.0.0.1",
    },
    "trainjob": {
        "PET_NNODES": "2", "PET_NPROC_PER_NODE": "8", "PET_NODE_RANK": "1", "PET_MASTER_PORT": "29400",
        "PET_MASTER_ADDR": "gpt-node-0-0.gpt", "JOB_COMPLETION_INDEX": "1", "KUBERNETES_SERVICE_HOST": "10.0.0.1",
    },
    "vcjob": {
        "VC_WORKER_HOSTS": "gpt-worker-0.gpt,gpt-worker-1.gpt", "VC_WORKER_NUM": "2", "VC_TASK_INDEX": "1",
        "VK_TASK_INDEX": "1", contract.POD_DEVICES: "8",
    },
    "acjob": {"MASTER_ADDR": "gpt-master-0", "MASTER_PORT": "2222", "RANK": "1", "WORLD_SIZE": "16",
              "LOCAL_RANK": "0,1,2,3,4,5,6,7", "ASCEND_VISIBLE_DEVICES": "0,1,2,3,4,5,6,7", **OURS},
    "jobset": {"JOB_COMPLETION_INDEX": "1", "JOBSET_NAME": "gpt", **OURS},
    "job": {"JOB_COMPLETION_INDEX": "1", **OURS},
    "pytorchjob": {"KUBERNETES_SERVICE_HOST": "10.0.0.1", "MASTER_ADDR": "gpt-master-0", "MASTER_PORT": "23456",
                   "WORLD_SIZE": "2", "RANK": "1", contract.POD_DEVICES: "8"},
    "openmpi": {"OMPI_COMM_WORLD_SIZE": "2", "OMPI_COMM_WORLD_RANK": "1", "OMPI_COMM_WORLD_LOCAL_SIZE": "1",
                "MASTER_ADDR": "10.0.0.1", contract.POD_DEVICES: "8"},
    "slurm": {"SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": "cx[1-2]", "SLURM_JOB_NUM_NODES": "2",
              "SLURM_TASKS_PER_NODE": "1(x2)", "SLURM_NODEID": "1", "SLURM_GPUS_ON_NODE": "8"},
    "torchrun": {"TORCHELASTIC_RUN_ID": "none", "LOCAL_RANK": "3", "RANK": "11", "GROUP_RANK": "1",
                 "GROUP_WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "8", "MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "29500"},
}  # fmt: skip


def found(variables: dict[str, str], hostname: str = "", devices: tuple[str, ...] = ()) -> Place:
    place = detect(Surroundings(variables, hostname, devices))
    assert place is not None
    return place


def test_every_row_of_the_table_has_a_case() -> None:
    assert {row.name for row in (*STARTERS, *PLATFORMS)} == set(CASES) - {"slurm"}


@pytest.mark.parametrize("name", CASES)
def test_each_platform_is_known_by_its_variables(name: str) -> None:
    place = found({"PATH": "/bin", **CASES[name]})
    assert (place.platform.name, place.index, place.count, place.devices) == (name, 1, 2, 8)
    cluster = place.cluster()
    assert [node.host == "local" for node in cluster.nodes] == [False, True]
    assert cluster.nodes[0].address == place.master


def test_peers_are_named_and_their_order_is_the_platforms() -> None:
    place = found(CASES["modelarts"])
    assert place.names() == ["modelarts-job-a1-worker-0", "modelarts-job-a1-worker-1"]
    assert place.master == "modelarts-job-a1-worker-0.modelarts-job-a1"
    assert found(CASES["volcengine"]).names() == ["node0", "node1"]
    assert found(CASES["volcengine"]).port == 2222


def test_tasks_of_several_kinds_count_from_the_master_and_a_pod_finds_itself_by_its_name() -> None:
    hosts = {"VC_MASTER_HOSTS": "gpt-master-0.gpt", "VC_WORKER_HOSTS": "gpt-worker-0.gpt,gpt-worker-1.gpt"}
    place = found({**hosts, "VC_TASK_INDEX": "1", "VK_TASK_INDEX": "1"}, hostname="gpt-worker-1")
    assert (place.index, place.count, place.master) == (2, 3, "gpt-master-0.gpt")
    with pytest.raises(InputFaults, match="elsewhere"):
        found({**hosts, "VC_TASK_INDEX": "1"}, hostname="elsewhere")


def test_devices_are_counted_below_dev_where_the_platform_does_not_say() -> None:
    job = {"JOB_COMPLETION_INDEX": "0", contract.POD_COUNT: "1"}
    place = found(job, devices=("davinci0", "davinci1", "davinci_manager", "null"))
    assert (place.kind, place.devices) == ("npu", 2)
    place = found(job, devices=("nvidia0", "nvidiactl", "nvidia-uvm"))
    assert (place.kind, place.devices) == ("cuda", 1)
    assert (found(job).kind, found(job).devices) == ("cpu", 1)


def test_outside_of_every_platform_there_is_no_place() -> None:
    assert detect(Surroundings({"PATH": "/bin", "RANK": "1"})) is None


def test_the_number_of_nodes_of_an_ascend_job_may_come_from_its_rank_table() -> None:
    variables = {name: text for name, text in CASES["acjob"].items() if not name.startswith("CLUSTERCTL_")}
    place = found(variables)
    assert (place.count, place.kind) == (0, "cpu")
    assert with_count(place, ["10.0.0.1", "10.0.0.2"]).cluster().names == ["node0", "node1"]


@pytest.mark.parametrize(
    "name, change, message",
    [
        ("modelarts", {"VC_TASK_INDEX": "two"}, r"\$VC_TASK_INDEX: is 'two', not a number"),
        ("modelarts", {"VC_TASK_INDEX": "2"}, r"\$VC_TASK_INDEX: is 2, and the 2 nodes count from 0"),
        ("modelarts", {"MA_NUM_HOSTS": "3"}, "there are 3 nodes, and 2 addresses"),
        ("volcengine", {"MLP_WORKER_ALL_HOSTS": "-oProxyCommand=x,b"}, "is not an address"),
        ("job", {contract.POD_PEERS: "", contract.POD_COUNT: ""}, "does not say how many nodes"),
        ("job", {contract.POD_PEERS: ""}, "does not say where node 0 is"),
        ("job", {contract.DEVICE_KIND: "tpu"}, "one of cpu, cuda, npu"),
        ("job", {contract.POD_PLATFORM: "vcjob"}, "the variables of that platform are not set"),
        ("trainjob", {"PET_NODE_RANK": ""}, "says by it which node this is"),
    ],
)
def test_contradictions_are_errors_that_name_the_variable(
    name: str, change: dict[str, str], message: str
) -> None:
    with pytest.raises(InputFaults, match=message):
        found({**CASES[name], **change})
