"""Real launchers on two nodes of two devices: torchrun, DeepSpeed's, accelerate's, MindSpore's."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.live.conftest import Shell, clean_environment

pytestmark = pytest.mark.live
MINDSPORE_PYTHON = Path(__file__).resolve().parents[2] / ".venv-judges/mindspore/bin/python"

PROGRAM = """
import os
import torch
import torch.distributed as dist

dist.init_process_group("gloo")
total = torch.ones(1)
dist.all_reduce(total)
print(f"rank {dist.get_rank()} of {dist.get_world_size()}, sum {int(total)}", flush=True)
dist.destroy_process_group()
"""
ACCELERATED = """
import torch
from accelerate import Accelerator

state = Accelerator()
total = state.reduce(torch.ones(1), "sum")
print(f"rank {state.process_index} of {state.num_processes}, sum {int(total)}", flush=True)
# Without this, threads of gloo may abort an interpreter that exits.
state.end_training()
"""


def ranks(shell: Shell, program: str, *command: str) -> set[str]:
    """Launch a program and return the line of each of its processes."""
    if not (Path(sys.executable).parent / command[0]).exists() and shutil.which(command[0]) is None:
        pytest.skip(f"{command[0]} is not installed")
    (shell.folder / "train.py").write_text(program)
    done = shell("launch", "--", *command, "train.py", timeout=300)
    assert done.returncode == 0, done.stderr
    logs = (shell.folder / "runs").glob("*/attempts/1/logs/*/*.out")
    return set(re.findall(r"rank \d of \d, sum \d", "".join(path.read_text() for path in logs)))


ALL = {f"rank {rank} of 4, sum 4" for rank in range(4)}


@pytest.mark.skipif(importlib.util.find_spec("torch") is None, reason="no torch here")
def test_torchrun_trains_on_all_nodes_together(shell: Shell) -> None:
    assert ranks(shell, PROGRAM, "torchrun") == ALL


@pytest.mark.skipif(importlib.util.find_spec("torch") is None, reason="no torch here")
@pytest.mark.parametrize(
    "command",
    [
        ("bash", "start.sh"),
        (
            "env",
            "A=1",
            "bash",
            "-c",
            "exec python -u -m torch.distributed.run --nproc_per_node=auto train.py",
            "x",
        ),
    ],
)
def test_torchrun_in_a_shell_trains_on_all_nodes_together(shell: Shell, command: tuple[str, ...]) -> None:
    """Nothing can be filled in inside a shell: torchrun takes what it lacks from its environment."""
    (shell.folder / "start.sh").write_text('run() { torchrun --master_port $MASTER_PORT "$@"; }\nrun "$1"\n')
    assert ranks(shell, PROGRAM, *command) == ALL


@pytest.mark.skipif(importlib.util.find_spec("deepspeed") is None, reason="no deepspeed here")
def test_deepspeed_trains_on_all_nodes_together(shell: Shell) -> None:
    assert ranks(shell, PROGRAM, "deepspeed") == ALL


@pytest.mark.skipif(importlib.util.find_spec("accelerate") is None, reason="no accelerate here")
@pytest.mark.parametrize("options", [(), ("--config_file", "accelerate.yaml")])
def test_accelerate_trains_on_all_nodes_together(shell: Shell, options: tuple[str, ...]) -> None:
    settings = {"compute_environment": "LOCAL_MACHINE", "distributed_type": "MULTI_GPU", "num_machines": 1}
    (shell.folder / "accelerate.yaml").write_text(
        json.dumps({**settings, "num_processes": 1, "machine_rank": 0, "mixed_precision": "no"})
    )
    assert ranks(shell, ACCELERATED, "accelerate", "launch", *options) == ALL
    done = shell("logs", "show", "--rank", "3")
    assert done.returncode == 2 and "--rank 0-1 --grep '^.rank3'" in done.stderr
    done = shell("logs", "show", "--rank", "0-1", "--grep", "^.rank3", "--no-prefix")
    assert done.stdout == "[rank3]:rank 3 of 4, sum 4\n"


FAILS = """
import os, sys, time
import torch.distributed as dist

dist.init_process_group("gloo")
print("up", flush=True)
if os.environ["RANK"] == "3":
    time.sleep(1)
    {how}
