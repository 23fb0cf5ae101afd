"""Detect the platform that started this process: which node this is, which others there are, and their devices.

`PLATFORMS` is the one table of what each platform sets; a batch system has a row of its own. A pod or container then
starts only its own ranks: the platform has started one process on each node, and SSH is not needed.
"""

from __future__ import annotations

import os
import re
import socket
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase

from clusterctl.backends.backend import Platform, around
from clusterctl.environment import environment
from clusterctl.errors import Fault, InputFaults
from clusterctl.hostfile import node_lists
from clusterctl.inventory.cluster import HOST, KINDS, MAX_DEVICES, MAX_NODES, Cluster, Node
from clusterctl.wire import contract

# Used if a platform names no port: all pods must use the same port without communicating.
DEFAULT_PORT = 29500
# Patterns of the device files of each kind below /dev.
DEVICE_FILES = {"npu": re.compile(r"davinci[0-9]+\Z"), "cuda": re.compile(r"nvidia[0-9]+\Z")}


_OURS = contract.POD_PLATFORM
_COUNT, _DEVICES, _PEERS = (contract.POD_COUNT,), (contract.POD_DEVICES,), (contract.POD_PEERS,)
# Starters of processes, which a batch system or a platform may have started.
STARTERS = (
    Platform("torchrun", "a rank of torchrun", ("TORCHELASTIC_RUN_ID", "LOCAL_RANK"), ("GROUP_RANK",),
             count=("GROUP_WORLD_SIZE",), master=("MASTER_ADDR",), port=("MASTER_PORT",),
             devices=("LOCAL_WORLD_SIZE",), starts_ranks=True),
    Platform("openmpi", "Open MPI", ("OMPI_COMM_WORLD_SIZE",), ("OMPI_COMM_WORLD_RANK",),
             count=("OMPI_COMM_WORLD_SIZE",), master=("MASTER_ADDR",), port=("MASTER_PORT",),
             devices=_DEVICES, local_size="OMPI_COMM_WORLD_LOCAL_SIZE"),
)  # fmt: skip
# The first row whose marks are set is the platform. Variables of our own manifests come first in each row.
PLATFORMS = (
    Platform("modelarts", "ModelArts", ("MA_NUM_HOSTS",), ("VC_TASK_INDEX", "MA_TASK_INDEX"),
             count=("MA_NUM_HOSTS",), peers=("VC_WORKER_HOSTS",), devices=("MA_NUM_GPUS",)),
    Platform("volcengine", "volcengine", ("MLP_WORKER_NUM",), ("MLP_ROLE_INDEX",),
             count=("MLP_WORKER_NUM",), peers=("MLP_WORKER_ALL_HOSTS",), master=("MLP_WORKER_0_HOST",),
             port=("MLP_WORKER_0_PORT",), devices=("MLP_WORKER_GPU",)),
    Platform("trainjob", "Kubernetes TrainJob", ("PET_NNODES",), ("PET_NODE_RANK",), count=("PET_NNODES",),
             peers=_PEERS, master=("PET_MASTER_ADDR",), port=("PET_MASTER_PORT",),
             devices=(*_DEVICES, "PET_NPROC_PER_NODE")),
    Platform("vcjob", "Volcano job", ("VC_TASK_INDEX",), ("VC_TASK_INDEX",), count=_COUNT,
             peers=("VC_*_HOSTS",), devices=_DEVICES),
    Platform("vcjob", "Volcano job", ("VK_TASK_INDEX",), ("VK_TASK_INDEX",), count=_COUNT,
             peers=("VC_*_HOSTS",), devices=_DEVICES),
    Platform("acjob", "AscendJob of MindSpore", ("MS_SCHED_HOST", "MS_NODE_RANK"), ("MS_NODE_RANK",),
             count=_COUNT, peers=_PEERS, master=("MS_SCHED_HOST",), port=("MS_SCHED_PORT",), devices=_DEVICES),
    Platform("jobset", "Kubernetes JobSet", ("JOB_COMPLETION_INDEX", "JOBSET_NAME"),
             ("JOB_COMPLETION_INDEX",), count=_COUNT, peers=_PEERS, devices=_DEVICES),
    Platform("job", "Kubernetes Job", ("JOB_COMPLETION_INDEX",), ("JOB_COMPLETION_INDEX",),
             count=_COUNT, peers=_PEERS, master=("MASTER_ADDR",), port=("MASTER_PORT",), devices=_DEVICES),
    Platform("pai", "Alibaba PAI", ("NPROC_PER_NODE", "WORLD_SIZE", "RANK", "MASTER_ADDR"), ("RANK",),
             count=("WORLD_SIZE",), master=("MASTER_ADDR",), port=("MASTER_PORT",), devices=("NPROC_PER_NODE",)),
    Platform("acjob", "AscendJob", ("ASCEND_VISIBLE_DEVICES", "RANK", "MASTER_ADDR"), ("RANK",), count=_COUNT,
             peers=_PEERS, master=("MASTER_ADDR",), port=("MASTER_PORT",), devices=_DEVICES),
    Platform("pytorchjob", "Kubeflow PyTorchJob", ("KUBERNETES_SERVICE_HOST", "WORLD_SIZE", "RANK", "MASTER_ADDR"),
             ("RANK",), count=("WORLD_SIZE",), master=("MASTER_ADDR",), port=("MASTER_PORT",), devices=_DEVICES),
)  # fmt: skip


