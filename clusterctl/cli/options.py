"""The options that many commands share, and what they are turned into."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from clusterctl.cli import screen, ssh_option
from clusterctl.errors import UsageError
from clusterctl.settings import Settings, duration, inherited, load_settings

if TYPE_CHECKING:
    from clusterctl.inventory.cluster import Cluster
    from clusterctl.jobs.run_folder import RunDir
    from clusterctl.transport.fanout import Connections, Transport

ClusterFile = Annotated[
    Path | None,
    typer.Option(
        "--cluster",
        "--hostfile",
        "-c",
        metavar="FILE",
        help="The inventory: a cluster.yaml, hostfile, Slurm node list or rank table; cluster.yaml by default, "
        "or $CLUSTERCTL_CLUSTER, or the Slurm allocation.",
    ),
]
Nodes = Annotated[
    str | None,
    typer.Option("--nodes", "-n", metavar="SET", help="Only these nodes: node[1-4], node1,node3, @group."),
]
Exclude = Annotated[str | None, typer.Option("--exclude", "-x", metavar="SET", help="Without these nodes.")]
Json = Annotated[bool, typer.Option("--json", help="One JSON document on stdout.")]
DryRun = Annotated[bool, typer.Option("--dry-run", help="Say exactly what would be done, and do none of it.")]
Yes = Annotated[bool, typer.Option("--yes", "-y", help="Answer yes to what would be asked.")]
RunName = Annotated[
    str, typer.Argument(metavar="RUN", help="A run's id, a unique beginning of it, or `last`.")
]
Force = Annotated[bool, typer.Option("--force", help="Overwrite what is there.")]
AcceptNew = Annotated[
    bool,
    typer.Option(
        "--accept-new-host-keys",
        help="Record the host key of a node never seen; a changed key is refused all the same.",
    ),
]
ConnectTimeout = Annotated[
    float | None,
    typer.Option(
        "--connect-timeout",
        min=0.01,
        metavar="SECONDS",
        help="Until a node counts as unreachable; 10 by default.",
    ),
]
Persist = Annotated[
    str | None,
    typer.Option(
        "--persist",
        metavar="TIME",
        help="Keep the connections in the background that long after their last use: 10m, 1h; `off` by default.",
    ),
]


def cluster_of(file: Path | None, nodes: str | None = None, exclude: str | None = None) -> Cluster:
    """The inventory that a command line means, narrowed to the nodes that it names."""
    from clusterctl.hostfile import detect
    from clusterctl.hostfile.cache import inventories
    from clusterctl.inventory.cluster import KINDS

    settings = load_settings()
    if settings.kind not in KINDS:
        raise UsageError(f"kind {settings.kind!r}: no such kind", "cpu, cuda (NVIDIA GPUs) or npu (Ascend)")
    default = Path(settings.cluster)
    allocation = _allocation() if file is None and not default.exists() else {}
    if allocation and settings.cluster == Settings.cluster:
        cluster = detect.from_slurm(allocation, settings.kind)
    else:
        cluster = inventories().load(file or default, settings.kind)
    return cluster.select(nodes, exclude) if nodes or exclude else cluster


def inventory_there() -> bool:
    """Whether there are nodes without naming a file: the settings' inventory, or a Slurm allocation."""
    return Path(load_settings().cluster).exists() or bool(_allocation())


def _allocation() -> dict[str, str]:
    """What Slurm says of the allocation that this process runs in; nothing outside of one."""
    from clusterctl.hostfile.slurm import NODES, VARIABLES

    said = inherited(VARIABLES)
    return said if any(said.get(name) for name in NODES) else {}


@contextmanager
def connected(
    cluster: Cluster,
    accept_new: bool = False,
    persist: str | None = None,
    connect_timeout: float | None = None,
    at_once: int | None = None,
) -> Iterator[Connections]:
    """Yield connections to a cluster's nodes, made as the settings say and closed at the end; or the keeper's.

    `at_once` is how many nodes are connected at the same time: all of them by default.
    """
    from clusterctl.ssh.choose import transport_to
    from clusterctl.transport import open_files
    from clusterctl.transport.fanout import Connections

    settings = load_settings()
    ways: dict[str, Any] = {
        "accept_new": accept_new or settings.accept_new_host_keys,
        "ssh": ssh_option.chosen(),
        "connect_timeout": connect_timeout or settings.connect_timeout,
    }
    ssh_option.tell_without_ssh(cluster)
    kept_for = duration(persist or settings.persist)
    if kept_for:
        from clusterctl.keeper.client import KeptTransport

        transport: Transport = KeptTransport(cluster, ways, kept_for, screen.ask_secret)
    else:
        most = len(cluster.nodes) if at_once is None else at_once
        open_files.require(cluster.nodes, most, children=ways["ssh"] == "openssh")
        transport = transport_to(cluster, ask=screen.ask_secret, **ways)
    with Connections(transport, settings.fanout, kept=bool(kept_for)) as connections:
        yield connections


def runs_folder() -> Path:
    """Where the runs of this project are kept."""
    return Path(load_settings().runs).expanduser().absolute()


def run_named(name: str) -> RunDir:
    """The run that a command line means."""
    from clusterctl.jobs.run_folder import find_run

    return find_run(runs_folder(), name)


@contextmanager
def connected_to(run: RunDir) -> Iterator[Connections]:
    """Connections to the nodes of a run, as they were when it started."""
    from clusterctl.jobs.record import cluster_of as nodes_of

    with connected(nodes_of(run)) as connections:
        yield connections
