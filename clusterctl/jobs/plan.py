"""Cluster + Job -> Plan -> NodePlan -> ProcessSpec: who starts what where, as a value; nothing is touched."""

from __future__ import annotations

import posixpath
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from clusterctl import contract
from clusterctl.errors import UsageError
from clusterctl.inventory.cluster import Cluster, Node
from clusterctl.jobs.job import (
    Job,
    devices_on,
    filled,
    train_part,
)
from clusterctl.jobs.run_folder import NodeFiles


@dataclass(frozen=True)
class Facts:
    """What only the nodes or the clock can say; a plan without it is the same plan with the defaults shown."""

    run_id: str = "<run>"
    attempt: int = 1
    master_port: int = 29500
    workdirs: Mapping[str, str] = field(default_factory=dict)
    """Each node's work folder with `~` resolved by the node itself."""
    homes: Mapping[str, str] = field(default_factory=dict)
    """Each node's home, for a python given as `~/venv/bin/python`."""
    cpus: Mapping[str, int] = field(default_factory=dict)
    code_paths: Mapping[str, str] = field(default_factory=dict)
    """Where the pushed code lies on each node."""
    data_paths: Mapping[str, str] = field(default_factory=dict)
    forwarded: Mapping[str, str] = field(default_factory=dict)
    rank_table: str = ""
    """The rank table's text, the same on every node; empty where the run has none."""


@dataclass(frozen=True)
class ProcessSpec:
    """One rank's process: argv and environment as data, all the way."""

    rank: int
    local_rank: int
    device: int
    argv: tuple[str, ...]
    env: dict[str, str] = field(hash=False)
    cwd: str
    programs: str = ""
    """The folder of the node's Python, searched first: torchrun, deepspeed and ninja of a venv lie in it."""


@dataclass(frozen=True)
class NodePlan:
    """What one node does in a run."""

    node: Node
    run_dir: str
    processes: tuple[ProcessSpec, ...]
    train: dict[str, Any] | None = field(default=None, hash=False)
    """The trainer's configuration with this node's paths in it."""


@dataclass(frozen=True)
class Plan:
    """One attempt of a run, whole."""

    job: Job
    cluster: Cluster
    facts: Facts
    master_address: str
    hostfile: str
    nodes: tuple[NodePlan, ...]

    @property
    def master(self) -> str:
        """Where rank 0 listens."""
        return f"{self.master_address}:{self.facts.master_port}"

    @property
    def world_size(self) -> int:
        return sum(len(node.processes) for node in self.nodes)

    def as_json(self) -> dict[str, Any]:
        """The plan as `clusterctl plan --json` shows it and the run's folder keeps it."""
        return {
            "run": self.facts.run_id,
            "attempt": self.facts.attempt,
            "job": self.job.name,
            "world_size": self.world_size,
            "master": self.master,
            "hostfile": self.hostfile,
            "rank_table": bool(self.facts.rank_table),
            "nodes": [
                {
                    "node": plan.node.name,
                    "address": plan.node.address,
                    "run_dir": plan.run_dir,
                    "processes": [asdict(process) for process in plan.processes],
                }
                for plan in self.nodes
            ],
        }


def make_plan(cluster: Cluster, job: Job, facts: Facts | None = None) -> Plan:
    """Lay a job over the nodes: ranks in the inventory's order, node by node, device by device."""
    from clusterctl.hostfile import formats as hostfile

    facts = facts or Facts(forwarded={}, master_port=job.master_port or 29500)
    world = sum(len(devices_on(job, node)) for node in cluster.nodes)
    master = cluster.nodes[0].address
    plans, first = [], 0
    # Whatever a rank derives from it, all derive alike.
    same = replace(job, train=train_part(job, cluster))
    for place, node in enumerate(cluster.nodes):
        plan = _node_plan(node, same, facts, world, first, place, master)
        plans.append(plan)
        first += len(plan.processes)
    slots = {node.name: len(devices_on(job, node)) for node in cluster.nodes}
    return Plan(job, cluster, facts, master, hostfile.deepspeed(cluster, slots), tuple(plans))


def run_dir_on(node: Node, facts: Facts) -> str:
    """A run's folder on a node; with the node's name in it, since homes may be one disk that all nodes see."""
    return posixpath.join(facts.workdirs.get(node.name, node.workdir), "runs", facts.run_id, node.name)


def rank_table_wanted(job: Job, cluster: Cluster) -> bool:
    """Whether this run's ranks find a rank table."""
    return job.rank_table == "always" or (
        job.rank_table == "auto" and all(node.kind == "npu" for node in cluster.nodes)
    )


def _node_plan(
    node: Node, job: Job, facts: Facts, world: int, first: int, place: int, master: str
) -> NodePlan:
    run_dir = run_dir_on(node, facts)
    code = facts.code_paths.get(
        node.name, posixpath.join(node.workdir, "store/code/<hash>") if _has_code(job) else ""
    )
    data = facts.data_paths.get(
        node.name, job.data_there or posixpath.join(node.workdir, "store/data/<hash>")
    )
    devices = devices_on(job, node)
    processes = []
    for local, device in enumerate(devices):
        env = _rank_env(
            node,
            job,
            facts,
            first + local,
            local,
            device,
            world,
            len(devices),
            place,
            master,
            run_dir,
            code,
            data,
        )
        python = (
            node.python.replace("~", facts.homes.get(node.name, "~"), 1)
            if node.python.startswith("~/")
            else node.python
        )
        argv = _argv(job, replace(node, python=python), run_dir, env, data)
        programs = posixpath.dirname(python)
        processes.append(ProcessSpec(first + local, local, device, argv, env, code or run_dir, programs))
    train = filled(job.train, data) if job.train is not None else None
    return NodePlan(node, run_dir, tuple(processes), train)


