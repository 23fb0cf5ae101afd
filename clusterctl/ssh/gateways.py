"""Log in to each gateway once for all nodes behind it, and limit concurrent handshakes with one server.

This module does not need paramiko.
"""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from clusterctl.errors import NoAddress, NodeError, Unreachable
from clusterctl.ssh.config import Route
from clusterctl.ssh.proxy import Place, connected
from clusterctl.ssh.retry import Dropped
from clusterctl.transport.open_files import too_many

if TYPE_CHECKING:
    import paramiko

    from clusterctl.ssh.session import Session


# Nodes whose handshakes run through one gateway at a time.
AT_ONCE = 16
# Seconds for which other nodes do not try a gateway that has failed.
REMEMBERED = 10.0
# Seconds that an unused login stays open.
LINGER = 5.0


@dataclass
class Gateway:
    """One gateway and its users."""

    route: Route
    openings: threading.BoundedSemaphore = field(default_factory=lambda: threading.BoundedSemaphore(AT_ONCE))
    change: threading.Lock = field(default_factory=threading.Lock)
    login: Login | None = None
    failed: NodeError | None = None
    failed_at: float = 0.0
    users: int = 0


class Login:
    """A session, and the resources to release with it."""

    def __init__(self, session: Session, user: str | None, then: Callable[[], None] | None = None) -> None:
        self.session = session
        self.user = user
        self._then = then
        self._change = threading.Lock()

    def close(self) -> None:
        self.session.close()
        with self._change:
            then, self._then = self._then, None
        if then is not None:
            then()


class Gateways:
    """The gateways of one transport; `log_in` logs in to one, through the gateways before it if there are any."""

    def __init__(self, log_in: Callable[[str, Route], Login]) -> None:
        self._log_in = log_in
        self._gateways: dict[Route, Gateway] = {}
        self._change = threading.Lock()

    def of(self, route: Route) -> Gateway:
        assert route.gateway is not None
        with self._change:
            return self._gateways.setdefault(route.gateway, Gateway(route.gateway))

    def channel_to(self, node: str, route: Route, limit: float) -> paramiko.Channel:
        """Return a byte stream to a node through its gateway; call `give_back` after use."""
        import paramiko

        from clusterctl.ssh.session import ChannelRefused

        gateway = self.of(route)
        session = self._session(node, gateway)
        where = paramiko.Message()
        where.add_string(route.host)
        where.add_int(route.port)
        where.add_string("127.0.0.1")
        where.add_int(0)
        try:
            channel: paramiko.Channel = session.open("direct-tcpip", where, limit=limit)
            return channel
        except ChannelRefused as refusal:
            self.give_back(gateway)
            message = f"the gateway {gateway.route.name} can't reach {route.name}: {refusal}"
            hint = "check `host` and `port` as the gateway sees them, and AllowTcpForwarding there"
            raise Unreachable(node, message, hint) from None
        except (paramiko.SSHException, EOFError, OSError) as problem:
            # The next attempt logs in again.
            self.give_back(gateway)
            raise Dropped(node, f"its gateway {gateway.route.name}: {problem}") from None
        except BaseException:
            self.give_back(gateway)
            raise

    def give_back(self, gateway: Gateway) -> None:
        """Count one user less; LINGER seconds after the last user has left, close the login."""
        with gateway.change:
            gateway.users -= 1
            unused = gateway.users == 0
        if unused:
            timer = threading.Timer(LINGER, self._close_unused, [gateway])
            timer.daemon = True
            timer.start()

    def _close_unused(self, gateway: Gateway) -> None:
        with gateway.change:
            login, gateway.login = (None, gateway.login) if gateway.users else (gateway.login, None)
        if login is not None:
            login.close()

    def _session(self, node: str, gateway: Gateway) -> Session:
        with gateway.change:
            recent = time.monotonic() - gateway.failed_at < REMEMBERED
            if gateway.failed is not None and recent:
                raise _error_for(node, gateway)
            if gateway.login is None or not gateway.login.session.active:
                try:
                    gateway.login = self._log_in(f"gateway {gateway.route.name}", gateway.route)
                except NodeError as problem:
                    gateway.failed, gateway.failed_at = problem, time.monotonic()
                    raise _error_for(node, gateway) from None
                # Many threads wait for this gateway's channels, so it needs a thread that reads for them.
                gateway.login.session.start()
                gateway.failed = None
            gateway.users += 1
            return gateway.login.session


def _error_for(node: str, gateway: Gateway) -> NodeError:
    """Return the gateway's failure as the node's error, with the same text for every node."""
    failed = gateway.failed
    assert failed is not None
    return type(failed)(node, f"its gateway {gateway.route.name}: {failed.reason}", failed.hint)


# Concurrent handshakes with one server; sshd by default drops some at random from 10 on.
HANDSHAKES_AT_ONCE = 8


class LoginQueues:
    """Limits the concurrent handshakes with each server: many nodes may share one address."""

    def __init__(self) -> None:
        self._queues: dict[tuple[str, int, Route | None], threading.BoundedSemaphore] = {}
        self._change = threading.Lock()

    def of(self, route: Route) -> threading.BoundedSemaphore:
        with self._change:
            key = (route.host, route.port, route.gateway)
            return self._queues.setdefault(key, threading.BoundedSemaphore(HANDSHAKES_AT_ONCE))


def dial(node: str, route: Route, limit: float, worked: dict[tuple[str, int], Place]) -> socket.socket:
    """Return a byte stream to the server: a TCP connection, or the user's ProxyCommand.

    `worked` has the addresses that answered before.
    """
    try:
        return connected(route, limit, worked)
    except (socket.gaierror, UnicodeError) as problem:
        message = f"no address for {route.host!r} ({getattr(problem, 'strerror', problem)})"
        raise NoAddress(node, message, "check `host`, and the name server of this machine") from None
    except OSError as problem:
        raise _unreachable(node, route, problem, limit) from None


def _unreachable(node: str, route: Route, trouble: OSError, limit: float) -> Unreachable:
    lack = too_many(node, trouble)
    if lack is not None:
        return lack
    if isinstance(trouble, ConnectionRefusedError):
        message = f"nothing listens at {route.host} port {route.port}"
        return Unreachable(node, message, "check `host` and `port`, and that sshd runs there")
    if isinstance(trouble, TimeoutError):
        message = f"{route.host} port {route.port} did not answer within {limit:g} s"
        return Unreachable(node, message, "check the address, the network and the firewall")
    return Unreachable(node, f"{route.host} port {route.port}: {trouble.strerror or trouble}")
