"""What starts the ranks of a run: this machine over SSH, or a program that manages the machines.

A backend of the second kind has a folder here, rows in the tables below, and its part of a job in `jobs/parts/`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from typing import TYPE_CHECKING, cast

if TYPE_CHECKING:
    from clusterctl.inventory.cluster import Cluster, Node
    from clusterctl.jobs.job import Job
    from clusterctl.jobs.run_folder import RunDir
    from clusterctl.transport.fanout import Transport


@dataclass(frozen=True)
class Ending:
    """How `stop` ends a run without asking its nodes."""

    would: str
    """What it does, after "would"."""
    end: Callable[[], tuple[str, list[str] | None]]
    """Do it; return what happened, and the names of deleted objects where there are such."""


@dataclass(frozen=True)
class Platform:
    """One row of the table: the variables of a platform. Of several names, the first that is set counts."""

    name: str
    title: str
    marks: tuple[str, ...]
    """This is the platform if all of them are set."""
    index: tuple[str, ...]
    """The index of this node."""
    count: tuple[str, ...] = ()
    """The number of nodes; without it, the number of peers."""
    peers: tuple[str, ...] = ()
    """The addresses of all nodes in order, separated by commas; `*` stands for any text in a name."""
    master: tuple[str, ...] = ()
    """The address of node 0; without it, the first peer."""
    port: tuple[str, ...] = ()
    devices: tuple[str, ...] = ()
    """The number of devices on each node."""
    local_size: str = ""
    """How many processes the platform started on this node: more than one are ranks already."""
    starts_ranks: bool = False
    """Whether each process of this platform is a rank already."""
    reaches_others: bool = False
    """Whether one process reaches the other nodes, so that it starts their ranks too."""
    folds: bool = False
    """Whether the peers are a node list with ranges."""


class Backend:
    """How the runs of one kind are followed and ended. This class itself: from this machine over SSH."""

    name = "ssh"
    way = "ssh"
    """The program that reaches the nodes of an allocation."""
    reaches_nodes = True
    """Whether this machine can connect to the nodes of a run."""
    records_all = False
    """Whether the folder of a run here has its state and logs at all times, so that nobody asks its nodes for them."""
    keeps_nodes = True
    """Whether the nodes of an ended run are still those of this user."""
    resubmits = False
    """Whether a run continues as a new job, whose nodes are chosen anew."""
    platform: Platform | None = None
    """The variables by which a process in a job knows its place, if all of them have each process's own."""

    @property
    def title(self) -> str:
        """Its name for people."""
        return KNOWN.get(self.name, OVER_SSH).title

    @property
    def record(self) -> str:
        """The file in the folder of each of its runs."""
        return KNOWN.get(self.name, OVER_SSH).record

    def refresh(self, runs: Sequence[RunDir]) -> None:
        """Update the recorded states of its runs; raise a ClusterctlError if it does not answer."""

    def ending(self, run: RunDir, grace: float | None) -> Ending | None:
        """Return how a run is ended within `grace` seconds; None: by stopping its processes on the nodes."""

    def fetch_logs(self, run: RunDir) -> None:
        """Copy the logs of a run whose nodes are not reached from here."""

    def submit_again(self, run: RunDir, job: Job) -> int:
        """Submit a run whose job has ended once more; return the number of the new job."""
        raise NotImplementedError

    def allocated(self, variables: Mapping[str, str], kind: str) -> Cluster:
        """Return the nodes of the job that these variables describe, without asking anyone."""
        raise NotImplementedError

    def described(self, cluster: Cluster) -> Cluster:
        """Return the nodes of an allocation with the addresses and devices that the backend reports."""
        return cluster

    def is_here(self, node: Node) -> bool:
        """Return whether a node of an allocation is this machine, as seen from inside its job."""
        return False

    def transport(self, nodes: Sequence[Node]) -> Transport | None:
        """Return how the nodes of an allocation are reached; None: over SSH."""

    def begin(self, transport: Transport) -> None:
        """Start the agents of its nodes now, so that they start before the first connection is requested."""

    def terminal(self, node: Node, command: str) -> list[str]:
        """Return the program that runs a command, or a shell, on a node of an allocation; empty: ssh."""
        return []

    def ask_for(self, kind: str) -> str:
        """Return the key of a job that asks for devices of this kind."""
        return ""


