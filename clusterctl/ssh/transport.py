"""Reach nodes over SSH with paramiko.

A host key is checked in the key exchange, before any login: an unknown key is refused, or recorded with consent; a
changed key is always refused. paramiko is loaded only after the first connection is open, while the servers do their
part of the handshake.
"""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from clusterctl.errors import ClusterctlError, LoginRefused, Unreachable
from clusterctl.settings import inherited
from clusterctl.ssh.config import AGENT, Route, route_to
from clusterctl.ssh.config_query import Configuration
from clusterctl.ssh.gateways import Gateways, Login, LoginQueues, dial
from clusterctl.ssh.host_keys import HostKey, SeenKey, key_file
from clusterctl.ssh.known_hosts import Recorder
from clusterctl.ssh.load_paramiko import load_paramiko
from clusterctl.ssh.proxy import Place, ProxySocket
from clusterctl.ssh.retry import HANDSHAKE_LIMIT, STALLED, Dropped, retried

if TYPE_CHECKING:
    import paramiko

    from clusterctl.inventory.cluster import Node
    from clusterctl.ssh.login import AskSecret, Keys
    from clusterctl.ssh.program import ProgramStream
    from clusterctl.transport.connection import Connection


class SshTransport(Recorder):
    """Reaches nodes over SSH; thread-safe, one instance serves a whole command."""

    def __init__(
        self,
        *,
        known_hosts: Path | None = None,
        accept_new: bool = False,
        connect_timeout: float = 10.0,
        ssh_config: Configuration | str | None = None,
        ask: AskSecret | None = None,
    ) -> None:
        """`known_hosts` is the cluster's own file, read before the user's. `ssh_config` replaces the user's
        configuration; "none" means an empty one. `ask` returns the passphrase that the user types for a key."""
        super().__init__(known_hosts, ssh_config)
        self._accept_new = accept_new
        self._timeout = connect_timeout
        self._ask = ask
        self._keys: Keys | None = None
        self._queues = LoginQueues()
        # By host and port, the last address that answered.
        self._worked: dict[tuple[str, int], Place] = {}
        self._gateways = Gateways(self._log_in)

    def connect(self, node: Node) -> Connection:
        """Log in and start the agent."""
        from clusterctl.transport.connection import connect_agent

        return connect_agent(node, self.start)

    def start(self, node: Node, command: str) -> ProgramStream:
        """Log in and run one command line in the login shell. The caller closes the stream."""
        login = self.log_in(node)
        from paramiko import SSHException

        from clusterctl.ssh.program import ProgramStream, start_program

        try:
            program = start_program(login.session, command, HANDSHAKE_LIMIT)
        except (SSHException, OSError, EOFError) as problem:
            login.close()
            raise Unreachable(node.name, f"logged in, but the server opened no session: {problem}") from None
        except BaseException:
            login.close()
            raise
        return ProgramStream(node.name, login.session, program, login.close)

    def log_in(self, node: Node) -> Login:
        """Log in to a node without starting anything. The caller closes the login."""
        return self._log_in(node.name, route_to(node, self._config))

    def seen(self, node: Node) -> SeenKey:
        """Return the host key that a node shows now, and the recorded ones, without logging in."""
        route = route_to(node, self._config)
        shown: list[HostKey] = []
        with contextlib.suppress(_Enough):
            retried(lambda: self._shake_hands(node.name, route, lambda key: _enough(shown, key)))
        return SeenKey(node.name, route.name, shown[0], tuple(self._known_hosts(route).of(route.name)))

    # ---- connecting

    def _log_in(self, node: str, route: Route) -> Login:
        """Log in to a server through its gateways; repeat a handshake that was dropped."""
        known = self._known_hosts(route)
        if self._ask is not None:
            self._unlock(route)

        def judge(key: HostKey) -> None:
            known.judge(node, route.name, key, self._accept_new)

        return retried(lambda: self._one_login(node, route, judge))

    def _unlock(self, route: Route) -> None:
        """If every key is locked, ask for a passphrase before connecting, so that no server has to wait for it."""
        if route.use_agent and inherited((AGENT,)):
            return
        if route.identities and all(key_file(identity).locked for identity in route.identities):
            load_paramiko()
            self._all_keys().unlocked(route.identities[0])

    def _one_login(self, node: str, route: Route, judge: Callable[[HostKey], None]) -> Login:
        from_gateway = self._gateways.of(route).openings if route.gateway else contextlib.nullcontext()
        with from_gateway, self._queues.of(route):
            login = self._shake_hands(node, route, judge)
            from clusterctl.ssh.login import log_in

            try:
                log_in(login.session, node, route, self._all_keys(), HANDSHAKE_LIMIT)
            except BaseException as problem:
                login.close()
                raise _launcher_error(node, problem) from None
            return login

    def _shake_hands(self, node: str, route: Route, judge: Callable[[HostKey], None]) -> Login:
        """Return a session after the key exchange, without a login."""
        stream = self._stream(node, route)
        then = self._after(route)
        try:
            load_paramiko()
            from clusterctl.ssh.session import Session

            recorded = tuple(entry.kind for entry in self._known_hosts(route).of(route.name))
            session = Session(stream, judge, recorded, route.key_exchanges, route.ciphers)
            # A ProxyCommand may have to log in itself before the server can send its first line.
            session.shake_hands(HANDSHAKE_LIMIT, None if route.proxy_command else self._limit(route))
        except BaseException as problem:
            stream.close()
            then()
            proxy_words = stream.last_words() if isinstance(stream, ProxySocket) else ""
            if proxy_words and not isinstance(problem, ClusterctlError):
                raise Unreachable(
                    node, f"its ProxyCommand printed: {proxy_words}", f"try `{route.proxy_command}`"
                ) from None
            raise _launcher_error(node, problem) from None
        return Login(session, route.user, then)

    def _limit(self, route: Route) -> float:
        """Return the seconds for a connection, and for the server's first line."""
        return min(self._timeout, route.connect_timeout or self._timeout)

    def _stream(self, node: str, route: Route) -> socket.socket | paramiko.Channel:
        limit = self._limit(route)
        return (
            self._gateways.channel_to(node, route, limit)
            if route.gateway
            else dial(node, route, limit, self._worked)
        )

    def _after(self, route: Route) -> Callable[[], None]:
        """Return the function to call when the session has ended."""
        if route.gateway is None:
            return lambda: None
        gateway = self._gateways.of(route)
        return lambda: self._gateways.give_back(gateway)

    def _all_keys(self) -> Keys:
        from clusterctl.ssh.login import Keys

        with self._change:
            self._keys = self._keys or Keys(self._ask)
            return self._keys


