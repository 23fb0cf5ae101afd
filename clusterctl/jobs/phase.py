"""The phases of a run, and of its part on one node."""

from __future__ import annotations

from collections.abc import Iterable
from enum import Enum


class Phase(str, Enum):
    """The phase of a run, or of one of its nodes, ordered by severity: a run has the most severe phase of its nodes."""

    UNKNOWN = "unknown"
    RUNNING = "running"
    LOST = "lost"
    FAILED = "failed"
    STOPPED = "stopped"
    FINISHED = "finished"
    # A run whose attempt failed, while its controller waits to start the next one. No node is ever in this phase.
    RESTARTING = "restarting"
    # A run that waits for nodes in the queue of a cluster. No node is ever in this phase.
    PENDING = "pending"

    __str__ = str.__str__

    def __format__(self, spec: str) -> str:
        return format(self.value, spec)

    @property
    def is_final(self) -> bool:
        """True if no process of the attempt is left."""
        return self in (Phase.LOST, Phase.FAILED, Phase.STOPPED, Phase.FINISHED)

    @staticmethod
    def of_nodes(phases: Iterable[Phase]) -> Phase:
        """Return the phase of a run from those of its nodes; a run without nodes is finished."""
        order = list(Phase)
        return min(phases, key=order.index, default=Phase.FINISHED)
