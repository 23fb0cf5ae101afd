"""Trainings on a real Slurm, with everything that Slurm does to a job; four minutes, so only with SLURM_DRILLS=1."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator

import pytest

from clusterctl.sandbox import demo, namespaces, queue
from tests.support.slurm_login import LIMITED, Login, login_of

MISSING = queue.why_not() or namespaces.why_not()
WHY_NOT = MISSING or ("" if os.environ.get("SLURM_DRILLS") else "set SLURM_DRILLS=1 (four minutes)")
pytestmark = [
    pytest.mark.live,
    pytest.mark.timeout(400),
    pytest.mark.skipif(bool(WHY_NOT), reason=f"Slurm: {WHY_NOT}"),
]

JOB = """
name: small
data: {data}
grace: 20
devices: 1
train:
  model: {{layers: 1, hidden: 32, heads: 2, sequence: 32, vocab: 512}}
  data: {{prefix: "{{data}}/text_document", tokenizer: "{{data}}/tokenizer.json", split: "90,10,0"}}
  steps: {steps}
  micro_batch: 2
  global_batch: 8
  precision: fp32
  optimizer: {{lr: 1e-3, warmup_steps: 2}}
  eval: {{every: 0, batches: 2}}
  save: {{every: {every}, keep: 3}}
slurm: {slurm}
"""
TWO = "{nodes: 2, time: 10}"
# Steps that are long enough for a signal to come before the last one.
SLOW = 'env: {CLUSTERCTL_FAULT: "rank0:step1:slow200"}\n'
STEPS = 24


@pytest.fixture(scope="module")
def login(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Login]:
    with login_of(tmp_path_factory.mktemp("slurm") / "box", 3) as found:
        data = found.folder / "data"
        data.mkdir()
        demo.write_corpus(found.folder / "corpus.jsonl")
        demo.train_tokenizer(found.folder / "corpus.jsonl", data / "tokenizer.json", 512)
        demo.build_data(found.folder / "corpus.jsonl", data / "tokenizer.json", data / "text_document")
        yield found


def job(login: Login, steps: int = STEPS, every: int = 1000, part: str = TWO) -> str:
    return JOB.format(data=login.folder / "data", steps=steps, every=every, slurm=part)


@pytest.fixture(scope="module")
def over_ssh(login: Login) -> dict[int, float]:
    """The losses of the same training over SSH, without a break."""
    file = login.folder / "ssh.yaml"
    file.write_text(job(login))
    nodes = ("-c", str(login.made.cluster_file), "-n", "node[1-2]")
    # SSH reaches the nodes from this machine, not from the network of Slurm.
    done = subprocess.run(
        [sys.executable, "-m", "clusterctl", "launch", *nodes, str(file)],
        cwd=login.folder,
        env=login.env,
        capture_output=True,
        text=True,
        timeout=200,
    )
    assert done.returncode == 0, done.stderr
    return losses(login, json.loads(login.clusterctl("runs", "--json").stdout)[0]["run"])


def losses(login: Login, run: str) -> dict[int, float]:
    return {step["step"]: step["loss"] for step in login.steps(run)}


def numbers(login: Login, run: str) -> list[int]:
    return [step["step"] for step in login.steps(run)]


def test_the_same_job_over_ssh_and_over_slurm_has_identical_losses(
    login: Login, over_ssh: dict[int, float]
) -> None:
    run, _ = login.submit(job(login))
    login.finished(run, 200)
    assert len(over_ssh) == STEPS
    assert losses(login, run) == over_ssh


def test_no_step_is_lost_when_a_job_saves_and_is_requeued(login: Login, over_ssh: dict[int, float]) -> None:
    run, number = login.submit(job(login) + SLOW)
    login.wait_for_steps(run, 6, 100)
    assert login("scancel", "--signal=USR1", "--batch", str(number)).returncode == 0
    login.wait(run, lambda state: state["phase"] == "pending", 60)
    done = max(numbers(login, run))
    login.start_now(number)
    login.finished(run, 200)
    # Each step once: none is repeated, none is missing.
    assert numbers(login, run) == list(range(1, STEPS + 1)) and done < STEPS
    assert losses(login, run) == over_ssh


def test_a_cancelled_job_is_stopped_and_says_why(login: Login) -> None:
    run, number = login.submit(job(login, steps=4000))
    login.wait_for_steps(run, 3, 100)
    assert login("scancel", str(number)).returncode == 0
    state = login.wait(run, lambda state: "cancelled" in state["verdict"], 60)
    assert state["phase"] == "stopped"


def test_a_job_at_its_time_limit_is_ended_and_says_why(login: Login) -> None:
    part = "{nodes: 2, time: 1, signal: 0, requeue: false}"
    run, _ = login.submit(job(login, steps=40000, part=part))
    state = login.wait(run, lambda state: "time limit" in state["verdict"], 200)
    assert state["phase"] in ("stopped", "failed")


def test_a_run_continues_on_other_nodes_after_a_node_was_killed(login: Login) -> None:
    run, number = login.submit(job(login, steps=60, every=4) + SLOW)
    login.wait_for_steps(run, 10, 100)
    nodes = login("squeue", "-h", "-j", str(number), "-o", "%N").stdout
    assert nodes.strip() == "node[1-2]"
    login.made.kill("node2")
    login.wait(run, lambda state: state["phase"] == "pending", 120)
    login.start_now(number, 200)
    login.finished(run, 250)
    seen = numbers(login, run)
    assert sorted(set(seen)) == list(range(1, 61))
    # From the newest checkpoint, at most `every` steps are done again.
    assert len(seen) - 60 <= 4 + 1, seen


# Opens the agents of all nodes. Only srun is on the path, so that the port is outside the range of the cluster.
OPEN = """
import os, sys
from clusterctl.backends.slurm.allocation import described, named
from clusterctl.environment import environment
from clusterctl.transport.fanout import Connections
from clusterctl.backends.slurm.programs import Srun
from clusterctl.backends.steps import StepTransport
nodes = described(named(environment(), "cpu")).nodes
os.environ["PATH"] = sys.argv[1]
for together in (nodes, ()):
    transport = StepTransport(Srun(), together)
    with Connections(transport) as connections:
        assert all(outcome.ok for outcome in connections.on_each(nodes, lambda node, link: link.hello()))
    print(*sorted(transport._by_streams))
