"""End leftover processes of a run on nodes that it abandoned, once they answer again, and make the nodes spares."""

from __future__ import annotations

import threading
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from clusterctl.inventory.cluster import Node
    from clusterctl.jobs.run_folder import RunDir
    from clusterctl.transport.connection import Connection
    from clusterctl.transport.fanout import Connections


def clear(run: RunDir, connections: Connections, writing: threading.Lock | None = None) -> list[str]:
    """Stop the run on all abandoned nodes; return the names of those that answered and have no processes of the run
    left.

    `writing` is held while the record changes, for callers whose other threads write it too.
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
        _return_to_spares(run, name, writing or nullcontext())
    return names


def _return_to_spares(run: RunDir, name: str, writing: AbstractContextManager[object]) -> None:
    with writing:
        record = run.read_record()
        back = next((entry.node for entry in record.abandoned if entry.node.name == name), None)
        known = {node.name for node in (*record.spares, *record.cluster.nodes)}
        spares = (*record.spares, back) if back and name not in known else record.spares
        rest = tuple(entry for entry in record.abandoned if entry.node.name != name)
        run.write_record(replace(record, abandoned=rest, spares=spares))
    run.add_event(
        "note", node=name, text=f"{name} answers again; what ran there was ended, and it is a spare"
    )