@dataclass(frozen=True)
class Surroundings:
    """The environment in which a process detects its platform; tests make their own."""

    variables: Mapping[str, str]
    hostname: str = ""
    device_files: tuple[str, ...] = ()
    """The names below /dev."""


@dataclass(frozen=True)
class Place:
    """The place of this process: its platform, the index of its node, the other nodes, and their devices."""

    platform: Platform
    index: int
    count: int
    """The number of nodes; 0 if only the rank table of the platform says it."""
    peers: tuple[str, ...] = ()
    """The addresses of the nodes in order; empty if the platform names the master only."""
    master: str = ""
    port: int = 0
    """0: the platform names none."""
    devices: int = 1
    kind: str = "cpu"
    processes: int = 1
    """How many processes the platform started on this node."""
    used: Mapping[str, str] = field(default_factory=dict)
    """The variables that were used, with their values."""

    @property
    def name(self) -> str:
        """The name of this node."""
        return self.names()[self.index]

    def describe(self) -> str:
        """Return the platform, this node and the variables that say so, for people."""
        number = f"node {self.index} of {self.count}" if self.count else f"node {self.index}"
        values = ", ".join(f"{name}={value[:60]}" for name, value in self.used.items())
        return f"{self.platform.title}; this is {number} ({values})"

    def as_json(self) -> dict[str, object]:
        """Return the place as `clusterctl nodes --json` shows it."""
        return {
            "name": self.platform.name,
            "node": self.index,
            "nodes": self.count,
            "master": self.master,
            "port": self.port or None,
            "kind": self.kind,
            "devices": self.devices,
            "variables": dict(self.used),
        }

    def names(self) -> list[str]:
        """Return the names of all nodes: the first labels of their addresses, or numbers if those are not unique."""
        labels = [peer.partition(".")[0] for peer in self.peers]
        plain = len(set(labels)) == len(labels) == self.count
        if plain and all(re.fullmatch(r"[A-Za-z][A-Za-z0-9-]*", label) for label in labels):
            return labels
        return [f"node{number}" for number in range(self.count)]

    def cluster(self) -> Cluster:
        """Return all nodes as an inventory; this one is reached without SSH."""
        names = self.names()
        peers = (self.master or names[0], *(self.peers or names)[1:])
        nodes = [
            Node(
                name=name,
                host="local" if number == self.index else peer,
                address=peer,
                kind=self.kind,
                devices=tuple(range(self.devices)),
                server_id=peer,
            )
            for number, (name, peer) in enumerate(zip(names, peers, strict=True))
        ]
        return Cluster(self.platform.name, tuple(nodes), source=f"the variables of {self.platform.title}")


