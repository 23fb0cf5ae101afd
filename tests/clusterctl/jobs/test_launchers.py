"""Commands that start the ranks of a node themselves: once per node, with what they leave open filled in."""

from __future__ import annotations

import shlex
from dataclasses import replace

import pytest

from clusterctl.errors import InputFaults
from clusterctl.inventory.cluster import Cluster, Node
from clusterctl.jobs import job as jobs
from clusterctl.jobs import job_check
from clusterctl.jobs.launchers.known import TORCH_MODULES
from clusterctl.jobs.plan import make_plan
from tests.clusterctl.conftest import Run

CLUSTER = Cluster(
    "c", tuple(Node(f"n{number}", f"h{number}", f"10.0.0.{number}", devices=(0, 1)) for number in (1, 2))
)


def commands(text: str, cluster: Cluster = CLUSTER) -> list[str]:
    """Return the command of each process of a plan."""
    made = make_plan(cluster, jobs.from_command(shlex.split(text), None))
    return [" ".join(process.argv) for node in made.nodes for process in node.processes]


def faults(text: str, cluster: Cluster = CLUSTER) -> list[str]:
    try:
        job_check.check(jobs.from_command(shlex.split(text), None), cluster)
    except InputFaults as error:
        return [fault.what for fault in error.faults]
    return []


def test_torchrun_runs_once_per_node_with_the_rendezvous_filled_in() -> None:
    first, second = commands("torchrun train.py --lr 1")
    assert first == (
        "python3 -m torch.distributed.run --nproc_per_node=2 --nnodes=2 --node_rank=0 --master_addr=10.0.0.1"
        " --master_port=29500 train.py --lr 1"
    )
    assert "--node_rank=1 " in second and not faults("torchrun train.py --lr 1")


@pytest.mark.parametrize("module", TORCH_MODULES)
def test_torchs_module_is_known_and_runs_with_the_nodes_python(module: str) -> None:
    (first, _) = commands(f"python -m {module} --nproc-per-node 2 -m package.train --nnodes 7")
    assert first.startswith(f"python3 -m {module} --nnodes=2 --node_rank=0 ")
    assert first.endswith("--nproc-per-node 2 -m package.train --nnodes 7"), "words of the program stay"


def test_a_rendezvous_of_the_users_choice_gets_its_end_point() -> None:
    (first, _) = commands("torchrun --rdzv-backend=c10d --nproc_per_node=auto train.py")
    assert "--rdzv_endpoint=10.0.0.1:29500 --rdzv_id=clusterctl" in first and "--node_rank" not in first
    assert not faults("torchrun --rdzv-backend=c10d --nnodes=1:4 train.py")


def test_deepspeed_accelerate_and_msrun_are_filled_in() -> None:
    (first, _) = commands("deepspeed --no_local_rank train.py --deepspeed_config ds.json")
    assert (
        first.startswith("deepspeed --hostfile=")
        and " --no_ssh --node_rank=0 --master_addr=10.0.0.1" in first
    )
    assert first.endswith("--no_local_rank train.py --deepspeed_config ds.json")
    _, second = commands("accelerate launch --mixed_precision bf16 train.py")
    for part in (
        "--num_processes=4 ",
        "--num_machines=2 ",
        "--machine_rank=1 ",
        "--multi_gpu",
        "--mixed_precision bf16",
    ):
        assert part in second
    (first, _) = commands("msrun --log_dir logs train.py")
    assert "--worker_num=4 --local_worker_num=2 --node_rank=0 --master_addr=10.0.0.1" in first
    assert "/launcher --log_dir logs train.py" not in first and "--log_dir logs train.py" in first
    (first, _) = commands("msrun train.py")
    assert first.endswith("/launcher train.py") and " --log_dir=" in first


