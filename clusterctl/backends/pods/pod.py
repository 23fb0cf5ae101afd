"""Start this node's part of a job inside a pod or container: the platform has started the same command on each node.

Nodes need no SSH between them: every pod plans the same job for all nodes, from the variables of its platform, and
starts the ranks of its own node. The ranks connect at the address and port of node 0.
"""

from __future__ import annotations

import re
import socket
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from clusterctl.backends.backend import QUEUES
from clusterctl.backends.pods import rank_table
from clusterctl.backends.pods.detect import DEFAULT_PORT, Place, with_count
from clusterctl.checkpoints.pod_uploads import bring_from_store
from clusterctl.checkpoints.stored import access_of
from clusterctl.environment import environment
from clusterctl.errors import UsageError, WorkFailed
from clusterctl.inventory.cluster import Cluster, Node
from clusterctl.jobs import plan as plans
from clusterctl.jobs.facts import Facts
from clusterctl.jobs.job import Job, rank_table_wanted
from clusterctl.jobs.parts.own_table import file_of
from clusterctl.jobs.parts.saving import saving_of
from clusterctl.jobs.parts.table_problems import read_table
from clusterctl.jobs.run_folder import RunDir
from clusterctl.runs import start as runs
from clusterctl.runs.prepare.stage import Tell, push_code, push_data
from clusterctl.runs.prepare.work import WorkFolders
from clusterctl.storage.client import check_access
from clusterctl.transport.fanout import Connections
from clusterctl.wire import contract

# Seconds until the name of node 0 must resolve: the names of pods exist only after the pods do.
RESOLVE_PATIENCE = 300.0
RESOLVE_POLL = 2.0
SAVED_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}")
# Variables of the container that no rank gets: those of this shell, and options that torchrun reads from its
# environment, which describe the platform's own ranks.
NOT_PASSED = ("_", "PWD", "OLDPWD", "SHLVL", "RANK_TABLE_FILE", "TORCHELASTIC_RUN_ID")
NOT_PASSED_PREFIXES = (
    *("PET_", "CLUSTERCTL_", "OMPI_", "PMIX_", "PMI_", "PRTE_"),
    *(known.prefix for known in QUEUES.values() if known.prefix),
)


@dataclass(frozen=True)
class Part:
    """One node's part of a job, and the job's nodes as its platform names them."""

    place: Place
    whole: Cluster
    table: str = ""
    """The rank table of the platform, checked; "" if it has none."""

    @property
    def own(self) -> Node:
        return self.whole.nodes[self.place.index]

    @property
    def here(self) -> Cluster:
        """The inventory of this node alone: the only one that is reached from here."""
        return replace(self.whole, nodes=(self.own,))

    def start(self, job: Job, connections: Connections, folder: Path, tell: Tell, run: RunDir) -> RunDir:
        """Start the ranks of this node; the others start theirs."""
        hellos = runs.reach(self.here, connections, tell)
        hello = hellos[self.own.name]
        saved_as = saved_name(job, self.place.count)
        access = access_of(job, saved_as or run.run_id)
        if access:
            check_access(self.here.nodes, access, connections.of)
        code = push_code(self.here, job, connections, tell, folder)
        work = WorkFolders(
            self.here,
            job,
            connections,
            code,
            {self.own.name: plans.run_dir_in(hello.workdir, run.run_id, self.own)},
            lambda altered: push_code(altered, job, connections, tell, folder),
        )
        facts = Facts(
            run_id=run.run_id,
            saved_as=saved_as,
            parts=tuple(self.whole.names),
            master_port=job.master_port or self.place.port or DEFAULT_PORT,
            workdirs={self.own.name: hello.workdir},
            homes={self.own.name: hello.home},
            cpus={self.own.name: hello.cpus},
            code_paths=code,
            data_paths=push_data(self.here, job, connections, tell),
            forwarded=passed_on(environment()),
            rank_table=self.table if rank_table_wanted(job, self.whole) else "",
        )
        whole = plans.make_plan(self.whole, job, facts)
        made = self.of(whole)
        if access and (text := bring_from_store(access, whole, self.own, connections)):
            tell("checkpoint", text)
        wait_for_name(made.master_address, tell)
        work.ready()
        try:
            runs.start_all(run, made, connections, tell)
        except BaseException as problem:
            runs.write_unstarted(run, self.here, problem)
            raise
        return run

    def of(self, made: plans.Plan) -> plans.Plan:
        """Return the part of a plan for all nodes that belongs to this node."""
        own = tuple(part for part in made.nodes if part.node == self.own)
        return replace(made, cluster=self.here, nodes=own)


