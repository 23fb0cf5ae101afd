"""What `network:` sets for NCCL and HCCL, and what of it is refused."""

from __future__ import annotations

from pathlib import Path

import pytest

from clusterctl.agent.network import rdma_ports
from clusterctl.errors import InputFaults
from clusterctl.inventory.cluster import Cluster, Node
from clusterctl.jobs import job, job_check, plan


def nodes(kind: str, count: int = 2) -> Cluster:
    names = [f"node{i}" for i in range(1, count + 1)]
    made = tuple(
        Node(name, name, f"10.0.0.{i}", kind=kind, devices=(0, 1)) for i, name in enumerate(names, 1)
    )
    return Cluster("lab", made)


def loaded(tmp_path: Path, network: str) -> job.Job:
    path = tmp_path / "job.yaml"
    path.write_text(f'command: ["true"]\nnetwork: {network}\n')
    return job.load(path)


def environment(tmp_path: Path, kind: str, network: str) -> dict[str, str]:
    made = plan.make_plan(nodes(kind), loaded(tmp_path, network))
    env = made.nodes[0].processes[0].env
    return {
        name: value for name, value in env.items() if name.startswith(("NCCL_IB", "NCCL_NET", "HCCL_RDMA"))
    }


def test_what_rdma_sets(tmp_path: Path) -> None:
    assert environment(tmp_path, "cuda", "{rdma: auto}") == {}
    assert environment(tmp_path, "cuda", "{rdma: on}") == {"NCCL_IB_DISABLE": "0", "NCCL_NET": "IB"}
    assert environment(tmp_path, "cuda", "{rdma: off}") == {"NCCL_IB_DISABLE": "1", "NCCL_NET": "Socket"}
    tuned = "{rdma: on, traffic_class: 132, service_level: 4, timeout: 20, retries: 7}"
    assert environment(tmp_path, "npu", tuned) == {
        "HCCL_RDMA_TC": "132",
        "HCCL_RDMA_SL": "4",
        "HCCL_RDMA_TIMEOUT": "20",
        "HCCL_RDMA_RETRY_CNT": "7",
    }
    assert environment(tmp_path, "cuda", "{timeout: 18}") == {"NCCL_IB_TIMEOUT": "18"}


def test_the_users_own_variables_win(tmp_path: Path) -> None:
    path = tmp_path / "job.yaml"
    path.write_text('command: ["true"]\nnetwork: {rdma: off}\nenv: {NCCL_NET: Mine}\n')
    env = plan.make_plan(nodes("cuda"), job.load(path)).nodes[0].processes[0].env
    assert (env["NCCL_NET"], env["NCCL_IB_DISABLE"]) == ("Mine", "1")


def test_wrong_settings_are_refused_with_their_lines(tmp_path: Path) -> None:
    with pytest.raises(InputFaults) as caught:
        loaded(tmp_path, "{rdma: onn, traffic_class: 130, timeout: 99, speed: 1}")
    said = str(caught.value)
    assert "job.yaml:2 network.rdma: unknown 'onn'" in said and "did you mean 'on'?" in said
    for part in ("a multiple of 4", "5 to 22", "unknown key 'speed'"):
        assert part in said


@pytest.mark.parametrize(
    ("kind", "network", "says"),
    [
        ("cpu", "{rdma: on}", "gloo"),
        ("cpu", "{retries: 3}", "network.retries"),
        ("npu", "{rdma: off}", "no other way"),
    ],
)
def test_what_a_kind_of_device_cannot_do_is_refused(
    kind: str, network: str, says: str, tmp_path: Path
) -> None:
    with pytest.raises(InputFaults, match=says):
        job_check.check(loaded(tmp_path, network), nodes(kind))


def test_a_node_names_its_rdma_ports(tmp_path: Path) -> None:
    for device, state in (("mlx5_1", "1: DOWN"), ("mlx5_0", "4: ACTIVE")):
        port = tmp_path / device / "ports" / "1"
        port.mkdir(parents=True)
        for name, text in (("state", state), ("rate", "100 Gb/sec (4X EDR)"), ("link_layer", "Ethernet")):
            (port / name).write_text(text + "\n")
    first, second = rdma_ports(str(tmp_path))
    assert first == {"name": "mlx5_0:1", "state": "ACTIVE", "rate": "100 Gb/sec", "link": "Ethernet"}
    assert (second["name"], second["state"]) == ("mlx5_1:1", "DOWN")
    assert rdma_ports(str(tmp_path / "none")) == []