def surroundings() -> Surroundings:
    """Return the surroundings of this process."""
    try:
        files = tuple(sorted(os.listdir("/dev")))
    except OSError:
        files = ()
    return Surroundings(environment(), socket.gethostname(), files)


def platform_of(variables: Mapping[str, str]) -> Platform | None:
    """Return the row of the table that fits these variables; None outside of every platform."""
    named = variables.get(_OURS)
    queue = around(variables)
    own = queue.platform if queue else None
    rows: list[Platform] = [*STARTERS, *([own] if own else []), *PLATFORMS]
    fitting = [row for row in rows if all(variables.get(name) for name in row.marks)]
    if named:
        of_name = [row for row in fitting if row.name == named]
        if of_name:
            return of_name[0]
        known = sorted({row.name for row in rows})
        problem = f"is {named!r}, and the variables of that platform are not set"
        raise InputFaults([Fault(f"${_OURS}", problem, f"leave it out, or one of {', '.join(known)}")])
    return fitting[0] if fitting else None


def detect(seen: Surroundings) -> Place | None:
    """Return the place of this process, or None outside of every platform; raise InputFaults with all faults."""
    platform = platform_of(seen.variables)
    return None if platform is None else _Reader(seen, platform).place()


class _Reader:
    """Reads the values of one platform, and collects their faults."""

    def __init__(self, seen: Surroundings, platform: Platform) -> None:
        self.seen = seen
        self.platform = platform
        self.used: dict[str, str] = {}
        self.faults: list[Fault] = []

    def place(self) -> Place:
        platform = self.platform
        peers, own = self._peers()
        count = self._number(platform.count, 1, MAX_NODES) or len(peers)
        index = own if own is not None else self._number(platform.index, 0, MAX_NODES)
        master = self._text(platform.master) or (peers[0] if peers else "")
        kind, found = self._devices()
        place = Place(
            platform=platform,
            index=index or 0,
            count=count,
            peers=peers,
            master=master,
            port=self._number(platform.port, 1, 65535) or 0,
            devices=found,
            kind=kind,
            processes=self._number((platform.local_size,), 1, 10_000) or 1,
            used=self.used,
        )
        self._check(place, index)
        if self.faults:
            raise InputFaults(self.faults)
        return place

    def _check(self, place: Place, index: int | None) -> None:
        """Record missing values, and values that contradict each other."""
        platform, names = place.platform, place.platform.index
        if index is None and not platform.reaches_others and not self.faults:
            self._fault(names[0], f"is not set, and {platform.title} says by it which node this is")
        if place.peers and len(place.peers) != place.count:
            problem = (
                f"there are {place.count} nodes, and {len(place.peers)} addresses: {','.join(place.peers)}"
            )
            self._fault((*platform.count, *platform.peers)[0], problem, "both come from the same job")
        elif place.count and place.index >= place.count:
            self._fault(names[0], f"is {place.index}, and the {place.count} nodes count from 0")
        for address in (*place.peers, place.master):
            if address and not HOST.match(address):
                self._fault("peers", f"{address!r} is not an address", "a name or an IP address")
        if not place.count and platform.name != "acjob":
            remedy = f"set {contract.POD_COUNT} and {contract.POD_PEERS}, as `clusterctl submit k8s` does"
            self._fault(names[0], f"{platform.title} does not say how many nodes there are", remedy)
        elif place.count > 1 and not place.master:
            remedy = f"set MASTER_ADDR, or {contract.POD_PEERS} with the addresses of all nodes"
            self._fault("master", f"{platform.title} does not say where node 0 is", remedy)

    def _fault(self, name: str, problem: str, remedy: str = "") -> None:
        where = f"${name}" if name.isupper() or "_" in name else f"the variables of {self.platform.title}"
        self.faults.append(Fault(where, problem, remedy))

    def _text(self, names: Sequence[str]) -> str:
        """Return the first of these variables that is set."""
        for name in names:
            value = self.seen.variables.get(name, "")
            if value:
                self.used[name] = value
                return value
        return ""

    def _number(self, names: Sequence[str], least: int, most: int) -> int | None:
        name = next((name for name in names if self.seen.variables.get(name)), "")
        text = self._text([name])
        if not text:
            return None
        if not re.fullmatch(r"[0-9]{1,9}", text) or not least <= int(text) <= most:
            self._fault(name, f"is {text[:40]!r}, not a number from {least} to {most}")
            return None
        return int(text)

    def _peers(self) -> tuple[tuple[str, ...], int | None]:
        """Return the addresses of all nodes, and the index of this one if only its name says it."""
        patterns = self.platform.peers
        names = [name for name in self.seen.variables for each in patterns if fnmatchcase(name, each)]
        names = names if any("*" in each for each in patterns) else names[:1]
        if self.platform.folds:
            return self._folded_nodes(), None
        # Volcano sorts tasks of several kinds so: the master first, then the workers.
        names.sort(key=lambda name: ("MASTER" not in name, name))
        lists = {name: self._text([name]).replace(";", ",") for name in names}
        peers = tuple(
            address.strip().rpartition("@")[2]
            for text in lists.values()
            for address in text.split(",")
            if address.strip()
        )
        if len(names) < 2:
            return self._without_ports(peers), None
        # The index counts within one kind of task.
        host = self.seen.hostname.partition(".")[0]
        own = [number for number, peer in enumerate(peers) if peer.partition(".")[0] == host]
        if len(own) != 1:
            self._fault(names[0], f"this pod is called {host!r}, which is not one of {','.join(peers)}")
        return peers, own[0] if own else 0

    def _without_ports(self, peers: tuple[str, ...]) -> tuple[str, ...]:
        """Return addresses without the ports that some platforms add, as in `10.0.0.1:2222`."""
        return tuple(re.sub(r"\A([^:]+):[0-9]+\Z", r"\1", peer) for peer in peers)

    def _folded_nodes(self) -> tuple[str, ...]:
        entries, faults = node_lists.from_variables(dict(self.seen.variables))
        self._text(self.platform.peers)
        if faults:
            raise InputFaults(faults)
        return tuple(entry.address for entry in entries)

    def _devices(self) -> tuple[str, int]:
        """Return the kind and number of this node's devices: as the platform says, else as /dev shows them."""
        given = self._number(self.platform.devices, 0, MAX_DEVICES)
        kind = self._text([contract.DEVICE_KIND])
        if kind and kind not in KINDS:
            self._fault(contract.DEVICE_KIND, f"is {kind!r}", f"one of {', '.join(KINDS)}")
        seen = {
            name: sum(bool(form.match(file)) for file in self.seen.device_files)
            for name, form in DEVICE_FILES.items()
        }
        kind = kind or next((name for name, number in seen.items() if number), "cpu")
        visible = self.seen.variables.get("ASCEND_VISIBLE_DEVICES", "") if kind == "npu" else ""
        listed = len(visible.split(",")) if re.fullmatch(r"[0-9]+(,[0-9]+)*", visible) else 0
        return kind, given or listed or seen.get(kind, 0) or 1


def with_count(place: Place, servers: Sequence[str]) -> Place:
    """Return a place whose platform leaves the number of nodes to the rank table, with the servers of that table."""
    peers = place.peers or (tuple(servers) if all(HOST.match(server) for server in servers) else ())
    return replace(place, count=len(servers), peers=peers)
