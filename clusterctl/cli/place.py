"""Where the checkpoint of `generate` and `serve` is: on this machine, or on a node."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from clusterctl.cli import options, screen
from clusterctl.errors import UsageError
from clusterctl.text import size

if TYPE_CHECKING:
    from clusterctl.checkpoints.find import Checkpoint, CheckpointList
    from clusterctl.inventory.cluster import Cluster
    from clusterctl.jobs.run_folder import RunDir


@dataclass(frozen=True)
class OnNode:
    """A node, and the checkpoint's folder there; `local`: a folder here that is pushed first."""

    cluster: Cluster
    folder: str = ""
    local: Path | None = None


def here(where: str) -> Path:
    """Return the folder of a checkpoint on this machine; the newest of a run is fetched if only its nodes have it."""
    from clusterctl.checkpoints import find

    if find.is_folder(where):
        return folder_of(where)
    run = options.run_named(where)
    local = newest(run.checkpoints)
    if local is not None:
        return local
    with options.connected_to(run) as connections:
        return _fetched(run, find.of_run(run, connections))


def newest(folder: Path) -> Path | None:
    """Return the newest checkpoint in a local folder."""
    found = [path for path in folder.glob("step-*") if (path / "manifest.json").is_file()]
    return max(found, key=lambda path: path.name, default=None)


def folder_of(where: str) -> Path:
    """Return a local checkpoint: the folder itself, or the newest in it."""
    path = Path(where)
    if (path / "manifest.json").is_file():
        return path
    found = newest(path)
    if found is None:
        raise UsageError(
            f"{where}: not a checkpoint: it has no manifest.json", "name a step-... folder, or a run"
        )
    return found


def _fetched(run: RunDir, found: CheckpointList) -> Path:
    from clusterctl.checkpoints.pull import plan_pull, pull
    from clusterctl.cli.checkpoint import manifest_of
    from clusterctl.cli.views.progress_bar import bar

    checkpoint = found.newest()
    target = (run.checkpoints / checkpoint.name).absolute()
    made = plan_pull(checkpoint, manifest_of(checkpoint), target)
    with bar("pull") as drawn:
        pull(made, drawn.of)
    names = ", ".join(part.holding.holder.name for part in made.fetches)
    screen.log(f"fetched {checkpoint.name} ({size(made.bytes)}) from {names} to {target}")
    return target


def on_node(where: str, on: str | None, inventory: Path | None) -> OnNode:
    """Return the node that serves a checkpoint: named, one that has it, or the first of the inventory."""
    from clusterctl.checkpoints import find

    if find.is_folder(where):
        cluster = _single(options.cluster_of(inventory, on), on)
        folder = folder_of(where)
        screen.log(f"{folder} is pushed to {cluster.nodes[0].name}")
        return OnNode(cluster, local=folder)
    run = options.run_named(where)
    with options.connected_to(run) as connections:
        found = find.of_run(run, connections)
        whole = _whole_on(found.newest())
        cluster = options.cluster_of(inventory, on) if on or inventory else run.read_record().cluster
        if not on:
            cluster = cluster.select(
                next((name for name in whole if name in cluster.names), cluster.names[0])
            )
        cluster = _single(cluster, on)
        name = cluster.nodes[0].name
        if name in whole:
            screen.log(f"using {whole[name]} on {name}")
            return OnNode(cluster, whole[name])
        local = _fetched(run, found)
    screen.log(f"{local} is pushed to {name}")
    return OnNode(cluster, local=local)


def _whole_on(checkpoint: Checkpoint) -> dict[str, str]:
    """Return the nodes that have every file of a checkpoint, with its folder on each."""
    from clusterctl.checkpoints.holder import HERE

    return {
        holding.holder.name: holding.entry.path
        for holding in checkpoint.holdings
        if holding.holder.name != HERE
        and holding.entry.digest
        and len(holding.entry.have) == holding.entry.count
    }


def _single(cluster: Cluster, on: str | None) -> Cluster:
    if len(cluster.nodes) > 1 and on:
        raise UsageError(f"--on {on}: {len(cluster.nodes)} nodes, and a server runs on one", "name one node")
    return cluster.select(cluster.names[0])