class _Enough(Exception):
    """The host key was shown; nothing more is needed from the server."""


def _enough(shown: list[HostKey], key: HostKey) -> None:
    shown.append(key)
    raise _Enough


def _launcher_error(node: str, problem: BaseException) -> BaseException:
    """Return the launcher's error for an exception that paramiko raised."""
    import paramiko

    from clusterctl.ssh.packets import NoKeyExchange, NoSshServer

    if isinstance(problem, (ClusterctlError, _Enough, Dropped)) or not isinstance(problem, Exception):
        return problem
    if isinstance(problem, paramiko.AuthenticationException):
        return LoginRefused(node, str(problem) or "the login was refused")
    if isinstance(problem, NoSshServer):
        hint = "check `host` and `port`; a hung machine can still accept connections"
        return Unreachable(node, f"no SSH server answers there: {problem}", hint)
    if isinstance(problem, paramiko.ssh_exception.IncompatiblePeer):
        return Unreachable(node, f"no common encryption algorithm: {problem}", "see `--ssh openssh`")
    if isinstance(problem, NoKeyExchange):
        return Dropped(node, str(problem), STALLED)
    if isinstance(problem, (paramiko.SSHException, EOFError, OSError)):
        return Dropped(node, str(problem) or "the connection ended during the handshake")
    return Dropped(node, f"its answer is invalid ({type(problem).__name__}: {problem})")
