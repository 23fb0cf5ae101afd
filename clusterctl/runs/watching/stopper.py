"""Stop the nodes of an attempt that is watched; a node that is away is stopped when it answers again."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from clusterctl.runs.stop import StopRequest, read_request, stop_nodes

if TYPE_CHECKING:
    from clusterctl.inventory.cluster import Node
    from clusterctl.jobs.record import RunRecord
    from clusterctl.jobs.run_folder import RunDir
    from clusterctl.transport.fanout import Connections

Before = Callable[[StopRequest], StopRequest]
# Seconds that `stop` has to reach the nodes before the controller sends its request to those that still run.
OBEY = 3.0


class Stopper:
    """Sends the requests to stop, each in a thread of its own."""

    def __init__(self, run: RunDir, record: RunRecord, connections: Connections) -> None:
        self.run, self.record, self.connections = run, record, connections
        # How the ranks are ended after a failure, and the node that failed: that one ends its own ranks.
        self.request: StopRequest | None = None
        self._failed = ""
        self._thread: threading.Thread | None = None
        # When a request to stop the run was first seen, and whether the nodes were told.
        self._asked_at: float | None = None
        self._obeyed = False

    def stop(
        self,
        nodes: Sequence[Node],
        failed: str,
        request: StopRequest,
        before: Before = lambda request: request,
    ) -> None:
        """Stop these nodes, because the node `failed` did; only the first call counts.

        `before` runs first, in the thread that sends the request, and may change it.
        """
        if nodes and not self.request:
            self.request, self._failed = request, failed

            def send() -> None:
                self.request = before(request)
                stop_nodes(self.connections, nodes, self.run, self.request)

            self._thread = threading.Thread(target=send, daemon=True, name="stop")
            self._thread.start()

    def join(self) -> None:
        """Wait until the nodes are stopped, if they are being stopped."""
        if self._thread:
            self._thread.join()

    def must_obey(self) -> bool:
        """Return whether a stop of the run was requested, and its command had the time to reach the nodes."""
        if self._obeyed or not self.run.stop_asked.exists():
            return False
        self._asked_at = self._asked_at or time.monotonic()
        return time.monotonic() - self._asked_at >= OBEY

    def obey(self, running: Sequence[Node]) -> None:
        """Send the request to the nodes that still run: `stop` may have been killed, or cut off."""
        self._obeyed = True
        self._send(running, read_request(self.run, self.record))

    def stop_again(self, node: Node) -> None:
        """Stop the ranks of a node that was away when the others were stopped."""
        if self.run.stop_asked.exists():
            self._send([node], read_request(self.run, self.record))
        elif self.request and node.name != self._failed:
            self._send([node], self.request)

    def _send(self, nodes: Sequence[Node], request: StopRequest) -> None:
        args = (self.connections, nodes, self.run, request)
        threading.Thread(target=stop_nodes, args=args, daemon=True, name="stop").start()