def _has_code(job: Job) -> bool:
    return job.code is not None or job.train is not None


def _argv(job: Job, node: Node, run_dir: str, env: Mapping[str, str], data: str) -> tuple[str, ...]:
    if job.train is not None:
        return (
            node.python,
            "-u",
            "-m",
            "trainer",
            "train",
            posixpath.join(run_dir, contract.TRAIN_CONFIG_FILE),
        )
    words = [
        node.python if position == 0 and word in ("python", "python3") else word
        for position, word in enumerate(job.command)
    ]
    names = {"rank": env[contract.RANK], "local_rank": env[contract.LOCAL_RANK], **_node_names(node)}
    if job.data is not None or job.data_there:
        names["data"] = data
    return tuple(fill(word, names, f"{job.source}: command") for word in words)


def _node_names(node: Node) -> dict[str, str]:
    return {
        "node": node.name,
        "node.name": node.name,
        "node.address": node.address,
        "node.host": node.host,
        "node.interface": node.interface or "",
    }


def fill(text: str, names: Mapping[str, str], where: str) -> str:
    """`{node.address}` and the like; any other brace stays as it is, since programs use braces too."""

    def one(match: re.Match[str]) -> str:
        if match[1] not in names and match[1].startswith("node."):
            raise UsageError(
                f"{where}: unknown {match[0]}", f"known: {', '.join('{' + name + '}' for name in names)}"
            )
        return names.get(match[1], match[0])

    return re.sub(r"\{([a-z_.]+)\}", one, text)


def _rank_env(
    node: Node,
    job: Job,
    facts: Facts,
    rank: int,
    local: int,
    device: int,
    world: int,
    local_world: int,
    place: int,
    master: str,
    run_dir: str,
    code: str,
    data: str,
) -> dict[str, str]:
    env: dict[str, str] = dict(facts.forwarded)
    env.update(_runtime_env(node, facts, local_world, code))
    env.update(_device_env(node, job, facts, rank, device, world, run_dir))
    env.update(
        {
            contract.RANK: str(rank),
            contract.LOCAL_RANK: str(local),
            contract.WORLD_SIZE: str(world),
            contract.LOCAL_WORLD_SIZE: str(local_world),
            contract.GROUP_RANK: str(place),
            contract.MASTER_ADDR: master,
            contract.MASTER_PORT: str(facts.master_port),
        }
    )
    names = {**_node_names(node), "rank": str(rank), "local_rank": str(local), "data": data}
    for source, given in ((f"{node.name}.env", node.env), (f"{job.source}: env", job.env)):
        env.update({name: fill(value, names, f"{source}.{name}") for name, value in given.items()})
    env.update(
        {
            contract.RUN_ID: facts.run_id,
            contract.RUN_DIR: run_dir,
            contract.ATTEMPT: str(facts.attempt),
            contract.NODE: node.name,
            contract.DEVICE_KIND: node.kind,
            contract.CACHE_DIR: posixpath.join(facts.workdirs.get(node.name, node.workdir), "cache"),
        }
    )
    return env


def _runtime_env(node: Node, facts: Facts, local_world: int, code: str) -> dict[str, str]:
    """What any Python program on this node is better off with; a job's own `env` overrides each."""
    env = {
        "PYTHONUNBUFFERED": "1",
        "OMP_NUM_THREADS": str(max(1, facts.cpus.get(node.name, 1) // max(1, local_world))),
    }
    if code:
        env["PYTHONPATH"] = code
    if node.kind == "cpu":
        env.update(contract.MALLOC_TUNING)
    if node.kind != "npu":
        # torch_npu installed without CANN breaks `import torch`.
        env["TORCH_DEVICE_BACKEND_AUTOLOAD"] = "0"
    if node.interface:
        env[contract.GLOO_SOCKET_IFNAME] = node.interface
        if node.kind == "cuda":
            env[contract.NCCL_SOCKET_IFNAME] = node.interface
        if node.kind == "npu":
            env[contract.HCCL_SOCKET_IFNAME] = f"={node.interface}"
    return env


def _device_env(
    node: Node, job: Job, facts: Facts, rank: int, device: int, world: int, run_dir: str
) -> dict[str, str]:
    devices = ",".join(map(str, devices_on(job, node)))
    table = {contract.RANK_TABLE_FILE: posixpath.join(run_dir, "rank_table.json")} if facts.rank_table else {}
    if node.kind == "cuda":
        return {contract.CUDA_VISIBLE: devices}
    if node.kind == "npu":
        return {
            contract.ASCEND_VISIBLE: devices,
            contract.RANK_ID: str(rank),
            contract.RANK_SIZE: str(world),
            contract.DEVICE_ID: str(device),
            contract.HCCL_IF_IP: node.address,
            contract.PLOG_PATH: NodeFiles(run_dir, facts.attempt).plogs,
            **table,
        }
    return table
