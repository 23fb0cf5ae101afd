"""Launchers behind wrappers, in shells and in scripts: found and filled in, or refused with the form that works."""

from __future__ import annotations

import importlib.util
import shlex
from dataclasses import replace
from pathlib import Path

import pytest

from clusterctl.errors import Fault, InputFaults
from clusterctl.inventory.cluster import Cluster, Node
from clusterctl.jobs import job as jobs
from clusterctl.jobs import job_check
from clusterctl.jobs.launchers import fill, known, options
from clusterctl.jobs.plan import ProcessSpec, make_plan

CLUSTER = Cluster(
    "c", tuple(Node(f"n{number}", f"h{number}", f"10.0.0.{number}", devices=(0, 1)) for number in (1, 2))
)
SCRIPTS = {
    "plain.sh": "#!/bin/bash\nset -e\ncd $(dirname $0)\ntorchrun train.py\n",
    "megatron.sh": """
        GPUS_PER_NODE=2
        NNODES=${NNODES:-1}
        DISTRIBUTED_ARGS="
            --nproc_per_node $GPUS_PER_NODE --nnodes $NNODES --node_rank ${NODE_RANK:-0}
            --master_addr ${MASTER_ADDR:-localhost} --master_port ${MASTER_PORT:-6000}
        "
        torchrun $DISTRIBUTED_ARGS pretrain_gpt.py --lr 1
    """,
    "array.sh": """
        ARGS=(--nproc_per_node 2 --nnodes "$NNODES" --node_rank "$NODE_RANK")
        LAUNCHER="python -u -m torch.distributed.run ${ARGS[@]}"
        $LAUNCHER train.py
    """,
    "function.sh": 'run() { exec torchrun train.py "$@"; }\nrun a b\n',
    "function2.sh": "function start_training {\n  torchrun train.py\n}\nstart_training\n",
    "branch.sh": 'case "$1" in\n  train) torchrun train.py ;;\n  *) echo usage ;;\nesac\n',
    "condition.sh": "if [ -n $A ]; then\n  nohup torchrun train.py > log 2>&1 &\n  wait\nfi\n",
    "outer.sh": "source env.sh\nbash $(dirname $0)/inner/plain.sh\n",
    "inner/plain.sh": "torchrun ../train.py\n",
    "env.sh": "export A=1\n",
    "command.sh": "CMD='torchrun train.py'\neval $CMD\n",
    "here.sh": "cat > other.sh <<EOF\ntorchrun train.py\nEOF\npython train.py\n",
    "talks.sh": "# torchrun train.py\necho torchrun train.py\nwhich torchrun && python train.py\n",
    "argument.sh": "torchrun --nnodes ${1:-1} --node_rank $2 train.py\n",
    "wrapper.sh": 'set -e\nulimit -n 4096\nexec "$@"\n',
    "one_node.sh": "NNODES=1\nMASTER_ADDR=localhost\ntorchrun --nnodes $NNODES --master_addr $MASTER_ADDR train.py\n",
    "ds.sh": "deepspeed train.py --deepspeed_config ds.json\n",
    "ds_filled.sh": "deepspeed --hostfile $CLUSTERCTL_HOSTFILE --no_ssh --node_rank $NODE_RANK"
    " --master_addr $MASTER_ADDR --master_port $MASTER_PORT train.py\n",
    "acc.sh": "accelerate launch train.py\n",
    "which.sh": "python3 $(which torchrun) train.py\n`command -v python` -m torch.distributed.run train.py\n",
    "group.sh": "( cd src; torchrun train.py ) 2>&1 | tee log\n",
    "again.sh": "for lr in 1 2; do\n  until torchrun train.py --lr $lr; do sleep 1; done\ndone\n",
    "literal.sh": "torchrun --nnodes 2 --nproc_per_node 2 --node_rank 0 --master_addr 10.0.0.1 train.py\n",
    "cpu.yaml": "distributed_type: MULTI_CPU\nnum_processes: 1\n",
    "gpu.yaml": "distributed_type: 'MULTI_GPU'\n",
    "factory.sh": "llamafactory-cli train config.yaml\n",
}