def part_of(place: Place, job: Job, tell: Tell, *, waits: bool = True) -> Part:
    """Return this node's part of a job; wait for the rank table if the platform makes one, unless `waits` is off."""
    refuse(place)
    path = rank_table.find(environment()) if place.kind == "npu" or not place.count else None
    own = file_of(job.rank_table)
    text = read_table(own) if own else ""
    path = None if own else path
    if path is None and (not place.count or job.rank_table == "always"):
        problem = f"{place.platform.title} has mounted no rank table"
        remedy = f"mount it at {rank_table.OPERATOR}, or set RANK_TABLE_FILE"
        raise UsageError(problem, remedy)
    if path is not None and job.rank_table != "never":
        table = rank_table.wait(path, tell, rank_table.PATIENCE if waits else 0.0)
        text = table.render()
        servers = [server.server_id for server in table.servers]
        place = place if place.count else with_count(place, servers)
        if table.ranks != place.count * place.devices and job.devices is None:
            problem = f"{path} has {table.ranks} ranks, and {place.count} nodes of {place.devices} devices"
            raise UsageError(f"{problem} have {place.count * place.devices}", "both must be of the same job")
    cluster = place.cluster()
    # A container's HOME counts, also for a user without an entry in /etc/passwd.
    workdir = str(Path.home() / ".clusterctl")
    nodes = tuple(replace(node, python=sys.executable, workdir=workdir) for node in cluster.nodes)
    return Part(place, replace(cluster, nodes=nodes), text)


def refuse(place: Place) -> None:
    """Raise a UsageError if the platform started more than one process on this node."""
    if place.platform.starts_ranks:
        problem = f"this process is {place.platform.title}, which has started the ranks already"
        raise UsageError(
            problem, "start the program itself here, or `clusterctl launch` in place of torchrun"
        )
    if place.processes > 1:
        problem = f"{place.platform.title} started {place.processes} processes on this node"
        raise UsageError(problem, "start one on each node (mpirun -N 1): clusterctl starts the ranks")


def saved_name(job: Job, nodes: int) -> str:
    """Return the name under which all pods of a job, and those that take their places, keep its checkpoints.

    Raise a UsageError if several pods would keep them under names of their own.
    """
    saving, name = saving_of(job.train), environment().get(contract.SAVED_AS, "")
    if name and not SAVED_NAME.fullmatch(name):
        remedy = "use letters, digits, '.', '_' and '-', at most 100"
        raise UsageError(f"{contract.SAVED_AS}: {name!r} cannot name a folder", remedy)
    if nodes > 1 and not name and (saving.to or saving.dir):
        key = "to" if saving.to else "dir"
        problem = f"train.save.{key}: the {nodes} nodes do not know under which name they save together"
        remedy = f"set {contract.SAVED_AS} to the same name on all nodes, such as {job.name}-1"
        raise UsageError(problem, f"{remedy}; `clusterctl submit` does so")
    return name


def adapted(job: Job, tell: Tell) -> Job:
    """Return a job without the parts that only the platform can do in a pod; report these parts."""
    if job.nodes:
        tell("note", f"`nodes: {job.nodes}` is left out: the platform has chosen the nodes")
    if job.restart is not None:
        tell("note", "`restart` is left out: the platform starts the pods again (backoffLimit, maxRestarts)")
    # The process is already in the container.
    return replace(job, nodes=None, restart=None, container=None)


def passed_on(variables: Mapping[str, str]) -> dict[str, str]:
    """Return the variables of the container that its ranks get too; records show their names only."""
    return {
        name: value
        for name, value in variables.items()
        if name not in NOT_PASSED and not name.startswith(NOT_PASSED_PREFIXES) and name.isidentifier()
    }


def wait_for_name(host: str, tell: Tell, patience: float = RESOLVE_PATIENCE) -> None:
    """Return once the name of node 0 resolves; raise an error if it does not in time."""
    deadline = time.monotonic() + patience
    waiting = False
    while True:
        try:
            socket.getaddrinfo(host, None)
            return
        except OSError as problem:
            if not waiting:
                tell("wait", f"the name of node 0, {host}, does not resolve yet")
                waiting = True
            if time.monotonic() > deadline:
                hint = (
                    "is its pod running, and does the headless service select it (publishNotReadyAddresses)?"
                )
                raise WorkFailed(
                    f"{host}, node 0, does not resolve after {patience:g} s: {problem}", hint
                ) from None
        time.sleep(RESOLVE_POLL)
