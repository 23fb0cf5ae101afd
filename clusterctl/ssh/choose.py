"""Choose how each node is reached: with paramiko, or with OpenSSH's own program."""

from __future__ import annotations

import shutil
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from clusterctl.errors import Fault, InputFaults, UsageError, did_you_mean
from clusterctl.ssh.config import MARKS, chain, route_to
from clusterctl.ssh.config_query import Configuration

if TYPE_CHECKING:
    from clusterctl.inventory.cluster import Cluster, Node
    from clusterctl.ssh.gateways import Login
    from clusterctl.ssh.host_keys import HostKey, SeenKey
    from clusterctl.ssh.openssh import OpenSshTransport
    from clusterctl.ssh.transport import SshTransport
    from clusterctl.transport.connection import Connection
    from clusterctl.transport.fanout import Stream

T = TypeVar("T")
CHOICES = ("auto", "paramiko", "openssh")


def checked(choice: str) -> str:
    """Return the choice; raise UsageError if it is unknown or not installed."""
    if choice not in CHOICES:
        near = did_you_mean(choice[:40], CHOICES)
        raise UsageError(
            f"--ssh or $CLUSTERCTL_SSH: no SSH client is called {choice[:40]!r}",
            near or f"use one of {', '.join(CHOICES)}",
        )
    if choice == "openssh" and shutil.which("ssh") is None:
        raise UsageError(
            "this machine has no `ssh` program", "install OpenSSH's client, or use --ssh paramiko"
        )
    return choice


class SshChoice:
    """Reaches nodes over SSH with the chosen client. `auto` uses paramiko, which starts no process and takes 0.4
    times OpenSSH's CPU time, and OpenSSH for each node whose configuration needs it."""

    def __init__(
        self,
        choice: str = "auto",
        *,
        known_hosts: Path | None = None,
        accept_new: bool = False,
        connect_timeout: float = 10.0,
        ssh_config: str | None = None,
        ask: Callable[[str], str | None] | None = None,
    ) -> None:
        """`choice` is one of CHOICES; the other parameters are those of the two transports."""
        self._choice = checked(choice)
        self._known_hosts = known_hosts
        self._ask = ask
        self._config = Configuration(ssh_config)
        self._accept_new = accept_new
        self._timeout = connect_timeout
        self._paramiko: SshTransport | None = None
        self._openssh: OpenSshTransport | None = None
        self._change = threading.Lock()

    def connect(self, node: Node) -> Connection:
        return self._transport_for(node).connect(node)

    def start(self, node: Node, command: str) -> Stream:
        return self._transport_for(node).start(node, command)

    def log_in(self, node: Node) -> Login:
        """Log in to a node with paramiko, for fabric."""
        self.require_paramiko([node])
        with self._change:
            transport = self._by_paramiko()
        return transport.log_in(node)

    def require_paramiko(self, nodes: Sequence[Node]) -> None:
        """Raise a UsageError that names every node which fabric cannot reach."""
        faults = []
        for node in nodes:
            name, reason = self.chosen(node)
            if node.host == "local":
                faults.append(
                    Fault(node.name, "is this machine, and fabric needs SSH", f"leave it out: -x {node.name}")
                )
            elif name == "openssh":
                way = f"OpenSSH's program ({reason})" if reason else "OpenSSH's program"
                problem = f"is reached by {way}, and fabric needs paramiko"
                faults.append(Fault(node.name, problem, "try --ssh paramiko"))
        if faults:
            raise InputFaults(faults)

    def seen(self, node: Node) -> SeenKey:
        """Return the host key that a node shows now, and the recorded ones."""
        return self._transport_for(node).seen(node)

    def record(self, node: Node, key: HostKey) -> Path:
        """Record a host key for a node; return the file it was written to."""
        return self._transport_for(node).record(node, key)

    def chosen(self, node: Node) -> tuple[str, str]:
        """Return `paramiko` or `openssh`, and the reason if the configuration decided, else ""."""
        if self._choice != "auto":
            return self._choice, ""
        routes = chain(route_to(node, self._config))
        reason = next((route.only_openssh for route in routes if route.only_openssh), "")
        if self._known_hosts is not None and self._config.has_marks(str(self._known_hosts)):
            reason = reason or MARKS
        if self._config.program is None:
            reason = ""
        return ("openssh" if reason else "paramiko"), reason

    def _transport_for(self, node: Node) -> SshTransport | OpenSshTransport:
        by_openssh = self.chosen(node)[0] == "openssh"
        with self._change:
            return self._by_openssh() if by_openssh else self._by_paramiko()

    def _made(self, kind: Callable[..., T], **more: object) -> T:
        return kind(
            known_hosts=self._known_hosts,
            accept_new=self._accept_new,
            connect_timeout=self._timeout,
            ssh_config=self._config,
            **more,
        )

    def _by_paramiko(self) -> SshTransport:
        from clusterctl.ssh.transport import SshTransport

        self._paramiko = self._paramiko or self._made(SshTransport, ask=self._ask)
        return self._paramiko

    def _by_openssh(self) -> OpenSshTransport:
        from clusterctl.ssh.openssh import OpenSshTransport

        self._openssh = self._openssh or self._made(OpenSshTransport)
        return self._openssh


def choice_for(
    cluster: Cluster,
    choice: str = "auto",
    *,
    accept_new: bool = False,
    connect_timeout: float = 10.0,
    ask: Callable[[str], str | None] | None = None,
) -> SshChoice:
    """Return an SshChoice that records new host keys in the cluster's own file, if it has one."""
    known = Path(cluster.known_hosts) if cluster.known_hosts else None
    return SshChoice(
        choice, known_hosts=known, accept_new=accept_new, connect_timeout=connect_timeout, ask=ask
    )
