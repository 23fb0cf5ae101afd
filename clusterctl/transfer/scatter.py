"""Push the shards of a corpus to different nodes: shard i goes to node i, modulo the number of nodes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from clusterctl.errors import Fault, InputFaults
from clusterctl.inventory.cluster import Cluster, Node
from clusterctl.transfer import push
from clusterctl.transfer.push import Progress, PushResult
from clusterctl.transport.connection import Connection
from clusterctl.transport.fanout import Connections, Outcome

ENDINGS = ("bin", "idx")
MORE = ("manifest.json",)


@dataclass(frozen=True)
class Portion:
    """The files of one folder that one node gets."""

    node: Node
    shards: tuple[str, ...]
    files: tuple[str, ...]


def portions(cluster: Cluster, prefixes: Sequence[str]) -> tuple[Path, list[Portion]]:
    """Return which shards go to which node; raise all faults together."""
    found = sorted({_prefix(prefix) for prefix in prefixes}, key=str)
    folder = found[0].parent
    faults = [
        Fault(
            f"{shard}.{ending}",
            "no such file",
            "a shard is a .bin and an .idx, as `clusterctl data split` writes",
        )
        for shard in found
        for ending in ENDINGS
        if not Path(f"{shard}.{ending}").is_file()
    ]
    faults += [
        Fault(str(shard), f"is not in {folder} as {found[0].name} is", "put the shards into one folder")
        for shard in found
        if shard.parent != folder
    ]
    if faults:
        raise InputFaults(faults)
    given: dict[str, list[Path]] = {node.name: [] for node in cluster.nodes}
    for number, shard in enumerate(found):
        given[cluster.nodes[number % len(cluster.nodes)].name].append(shard)
    return folder, [
        Portion(node, tuple(shard.name for shard in given[node.name]), _files(given[node.name]))
        for node in cluster.nodes
        if given[node.name]
    ]


def _prefix(name: str) -> Path:
    """Return a shard's prefix, given the prefix or any file of the shard, so that `shards/*` works."""
    for ending in (*ENDINGS, *MORE):
        if name.endswith(f".{ending}"):
            return Path(name[: -len(ending) - 1])
    return Path(name)


def _files(shards: Sequence[Path]) -> tuple[str, ...]:
    names = [f"{shard.name}.{ending}" for shard in shards for ending in (*ENDINGS, *MORE)]
    return tuple(name for name in names if (shards[0].parent / name).is_file())


def scatter(
    folder: Path,
    given: Sequence[Portion],
    dest: str,
    connections: Connections,
    progress: Callable[[str], Progress],
    replace: bool = False,
) -> list[Outcome[PushResult]]:
    """Push each node its shards; data that the node already has is not sent."""
    by_node = {portion.node.name: portion for portion in given}

    def send(node: Node, link: Connection) -> PushResult:
        only = by_node[node.name].files
        manifest = push.make_manifest(folder, only=only, everything=True)
        source = push.Source(folder, manifest)
        return push.push_tree(link, source, dest, replace=replace, progress=progress(node.name))

    return connections.on_each([portion.node for portion in given], send)
