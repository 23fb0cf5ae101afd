"""A job laid over nodes: ranks, environments, paths; all of it without a node."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import pytest

from clusterctl.errors import InputFaults, UsageError
from clusterctl.inventory.cluster import Cluster, Node, named_devices
from clusterctl.jobs import job, job_check, plan
from clusterctl.jobs.job import rank_table_wanted
from clusterctl.jobs.restarts import Restart
from clusterctl.wire import contract


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
        "ASCEND_DEVICE_ID": "0",
        "ASCEND_RT_VISIBLE_DEVICES": "0,1",
        "RANK_TABLE_FILE": "/w/runs/r/node2/rank_table.json",
        "HCCL_IF_IP": "10.0.0.2",
        "ASCEND_PROCESS_LOG_PATH": "/w/runs/r/node2/attempts/1/plogs",
        "HCCL_SOCKET_IFNAME": "=eth0",
        "HCCL_CONNECT_TIMEOUT": "1200",
    }
    assert {name: env.get(name) for name in wanted} == wanted
    own = plan.make_plan(cluster("npu"), bare(env={"HCCL_CONNECT_TIMEOUT": "300"}), facts)
    assert own.nodes[0].processes[0].env["HCCL_CONNECT_TIMEOUT"] == "300"
    assert "TORCH_DEVICE_BACKEND_AUTOLOAD" not in env


def test_devices_of_gpus_are_counted_as_nvidia_smi_does() -> None:
    env = plan.make_plan(cluster("cuda"), bare()).nodes[0].processes[0].env
    assert (env["CUDA_DEVICE_ORDER"], env["CUDA_VISIBLE_DEVICES"]) == ("PCI_BUS_ID", "0,1")


def test_a_training_gets_a_rank_table_only_if_its_job_asks_for_one(tmp_path: Path) -> None:
    path = tmp_path / "job.yaml"

    def wanted(text: str) -> bool:
        path.write_text(text)
        return rank_table_wanted(job.load(path), cluster("npu"))

    training = "train: {model: {layers: 1, hidden: 8, heads: 1}, data: {random: true}, steps: 1}\n"
    assert wanted('command: ["true"]\n') and not wanted(training)
    assert wanted(training + "rank_table: always\n") and not wanted('command: ["true"]\nrank_table: never\n')


def test_a_training_over_several_kinds_of_devices_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "job.yaml"
    path.write_text("train: {model: {layers: 1, hidden: 8, heads: 1}, data: {random: true}, steps: 1}\n")
    mixed = cluster("cuda", (1, 1, 1))
    mixed = replace(mixed, nodes=(*mixed.nodes[:2], replace(mixed.nodes[2], kind="npu")))
    wanted = r"its ranks would be on cuda \(node\[1-2\]\) and npu \(node3\).*-n NODES"
    with pytest.raises(InputFaults, match=wanted):
        job_check.check(job.load(path), mixed)


def test_an_npu_rank_counts_its_device_in_the_list_of_visible_devices() -> None:
    nodes = cluster("npu", (8, 8))
    env = plan.make_plan(nodes, bare(devices=(4, 5))).nodes[1].processes[1].env
    names = ("ASCEND_RT_VISIBLE_DEVICES", "DEVICE_ID", "ASCEND_DEVICE_ID")
    assert [env.get(name) for name in names] == ["4,5", "1", "1"]
    env = plan.make_plan(nodes, bare(devices=(4, 5), device_ids="physical")).nodes[1].processes[1].env
    assert [env.get(name) for name in names] == [None, "5", "5"]


def test_hccl_gets_an_address_and_never_a_name() -> None:
    named = cluster("npu")
    named = replace(
        named, nodes=tuple(replace(node, address=f"lab-{node.name}.example") for node in named.nodes)
    )
    for process in plan.make_plan(named, bare()).nodes[0].processes:
        assert "HCCL_IF_IP" not in process.env and process.env["MASTER_ADDR"] == "lab-node1.example"


@pytest.mark.parametrize("given", [(7, 0, 3), None])
def test_npu_devices_are_taken_in_ascending_order_only(given: tuple[int, ...] | None, tmp_path: Path) -> None:
    path = tmp_path / "job.yaml"
    path.write_text('command: ["true"]\n' + (f"devices: {list(given)}\n" if given else ""))
    nodes = cluster("npu", (8,))
    if given is None:
        nodes = replace(nodes, nodes=tuple(replace(node, devices=(7, 0, 3)) for node in nodes.nodes))
    with pytest.raises(InputFaults, match=r"7,0,3 are not in ascending order \(write \"0,3,7\": CANN takes"):
        job_check.check(job.load(path), nodes)
    job_check.check(
        job.load(path),
        replace(nodes, nodes=tuple(replace(n, kind="cuda", devices=(7, 0, 3)) for n in nodes.nodes)),
    )
    # The remedy works in a job as in an option.
    for remedy in ('"0,3,7"', "[0, 3, 7]"):
        path.write_text(f'command: ["true"]\ndevices: {remedy}\n')
        job_check.check(job.load(path), nodes)
    assert named_devices("0,3,7") == (0, 3, 7)


def test_the_lists_that_a_refusal_of_devices_shows_are_taken() -> None:
    with pytest.raises(UsageError, match="not a choice of devices") as refused:
        named_devices("[0, 3, 7]")
    shown = re.findall(r'"(.*?)"', refused.value.hint)
    assert [named_devices(text) for text in shown] == [tuple(range(8)), (0, 1)]


def test_a_rank_gets_the_variables_of_torchrun() -> None:
    facts = plan.Facts(run_id="r", attempt=3, workdirs={"node2": "/w"})
    wanted = {
        "GROUP_WORLD_SIZE": "2",
        "ROLE_RANK": "3",
        "ROLE_WORLD_SIZE": "4",
        "ROLE_NAME": "default",
        "TORCHELASTIC_RUN_ID": "r",
        "TORCHELASTIC_RESTART_COUNT": "2",
        "TORCHELASTIC_MAX_RESTARTS": "5",
        "TORCHELASTIC_ERROR_FILE": "/w/runs/r/node2/attempts/3/error-rank-3.json",
    }
    made = plan.make_plan(cluster(), bare(restart=Restart(max=5)), facts)
    env = made.nodes[1].processes[1].env
    assert {name: env.get(name) for name in wanted} == wanted
    assert "TORCHELASTIC_USE_AGENT_STORE" not in env


def test_a_job_chooses_the_variables_of_another_launcher() -> None:
    facts = plan.Facts(master_port=8118)
    env = plan.make_plan(cluster("npu"), bare(env_style="mindspore"), facts).nodes[1].processes[0].env
    wanted = {
        "RANK_ID": "2", "RANK_SIZE": "4", "DEVICE_ID": "0", "MS_WORKER_NUM": "4", "MS_SCHED_HOST": "10.0.0.1",
        "MS_SCHED_PORT": "8118", "MS_NODE_ID": "2", "MS_ROLE": "MS_WORKER", "RANK": "2",
    }  # fmt: skip
    assert {name: env.get(name) for name in wanted} == wanted and "ROLE_RANK" not in env
    with_table = plan.make_plan(cluster("npu"), bare(env_style="mindspore"), replace(facts, rank_table="{}"))
    assert "MS_ROLE" not in with_table.nodes[0].processes[0].env
    env = plan.make_plan(cluster(), bare(env_style="mpi"), facts).nodes[1].processes[1].env
    wanted = {
        "OMPI_COMM_WORLD_RANK": "3", "OMPI_COMM_WORLD_SIZE": "4", "OMPI_COMM_WORLD_LOCAL_RANK": "1",
        "PMI_RANK": "3", "PMI_SIZE": "4", "MPI_LOCALRANKID": "1", "MPI_LOCALNRANKS": "2", "WORLD_SIZE": "4",
    }  # fmt: skip
    assert {name: env.get(name) for name in wanted} == wanted


def test_a_folder_in_which_hccl_opens_no_table_is_refused() -> None:
    facts = plan.Facts(run_id="train.json-1120", rank_table="{}")
    with pytest.raises(UsageError, match=r"contains '\.json'"):
        plan.make_plan(cluster("npu"), bare(), facts)
    plan.make_plan(cluster("npu"), bare(), replace(facts, rank_table=""))


def test_placeholders_are_filled_alike_in_command_environment_and_training() -> None:
    names = ("data", "run_dir", "node_rank", "world_size", "master", "master_port", "node.name")
    text = " ".join(f"{{{name}}}" for name in names)
    facts = plan.Facts(run_id="r", workdirs={"node2": "/w"}, data_paths={"node2": "/d"}, master_port=5000)
    filled = "/d /w/runs/r/node2 1 4 10.0.0.1 5000 node2"
    process = plan.make_plan(cluster(), bare("run", text, env={"A": text}), facts).nodes[1].processes[0]
    assert process.argv == ("run", filled) and process.env["A"] == filled
    training = replace(bare(), command=(), train={"model": {"x": [text]}})
    assert plan.make_plan(cluster(), training, facts).nodes[1].train["model"] == {"x": [filled]}  # type: ignore[index]
    awk = bare("awk", "{{print}} {rank}{local_rank} {print} ${rank}")
    argv = plan.make_plan(cluster(), awk, facts).nodes[1].processes[1].argv
    assert argv == ("awk", "{print} 31 {print} ${rank}")


def test_unknown_placeholders_are_named_with_their_lines(tmp_path: Path) -> None:
    path = tmp_path / "job.yaml"
    path.write_text("command: [run, '{mastr}', '{data}', '{{print}}']\nenv:\n  A: '{rnk}'\n")
    with pytest.raises(InputFaults) as caught:
        job_check.check(job.load(path), cluster())
    unknown, no_data, other = caught.value.faults
    assert unknown.where == f"{path}:1 command.1" and unknown.what == "unknown placeholder {mastr}"
    assert "did you mean 'master'?" in unknown.remedy and "{{mastr}} writes the text itself" in unknown.remedy
    assert no_data.what == "{data} is used, but the job has no data"
    assert other.where == f"{path}:3 env.A"
    path.write_text("train: {model: gpt-tiny, steps: 1, name: '{rank}'}\n")
    with pytest.raises(InputFaults, match="the train part is the same for all ranks"):
        job_check.check(job.load(path), cluster())


def test_set_takes_a_text_that_begins_with_a_placeholder(tmp_path: Path) -> None:
    path = tmp_path / "job.yaml"
    path.write_text("train: {model: gpt-tiny}\n")
    loaded = job.load(path, ["train.data.prefix={data}/x", "train.data.other={data}", "train.more={a: 1}"])
    assert loaded.train == {
        "model": "gpt-tiny",
        "data": {"prefix": "{data}/x", "other": "{data}"},
        "more": {"a": 1},
    }


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
    with pytest.raises(UsageError, match=r"unknown placeholder \{node.adress\}"):
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
        job_check.check(job.load(path), cluster())
    said = str(caught.value)
    assert f"{path}:2 devices: node[1-2] have no device 2, 3; they have 0, 1" in said


def test_a_job_is_a_command_or_a_training_and_its_faults_come_at_once(tmp_path: Path) -> None:
    path = tmp_path / "job.yaml"
    path.write_text("name: a b\ncomand: [x]\nmaster_port: 70000\nrank_table: often\ndata: nowhere\n")
    with pytest.raises(InputFaults) as caught:
        job.load(path)
    said = str(caught.value)
    for part in (
        "not a name for the folder of a run",
        "did you mean 'command'?",
        "70000 is too large",
        "unknown 'often'",
        "no folder",
        "either a `command` or a `train`",
    ):
        assert part in said, said


@pytest.mark.parametrize("text", ["command: 5\n", "train: []\n", "command: [1, {a: 2}]\n", "- a\n"])
def test_a_part_that_cannot_be_read_is_not_missing_too(tmp_path: Path, text: str) -> None:
    path = tmp_path / "job.yaml"
    path.write_text(text)
    with pytest.raises(InputFaults) as caught:
        job.load(path)
    assert len(caught.value.faults) == 1


def test_a_fault_of_one_corpus_of_several_names_its_line(tmp_path: Path) -> None:
    path = tmp_path / "job.yaml"
    path.write_text(
        "name: mix\ntrain:\n  model: gpt-tiny\n  steps: 1\n  data:\n    blend:\n"
        "      - {prefix: a, weight: 1}\n      - {prefix: b, weigth: 2}\n"
    )
    with pytest.raises(InputFaults) as caught:
        job_check.check(job.load(path), cluster())
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


def test_a_training_on_data_of_an_object_store_is_planned(tmp_path: Path) -> None:
    path = tmp_path / "job.yaml"
    path.write_text(
        "data: s3://corpora/wiki\n"
        "train:\n"
        "  model: {layers: 1, hidden: 32, heads: 2, sequence: 32, vocab: 500}\n"
        "  data: {prefix: '{data}/corpus', tokenizer: '{data}/tokenizer.json'}\n"
        "  steps: 10\n"
        "  micro_batch: 2\n"
    )
    summary = job_check.check(job.load(path), cluster())
    assert summary is not None and summary.layout.data == 4
    path.write_text(path.read_text().replace("{data}/corpus", "s3://corpora/wiki/corpus"))
    with pytest.raises(InputFaults, match="is a URL, and a corpus is read from files"):
        job_check.check(job.load(path), cluster())
