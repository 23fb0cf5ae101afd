"""Options that many commands share, and the values that they stand for."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, cast

import typer

from clusterctl.cli import choices
from clusterctl.cli.declared import option
from clusterctl.errors import UsageError
from clusterctl.settings import load_settings

if TYPE_CHECKING:
    from clusterctl.client.node_choice import Choice
    from clusterctl.inventory.cluster import Cluster
    from clusterctl.jobs.run_folder import RunDir
    from clusterctl.transport.fanout import Connections

# Endings of job files; other words begin a command.
JOB_FILES = (".yaml", ".yml", ".json")
# Click's UsageError: typer has a copy of click of its own.
WRONG_WORDS = cast(type[Exception], typer.BadParameter.__mro__[1])
ClusterFile = Annotated[
    Path | None,
    typer.Option(
        "--cluster",
        "--hostfile",
        "-c",
        metavar="FILE",
        help="The inventory: a cluster.yaml, hostfile, node list or rank table. Default: "
        "$CLUSTERCTL_CLUSTER, else ./cluster.yaml, else the allocation or the pods of this job.",
    ),
]


def complete_runs(incomplete: str) -> list[str]:
    """Return the runs whose id begins with `incomplete`, for the completion of a shell."""
    from clusterctl.jobs.run_folder import all_runs

    try:
        names = ["last", *(run.run_id for run in all_runs(runs_folder()))]
    except (UsageError, OSError):
        return []
    return [name for name in names if name.startswith(incomplete)]


def complete_nodes(incomplete: str) -> list[str]:
    """Return the nodes and groups of the default inventory that continue a node set."""
    before, comma, last = incomplete.rpartition(",")
    try:
        cluster = choices.cluster_of(None)
    except (UsageError, OSError):
        return []
    names = [*cluster.names, *(f"@{group}" for group in cluster.groups), "all"]
    return [f"{before}{comma}{name}" for name in names if name.startswith(last)]


def complete_jobs(incomplete: str) -> list[str]:
    """Return the folders and the YAML files that continue a path, for the completion of a shell."""
    before, slash, last = incomplete.rpartition("/")
    folder = Path(before + slash or ".")
    try:
        entries = sorted(folder.iterdir())
    except OSError:
        return []
    jobs = [entry.name for entry in entries if entry.suffix in (".yaml", ".yml") or entry.is_dir()]
    return [f"{before}{slash}{name}" for name in jobs if name.startswith(last)]


Nodes = Annotated[
    str | None,
    typer.Option(
        "--nodes",
        "-n",
        metavar="SET",
        help="Use only these nodes: node[1-4], node1,node3, @group.",
        autocompletion=complete_nodes,
    ),
]
Exclude = Annotated[str | None, typer.Option("--exclude", "-x", metavar="SET", help="Leave out these nodes.")]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON document.")]
DryRun = Annotated[bool, typer.Option("--dry-run", help="Show what would happen; change nothing.")]
Yes = Annotated[bool, typer.Option("--yes", "-y", help="Answer yes to every question.")]
RunName = Annotated[
    str,
    typer.Argument(
        metavar="RUN", help="A run id, a unique prefix of one, or `last`.", autocompletion=complete_runs
    ),
]
Force = Annotated[bool, typer.Option("--force", help="Overwrite an existing file.")]
Fanout = Annotated[
    int | None,
    typer.Option("--fanout", "-f", min=1, metavar="N", help="Use at most N nodes at the same time."),
]
# Help of `--replace`, shared by `push` and `data scatter`.
REPLACE = "Overwrite a folder even if clusterctl did not create it (its contents are lost)."
AcceptNew = Annotated[
    bool,
    typer.Option(
        "--accept-new-host-keys",
        help="Trust nodes seen for the first time; a changed key is still refused.",
    ),
]
ConnectTimeout = Annotated[
    float | None,
    typer.Option(
        "--connect-timeout",
        "-t",
        min=0.01,
        metavar="SECONDS",
        help="Give up on a node that does not answer after this long. Default: 10.",
    ),
]


@dataclass(frozen=True)
class NodeOptions:
    """The options that choose nodes."""

    cluster: ClusterFile = None
    nodes: Nodes = None
    exclude: Exclude = None

    @property
    def narrows(self) -> bool:
        """True if the options choose a part of the inventory."""
        return bool(self.nodes or self.exclude)

    def chosen(self) -> Cluster:
        """Return the chosen nodes of the inventory."""
        return choices.cluster_of(self.cluster, self.nodes, self.exclude)

    def choose(self, asks: bool, accept_new: bool = False) -> Choice:
        """Return how the nodes of a job are chosen; with `asks`, nodes tell what the inventory does not name."""
        from clusterctl.client.node_choice import Choice

        completed = partial(with_devices, remote=asks, accept_new=accept_new)
        select = partial(choices.cluster_of, self.cluster)
        return Choice(select, self.nodes, self.exclude, completed=completed)


@dataclass(frozen=True)
class ConnectionOptions:
    """The options for connections to nodes."""

    connect_timeout: ConnectTimeout = None
    accept_new: AcceptNew = False
    persist: str | None = option(
        "Keep connections open in the background for this long after their last use: 10m, 1h. Default: off.",
        metavar="TIME",
    )

    def open(self, cluster: Cluster, at_once: int | None = None) -> AbstractContextManager[Connections]:
        """Return connections to a cluster's nodes; at most `at_once` connect at the same time."""
        return choices.connected(cluster, self.accept_new, self.persist, self.connect_timeout, at_once)


