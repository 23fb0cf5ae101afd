"""Find the checkpoints of a run or a folder: for each, the machines that have its files."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path

from clusterctl.checkpoints.checkpoint import (
    Checkpoint,
    CheckpointCopy,
    CheckpointList,
    combine,
    latest_of,
    merge,
)
from clusterctl.checkpoints.holder import Holder, Listing, NodeHolder, ThisMachine
from clusterctl.errors import UsageError
from clusterctl.inventory import nodeset
from clusterctl.inventory.cluster import Node
from clusterctl.jobs.parts.saving import saving_of
from clusterctl.jobs.record import RunRecord
from clusterctl.jobs.run_folder import NodeFiles, RunDir
from clusterctl.transport.connection import Connection
from clusterctl.transport.fanout import Connections, within
from clusterctl.wire.saved import LATEST, MANIFEST


def of_folder(path: Path) -> CheckpointList:
    """Return the checkpoints in a local folder, or the single one that it is."""
    here = ThisMachine()
    if (path / MANIFEST).exists():
        entry = here.entry(str(path.absolute()))
        return CheckpointList(
            str(path), (Checkpoint(entry.step, entry.digest, (CheckpointCopy(here, entry),)),)
        )
    listing = here.listing(str(path.absolute()))
    if not listing.checkpoints:
        raise UsageError(f"{path}: no checkpoint in it", "name a run, or a folder with step-... folders")
    return CheckpointList(str(path), combine([(here, listing)]), listing.latest)


def is_folder(where: str) -> bool:
    """Return whether a command line names a folder of checkpoints, not a run."""
    path = Path(where)
    return path.is_dir() and not (path / "run.json").is_file() and ("/" in where or _has_checkpoints(path))


def _has_checkpoints(path: Path) -> bool:
    return (path / MANIFEST).exists() or (path / LATEST).exists() or any(path.glob("step-*"))


def shared_folder(record: RunRecord) -> str:
    """Return the folder of the run's checkpoints on a shared disk; "" if each node has its own."""
    folder = saving_of(record.job.train).dir
    return f"{folder}/{record.folder_name}" if folder else ""


def folder_on(record: RunRecord, run_dir: str) -> str:
    """Return the folder of checkpoints on a node with this run folder."""
    return shared_folder(record) or NodeFiles(run_dir).checkpoints


def folders_of(record: RunRecord) -> list[tuple[Node, str]]:
    """Return the nodes that may have checkpoints of a run, also spares and those that left it, with each folder."""
    folders = {node.name: (node, record.run_dirs[node.name]) for node in record.cluster.nodes}
    for left in record.abandoned:
        folders.setdefault(left.node.name, (left.node, left.run_dir))
    for node in record.spares:
        folders.setdefault(node.name, (node, f"{node.workdir}/runs/{record.run}/{node.name}"))
    return [(node, folder_on(record, run_dir)) for node, run_dir in folders.values()]


def of_nodes(
    folders: Sequence[tuple[Node, str]], connections: Connections, patience: float | None = None
) -> CheckpointList:
    """Return the checkpoints on some nodes, each with its folder, as far as they answer within `patience` seconds."""
    folder_of = {node.name: folder for node, folder in folders}

    def ask(node: Node, link: Connection) -> tuple[Holder, Listing]:
        holder = NodeHolder(node, link)
        return holder, holder.listing(folder_of[node.name])

    outcomes = within(connections, [node for node, _ in folders], ask, patience)
    listings = [outcome.get() for outcome in outcomes if outcome.ok]
    unreachable = {
        outcome.node.name: getattr(outcome.error, "reason", str(outcome.error))
        for outcome in outcomes
        if not outcome.ok
    }
    return CheckpointList(fold_or_empty(folder_of), combine(listings), latest_of(listings), unreachable)


def fold_or_empty(names: Iterable[str]) -> str:
    """Return node names as a node set, "" without any."""
    found = list(names)
    return nodeset.fold(found) if found else ""


def of_run(run: RunDir, connections: Connections) -> CheckpointList:
    """Return the checkpoints of a run on its nodes and on this machine."""
    record = run.read_record()
    folders = folders_of(record)
    if shared_folder(record):
        # Every node of a shared disk has the same answer: one of them is enough.
        folders = first_reachable(folders, connections)
    return replace(with_copies_here(of_nodes(folders, connections), run), source=run.run_id)


def with_copies_here(found: CheckpointList, run: RunDir) -> CheckpointList:
    """Return the checkpoints on the nodes together with those that this machine has of the run."""
    folder = run.checkpoints.absolute()
    if not folder.is_dir():
        return found
    here: tuple[Holder, Listing] = (ThisMachine(), ThisMachine().listing(str(folder)))
    return replace(found, checkpoints=merge(found.checkpoints, combine([here])))


def first_reachable(folders: Sequence[tuple[Node, str]], connections: Connections) -> list[tuple[Node, str]]:
    """Return the first of the nodes that answers, or all if none does."""
    for node, folder in folders:
        if connections.on_each([node], lambda node, link: link.hello())[0].ok:
            return [(node, folder)]
    return list(folders)
