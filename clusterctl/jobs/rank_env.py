"""The environment of one rank: the variables that torch, Ascend's CANN, MindSpore and MPI programs read.

Devices of an NPU node: ASCEND_RT_VISIBLE_DEVICES lists the physical ids of the job's devices, and DEVICE_ID and
ASCEND_DEVICE_ID are the position in this list, as CANN defines them. With `device_ids: physical` in the job, the
list is not set, and both are the physical id: for programs that open devices by it.
"""

from __future__ import annotations

import json
import posixpath
from dataclasses import dataclass

from clusterctl.inventory.addresses import is_ip
from clusterctl.inventory.cluster import Node
from clusterctl.jobs.facts import Facts
from clusterctl.jobs.job import Job
from clusterctl.jobs.launchers.fill import variables
from clusterctl.jobs.launchers.options import Shape
from clusterctl.jobs.placeholders import fill
from clusterctl.jobs.run_folder import NodeFiles
from clusterctl.wire import contract


@dataclass(frozen=True)
class NodePlace:
    """A node's part in a run."""

    node: Node
    node_rank: int
    nodes: int
    world_size: int
    first_rank: int
    devices: tuple[int, ...]
    shape: Shape
    mpi: bool
    """Whether the first node starts mpirun, and the others wait for what it sends."""
    processes: int
    """Number of processes: one per device, or one that uses all devices."""
    master: str
    master_port: int
    run_dir: str
    code: str
    data: str

    def placeholders(self) -> dict[str, str]:
        """Return the values of the placeholders that are the same for all ranks of the node."""
        return {
            "data": self.data,
            "run_dir": self.run_dir,
            "node_rank": str(self.node_rank),
            "world_size": str(self.world_size),
            "master": self.master,
            "master_port": str(self.master_port),
            "node": self.node.name,
            "node.name": self.node.name,
            "node.address": self.node.address,
            "node.host": self.node.host,
            "node.interface": self.node.interface or "",
        }

    def placeholders_of(self, local_rank: int) -> dict[str, str]:
        """Return the values of the placeholders for one rank."""
        ranks = {"rank": str(self.first_rank + local_rank), "local_rank": str(local_rank)}
        return {**self.placeholders(), **ranks}


def rank_environment(place: NodePlace, local_rank: int, job: Job, facts: Facts) -> dict[str, str]:
    """Return the environment of one rank; the job's `env` overrides all but the names of the run itself."""
    rank = place.first_rank + local_rank
    node = place.node
    env = {
        **facts.forwarded,
        **_runtime(place, facts),
        **job.network.environment(place.node.kind),
        **_of_launcher(place, job),
        **_devices(place, local_rank, job, facts),
        **_torch(place, rank, local_rank),
        **_STYLES[job.env_style](place, rank, local_rank, job, facts),
    }
    values = place.placeholders_of(local_rank)
    for source, given in ((f"{node.name}.env", node.env), (f"{job.source}: env", job.env)):
        env |= {name: fill(text, values, f"{source}.{name}") for name, text in given.items()}
    workdir = facts.workdirs.get(node.name, node.workdir)
    return env | {
        contract.RUN_ID: facts.run_id,
        contract.RUN_DIR: place.run_dir,
        contract.ATTEMPT: str(facts.attempt),
        contract.NODE: node.name,
        contract.DEVICE_KIND: node.kind,
        contract.CACHE_DIR: posixpath.join(workdir, "cache"),
        **({contract.SAVED_AS: facts.saved_as} if facts.saved_as else {}),
    }


def _of_launcher(place: NodePlace, job: Job) -> dict[str, str]:
    """Return the variables for a launcher that one process per node starts, wherever it stands in the command."""
    if not job.per_node:
        return {}
    # Without it accelerate's processes do not join each other on CPUs.
    mpi = {
        "CLUSTERCTL_MPI_NODES": json.dumps(place.shape.node_names),
        "CLUSTERCTL_MPI_SLOTS": json.dumps(place.shape.devices),
    }
    on_cpus = {"ACCELERATE_USE_CPU": "true"} if place.node.kind == "cpu" else {}
    return {**variables(place.shape), **on_cpus, **(mpi if place.mpi and not place.node_rank else {})}


def _torch(place: NodePlace, rank: int, local_rank: int) -> dict[str, str]:
    """Return the variables of torch.distributed, which every style has."""
    return {
        contract.RANK: str(rank),
        contract.LOCAL_RANK: str(local_rank),
        contract.WORLD_SIZE: str(place.world_size),
        contract.LOCAL_WORLD_SIZE: str(place.processes),
        contract.GROUP_RANK: str(place.node_rank),
        contract.MASTER_ADDR: place.master,
        contract.MASTER_PORT: str(place.master_port),
        # Names of these in scripts.
        "NNODES": str(place.nodes),
        "NODE_RANK": str(place.node_rank),
    }


