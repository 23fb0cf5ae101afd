"""Before an attempt starts, find the newest checkpoint of which the reachable nodes together have all files.

Nodes that joined the run get the files of their ranks. A copy on this machine is used if the nodes lack files.
"""

from __future__ import annotations

import time

from clusterctl.checkpoints.checkpoint import Checkpoint, CheckpointList
from clusterctl.checkpoints.find import folder_on, folders_of, of_nodes, shared_folder, with_copies_here
from clusterctl.checkpoints.moves import Move, move_all, rank_of
from clusterctl.checkpoints.stored import access_of, fetch_checkpoint, newest_stored
from clusterctl.errors import WorkFailed
from clusterctl.inventory.cluster import Node
from clusterctl.inventory.nodeset import fold
from clusterctl.jobs.plan import Plan
from clusterctl.jobs.run_folder import RunDir
from clusterctl.text import plural, size
from clusterctl.transport.fanout import Connections

# Seconds in which a node must answer: connecting to a dead one takes longer.
PATIENCE = 5.0


def bring_checkpoint(run: RunDir, made: Plan, connections: Connections) -> str:
    """Move the files that the nodes of an attempt lack to them; return which checkpoint it will continue from, or "".

    Spares are asked too: they may have been nodes of the run. Each rank's own file is copied to the node of that rank;
    other data that ranks need, they fetch from each other while loading.
    """
    record = run.read_record()
    if record.job.train is None:
        return ""
    plan = {part.node.name: (part.node, folder_on(record, part.run_dir)) for part in made.nodes}
    if shared_folder(record):
        found = of_nodes(list(plan.values())[:1], connections)
        newest = _newest(found)
        return _text(newest, found, "on the shared disk") if newest else ""
    # Abandoned nodes are not asked: they become spares as soon as they answer.
    dead = {left.node.name for left in record.abandoned}
    others = [entry for entry in folders_of(record) if entry[0].name not in {*plan, *dead}]
    found = with_copies_here(of_nodes([*plan.values(), *others], connections, patience=PATIENCE), run)
    newest = _newest(found)
    text, note = _from_store(run, newest, made, plan, connections)
    if newest is None or text:
        return text
    return note + _move(newest, found, made, plan, connections)


def _from_store(
    run: RunDir,
    newest: Checkpoint | None,
    made: Plan,
    plan: dict[str, tuple[Node, str]],
    connections: Connections,
) -> tuple[str, str]:
    """Fetch a checkpoint that is newer than those of the nodes; return what was fetched, or why nothing was."""
    record = run.read_record()
    access = access_of(record.job, record.folder_name)
    if access is None:
        return "", ""
    try:
        stored = newest_stored(next(iter(plan.values()))[0], connections, access)
        if stored is None or (newest is not None and stored[1].step <= newest.step):
            return "", ""
        return fetch_checkpoint(*stored, access, made, plan, connections), ""
    except WorkFailed as error:
        if newest is None:
            raise
        # An older checkpoint is better than none.
        return "", f"{error.message}; "


def _move(
    newest: Checkpoint,
    found: CheckpointList,
    made: Plan,
    plan: dict[str, tuple[Node, str]],
    connections: Connections,
) -> str:
    """Move the files that nodes lack to them; return a line for the log."""
    began = time.monotonic()
    moves = moves_for(newest, made, plan)
    outcomes = move_all(newest, moves, connections)
    sound = [copy.holder.name for copy in newest.holdings if copy.entry.digest]
    text = _text(newest, found, f"complete on {fold(sound)}")
    if failed := [outcome.error.message for outcome in outcomes if outcome.error is not None]:
        # The ranks can still fetch the files from each other.
        return f"{text}; not moved: {'; '.join(failed)}"
    moved = sum(outcome.get() for outcome in outcomes)
    if moves:
        files = plural(sum(len(move.names) for move in moves), "file")
        targets = fold(sorted({move.target.name for move in moves}))
        text += f"; {files} ({size(moved)}) moved to {targets} in {time.monotonic() - began:.1f} s"
    return text


def _newest(found: CheckpointList) -> Checkpoint | None:
    return next((checkpoint for checkpoint in found.checkpoints if checkpoint.is_resumable), None)


def _text(newest: Checkpoint, found: CheckpointList, where: str) -> str:
    """Return which checkpoint was chosen, what is damaged of it, and why newer ones were not."""
    newer = [
        "; ".join(item.faults) or f"{item.name} lacks {plural(item.missing, 'file')}"
        for item in found.checkpoints
        if item.step > newest.step
    ]
    parts = [f"{newest.name}: the newest checkpoint that the living nodes have, {where}", *newest.faults]
    return "; ".join([*parts, *(f"passed over: {reason}" for reason in newer)])


def moves_for(checkpoint: Checkpoint, made: Plan, folders: dict[str, tuple[Node, str]]) -> list[Move]:
    """Return the moves after which each node has its ranks' own files, and the nodes together have all files."""
    node_of = {process.rank: part.node.name for part in made.nodes for process in part.processes}
    layout = checkpoint.facts.layout
    same_world = layout is not None and layout.world == made.world_size
    wanted: dict[tuple[str, str], list[str]] = {}
    for number, file in enumerate(sorted(checkpoint.copies_of)):
        holders = [holding.holder.name for holding in checkpoint.holders_of(file)]
        rank = rank_of(file)
        target = node_of.get(rank) if same_world and rank is not None else None
        if target is None and not any(name in folders for name in holders):
            # With another layout, it is enough that any node of the attempt has the file.
            target = list(folders)[number % len(folders)]
        if target is not None and target not in holders:
            living = [name for name in holders if name in folders] or holders
            wanted.setdefault((living[0], target), []).append(file)
    by_name = {holding.holder.name: holding for holding in checkpoint.holdings}
    return [
        Move(by_name[source], *folders[target], tuple(files)) for (source, target), files in wanted.items()
    ]