@pytest.fixture
def code(tmp_path: Path) -> Path:
    """Return a folder with these scripts."""
    for name, text in SCRIPTS.items():
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(text)
        path.chmod(0o755)
    (tmp_path / "train.py").write_text("")
    return tmp_path


def planned(command: str, code: Path) -> list[ProcessSpec]:
    """Return the processes of a command on both nodes."""
    plan = make_plan(CLUSTER, jobs.from_command(shlex.split(command), code))
    return [process for node in plan.nodes for process in node.processes]


def faults(command: str, code: Path, nodes: int = 2) -> list[Fault]:
    cluster = replace(CLUSTER, nodes=CLUSTER.nodes[:nodes])
    try:
        job_check.check(jobs.from_command(shlex.split(command), code), cluster)
    except InputFaults as error:
        return list(error.faults)
    return []


FILLED = [
    ("env X=1 torchrun train.py", "env X=1 torchrun --nproc_per_node=2 --nnodes=2 --node_rank=1 "),
    ("env -u A -i X=1 torchrun train.py", "X=1 torchrun --nproc_per_node=2 --nnodes=2 --node_rank=1 "),
    ("A=1 B='c d' torchrun train.py", "env A=1 B=c d torchrun --nproc_per_node=2 --nnodes=2 --node_rank=1 "),
    ("nohup nice -n 5 torchrun train.py", "nice -n 5 torchrun --nproc_per_node=2 --nnodes=2"),
    ("timeout -k 5 2h torchrun train.py", "2h torchrun --nproc_per_node=2 --nnodes=2"),
    ("stdbuf -oL numactl -N 0 torchrun train.py", "numactl -N 0 torchrun --nproc_per_node=2"),
    ("conda run -n composer torchrun train.py", "composer torchrun --nproc_per_node=2 --nnodes=2"),
    ("python -u -m torch.distributed.run train.py", "-u -m torch.distributed.run --nproc_per_node=2"),
    ("python3 -um torch.distributed.launch t.py", "-um torch.distributed.launch --nproc_per_node=2"),
    ("python3.11 -W ignore -X dev -m torch.distributed.run t.py", "torch.distributed.run --nproc_per_node=2"),
    ("python -Wignore -mtorch.distributed.run t.py", "-mtorch.distributed.run --nproc_per_node=2 --nnodes=2"),
    ("/opt/venv/bin/torchrun train.py", "/opt/venv/bin/torchrun --nproc_per_node=2 --nnodes=2"),
    ("python /opt/venv/bin/torchrun train.py", "/opt/venv/bin/torchrun --nproc_per_node=2 --nnodes=2"),
    ("python -m deepspeed.launcher.runner train.py", "deepspeed.launcher.runner --hostfile="),
    ("python -m accelerate.commands.launch train.py", "accelerate.commands.launch --num_processes=4"),
    ("accelerate-launch train.py", "accelerate-launch --num_processes=4 --num_machines=2 --machine_rank=1"),
    ("composer train.py", "composer --nproc=2 --world_size=4 --base_rank=2 --node_rank=1"),
    ("python -m paddle.distributed.launch t.py", "launch --master=10.0.0.1:29500 --nnodes=2 --rank=1"),
    ("fleetrun train.py", "fleetrun --master=10.0.0.1:29500 --nnodes=2 --rank=1 --nproc_per_node=2"),
    ("python -m mindspore.parallel.cluster.run t.py", "cluster.run --worker_num=4 --local_worker_num=2"),
    ("ray start", "ray start --address=10.0.0.1:29500 --block"),
    ("torchrun --nproc 2 train.py", "--nnodes=2 --node_rank=1 --master_addr=10.0.0.1 --master_port=29500 --nproc 2"),
    ("torchrun --virtual-local-rank train.py", "--master_port=29500 --virtual-local-rank train.py"),
    ("deepspeed -q train.py", "--master_port=29500 -q train.py"),
    ("pixi run -e gpu torchrun train.py", "gpu torchrun --nproc_per_node=2 --nnodes=2 --node_rank=1 "),
    ("apptainer exec --nv -B /data img.sif torchrun t.py", "img.sif torchrun --nproc_per_node=2 --nnodes=2"),
    ("flock -n lock strace -f -o out torchrun t.py", "-o out torchrun --nproc_per_node=2 --nnodes=2"),
    ("uv run --with x torchrun train.py", "--with x torchrun --nproc_per_node=2 --nnodes=2 --node_rank=1 "),
    ("tune run full_finetune_distributed --config c.yaml", "tune run --nproc_per_node=2 --nnodes=2"),
    ("deepspeed --num_gpus 2 --num_nodes 2 t.py", "--no_ssh --node_rank=1 --master_addr=10.0.0.1"),
    ("accelerate launch --config_file gpu.yaml t.py", "--machine_rank=1 --main_process_ip=10.0.0.1"),
    ("accelerate launch --vm --downcast_bf16 train.py", "--multi_gpu --vm --downcast_bf16 train.py"),
]  # fmt: skip