@dataclass(frozen=True)
class Known:
    """What is known of a backend before its folder is loaded, which takes longer."""

    title: str
    record: str
    """The file in the folder of each of its runs."""
    variables: tuple[str, ...] = ()
    """Of these, each of its jobs has one."""
    program: str = ""
    """The program that submits a batch file, where no other batch system has one of this name."""
    example: str = ""
    """For a batch system, keys of a job's part that show what can be asked for."""
    prefix: str = ""
    """What the variables of its tasks begin with, where a program in a pod would take itself for one of them."""


@dataclass(frozen=True)
class PlatformVerb:
    """A command that submits a job to a platform."""

    title: str
    part: str
    """The part of a job that says what to ask for."""
    help: str
    made_by: str
    """The function of the command line that makes the command."""
    examples: tuple[str, ...]
    """Its options after the name of the job file."""


# The backends by their folders, which are also the names of their parts of a job.
KNOWN = {
    "slurm": Known(
        "Slurm",
        "slurm.json",
        ("SLURM_JOB_NODELIST", "SLURM_NODELIST"),
        "sbatch",
        "slurm.nodes=4 slurm.time=60",
        "SLURM_",
    ),
    "sge": Known(
        "Grid Engine", "sge.json", ("PE_HOSTFILE", "SGE_JOB_SPOOL_DIR"), "", "sge.nodes=4 sge.pe=mpi"
    ),
    "pbs": Known("PBS", "pbs.json", ("PBS_NODEFILE",), "", "pbs.nodes=4 pbs.resources=ngpus=4"),
    "lsf": Known("LSF", "lsf.json", ("LSB_MCPU_HOSTS",), "bsub", "lsf.nodes=4 lsf.time=60"),
    "pods": Known("Kubernetes", "kubernetes.json"),
}
# The verbs that submit a job to a platform; a batch system has one of its own name.
PLATFORMS = {
    "k8s": PlatformVerb(
        *("Kubernetes", "kubernetes", "Submit a job to Kubernetes", "to_pods"),
        ("--kind jobset", "--kind acjob --print", "--kind jobset --delete"),
    ),
    "modelarts": PlatformVerb(
        *("ModelArts", "modelarts", "Print a job as a request of ModelArts", "to_service"),
        ("--print", "--print --image group/train:2"),
    ),
}
# The part of a job for pods.
PODS = PLATFORMS["k8s"].part
QUEUES = {name: known for name, known in KNOWN.items() if known.variables}
OVER_SSH = Known("SSH", "")
SSH = Backend()
# The batch system that a sandbox can start.
IN_SANDBOX = "slurm"


@cache
def named(name: str) -> Backend:
    """Return a backend by its name."""
    return cast(Backend, import_module(f"clusterctl.backends.{name}.backend").BACKEND)


def of_run(run: RunDir) -> Backend:
    """Return the backend that starts the ranks of a run."""
    return next((named(name) for name, known in KNOWN.items() if (run.root / known.record).exists()), SSH)


def of_node(node: Node) -> Backend:
    """Return the backend whose job holds a node; SSH if none does."""
    name, colon, _ = node.allocation.partition(":")
    # Older records have only the number of a job, of the first one.
    return named(name if colon else next(iter(QUEUES))) if node.allocation else SSH


def job_of(node: Node) -> str:
    """Return the number of the job that holds a node."""
    return node.allocation.rpartition(":")[2]


def by_backend(runs: Iterable[RunDir]) -> list[tuple[Backend, list[RunDir]]]:
    """Return the submitted runs of each backend."""
    found: dict[Backend, list[RunDir]] = {}
    for run in runs:
        found.setdefault(of_run(run), []).append(run)
    return [(backend, own) for backend, own in found.items() if backend is not SSH]


def around(variables: Mapping[str, str]) -> Backend | None:
    """Return the backend whose job this process is part of; None outside of a job."""
    found = [name for name, known in QUEUES.items() if any(map(variables.get, known.variables))]
    return named(found[0]) if found else None