class WrongValue(typer.BadParameter):
    """A wrong value of an option, with a remedy; all of a command line are reported together."""

    def __init__(self, error: UsageError) -> None:
        super().__init__(error.message)
        self.remedy = error.hint


def checked_by(check: Callable[[str], object]) -> Callable[[str | None], str | None]:
    """Return a callback for an option whose value `check` refuses with a UsageError."""

    def callback(value: str | None) -> str | None:
        try:
            if value is not None:
                check(value)
        except UsageError as error:
            raise WrongValue(error) from None
        return value

    return callback


def one_of(values: Sequence[str]) -> Callable[[str | None], str | None]:
    """Return a callback for an option with few values."""

    def check(value: str) -> None:
        if value not in values:
            raise UsageError(f"unknown value {value!r}", f"use one of {', '.join(values)}")

    return checked_by(check)


def require_node_path(path: str) -> None:
    """Raise a UsageError if the path of a file or folder on the nodes is empty."""
    if not path.strip():
        raise UsageError("the path on the nodes is empty", "name a path; is a variable of the shell unset?")


OfNodePath = checked_by(require_node_path)


def with_devices(cluster: Cluster, *, remote: bool = True, accept_new: bool = False) -> Cluster:
    """Return a cluster with the kinds and devices that its nodes report, where the inventory does not name them.

    Without `remote`, only a node that is this machine is asked.
    """
    unnamed = tuple(node for node in cluster.nodes if node.is_asked and (remote or node.host == "local"))
    if not unnamed:
        return cluster
    from clusterctl.checks import kinds

    with choices.connected(replace(cluster, nodes=unnamed), accept_new) as connections:
        found = kinds.completed(replace(cluster, nodes=unnamed), connections)
    by_name = {node.name: node for node in found.nodes}
    return replace(cluster, nodes=tuple(by_name.get(node.name, node) for node in cluster.nodes))


def runs_folder() -> Path:
    """Return the folder of this project's runs."""
    return Path(load_settings().runs).expanduser().absolute()


def run_named(name: str) -> RunDir:
    """Return the run that a command line names."""
    from clusterctl.client.submitted import refresh
    from clusterctl.jobs.run_folder import find_run

    run = find_run(runs_folder(), name)
    refresh(run)
    return run


def run_with_results(name: str, *, trains: bool = False) -> RunDir:
    """Return the run that a command line names for its results; `last` is never a run of generate, serve or eval.

    With `trains`, `last` is the newest training, or run of another program with a checkpoint here, if there is one.
    """
    from clusterctl.jobs.run_folder import all_runs

    if name == "last":
        candidates = []
        for run in all_runs(runs_folder()):
            job = run.read_record().job
            if job.only_reads_model:
                continue
            candidates.append(run.run_id)
            if not trains or job.train is not None or run.checkpoints.is_dir():
                return run_named(run.run_id)
        name = candidates[0] if candidates else name
    return run_named(name)


def connected_to(run: RunDir) -> Connections:
    """Return connections to the nodes of a run, as recorded when it started."""
    from clusterctl.client.submitted import require_nodes

    require_nodes(run)
    return choices.connected(run.read_record().cluster)
