"""A launcher that hears no node at all: whose link is gone, theirs or its own?"""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING

from clusterctl.inventory import Node

if TYPE_CHECKING:
    from clusterctl.transport import Connections

AGAIN = 2.0  # seconds between two askings of the nodes that stand by


class Outage:
    """While no node of a run answers, those that stand by are asked: if none does either, the link is our own."""

    def __init__(self, connections: Connections, spares: Sequence[Node]) -> None:
        self.connections, self.spares = connections, list(spares)
        self.asking: threading.Thread | None = None
        self.answered = False
        self.again = 0.0

    def is_ours(self) -> bool:
        """Whether nobody is known to answer; the asking itself goes on in a thread, since it may take 10 s."""
        under_way = self.asking is not None and self.asking.is_alive()
        if self.spares and not self.answered and not under_way and time.monotonic() > self.again:
            self.asking = threading.Thread(target=self._ask, daemon=True, name="ask spares")
            self.asking.start()
        return not self.answered

    def over(self) -> None:
        """A node answers: the next outage is another one."""
        self.answered = False

    def _ask(self) -> None:
        outcomes = self.connections.on_each(self.spares, lambda node, link: link.call("hello"))
        for outcome in outcomes:
            if not outcome.ok:
                self.connections.drop(outcome.node)
        self.answered = any(outcome.ok for outcome in outcomes)
        self.again = time.monotonic() + AGAIN
