"""Connections that a Cluster and its selections share; they are opened when first used."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from clusterctl.settings import load_settings
from clusterctl.transport.fanout import Connections

if TYPE_CHECKING:
    from clusterctl.inventory.cluster import Cluster


@dataclass(frozen=True)
class Reach:
    """How to log in to nodes; None takes the value of the settings."""

    accept_new_host_keys: bool | None = None
    ssh: str | None = None
    connect_timeout: float | None = None
    fanout: int | None = None
    at_once: int | None = None
    """How many nodes are connected at the same time; None: all."""
    kept_for: float = 0.0
    """Seconds that the keeper holds the connections after their use; 0: no keeper."""
    ask: Callable[[str], str | None] | None = None
    """Gets a passphrase or password from the user."""
    notice: Callable[[Cluster], object] | None = None
    """Called before connections are opened."""
    begin: bool = False
    """Whether the agents of an allocation start now, not at the first use of a connection."""

    def ssh_choice(self) -> str:
        """Return "auto", "paramiko" or "openssh"."""
        return self.ssh or load_settings().ssh

    def connect(self, cluster: Cluster) -> Connections:
        """Return connections to a cluster's nodes, or those of the keeper; each one opens when it is first used."""
        settings, ssh = load_settings(), self.ssh_choice()
        if self.notice:
            self.notice(cluster)
        accept_new = self.accept_new_host_keys
        accept_new = settings.accept_new_host_keys if accept_new is None else accept_new
        patience = self.connect_timeout or settings.connect_timeout
        fanout = self.fanout or settings.fanout
        if self.kept_for:
            from clusterctl.keeper.client import KeeperTransport
            from clusterctl.keeper.messages import WayOptions

            way = WayOptions(accept_new, patience, ssh)
            return Connections(KeeperTransport(cluster, way, self.kept_for, self.ask), fanout, kept=True)
        from clusterctl.backends.reach import transport_to
        from clusterctl.transport import open_files

        most = len(cluster.nodes) if self.at_once is None else self.at_once
        open_files.require(cluster.nodes, most, children=ssh == "openssh")
        transport = transport_to(
            cluster, ask=self.ask, accept_new=accept_new, ssh=ssh, connect_timeout=patience
        )
        if self.begin:
            transport.begin()
        return Connections(transport, fanout)


class Session:
    """The connections to one inventory's nodes; after `close` the next use opens new ones."""

    def __init__(self, cluster: Cluster, reach: Reach) -> None:
        self._cluster = cluster
        self.reach = reach
        self._connections: Connections | None = None
        self._change = threading.Lock()

    def connections(self) -> Connections:
        with self._change:
            if self._connections is None:
                self._connections = self.reach.connect(self._cluster)
            return self._connections

    def close(self) -> None:
        """Close all connections. Commands that still run over them are ended; runs continue."""
        with self._change:
            connections, self._connections = self._connections, None
        if connections is not None:
            connections.close()
