"""Decide which files of a checkpoint are copied from which node to which, and copy them."""

from __future__ import annotations

import posixpath
import secrets
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass

from clusterctl.checkpoints.checkpoint import Checkpoint, CheckpointCopy
from clusterctl.checkpoints.holder import NodeHolder
from clusterctl.inventory.cluster import Node
from clusterctl.transfer.between import End, copy_between
from clusterctl.transport.fanout import Connections, Outcome, on_each
from clusterctl.wire.saved import MANIFEST, UNFINISHED


@dataclass(frozen=True)
class Move:
    """Files of a checkpoint that one node has and another lacks."""

    source: CheckpointCopy
    target: Node
    folder: str
    """The folder of checkpoints on the target."""
    names: tuple[str, ...]


def copies_wanted(checkpoint: Checkpoint, folders: Mapping[str, tuple[Node, str]], copies: int) -> list[Move]:
    """Return the moves after which each file is on `copies` nodes, if there are as many.

    A file goes to the nodes that follow its first holder, in the order of the run.
    """
    names = list(folders)
    wanted: dict[tuple[str, str], list[str]] = {}
    for file, count in checkpoint.copies_of.items():
        have = [
            holding.holder.name for holding in checkpoint.holders_of(file) if holding.holder.name in folders
        ]
        if not have:
            continue
        first = names.index(have[0])
        ring = [name for name in (*names[first + 1 :], *names[:first]) if name not in have]
        for target in ring[: max(0, min(copies, len(names)) - count)]:
            wanted.setdefault((have[0], target), []).append(file)
    by_name = {holding.holder.name: holding for holding in checkpoint.holdings}
    return [
        Move(by_name[source], *folders[target], tuple(sorted(files)))
        for (source, target), files in wanted.items()
    ]


def move_all(checkpoint: Checkpoint, moves: Sequence[Move], connections: Connections) -> list[Outcome[int]]:
    """Move files, all sources at the same time; return for each source the bytes that reached their targets.

    The checkpoint is protected from pruning meanwhile.
    """
    sources = {move.source.holder.name: move.source.holder.node for move in moves}

    def work(node: Node) -> int:
        own = [move for move in moves if move.source.holder.name == node.name]
        return sum(_move(checkpoint, move, connections) for move in own)

    return on_each(list(sources.values()), work)


def _move(checkpoint: Checkpoint, move: Move, connections: Connections) -> int:
    target = NodeHolder(move.target, connections.of(move.target))
    present = next((h for h in checkpoint.holdings if h.holder.name == move.target.name), None)
    name = checkpoint.name
    path = present.entry.path if present else f"{move.folder}/{name.partition('.')[0]}"
    aside = posixpath.join(
        move.folder, f"{UNFINISHED}copies", f"{name}-{move.source.holder.name}-{secrets.token_hex(4)}"
    )
    # A damaged manifest is replaced.
    sound = present is not None and present.entry.digest != ""
    names = move.names if sound else (MANIFEST, *move.names)
    with ExitStack() as held:
        held.enter_context(move.source.holder.held([move.source.entry.path]))
        if sound:
            held.enter_context(target.held([path]))
        result = copy_between(
            End(move.source.holder.node, connections.of(move.source.holder.node)),
            move.source.entry.path,
            names,
            End(move.target, target.connection),
            aside,
        )
        target.connection.call(
            "complete_checkpoint", {"source": aside, "path": path, "digest": checkpoint.digest}
        )
    return result.bytes_sent + result.bytes_relayed


def rank_of(file: str) -> int | None:
    """Return the rank that wrote a file such as part-00003.safetensors."""
    word = file.partition(".")[0].removeprefix("part-")
    return int(word) if file.startswith("part-") and word.isascii() and word.isdecimal() else None