@pytest.mark.parametrize(("command", "part"), FILLED)
def test_a_launcher_behind_wrappers_is_filled_in(command: str, part: str, code: Path) -> None:
    processes = planned(command, code)
    assert len(processes) == 2 and part in " ".join(processes[1].argv), processes[1].argv
    assert not [fault for fault in faults(command, code) if "no such file" not in fault.what]


BY_VARIABLES = [
    "bash -c 'torchrun train.py'",
    "bash -lc 'cd src && exec torchrun train.py'",
    "/bin/sh -ec 'X=$(nproc); OMP_NUM_THREADS=$X torchrun train.py'",
    "env A=1 bash -o pipefail -c 'torchrun train.py | tee log'",
    "bash plain.sh",
    "bash -x plain.sh a b",
    "./plain.sh",
    "nohup ./plain.sh",
    "bash megatron.sh",
    "bash array.sh",
    "bash function.sh",
    "sh function2.sh",
    "bash branch.sh train",
    "bash condition.sh",
    "bash outer.sh",
    "bash command.sh",
    "bash argument.sh",
    "bash -c '. ./argument.sh' 2 1",
    "bash wrapper.sh torchrun train.py",
    "bash -c 'exec \"$@\"' - bash wrapper.sh torchrun train.py",
    "env -S 'A=1 torchrun' train.py",
    "bash -c 'source env.sh; bash plain.sh'",
    "bash factory.sh",
    "llamafactory-cli train config.yaml",
    "bash -c '$PYTHON -m torch.distributed.run train.py'",
    "bash -c 'python -m paddle.distributed.launch train.py'",
    "bash ds_filled.sh",
    "bash which.sh",
    "bash group.sh",
    "bash again.sh",
    "singularity exec img.sif bash -c 'torchrun train.py'",
    "bash -c 'torchrun --node_rank $NODE_RANK --nnodes=$NNODES train.py'",
]


@pytest.mark.parametrize("command", BY_VARIABLES)
def test_a_launcher_in_a_shell_is_filled_in_by_its_variables(command: str, code: Path) -> None:
    processes = planned(command, code)
    assert [process.argv for process in processes] == [tuple(shlex.split(command))] * 2
    assert not faults(command, code)
    env = processes[1].env
    assert (env["NNODES"], env["NODE_RANK"], env["NPROC_PER_NODE"]) == ("2", "1", "2")
    assert (env["PET_NNODES"], env["PET_NODE_RANK"], env["PET_NPROC_PER_NODE"]) == ("2", "1", "2")
    assert env["PET_RDZV_ENDPOINT"] == env["PADDLE_MASTER"] == "10.0.0.1:29500"


