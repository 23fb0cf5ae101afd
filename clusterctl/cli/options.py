"""Options that many commands share, and the values that they stand for."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, cast

import typer

from clusterctl.cli import kind_option, screen, ssh_option
from clusterctl.environment import environment
from clusterctl.errors import UsageError
from clusterctl.settings import SANDBOX, Settings, duration, load_settings

if TYPE_CHECKING:
    from clusterctl.backends.pods.detect import Place
    from clusterctl.client.node_choice import Choice
    from clusterctl.client.session import Reach
    from clusterctl.inventory.cluster import Cluster, Node
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
        help="The inventory: a cluster.yaml, hostfile, Slurm node list or rank table. Default: "
        "$CLUSTERCTL_CLUSTER, else ./cluster.yaml, else the allocation or the pods of this job.",
    ),
]


def option(text: str, *names: str, default: Any = None, **more: Any) -> Any:
    """Return a field of a group of options, with its help; `names` where they do not follow from the field's name."""
    return field(
        default=default, metadata={"option": lambda name: typer.Option(*names or [name], help=text, **more)}
    )


def argument(text: str, *, default: Any = None, **more: Any) -> Any:
    """Return a field for words without an option's name, which need not be given, with its help."""
    return field(default=default, metadata={"option": lambda name: typer.Argument(help=text, **more)})


def flag(text: str, *names: str, **more: Any) -> Any:
    """Return a field of a group of options that is True where the option is given."""
    return option(text, *names, default=False, **more)


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
        cluster = cluster_of(None)
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
        return cluster_of(self.cluster, self.nodes, self.exclude)

    def choose(self, asks: bool, accept_new: bool = False) -> Choice:
        """Return how the nodes of a job are chosen; with `asks`, nodes tell what the inventory does not name."""
        from clusterctl.client.node_choice import Choice

        completed = partial(with_devices, remote=asks, accept_new=accept_new)
        select = partial(cluster_of, self.cluster)
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
        return connected(cluster, self.accept_new, self.persist, self.connect_timeout, at_once)


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


def cluster_of(file: Path | None, nodes: str | None = None, exclude: str | None = None) -> Cluster:
    """Return the inventory of a command line, narrowed to the chosen nodes."""
    from clusterctl.hostfile import detect

    if file is not None:
        screen.hints_with(file)
    elif not has_inventory():
        raise _no_inventory()
    settings, kind = load_settings(), default_kind()
    default = Path(settings.cluster)
    allocated = allocated_nodes() if file is None and not default.exists() else None
    place = None if allocated or file is not None else place_here()
    if allocated and settings.cluster == Settings.cluster:
        cluster = described(allocated)
    elif place is not None:
        cluster = place.cluster()
    else:
        cluster = _with_kind(detect.load(file or default, kind), kind, settings.kind)
    if nodes is not None and not nodes.strip():
        # An empty value, such as an unset shell variable, must not select all nodes.
        raise UsageError("the node set is empty", "name nodes, as in node[1-4], or `all`")
    from clusterctl.cli import node_words

    cluster = node_words.select(cluster, nodes, exclude) if nodes or exclude else cluster
    return ssh_option.with_login(cluster)


def with_devices(cluster: Cluster, *, remote: bool = True, accept_new: bool = False) -> Cluster:
    """Return a cluster with the kinds and devices that its nodes report, where the inventory does not name them.

    Without `remote`, only a node that is this machine is asked.
    """
    unnamed = tuple(node for node in cluster.nodes if node.is_asked and (remote or node.host == "local"))
    if not unnamed:
        return cluster
    from clusterctl.checks import kinds

    with connected(replace(cluster, nodes=unnamed), accept_new) as connections:
        found = kinds.completed(replace(cluster, nodes=unnamed), connections)
    by_name = {node.name: node for node in found.nodes}
    return replace(cluster, nodes=tuple(by_name.get(node.name, node) for node in cluster.nodes))


def _no_inventory() -> UsageError:
    """Return the error for a command line without an inventory; a sandbox of this folder is offered."""

    default, sandbox = load_settings().cluster, SANDBOX / Settings.cluster
    if default != Settings.cluster:
        remedy = (
            "check $CLUSTERCTL_CLUSTER, and `cluster` in clusterctl.yaml and ~/.config/clusterctl/config.yaml"
        )
        return UsageError(f"{default}: no such file", remedy)
    remedy = "write one with `clusterctl init`, or name one by -c FILE"
    if sandbox.is_file():
        remedy = f"the sandbox of this folder is -c {sandbox}; `clusterctl init` writes a cluster.yaml"
    return UsageError(f"{default}: no such file", remedy)