def _torchrun(place: NodePlace, rank: int, local_rank: int, job: Job, facts: Facts) -> dict[str, str]:
    """Return the further variables that torchrun sets.

    TORCHELASTIC_USE_AGENT_STORE is left out: it makes ranks expect that the launcher holds the store.
    """
    return {
        "GROUP_WORLD_SIZE": str(place.nodes),
        "ROLE_RANK": str(rank),
        "ROLE_WORLD_SIZE": str(place.world_size),
        "ROLE_NAME": "default",
        "TORCHELASTIC_RUN_ID": facts.run_id,
        "TORCHELASTIC_RESTART_COUNT": str(facts.attempt - 1),
        "TORCHELASTIC_MAX_RESTARTS": str(job.restart.max if job.restart else 0),
        "TORCHELASTIC_ERROR_FILE": NodeFiles(place.run_dir, facts.attempt).error_file(rank),
    }


def _mindspore(place: NodePlace, rank: int, local_rank: int, job: Job, facts: Facts) -> dict[str, str]:
    """Return the variables that msrun sets. MS_ROLE is left out with a rank table, which needs no scheduler."""
    role = {} if facts.rank_table else {"MS_ROLE": "MS_WORKER"}
    return {
        "RANK_ID": str(rank),
        "RANK_SIZE": str(place.world_size),
        "DEVICE_ID": str(_device_id(place, local_rank, job)),
        "MS_WORKER_NUM": str(place.world_size),
        "MS_SCHED_HOST": place.master,
        "MS_SCHED_PORT": str(place.master_port),
        "MS_NODE_ID": str(rank),
        **role,
    }


def _mpi(place: NodePlace, rank: int, local_rank: int, job: Job, facts: Facts) -> dict[str, str]:
    """Return the variables that Open MPI, MPICH and Intel MPI set, from which programs read their rank."""
    if job.per_node:
        # mpirun, which this process may start, sets them for its ranks.
        return {}
    local_size = str(place.processes)
    return {
        "OMPI_COMM_WORLD_RANK": str(rank),
        "OMPI_COMM_WORLD_SIZE": str(place.world_size),
        "OMPI_COMM_WORLD_LOCAL_RANK": str(local_rank),
        "OMPI_COMM_WORLD_LOCAL_SIZE": local_size,
        "OMPI_COMM_WORLD_NODE_RANK": str(local_rank),
        "PMI_RANK": str(rank),
        "PMI_SIZE": str(place.world_size),
        # Without it MPICH's own start makes every rank the only one; with it, that fails and says so.
        "PMI_PORT": "127.0.0.1:1",
        "PMI_ID": str(rank),
        "MPI_LOCALRANKID": str(local_rank),
        "MPI_LOCALNRANKS": local_size,
    }


_STYLES = {"torchrun": _torchrun, "mindspore": _mindspore, "mpi": _mpi}


def _runtime(place: NodePlace, facts: Facts) -> dict[str, str]:
    """Return settings that help any Python program on this node."""
    node = place.node
    threads = facts.cpus.get(node.name, 1) // max(1, len(place.devices))
    # With its fault handler Python writes the stacks of all threads when a rank crashes or, since it hangs, is aborted.
    env = {"PYTHONUNBUFFERED": "1", "PYTHONFAULTHANDLER": "1", "OMP_NUM_THREADS": str(max(1, threads))}
    if place.code:
        env["PYTHONPATH"] = place.code
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


def _devices(place: NodePlace, local_rank: int, job: Job, facts: Facts) -> dict[str, str]:
    """Return the variables for the devices that the rank sees, and for NPUs those of HCCL."""
    node = place.node
    files = NodeFiles(place.run_dir, facts.attempt)
    table = {contract.RANK_TABLE_FILE: files.rank_table} if facts.rank_table else {}
    visible = ",".join(map(str, place.devices))
    if node.kind == "cuda":
        # nvidia-smi and the inventory count by the bus; CUDA's default order is by speed.
        return {"CUDA_DEVICE_ORDER": "PCI_BUS_ID", contract.CUDA_VISIBLE: visible}
    if node.kind != "npu":
        return table
    device = str(_device_id(place, local_rank, job))
    env = {
        contract.RANK_ID: str(place.first_rank + local_rank),
        contract.RANK_SIZE: str(place.world_size),
        contract.DEVICE_ID: device,
        "ASCEND_DEVICE_ID": device,
        contract.PLOG_PATH: files.plogs,
        # Seconds. HCCL waits 120 for all ranks, and torch_npu asks for 300 or more.
        "HCCL_CONNECT_TIMEOUT": "1200",
        **table,
    }
    if job.device_ids == "visible":
        env[contract.ASCEND_VISIBLE] = visible
    # HCCL_IF_IP must be an IP address; without it, HCCL uses the interface.
    return env | ({contract.HCCL_IF_IP: node.address} if is_ip(node.address) else {})


def _device_id(place: NodePlace, local_rank: int, job: Job) -> int:
    return local_rank if job.device_ids == "visible" else place.devices[local_rank]