def test_mindspores_variables_alone_need_a_rank_table_or_a_scheduler() -> None:
    job = replace(jobs.from_command(["python", "t.py"], None), env_style="mindspore")
    with pytest.raises(InputFaults) as caught:
        job_check.check(job, CLUSTER)
    assert "MindSpore's scheduler" in str(caught.value) and "launch -- msrun" in str(caught.value)
    npus = replace(CLUSTER, nodes=tuple(replace(node, kind="npu") for node in CLUSTER.nodes))
    # A rank table replaces it; msrun starts one, and so may the program.
    job_check.check(job, npus)
    job_check.check(replace(job, command=("msrun", "t.py")), CLUSTER)
    job_check.check(replace(job, env={"MS_ROLE": "MS_WORKER"}), CLUSTER)


def test_accelerate_on_cpus_is_told_so_by_its_variable() -> None:
    made = make_plan(CLUSTER, jobs.from_command(["accelerate", "launch", "a.py"], None))
    assert made.nodes[0].processes[0].env["ACCELERATE_USE_CPU"] == "true"
    assert (
        "ACCELERATE_USE_CPU"
        not in make_plan(CLUSTER, jobs.from_command(["a"], None)).nodes[0].processes[0].env
    )


@pytest.mark.parametrize(
    ("command", "problem"),
    [
        ("torchrun --nproc-per-node=4 t.py", "--nproc_per_node 4 does not fit the run, which needs 2"),
        ("torchrun --nnodes 3 t.py", "--nnodes 3 does not fit"),
        ("torchrun --nnodes 3:4 t.py", "--nnodes 3:4 does not fit"),
        ("torchrun --node-rank 0 t.py", "--node_rank 0 does not fit"),
        ("torchrun --master_addr 10.9.9.9 t.py", "--master_addr 10.9.9.9 does not fit"),
        ("torchrun --standalone t.py", "--standalone is for one node"),
        ("deepspeed --num_gpus=8 t.py", "--num_gpus 8 does not fit"),
        ("deepspeed --include n1:0 t.py", "--include n1:0 chooses among nodes"),
        ("accelerate launch --num_processes 2 t.py", "--num_processes 2 does not fit the run, which needs 4"),
        ("msrun --worker_num=8 t.py", "--worker_num 8 does not fit"),
        ("mpirun -np 4 -H n1,n2 ./a.out", "mpirun -H n1,n2 chooses nodes"),
        ("mpiexec --mca btl tcp,self --hostfile f ./a.out", "mpiexec --hostfile f chooses nodes"),
        ("torchrun", "torchrun is given no program to start"),
        ("torchrun --nnodes 2 --nproc-per-node 2", "torchrun is given no program to start"),
        ("deepspeed --no_local_rank", "deepspeed is given no program to start"),
        ("accelerate launch --num_machines 2", "accelerate launch is given no program to start"),
    ],
)
def test_what_contradicts_the_nodes_is_reported(command: str, problem: str) -> None:
    assert any(problem in text for text in faults(command)), faults(command)


@pytest.mark.parametrize(
    ("command", "remedy"),
    [
        ("torchrun --nnodes 3:4 t.py", "leave out --nnodes: choose the nodes by -n SET"),
        (
            "torchrun --nnodes 3 t.py",
            "leave out --nnodes: the run has 2 nodes; more must be in the inventory",
        ),
        (
            "deepspeed --num_nodes 1 t.py",
            "leave out --num_nodes: choose the first node by -n n1, or `nodes: n1`",
        ),
        ("deepspeed --num_gpus 8 t.py", "leave out --num_gpus: choose the devices by --devices"),
        ("accelerate launch --num_machines 3 t.py", "leave out --num_machines: the run has 2 nodes"),
        ("msrun --worker_num=8 t.py", "leave out --worker_num: it is filled in on every node"),
    ],
)
def test_the_remedy_names_the_option_of_launch_that_chooses(command: str, remedy: str) -> None:
    job = jobs.from_command(shlex.split(command), None)
    with pytest.raises(InputFaults) as caught:
        job_check.check(job, CLUSTER)
    assert [fault.remedy[: len(remedy)] for fault in caught.value.faults] == [remedy]