REFUSED = [
    ("bash one_node.sh", "one_node.sh: torchrun --nnodes 1 does not fit the run, which needs 2"),
    ("bash -c 'torchrun --nnodes 3 t.py'", "bash -c: torchrun --nnodes 3 does not fit"),
    ("bash -c 'torchrun --standalone t.py'", "--standalone is for one node"),
    ("env X=1 torchrun --node_rank=0 t.py", "--node_rank 0 does not fit"),
    ("bash argument.sh 2 1", "argument.sh: torchrun --node_rank 1 does not fit the run, which needs 0"),
    ("bash wrapper.sh torchrun --nnodes 3 t.py", "wrapper.sh: torchrun --nnodes 3 does not fit"),
    ("bash literal.sh", "literal.sh: torchrun --node_rank 0 does not fit the run, which needs 1"),
    ("deepspeed --node_rank 0 t.py", "deepspeed --node_rank 0 does not fit the run, which needs 1"),
    ("accelerate launch --machine_rank 0 t.py", "--machine_rank 0 does not fit the run, which needs 1"),
    ("accelerate launch --cpu t.py", "accelerate --cpu starts one process on each node, and the run has 4"),
    ("accelerate launch --config_file cpu.yaml t.py", "cpu.yaml with distributed_type MULTI_CPU starts one"),
    ("msrun --node_rank=0 t.py", "msrun --node_rank 0 does not fit the run, which needs 1"),
    ("bash ds.sh", "ds.sh: deepspeed would start one training on each node"),
    ("bash acc.sh", "acc.sh: accelerate launch would start one training on each node"),
    ("bash -c 'msrun train.py'", "msrun would start one training on each node"),
    ("bash -c 'composer train.py'", "composer would start one training on each node"),
    ("horovodrun -np 4 -H n1:2,n2:2 python t.py", "horovodrun would start ranks on other nodes in its own way"),
    ("colossalai run --host n1,n2 t.py", "colossalai run would start ranks on other nodes in its own way"),
    ("torchx run dist.ddp --script t.py", "torchx run would start ranks on other nodes in its own way"),
    ("srun -n 4 python t.py", "srun starts ranks through the batch system"),
    ("bash -c 'srun python t.py'", "bash -c: srun starts ranks through the batch system"),
    ("torchrun --nno 3 train.py", "--nnodes 3 does not fit"),
    ("deepspeed --launcher pdsh train.py", "deepspeed --launcher pdsh has no effect"),
    ("bash -c 'ray start --address 10.9.9.9:1'", "ray start would start one training on each node"),
]  # fmt: skip


@pytest.mark.parametrize(("command", "problem"), REFUSED)
def test_what_cannot_be_filled_in_is_refused_with_the_form_that_works(
    command: str, problem: str, code: Path
) -> None:
    found = faults(command, code)
    assert any(problem in fault.what for fault in found), found
    assert all(fault.remedy for fault in found)


def test_options_that_no_table_has_are_asked_of_the_installed_launcher(
    code: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[str] = []
    monkeypatch.setattr(fill, "flags", lambda name: asked.append(name) or frozenset(["--new_flag"]))
    command = "torchrun --new-flag --rdzv-conf a=1 --max-restarts 3 train.py"
    assert fill.program_of(shlex.split(command)) == "train.py" and set(asked) == {"torchrun"}
    asked.clear()
    assert (
        fill.program_of(shlex.split("accelerate launch --fsdp_version 2 --vm a.py")) == "a.py" and not asked
    )


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("torch") is None, reason="no torch here")
def test_our_tables_have_the_flags_of_the_installed_torchrun() -> None:
    found = known.flags("torchrun")
    assert {"--standalone", "--no_python"} <= found
    assert found - set(options.TORCH_FLAGS) == {"-h", "--help", "-m", "--module"}


def test_the_refusal_names_what_the_script_must_say(code: Path) -> None:
    (fault,) = faults("bash ds.sh", code)
    assert "launch -- deepspeed train.py --deepspeed_config ds.json" in fault.remedy
    assert "deepspeed --hostfile $CLUSTERCTL_HOSTFILE --no_ssh --node_rank $NODE_RANK" in fault.remedy
    assert not faults("bash ds.sh", code, nodes=1), "one node needs nothing from the others"


@pytest.mark.parametrize("command", ["bash here.sh", "bash talks.sh", "python train.py", "echo torchrun"])
def test_a_launcher_that_is_only_mentioned_changes_nothing(command: str, code: Path) -> None:
    assert len(planned(command, code)) == 4


def test_what_was_found_in_a_script_stays_when_the_script_changes(code: Path) -> None:
    job = jobs.from_command(["bash", "plain.sh"], code)
    (code / "plain.sh").write_text("python train.py\n")
    assert job.processes == "launcher" and job.per_node
