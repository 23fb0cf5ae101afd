"""What a command line and the settings choose: the inventory, its nodes, and how they are reached."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from clusterctl.cli import screen
from clusterctl.environment import environment
from clusterctl.errors import UsageError
from clusterctl.settings import SANDBOX, Settings, duration, load_settings

if TYPE_CHECKING:
    from clusterctl.backends.pods.detect import Place
    from clusterctl.client.session import Reach
    from clusterctl.inventory.cluster import Cluster, Node
    from clusterctl.transport.fanout import Connections

# The values of options that many commands have; None where an option is not given.
KIND: ContextVar[str | None] = ContextVar("kind", default=None)
SSH: ContextVar[str | None] = ContextVar("ssh", default=None)
USER: ContextVar[str | None] = ContextVar("user", default=None)
PORT: ContextVar[int | None] = ContextVar("port", default=None)


def cluster_of(file: Path | None, nodes: str | None = None, exclude: str | None = None) -> Cluster:
    """Return the inventory of a command line, narrowed to the chosen nodes."""
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
        cluster = _with_kind(_loaded(file or default, kind), kind, settings.kind)
    if nodes is not None and not nodes.strip():
        # An empty value, such as an unset shell variable, must not select all nodes.
        raise UsageError("the node set is empty", "name nodes, as in node[1-4], or `all`")
    from clusterctl.cli import node_words

    cluster = node_words.select(cluster, nodes, exclude) if nodes or exclude else cluster
    return with_login(cluster)


def _loaded(file: Path, kind: str) -> Cluster:
    """Return the cluster in any file that lists nodes; the readers of other files than cluster.yaml load slowly."""
    from clusterctl.hostfile.kinds import kind_of_file

    if kind_of_file(file) == "cluster":
        from clusterctl.inventory import cluster

        return cluster.load(file)
    from clusterctl.hostfile import detect

    return detect.load(file, kind)


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
    kind = KIND.get() or load_settings().kind
    with at_option("--kind" if KIND.get() else "kind in the settings or $CLUSTERCTL_KIND"):
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
    from clusterctl.hostfile.kinds import kind_of_file

    file = Path(cluster.source)
    tells = file.is_file() and kind_of_file(file) in ("cluster", "ranktable")
    if KIND.get() and any("kind" in node.unnamed for node in cluster.nodes):
        cluster = replace(cluster, nodes=tuple(_of_kind(node, kind) for node in cluster.nodes))
    if KIND.get() and tells and any(node.kind != kind for node in cluster.nodes):
        raise UsageError(f"--kind {kind}: {file} has the kind of its nodes", "edit the file, or leave it out")
    # A batch system reports the kind of the devices that it has allocated to a job.
    tells = tells or all(node.allocation and node.kind != Settings.kind for node in cluster.nodes)
    guessed = not tells and KIND.get() is None and of_settings == Settings.kind
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
        ssh(),
        connect_timeout,
        at_once=at_once,
        kept_for=kept_for,
        ask=screen.ask_secret,
        notice=warn_without_ssh,
        begin=begin,
    )


@contextmanager
def at_option(option: str) -> Iterator[None]:
    """Name an option in the error of its value."""
    try:
        yield
    except UsageError as error:
        raise UsageError(f"{option}: {error.message}", error.hint) from None


def with_login(cluster: Cluster) -> Cluster:
    """Return the cluster with the user and port of the command line."""
    user, port = USER.get(), PORT.get()
    if user is None and port is None:
        return cluster
    from clusterctl.inventory.cluster import USER as LEGAL

    if user is not None and not LEGAL.match(user):
        raise UsageError(f"--user {user!r} can't be a login name", "as in --user alice")
    nodes = (replace(node, user=user or node.user, port=port or node.port) for node in cluster.nodes)
    return replace(cluster, nodes=tuple(nodes))


def ssh() -> str:
    """Return the SSH client of the command line, else of the settings."""
    from clusterctl.ssh.choose import checked

    return checked(SSH.get() or load_settings().ssh)


def warn_without_ssh(cluster: Cluster) -> None:
    """Warn that ~/.ssh/config is ignored because the `ssh` program is missing."""
    config = Path("~/.ssh/config").expanduser()
    by_ssh = any(node.host != "local" and not node.allocation for node in cluster.nodes)
    if by_ssh and shutil.which("ssh") is None and config.is_file():
        screen.log(f"`ssh` is not installed, so {config} is ignored; only the inventory is used")
