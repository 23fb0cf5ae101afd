"""Nodes that a run went on without: cleared of its ranks as soon as they answer, and standing by from then on."""

from __future__ import annotations

import threading
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING

from clusterctl.jobs.record import abandoned_of

if TYPE_CHECKING:
    from clusterctl.inventory.cluster import Node
    from clusterctl.jobs.run_folder import RunDir
    from clusterctl.transport.fanout import Connection, Connections


def clear(run: RunDir, connections: Connections, writing: threading.Lock | None = None) -> list[str]:
    """Ask all that were given up; the names of those that answer, on which nothing of the run is left now.

    `writing` is held while the record changes, where the caller has other threads that write it.
    """
    there = {one.node.name: one for one in abandoned_of(run)}

    def stop(node: Node, link: Connection) -> None:
        one = there[node.name]
        link.call("stop", {"run_dir": one.run_dir, "attempt": one.attempt, "grace": 0.0})

    outcomes = connections.on_each([one.node for one in there.values()], stop) if there else []
    names = [outcome.node.name for outcome in outcomes if outcome.ok]
    for outcome in outcomes:
        if not outcome.ok:
            connections.drop(outcome.node)
    for name in names:
        _stand_by(run, name, writing or nullcontext())
    return names


def _stand_by(run: RunDir, name: str, writing: AbstractContextManager[object]) -> None:
    with writing:
        record = run.read_record()
        back = [one["node"] for one in record["abandoned"] if one["node"]["name"] == name]
        record["abandoned"] = [one for one in record["abandoned"] if one["node"]["name"] != name]
        known = [one["name"] for one in (*record["spares"], *record["cluster"]["nodes"])]
        record["spares"] += back[:1] if name not in known else []
        run.write_json(run.record, record, mode=0o600)
    run.add_event("note", node=name, text=f"{name} answers again; what ran there was ended, and it stands by")