@pytest.mark.slow
@pytest.mark.parametrize(
    "command",
    ["torchrun --help", "torchrun -m train", "deepspeed --module train", "torchrun --new_flag t.py"],
)
def test_a_program_that_may_be_there_is_not_missed(command: str) -> None:
    assert not [text for text in faults(command) if "no program" in text]


def test_the_address_may_be_written_as_the_first_nodes_name_or_as_a_placeholder() -> None:
    for address in ("n1", "h1", "10.0.0.1", "{master}"):
        assert not faults(f"torchrun --master-addr={address} --master-port=1234 t.py")


def test_one_node_takes_standalone_and_mpirun() -> None:
    single = replace(CLUSTER, nodes=CLUSTER.nodes[:1])
    (alone,) = commands("torchrun --standalone t.py", single)
    assert alone == "python3 -m torch.distributed.run --nproc_per_node=2 --standalone t.py"
    assert commands("mpirun ./a.out", single) == ["mpirun -np 2 ./a.out"] and not faults(
        "mpirun ./a.out", single
    )


def test_mpirun_runs_on_the_first_node_and_the_others_wait_for_its_daemons() -> None:
    job = jobs.from_command(shlex.split("mpirun --oversubscribe -mca btl tcp,self python solve.py"), None)
    assert not faults("mpirun --oversubscribe -np 3 -mca btl tcp,self -x A=1 python solve.py")
    plan = make_plan(CLUSTER, job)
    first, second = (node.processes[0] for node in plan.nodes)
    assert first.argv[2:] == ("first", "mpirun", "-np", "4", *job.command[1:])
    assert second.argv[1].endswith("/mpi_links.py") and second.argv[2:] == ("wait",)
    assert (
        first.env["CLUSTERCTL_MPI_NODES"] == '["n1", "n2"]' and first.env["CLUSTERCTL_MPI_SLOTS"] == "[2, 2]"
    )
    assert plan.world and plan.world["sizes"] == [4]
    hidden = replace(jobs.from_command(["python", "start.py"], None), processes="launcher", env_style="mpi")
    assert make_plan(CLUSTER, hidden).linked, "a program that starts mpirun by itself"


def test_any_program_can_run_once_per_node() -> None:
    job = replace(jobs.from_command(["./server"], None), processes="node")
    processes = [process for node in make_plan(CLUSTER, job).nodes for process in node.processes]
    assert [process.env["RANK"] for process in processes] == ["0", "1"]
    assert {(process.env["WORLD_SIZE"], process.env["LOCAL_WORLD_SIZE"]) for process in processes} == {
        ("2", "1")
    }
    as_is = replace(jobs.from_command(["torchrun", "t.py"], None), processes="device")
    assert sum(len(node.processes) for node in make_plan(CLUSTER, as_is).nodes) == 4
    assert make_plan(CLUSTER, as_is).nodes[0].processes[0].argv == ("torchrun", "t.py")


def test_a_run_is_named_after_the_program_and_not_after_its_launcher() -> None:
    for text in (
        "torchrun --nnodes 2 train.py",
        "python -m torch.distributed.run train.py",
        "deepspeed train.py",
    ):
        assert jobs.from_command(shlex.split(text), None).name == "train"
    assert jobs.from_command(["mpirun", "-np", "4", "python", "solve.py"], None).name == "solve"


def test_the_command_line_shows_what_is_filled_in_and_takes_per_node(command_line: Run) -> None:
    args = ("plan", "--what-if", "nodes=2,devices=4,kind=cuda", "--no-code")
    code, out, err = command_line(*args, "--", "torchrun", "t.py")
    assert code == 0 and "one process per node, with --nproc_per_node=4 --nnodes=2" in out, err
    code, out, _ = command_line(*args, "--per-node", "--", "./serve")
    assert code == 0 and "2 ranks on 2 nodes" in out
    code, _, err = command_line(*args, "--env-style", "mpirun", "--", "./serve")
    assert code == 2 and "--env-style mpirun: unknown" in err
