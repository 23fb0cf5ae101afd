"""Plan which processes start where (Cluster + Job -> Plan -> NodePlan -> ProcessSpec), without contacting a node."""

from __future__ import annotations

import posixpath
from dataclasses import asdict, dataclass, field, replace

from clusterctl.errors import UsageError
from clusterctl.hostfile import formats as hostfile
from clusterctl.inventory.cluster import Cluster, Node
from clusterctl.inventory.container import ContainerOptions
from clusterctl.inventory.setup import rank_python, request_for
from clusterctl.jobs.facts import Facts as Facts
from clusterctl.jobs.job import Job, devices_on
from clusterctl.jobs.job_check import launcher_shapes, train_part
from clusterctl.jobs.launchers.fill import completed, group_sizes, starts_mpi
from clusterctl.jobs.launchers.known import STARTERS
from clusterctl.jobs.launchers.options import Shape
from clusterctl.jobs.parts.container import RankContainer, container_name
from clusterctl.jobs.parts.saving import saving_of
from clusterctl.jobs.placeholders import fill, fill_all
from clusterctl.jobs.rank_env import NodePlace, rank_environment
from clusterctl.jobs.run_folder import NodeFiles


@dataclass(frozen=True)
class ProcessSpec:
    """The process of one rank: command and environment as data."""

    rank: int
    local_rank: int
    device: int
    argv: tuple[str, ...]
    env: dict[str, str] = field(hash=False)
    cwd: str
    programs: str = ""
    """The folder of the node's Python; programs such as torchrun and ninja are searched there first."""
    remove: tuple[str, ...] = ()
    """The command that removes the rank's container; empty if it has none."""


@dataclass(frozen=True)
class NodePlan:
    """The part of one node in a run."""

    node: Node
    run_dir: str
    processes: tuple[ProcessSpec, ...]
    train: dict[str, object] | None = field(default=None, hash=False)
    """The trainer's configuration with the paths on this node; None for a command."""
    setup: dict[str, object] | None = field(default=None, hash=False)
    """What the node's shell runs before the ranks start."""