dist.barrier()
"""


@pytest.mark.skipif(importlib.util.find_spec("torch") is None, reason="no torch here")
@pytest.mark.parametrize(
    ("launcher", "how", "words"),
    [
        ("torchrun", "raise ValueError('bad worker')", "exited with code 1: ValueError: bad worker"),
        ("torchrun", "os.kill(os.getpid(), 11)", "ended by a segmentation fault (SIGSEGV)"),
        ("deepspeed", "raise ValueError('bad worker')", "exited with code 1: ValueError: bad worker"),
        ("torchrun", "time.sleep(600)", "3 of 4 ranks wait in barrier at"),
    ],
)
def test_the_worker_that_fails_below_a_launcher_is_the_cause(
    shell: Shell, launcher: str, how: str, words: str
) -> None:
    if importlib.util.find_spec("deepspeed") is None and launcher == "deepspeed":
        pytest.skip("no deepspeed here")
    (shell.folder / "train.py").write_text(FAILS.format(how=how))
    limit = ["--hang-after", "20s"] if "sleep(600)" in how else []
    done = shell("launch", *limit, "--", launcher, "train.py", timeout=280)
    assert done.returncode != 0
    cause = json.loads(next((shell.folder / "runs").glob("*/cause.json")).read_text())
    assert (cause["rank"], cause["node"], cause["device"]) == (3, "node2", 1), cause
    assert words in cause["title"]
    assert "out-of-memory" not in cause["others"] + cause["title"]
    shown = shell("logs", "show", "last", "--errors").stdout
    assert launcher != "torchrun" or limit or "Root Cause (first observed failure)" in shown
    assert launcher != "torchrun" or limit or "rank      : 3 (local_rank: 1)" in shown


HIDDEN = """
import subprocess
import sys
from collections.abc import Iterator

