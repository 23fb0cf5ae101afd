"""Ask the nodes of a run for facts that only they know: a free port on the master, and the addresses of the rank
table.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass
from typing import TYPE_CHECKING

from clusterctl.jobs.job import rank_table_wanted
from clusterctl.jobs.parts.own_table import file_of
from clusterctl.jobs.parts.table_problems import read_table
from clusterctl.runs.prepare.master_port import free_port
from clusterctl.text import plural

if TYPE_CHECKING:
    from clusterctl.inventory.cluster import Cluster
    from clusterctl.jobs.job import Job
    from clusterctl.transport.fanout import Connections


@dataclass(frozen=True)
class NodeFacts:
    """The answers of the nodes of a run."""

    master_port: int
    rank_table: str = ""
    """The text of the rank table; "" without one."""
    note: str = ""
    """Where the rank table comes from, as a text for users."""


def ask(cluster: Cluster, job: Job, connections: Connections) -> NodeFacts:
    """Return the free port and the rank table of a run."""
    from clusterctl.ranktable import from_nodes

    table = note = ""
    if file := file_of(job.rank_table):
        table = read_table(file)
        note = f"{file} fits the ranks of the job"
    elif rank_table_wanted(job, cluster):
        answer = from_nodes.build_from_nodes(cluster, connections, job.devices, of_run=True)
        table = answer.table.render()
        notes = "".join(f"; {text}" for text in (answer.detected, *answer.other_sources) if text)
        note = f"built from the answers of {plural(len(cluster.nodes), 'node')}{notes}"
    port = job.master_port or free_port(connections.of(cluster.nodes[0]), cluster.nodes[0])
    return NodeFacts(port, table, note)


class Question:
    """A call of `ask` in a thread of its own; the caller can check the nodes meanwhile."""

    def __init__(self, cluster: Cluster, job: Job, connections: Connections) -> None:
        self._facts: NodeFacts | None = None
        self._problem: BaseException | None = None
        self._thread = threading.Thread(
            target=self._ask, args=(cluster, job, connections), daemon=True, name="node facts"
        )
        self._thread.start()

    def _ask(self, cluster: Cluster, job: Job, connections: Connections) -> None:
        try:
            self._facts = ask(cluster, job, connections)
        except BaseException as problem:
            # Raised again where the answer is needed.
            self._problem = problem

    def answer(self) -> NodeFacts:
        """Wait for the facts and return them; raise the error that kept them from being found."""
        self._thread.join()
        if self._problem is not None:
            raise self._problem
        assert self._facts is not None
        return self._facts