"""


@pytest.mark.skipif(not shutil.which("iptables"), reason="iptables is not installed")
@pytest.mark.parametrize("way", ["DROP", "REJECT"])
def test_nodes_behind_a_firewall_are_reached_by_the_streams_of_srun(login: Login, way: str) -> None:
    config = queue.config_file(login.made.layout)
    text = config.read_text()
    config.write_text(f"{text}SrunPortRange=61001-63000\n")
    port = next(line.partition("=")[2] for line in text.splitlines() if line.startswith("SlurmctldPort="))
    only_srun = login.folder / "only-srun"
    only_srun.mkdir(exist_ok=True)
    link = only_srun / "srun"
    if not link.is_symlink():
        link.symlink_to(shutil.which("srun") or "")
    rule = (
        "INPUT",
        "-i",
        "br0",
        "-p",
        "tcp",
        "--syn",
        "-m",
        "multiport",
        "!",
        "--dports",
        f"61001:63000,{port}",
    )
    rule = (*rule, "-j", way)
    assert login("iptables", "-A", *rule).returncode == 0
    try:
        # srun's own ports are open, and the agents' connection goes to one of them.
        done = login.inside("$C exec all -- cat /proc/sys/kernel/hostname")
        # A drill before this one has killed a node.
        names = sorted(line.partition(": ")[0] for line in done.stdout.splitlines())
        assert len(names) == 2, done.stdout + done.stderr
        assert sorted(done.stdout.splitlines()) == [f"{name}: {name}" for name in names], done.stderr
        done = login.inside(f"{sys.executable} -c '{OPEN.replace(chr(39), chr(34))}' {only_srun}")
        assert done.stdout.splitlines() == [" ".join(names)] * 2, done.stdout + done.stderr
    finally:
        login("iptables", "-D", *rule)
        config.write_text(text)


@pytest.fixture(scope="module")
def limited(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Login]:
    """A Slurm that limits the memory of jobs, and has a partition that takes nodes from others."""
    with login_of(tmp_path_factory.mktemp("limited") / "box", 2, LIMITED) as found:
        data = found.folder / "data"
        data.mkdir()
        demo.write_corpus(found.folder / "corpus.jsonl")
        demo.train_tokenizer(found.folder / "corpus.jsonl", data / "tokenizer.json", 512)
        demo.build_data(found.folder / "corpus.jsonl", data / "tokenizer.json", data / "text_document")
        yield found


def test_a_preempted_job_says_so_and_continues_where_it_was(limited: Login) -> None:
    part = "{nodes: 2, time: 10, partition: sandbox}"
    run, number = limited.submit(job(limited, part=part) + SLOW)
    limited.wait_for_steps(run, 6, 100)
    urgent = ("sbatch", "-p", "urgent", "-N2", "--exclusive", "--wrap=sleep 5")
    assert limited(*urgent).returncode == 0
    state = limited.wait(run, lambda state: "preempted" in state["verdict"], 60)
    assert state["phase"] == "pending"
    limited.start_now(number, 60)
    limited.finished(run, 200)
    # The step that was under way when the job was preempted was finished and saved.
    assert numbers(limited, run) == list(range(1, STEPS + 1))


def test_a_rank_that_exceeds_the_memory_of_its_job_is_named(limited: Login) -> None:
    eat = "import time; held = [bytearray(20 << 20) for _ in range(60)]; time.sleep(60)"
    command = f"command: [{sys.executable}, -c, '{eat}']\ndevices: 1\n"
    run, _ = limited.submit(f"{command}slurm: {{nodes: 1, time: 10, requeue: false, extra: [--mem=500]}}\n")
    state = limited.ended(run, 60)
    assert state["phase"] == "failed"
    shown = limited.clusterctl("status", run).stdout
    assert "rank 0 on node1 (device 0) was killed by the kernel: the memory limit of its Slurm job" in shown
    assert "--mem=64G" in shown