# Each of them would train alone and end well.
launcher = [sys.executable, "-m", "torch.distributed.run", *sys.argv[1:], "wait.py"]
sys.exit(subprocess.run(launcher).returncode)
"""


@pytest.mark.skipif(importlib.util.find_spec("torch") is None, reason="no torch here")
@pytest.mark.parametrize(
    ("processes", "options", "cause"),
    [
        ("auto", [], "started the launcher torch.distributed.run itself"),
        (
            "launcher",
            ["--standalone", "--nnodes=1", "--nproc_per_node=2"],
            "torch.distributed.run formed a group of 2, and the run has 4 ranks",
        ),
    ],
)
def test_a_group_of_another_size_is_an_error_within_seconds(
    shell: Shell, processes: str, options: list[str], cause: str
) -> None:
    (shell.folder / "hidden.py").write_text(HIDDEN)
    (shell.folder / "wait.py").write_text("import time; time.sleep(600)")
    job = {"command": ["python", "hidden.py", *options], "code": ".", "processes": processes}
    (shell.folder / "job.yaml").write_text(json.dumps({**job, "restart": {"max": 3}}))
    done = shell("launch", "job.yaml", timeout=300)
    assert done.returncode != 0 and cause in done.stderr, done.stderr
    assert "it would fail again in the same way" in done.stderr


@pytest.mark.skipif(importlib.util.find_spec("torch") is None, reason="no torch here")
def test_a_hidden_launcher_that_forms_the_planned_group_runs(shell: Shell) -> None:
    """torchrun takes the nodes from its environment, though nobody saw it in the command."""
    (shell.folder / "hidden.py").write_text(HIDDEN.replace("wait.py", "train.py"))
    (shell.folder / "job.yaml").write_text("command: [python, hidden.py]\ncode: .\nprocesses: launcher\n")
    (shell.folder / "train.py").write_text(PROGRAM)
    done = shell("launch", "job.yaml", timeout=300)
    assert done.returncode == 0, done.stderr


OF_MPI = """
#include <mpi.h>
#include <stdio.h>
#include <stdlib.h>
#include <unistd.h>
int main(int count, char **words) {
    int rank, size, one = 1, sum = 0;
    MPI_Init(&count, &words);
    MPI_Comm_rank(MPI_COMM_WORLD, &rank);
    MPI_Comm_size(MPI_COMM_WORLD, &size);
    MPI_Allreduce(&one, &sum, 1, MPI_INT, MPI_SUM, MPI_COMM_WORLD);
    printf("rank %d of %d, sum %d on %s\\n", rank, size, sum, getenv("CLUSTERCTL_NODE"));
    fflush(stdout);
    if (count > 1) sleep(atoi(words[1]));
    MPI_Finalize();
    return 0;
}
"""


@pytest.fixture(scope="module")
def apart(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Shell]:
    """Two nodes with addresses, host names and temporary folders of their own; no SSH leads from one to the other."""
    folder = tmp_path_factory.mktemp("apart")
    shell = Shell(folder, {**clean_environment(), "CLUSTERCTL_CLUSTER": str(folder / "own/cluster.yaml")})
    up = shell("sandbox", "up", "--mode", "namespaces", "--dir", "own", timeout=120)
    assert up.returncode == 0, up.stderr
    yield shell
    shell("sandbox", "down", "--dir", "own")


@pytest.mark.skipif(os.geteuid() != 0, reason="nodes with addresses of their own need root")
@pytest.mark.timeout(900)
@pytest.mark.parametrize("kind", ["openmpi", "mpich"])
def test_mpirun_forms_one_group_over_all_nodes(apart: Shell, kind: str) -> None:
    compiler = shutil.which(f"mpicc.{kind}")
    if compiler is None:
        pytest.skip(f"no {kind} here")
    code = apart.folder / kind
    code.mkdir()
    (code / "program.c").write_text(OF_MPI)
    subprocess.run([compiler, "-o", code / "program", code / "program.c"], check=True)
    mpirun = f"mpirun.{kind}"
    lines = {f"rank {rank} of 4, sum 4 on node{1 + rank // 2}" for rank in range(4)}
    for _ in range(5):
        try:
            done = apart("launch", "--code", kind, "--", mpirun, "./program", timeout=100)
        except subprocess.TimeoutExpired as late:
            # One run in ten does not return from MPI_Finalize: MPICH 4.0.2 waits for ever in UCX 1.13.
            assert kind == "mpich" and lines == set(re.findall(r"rank .*", (late.stdout or b"").decode()))
            assert apart("stop", "last", timeout=100).returncode == 0
        else:
            break
    assert done.returncode == 0 and lines == set(re.findall(r"rank .*", done.stdout)), done.stderr

    # Without mpirun each rank would be the only one of its group.
    done = apart("launch", "--code", kind, "--env-style", "mpi", "--", "./program", "5", timeout=300)
    assert done.returncode != 0 and "mpirun PROGRAM" in done.stderr, done.stderr

    # The daemons end with the run.
    assert (
        apart("launch", "--code", kind, "-d", "--", mpirun, "./program", "600", timeout=300).returncode == 0
    )
    assert apart("stop", "last", timeout=300).returncode == 0
    left = apart("exec", "all", "--", "pgrep", "-f", "orted|hydra|mpi_links", timeout=300)
    assert left.stdout == "", left.stdout


MINDSPORE = """
import mindspore
from mindspore.communication import get_group_size, get_rank, init
from mindspore.ops import AllReduce

mindspore.set_device("CPU")
init()
total = AllReduce()(mindspore.Tensor([1.0]))
print(f"rank {get_rank()} of {get_group_size()}, sum {int(total.asnumpy()[0])}", flush=True)
"""


@pytest.mark.skipif(not MINDSPORE_PYTHON.exists(), reason="no MindSpore here: make judges")
@pytest.mark.skipif(os.geteuid() != 0, reason="nodes with addresses of their own need root")
def test_msrun_trains_on_all_nodes_together(tmp_path: Path) -> None:
    """Its first node starts the scheduler, which it knows by the address of a network interface."""
    folder, python = Shell(tmp_path, clean_environment()), str(MINDSPORE_PYTHON)
    up = folder("sandbox", "up", "--mode", "namespaces", "--python", python, "--dir", "own", timeout=120)
    assert up.returncode == 0, up.stderr
    try:
        (folder.folder / "train.py").write_text(MINDSPORE)
        cluster = str(folder.folder / "own/cluster.yaml")
        done = folder("launch", "-c", cluster, "--", "msrun", "train.py", timeout=300)
        assert done.returncode == 0, done.stderr
        logs = (folder.folder / "runs").glob("*/attempts/1/logs/*/*.out")
        assert set(re.findall(r"rank \d of \d, sum \d", "".join(path.read_text() for path in logs))) == ALL
        kept = list((folder.folder / "own").rglob("launcher/worker_?.log"))
        assert len(kept) == 4
    finally:
        folder("sandbox", "down", "--dir", "own")
