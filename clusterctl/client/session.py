"""Connections that a Cluster and its selections share; they are opened when first used."""

from __future__ import annotations

import threading
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

    def ssh_choice(self) -> str:
        """Return "auto", "paramiko" or "openssh"."""
        return self.ssh or load_settings().ssh

    def connect(self, cluster: Cluster) -> Connections:
        """Return connections to a cluster's nodes; each one opens when it is first used."""
        from clusterctl.backends.reach import transport_to

        settings = load_settings()
        accept_new = self.accept_new_host_keys
        transport = transport_to(
            cluster,
            accept_new=settings.accept_new_host_keys if accept_new is None else accept_new,
            connect_timeout=self.connect_timeout or settings.connect_timeout,
            ssh=self.ssh_choice(),
        )
        return Connections(transport, self.fanout or settings.fanout)


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
