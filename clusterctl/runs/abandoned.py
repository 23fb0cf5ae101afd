"""End leftover processes of a run on nodes that it abandoned or lost, once they answer again."""

from __future__ import annotations

from collections.abc import Callable, Collection
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import TYPE_CHECKING

from clusterctl.jobs.record import Abandoned

if TYPE_CHECKING:
    from clusterctl.inventory.cluster import Node
    from clusterctl.jobs.run_folder import RunDir
    from clusterctl.transport.connection import Connection
    from clusterctl.transport.fanout import Connections

Writing = Callable[[], AbstractContextManager[bool]]
"""Yields whether the record may be written now, and keeps other writers away meanwhile."""


def note(run: RunDir, names: Collection[str]) -> None:
    """Record nodes of the ended attempt that do not answer: what still runs there has to be ended."""
    record = run.read_record()
    known = {(entry.node.name, entry.attempt) for entry in record.abandoned}
    added = tuple(
        Abandoned(node, record.run_dirs[node.name], record.attempt)
        for node in record.cluster.nodes
        # The processes on the nodes of an allocation end with it.
        if node.name in names and not node.allocation and (node.name, record.attempt) not in known
    )
    if added:
        run.write_record(replace(record, abandoned=(*record.abandoned, *added)))


def clear(run: RunDir, connections: Connections, writing: Writing = lambda: nullcontext(True)) -> list[str]:
    """Stop the run on all abandoned nodes; return the names of those that answered and have no processes of the run
    left.
    """
    abandoned = {entry.node.name: entry for entry in run.read_record().abandoned}

    def stop(node: Node, link: Connection) -> None:
        entry = abandoned[node.name]
        link.call("stop", {"run_dir": entry.run_dir, "attempt": entry.attempt, "grace": 0.0})

    outcomes = connections.on_each([entry.node for entry in abandoned.values()], stop) if abandoned else []
    names = [outcome.node.name for outcome in outcomes if outcome.ok]
    for outcome in outcomes:
        if not outcome.ok:
            connections.drop(outcome.node)
    for name in names:
        _note_cleared(run, name, writing)
    return names


def _note_cleared(run: RunDir, name: str, writing: Writing) -> None:
    """Record that nothing is left on a node; one that the run does not use any more becomes a spare."""
    with writing() as ours:
        if not ours:
            return
        record = run.read_record()
        back = next((entry.node for entry in record.abandoned if entry.node.name == name), None)
        known = {node.name for node in (*record.spares, *record.cluster.nodes)}
        spare = back is not None and name not in known
        spares = (*record.spares, back) if back and spare else record.spares
        rest = tuple(entry for entry in record.abandoned if entry.node.name != name)
        run.write_record(replace(record, abandoned=rest, spares=spares))
    text = f"{name} answers again; what ran there was ended" + ", and it is a spare" * spare
    run.add_event("note", node=name, text=text)