def default_kind() -> str:
    """Return the kind of device that is assumed if neither option nor file names it."""
    kind = kind_option.chosen() or load_settings().kind
    with at_option("--kind" if kind_option.chosen() else "kind in the settings or $CLUSTERCTL_KIND"):
        require_kind(kind)
    return kind


def require_kind(kind: str) -> None:
    """Raise a UsageError if `kind` is no kind of device."""
    from clusterctl.inventory.cluster import KINDS

    if kind not in KINDS:
        raise UsageError(f"unknown kind {kind!r}", "use cpu, cuda (NVIDIA GPUs) or npu (Ascend)")


def allocated_nodes() -> Cluster | None:
    """Return the names of the nodes of the job around this process; None outside of every batch system."""
    from clusterctl.backends import backend as backends

    variables = environment()
    backend = backends.around(variables)
    return backend.allocated(variables, default_kind()) if backend else None


def described(cluster: Cluster) -> Cluster:
    """Return the nodes of an allocation with the addresses and devices that the batch system reports."""
    from clusterctl.backends import backend as backends

    found = backends.of_node(cluster.nodes[0]).described(cluster)
    return _with_kind(found, default_kind(), load_settings().kind)


def place_here() -> Place | None:
    """Return the place of this process if its platform is the default inventory: in a pod, without a cluster.yaml."""
    settings = load_settings()
    if settings.cluster != Settings.cluster or Path(settings.cluster).exists():
        return None
    from clusterctl.backends.pods.detect import detect, surroundings

    place = detect(surroundings())
    return place if place is not None and not place.platform.reaches_others else None


def _with_kind(cluster: Cluster, kind: str, of_settings: str) -> Cluster:
    """Record whether the kinds of a cluster are a guess; raise a UsageError if --kind contradicts its file."""
    from clusterctl.hostfile.detect import kind_of_file

    file = Path(cluster.source)
    tells = file.is_file() and kind_of_file(file) in ("cluster", "ranktable")
    if kind_option.chosen() and any("kind" in node.unnamed for node in cluster.nodes):
        cluster = replace(cluster, nodes=tuple(_of_kind(node, kind) for node in cluster.nodes))
    if kind_option.chosen() and tells and any(node.kind != kind for node in cluster.nodes):
        raise UsageError(f"--kind {kind}: {file} has the kind of its nodes", "edit the file, or leave it out")
    # A batch system reports the kind of the devices that it has allocated to a job.
    tells = tells or all(node.allocation and node.kind != Settings.kind for node in cluster.nodes)
    guessed = not tells and kind_option.chosen() is None and of_settings == Settings.kind
    return replace(cluster, assumed=True) if guessed else cluster


def _of_kind(node: Node, kind: str) -> Node:
    """Return a node with this kind, if the inventory names none; one CPU, or the devices that the node will report."""
    if "kind" not in node.unnamed:
        return node
    unnamed = () if kind == "cpu" else tuple(key for key in node.unnamed if key != "kind")
    return replace(node, kind=kind, unnamed=unnamed, devices=() if "devices" in unnamed else node.devices)


def has_inventory() -> bool:
    """Return whether there is a default inventory: the settings' file, an allocation, or a pod's platform."""
    from clusterctl.backends import backend as backends

    in_job = backends.around(environment()) is not None
    return Path(load_settings().cluster).exists() or in_job or place_here() is not None


def connected(
    cluster: Cluster,
    accept_new: bool = False,
    persist: str | None = None,
    connect_timeout: float | None = None,
    at_once: int | None = None,
    begin: bool = False,
) -> Connections:
    """Return connections to a cluster's nodes according to the settings, or those of the keeper; `with` closes them.

    `at_once` is how many nodes are connected at the same time: all of them by default. With `begin` the agents of an
    allocation start now, not at the first use of a connection.
    """
    return reach(accept_new, persist, connect_timeout, at_once, begin).connect(cluster)


def reach(
    accept_new: bool = False,
    persist: str | None = None,
    connect_timeout: float | None = None,
    at_once: int | None = None,
    begin: bool = False,
) -> Reach:
    """Return how this command line reaches nodes; the arguments are those of `connected`."""
    from clusterctl.client.session import Reach

    with at_option("--persist" if persist else "`persist` in the settings, or $CLUSTERCTL_PERSIST"):
        kept_for = duration(persist or load_settings().persist)
    return Reach(
        accept_new or None,
        ssh_option.chosen(),
        connect_timeout,
        at_once=at_once,
        kept_for=kept_for,
        ask=screen.ask_secret,
        notice=ssh_option.warn_without_ssh,
        begin=begin,
    )


@contextmanager
def at_option(option: str) -> Iterator[None]:
    """Name an option in the error of its value."""
    try:
        yield
    except UsageError as error:
        raise UsageError(f"{option}: {error.message}", error.hint) from None


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
    return connected(run.read_record().cluster)