@dataclass(frozen=True)
class Plan:
    """One attempt of a run on all nodes."""

    job: Job
    cluster: Cluster
    facts: Facts
    master_address: str
    hostfile: str
    nodes: tuple[NodePlan, ...]
    world: dict[str, object] | None = field(default=None, hash=False)
    """What the nodes compare launchers with that ranks start: sizes of groups, and names of launchers."""

    linked: bool = False
    """Whether the nodes are linked for mpirun."""

    @property
    def master(self) -> str:
        """The address and port of rank 0."""
        return f"{self.master_address}:{self.facts.master_port}"

    @property
    def world_size(self) -> int:
        return sum(len(node.processes) for node in self.nodes)

    def as_json(self) -> dict[str, object]:
        """Return the plan as `clusterctl plan --json` shows it and the run folder stores it."""
        return {
            "run": self.facts.run_id,
            "attempt": self.facts.attempt,
            "job": self.job.name,
            "world_size": self.world_size,
            "master": self.master,
            "hostfile": self.hostfile,
            "rank_table": bool(self.facts.rank_table),
            "forward": list(self.job.forward),
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
    """Return the plan of a job on these nodes: ranks in the order of the inventory, node by node, device by device."""
    facts = facts or Facts(forwarded={}, master_port=job.master_port or 29500)
    sizes = [1 if job.per_node else len(devices_on(job, node)) for node in cluster.nodes]
    master = cluster.nodes[0].address
    plans, first = [], 0
    # All ranks derive the same values from the configuration.
    same = replace(job, train=train_part(job, cluster))
    shapes = launcher_shapes(job, cluster, facts.master_port)
    mpi = len(cluster.nodes) > 1 and needs_links(job)
    for node, shape in zip(cluster.nodes, shapes, strict=True):
        number, run_dir = shape.node_rank, run_dir_on(node, facts)
        place = NodePlace(
            node=node,
            node_rank=number,
            nodes=len(cluster.nodes),
            world_size=sum(sizes),
            first_rank=first,
            devices=devices_on(job, node),
            shape=replace(shape, hostfile=NodeFiles(run_dir).hostfile),
            mpi=mpi,
            processes=sizes[number],
            master=master,
            master_port=facts.master_port,
            run_dir=run_dir,
            code=job.work_on(run_dir) or _code_on(node, job, facts),
            data=data_on(node, job, facts),
        )
        plans.append(_node_plan(place, same, facts))
        first += place.processes
    slots = {node.name: len(devices_on(job, node)) for node in cluster.nodes}
    return Plan(
        job,
        cluster,
        facts,
        master,
        hostfile.deepspeed(cluster, slots),
        tuple(plans),
        _world(job, shapes[0]),
        mpi,
    )


def _world(job: Job, shape: Shape) -> dict[str, object] | None:
    """Return the sizes that groups of ranks may have, and names of launchers; None if the user chose the processes."""
    if job.train is not None or job.processes in ("device", "node") or shape.world < 2:
        return None
    sizes = group_sizes(job.command, job.code, shape) if job.per_node else set()
    if sizes is None:
        return None
    alone = job.env_style == "mpi" and not job.per_node
    return {"sizes": sorted(sizes), "launchers": STARTERS, "alone": alone}


def needs_links(job: Job) -> bool:
    """Return whether the nodes of a run must be linked for mpirun."""
    if not job.per_node or job.train is not None or job.processes == "node":
        return False
    return job.env_style == "mpi" or starts_mpi(job.command, job.code)


def run_dir_on(node: Node, facts: Facts) -> str:
    """Return the folder of a run on a node; it contains the node's name, since homes may be one shared disk."""
    return run_dir_in(facts.workdirs.get(node.name, node.workdir), facts.run_id, node)


def run_dir_in(workdir: str, run_id: str, node: Node) -> str:
    """Return the folder of a run on a node whose own work folder is known."""
    return posixpath.join(workdir, "runs", run_id, node.name)


def data_on(node: Node, job: Job, facts: Facts) -> str:
    """Return the folder of the job's data on a node."""
    default = job.data_there or posixpath.join(node.workdir, "store/data/<hash>")
    return facts.data_paths.get(node.name, default)


def _code_on(node: Node, job: Job, facts: Facts) -> str:
    """Return the folder of the job's code on a node; "" if it has none."""
    has_code = job.code is not None or job.train is not None or job.trainer
    default = posixpath.join(node.workdir, "store/code/<hash>") if has_code else ""
    return facts.code_paths.get(node.name, default)


def _node_plan(place: NodePlace, job: Job, facts: Facts) -> NodePlan:
    node = place.node
    if facts.rank_table and ".json" in place.run_dir:
        problem = f"{node.name}: the run's folder {place.run_dir} contains '.json'"
        raise UsageError(problem, "HCCL then opens no rank table in it: rename the job or the work folder")
    python = rank_python(node.python, node.setup, job.setup)
    if python.startswith("~/"):
        python = python.replace("~", facts.homes.get(node.name, "~"), 1)
    contained = container_of(job, node)
    if contained:
        python = contained.python
    processes = []
    for local_rank, device in enumerate(place.devices[: place.processes]):
        env = rank_environment(place, local_rank, job, facts)
        argv = _argv(job, python, place, local_rank)
        rank = place.first_rank + local_rank
        cwd = place.code or place.run_dir
        process = ProcessSpec(rank, local_rank, device, argv, env, cwd, posixpath.dirname(python))
        processes.append(_in_container(process, place, job, facts) if contained else process)
    train = None if job.train is None else fill_all(job.train, place.placeholders(), f"{job.source}: train")
    code = place.code if job.prepares_work else _code_on(node, job, facts)
    setup = request_for(node.setup, job.setup, code)
    return NodePlan(node, place.run_dir, tuple(processes), train, setup)


def container_of(job: Job, node: Node) -> ContainerOptions | None:
    """Return the container of a node's ranks: the node's own, else the job's."""
    return node.container or job.container


def _in_container(process: ProcessSpec, place: NodePlace, job: Job, facts: Facts) -> ProcessSpec:
    """Return the process of a rank as the runtime of its node starts it."""
    options = container_of(job, place.node)
    assert options is not None
    saved = saving_of(job.train).dir
    workdir = facts.workdirs.get(place.node.name, place.node.workdir)
    own = RankContainer(
        options=options,
        node=place.node,
        name=container_name(facts.run_id, facts.attempt, place.node.name, process.rank),
        run_id=facts.run_id,
        folders=(workdir, *([saved] if saved else [])),
        read_only=(place.data,) if job.data_there else (),
        cwd=process.cwd,
        rdma=job.network.rdma == "on",
    )
    # The folder of the node's Python is not in the image.
    argv = own.command(process.argv, sorted(process.env))
    return replace(process, argv=argv, programs="", remove=own.removal())


def _argv(job: Job, python: str, place: NodePlace, local_rank: int) -> tuple[str, ...]:
    """Return the command of one rank; `python` as its first word is the Python of the node."""
    if job.train is not None:
        config = NodeFiles(place.run_dir).train_config
        return (python, "-u", "-m", "trainer", "train", config)
    command = list(job.command)
    if job.fills_launcher:
        command = completed(command, place.shape)
    first, *others = command
    argv = (python if first in ("python", "python3") else first, *others)
    if place.mpi:
        links = NodeFiles(place.run_dir).mpi_links
        argv = (python, links, "wait") if place.node_rank else (python, links, "first", *argv)
    values = place.placeholders_of(local_rank)
    strict = job.document is not None
    return tuple(fill(word, values, f"{job.source}: command", strict=strict) for word in argv)
