"""fabric for the user's own scripts, over logins that were checked here.

fabric's own client accepts any host key and reads ~/.ssh/config in its own way; neither happens to a
connection that is logged in before fabric gets it.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from clusterctl.ssh.transport import SshTransport

if TYPE_CHECKING:
    from clusterctl.inventory.cluster import Node


@contextmanager
def fabric_connection(transport: SshTransport, node: Node) -> Iterator[Any]:
    """A `fabric.Connection` to a node, through its gateways, closed at the end: run, put, get, local, forward."""
    login = transport.log_in(node)
    try:
        import fabric
        import paramiko

        # Fabric waits for channels as paramiko does, for a thread to fill them.
        login.session.start()
        nothing = fabric.Config(ssh_config=paramiko.SSHConfig(), lazy=True)
        connection = fabric.Connection(node.host, user=login.user, port=node.port, config=nothing)
        client = paramiko.SSHClient()
        client._transport = login.session  # type: ignore[attr-defined]
        connection.client, connection.transport = client, login.session
        yield connection
    finally:
        login.close()
