"""A job laid over nodes: ranks, environments, paths; all of it without a node."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from clusterctl import contract
from clusterctl.errors import InputFaults, UsageError
from clusterctl.inventory.cluster import Cluster, Node
from clusterctl.jobs import job, plan


def cluster(kind: str = "cpu", counts: tuple[int, ...] = (2, 2)) -> Cluster:
    nodes = tuple(
        Node(
            f"node{n}",
            f"10.0.0.{n}",
            f"10.0.0.{n}",
            devices=tuple(range(count)),
            kind=kind,
            server_id=f"10.0.0.{n}",
            interface="eth0",
        )
        for n, count in enumerate(counts, 1)
    )
    return Cluster("lab", nodes, source="cluster.yaml")


def bare(*argv: str, **more: object) -> job.Job:
    return job.Job(name="j", command=argv or ("true",), source="job.yaml", **more)  # type: ignore[arg-type]


def test_ranks_count_node_by_node_even_when_nodes_are_unequal() -> None:
    made = plan.make_plan(cluster(counts=(3, 1, 2)), bare())
    assert [[process.rank for process in node.processes] for node in made.nodes] == [[0, 1, 2], [3], [4, 5]]
    last = made.nodes[2].processes[1].env
    wanted = {
        "RANK": "5",
        "LOCAL_RANK": "1",
        "WORLD_SIZE": "6",
        "LOCAL_WORLD_SIZE": "2",
        "GROUP_RANK": "2",
        "MASTER_ADDR": "10.0.0.1",
    }
    assert {name: last[name] for name in wanted} == wanted


def test_an_npu_rank_finds_ascend_names_and_its_rank_table() -> None:
    facts = plan.Facts(run_id="r", rank_table="{}", workdirs={"node2": "/w"})
    env = plan.make_plan(cluster("npu"), bare(), facts).nodes[1].processes[0].env
    wanted = {
        "RANK_ID": "2",
        "RANK_SIZE": "4",
        "DEVICE_ID": "0",
        "ASCEND_RT_VISIBLE_DEVICES": "0,1",
        "RANK_TABLE_FILE": "/w/runs/r/node2/rank_table.json",
        "HCCL_IF_IP": "10.0.0.2",
        "ASCEND_PROCESS_LOG_PATH": "/w/runs/r/node2/attempts/1/plogs",
        "HCCL_SOCKET_IFNAME": "=eth0",
    }
    assert {name: env.get(name) for name in wanted} == wanted
    assert "TORCH_DEVICE_BACKEND_AUTOLOAD" not in env


def test_programs_beside_a_nodes_python_are_searched_first() -> None:
    nodes = [replace(node, python="~/venv/bin/python") for node in cluster().nodes]
    facts = plan.Facts(homes={node.name: "/home/u" for node in nodes})
    made = plan.make_plan(Cluster("lab", tuple(nodes)), bare(), facts)
    assert {one.programs for node in made.nodes for one in node.processes} == {"/home/u/venv/bin"}


def test_a_cuda_rank_sees_its_nodes_devices() -> None:
    env = plan.make_plan(cluster("cuda"), bare(devices=(1,))).nodes[0].processes[0].env
    assert env["CUDA_VISIBLE_DEVICES"] == "1"
    assert "RANK_TABLE_FILE" not in env


def test_a_cpu_rank_gets_its_share_of_threads_and_the_tuned_allocator() -> None:
    facts = plan.Facts(cpus={"node1": 8, "node2": 1})
    made = plan.make_plan(cluster(), bare(), facts)
    assert [node.processes[0].env["OMP_NUM_THREADS"] for node in made.nodes] == ["4", "1"]
    assert made.nodes[0].processes[0].env["MALLOC_MMAP_MAX_"] == "0"


def test_words_and_environment_are_filled_a_node_at_a_time_and_other_braces_stay() -> None:
    one = bare(
        "python",
        "x.py",
        "--me={node.address}",
        '{"a": {}}',
        "{rank}",
        env={"IP": "{node.address}", "JSON": '{"k": 1}'},
    )
    process = plan.make_plan(cluster(), one).nodes[1].processes[1]
    assert process.argv == ("python3", "x.py", "--me=10.0.0.2", '{"a": {}}', "3")
    assert (process.env["IP"], process.env["JSON"]) == ("10.0.0.2", '{"k": 1}')
    with pytest.raises(UsageError, match=r"unknown \{node.adress\}"):
        plan.make_plan(cluster(), bare(env={"IP": "{node.adress}"}))


def test_a_jobs_environment_overrides_ours_but_never_the_run_marker() -> None:
    env = (
        plan.make_plan(cluster(), bare(env={"OMP_NUM_THREADS": "7", contract.RUN_ID: "x"}))
        .nodes[0]
        .processes[0]
        .env
    )
    assert env["OMP_NUM_THREADS"] == "7"
    assert env[contract.RUN_ID] == "<run>"


def test_nothing_of_the_launchers_environment_travels_unless_it_is_forwarded(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("MY_TOKEN", "secret")
    assert "MY_TOKEN" not in plan.make_plan(cluster(), bare()).nodes[0].processes[0].env
    forwarded = plan.make_plan(cluster(), bare(), plan.Facts(forwarded={"MY_TOKEN": "secret"}))
    assert forwarded.nodes[0].processes[0].env["MY_TOKEN"] == "secret"


def test_more_devices_than_a_node_has_is_a_fault_that_names_node_and_key(tmp_path: Path) -> None:
    path = tmp_path / "job.yaml"
    path.write_text('command: ["true"]\ndevices: 4\n')
    with pytest.raises(InputFaults) as caught:
        job.check(job.load(path), cluster())
    said = str(caught.value)
    assert f"{path}:2 devices: node1 has no device 2, 3; it has 0, 1" in said
    assert "node2 has no device 2, 3" in said


def test_a_job_is_a_command_or_a_training_and_its_faults_come_at_once(tmp_path: Path) -> None:
    path = tmp_path / "job.yaml"
    path.write_text("name: a b\ncomand: [x]\nmaster_port: 70000\nrank_table: often\ndata: nowhere\n")
    with pytest.raises(InputFaults) as caught:
        job.load(path)
    said = str(caught.value)
    for part in (
        "can't name a run's folder",
        "did you mean 'command'?",
        "70000 is no port",
        "unknown 'often'",
        "no folder",
        "either a `command` or a `train`",
    ):
        assert part in said, said


def test_a_fault_of_one_corpus_of_several_names_its_line(tmp_path: Path) -> None:
    path = tmp_path / "job.yaml"
    path.write_text(
        "name: mix\ntrain:\n  model: gpt-tiny\n  steps: 1\n  data:\n    blend:\n"
        "      - {prefix: a, weight: 1}\n      - {prefix: b, weigth: 2}\n"
    )
    with pytest.raises(InputFaults) as caught:
        job.check(job.load(path), cluster())
    told = str(caught.value)
    assert "job.yaml:8 train.data.blend.1.weigth: unknown key" in told
    assert "job.yaml:8 train.data.blend.1: has no weight" in told


def test_set_overrides_are_read_like_the_file(tmp_path: Path) -> None:
    path = tmp_path / "job.yaml"
    path.write_text("train: {steps: 10, optimizer: {lr: 1e-3}}\n")
    loaded = job.load(path, ["train.steps=20", "train.optimizer.lr=1e-4", "name=other"])
    assert loaded.train == {"steps": 20, "optimizer": {"lr": 1e-4}}
    assert loaded.name == "other"
    with pytest.raises(InputFaults, match="KEY=VALUE"):
        job.load(path, ["train.steps"])


def test_a_fault_of_what_set_gave_is_told_there(tmp_path: Path) -> None:
    (tmp_path / "job.yaml").write_text("name: one\ncommand: [a]\nmaster_port: 7000\ngrace: 3\n")
    with pytest.raises(InputFaults) as caught:
        job.load(tmp_path / "job.yaml", ["master_port=x", "grase=1"])
    assert sorted(fault.where for fault in caught.value.faults) == ["--set grase", "--set master_port"]


def test_a_bare_command_is_named_after_its_script() -> None:
    assert job.from_command(["python", "train.py", "--lr", "1"], None).name == "train"
    assert job.from_command(["./bin/run me"], None).name == "run-me"
    assert job.from_command(["bash", "run.sh"], None).name == "run"
