"""Reach each node in its way: over SSH, through the batch system whose job holds it, or as this machine."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from clusterctl.backends.backend import SSH, of_node

if TYPE_CHECKING:
    from clusterctl.backends.backend import Backend
    from clusterctl.inventory.cluster import Cluster, Node
    from clusterctl.transport.connection import Connection
    from clusterctl.transport.fanout import Stream, Transport


class ByNode:
    """The transport of each node: `ssh` makes the one over SSH when the first node needs it."""

    def __init__(self, ssh: Callable[[], Transport], allocated: Sequence[Node]) -> None:
        self._make_ssh = ssh
        self._allocated = allocated
        self._local: Transport | None = None
        self._made: dict[Backend, Transport] = {}
        self._change = threading.Lock()

    def connect(self, node: Node) -> Connection:
        return self._transport_for(node).connect(node)

    def start(self, node: Node, command: str) -> Stream:
        return self._transport_for(node).start(node, command)

    def begin(self) -> None:
        """Start the agents of an allocation before the first connection is requested, where it starts all at once."""
        for node in self._allocated[:1]:
            of_node(node).begin(self._transport_for(node))

    def _transport_for(self, node: Node) -> Transport:
        backend = of_node(node)
        if node.host == "local" or backend.is_here(node):
            from clusterctl.transport.local import LocalTransport

            self._local = self._local or LocalTransport()
            return self._local
        with self._change:
            if backend not in self._made:
                own = [other for other in self._allocated if of_node(other) is backend]
                self._made[backend] = backend.transport(own) or self._by_ssh()
            return self._made[backend]

    def _by_ssh(self) -> Transport:
        if SSH not in self._made:
            self._made[SSH] = self._make_ssh()
        return self._made[SSH]


def transport_to(
    cluster: Cluster,
    *,
    accept_new: bool = False,
    connect_timeout: float = 10.0,
    ssh: str = "auto",
    ask: Callable[[str], str | None] | None = None,
) -> ByNode:
    """Return the transport to a cluster's nodes. Each backend is loaded when it is needed. `ask` gets a passphrase
    from the user."""

    def chosen() -> Transport:
        from clusterctl.ssh.choose import choice_for

        return choice_for(cluster, ssh, accept_new=accept_new, connect_timeout=connect_timeout, ask=ask)

    return ByNode(chosen, [node for node in cluster.nodes if node.allocation])
