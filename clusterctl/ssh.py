"""SSH: strict about who answers, explicit about who asks; the only module that knows paramiko and fabric.

A host key is checked before any login is tried: an unknown one is refused or, with consent, recorded; a
changed one is always refused. Nothing of fabric's own policy, which accepts any key, is left: its connections
get our client.
"""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import socket
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import paramiko
from paramiko.common import MSG_CHANNEL_REQUEST
from paramiko.hostkeys import HostKeyEntry, HostKeys, InvalidHostKey

from clusterctl import host_keys
from clusterctl.agent.frames import BEAT
from clusterctl.connection import Connection, LinkConnection
from clusterctl.errors import (
    LinkLost,
    LoginRefused,
    Unreachable,
    UsageError,
)
from clusterctl.host_keys import HostKey, SeenKey
from clusterctl.link import Link, agent_argv, shell_command
from clusterctl.ssh_answers import Configuration
from clusterctl.ssh_config import KNOWN_HOSTS, Way, way_to
from clusterctl.ssh_proxy import ProxySocket, connected
from clusterctl.ssh_retry import HANDSHAKE_LIMIT, Dropped, retried

if TYPE_CHECKING:
    from clusterctl.inventory import Cluster, Node

WINDOW = 16 << 20  # bytes that a node may be ahead of us
END_WAIT = 10.0  # seconds for the exit code after both streams ended
PIECE = 64 << 10  # paramiko copies what it is given once a packet


def as_value(key: paramiko.PKey) -> HostKey:
    """paramiko's key as ours."""
    return host_keys.host_key(key.get_name(), key.get_base64())


@dataclass
class KnownHosts:
    """The recorded host keys: first those of the cluster's own file, then the user's; new ones go into the
    first file."""

    files: Sequence[Path]
    _tables: list[HostKeys] = field(default_factory=list)
    _change: threading.Lock = field(default_factory=threading.Lock)

    def __post_init__(self) -> None:
        for path in self.files:
            table = HostKeys()
            try:
                if path.is_file():
                    table.load(str(path))
            except InvalidHostKey as problem:
                raise UsageError(
                    f"{path}: unreadable line {problem.line.strip()!r:.80}", "mend or remove it"
                ) from None
            self._tables.append(table)

    def of(self, name: str) -> list[paramiko.PKey]:
        """The keys recorded for a host, in the first file that names it."""
        with self._change:
            for table in self._tables:
                found = table.lookup(name)
                if found:
                    return list(found.values())
        return []

    def record(self, name: str, key: HostKey) -> None:
        """Append a key to the first file; what stands there is not touched."""
        with self._change:
            host_keys.append(self.files[0], name, key)
            entry = HostKeyEntry.from_line(f"{name} {key.kind} {key.base64}")
            if entry is not None:
                self._tables[0].add(name, entry.key.get_name(), entry.key)


class _StrictClient(paramiko.SSHClient):
    """A client whose answer to an unknown host is its own, whoever tries to set another."""

    def __init__(self, node: str, known: KnownHosts, accept_new: bool) -> None:
        super().__init__()
        self.node = node
        self.known = known
        self.accept_new = accept_new
        super().set_missing_host_key_policy(_AskConsent(self))

    def set_missing_host_key_policy(self, policy: object) -> None:
        raise AssertionError("the host key policy is not a caller's choice")

    def expect(self, name: str) -> None:
        """Let the handshake ask for a kind of key that is recorded for this host, and compare with it."""
        for key in self.known.of(name):
            self.get_host_keys().add(name, key.get_name(), key)


class _AskConsent(paramiko.MissingHostKeyPolicy):
    def __init__(self, client: _StrictClient) -> None:
        self.client = client

    def missing_host_key(self, client: paramiko.SSHClient, hostname: str, key: paramiko.PKey) -> None:
        ours = self.client
        if ours.accept_new:
            ours.known.record(hostname, as_value(key))
            return
        raise host_keys.unknown(ours.node, as_value(key))


class SshTransport:
    """Nodes over SSH; one instance serves a whole command, from many threads."""

    def __init__(
        self,
        *,
        known_hosts: Path | None = None,
        accept_new: bool = False,
        connect_timeout: float = 10.0,
        ssh_config: str | None = None,
    ) -> None:
        """`known_hosts` is the cluster's own file, read before the user's; `ssh_config` takes the place of
        the user's configuration, "none" stands for an empty one."""
        self._own_known_hosts = known_hosts
        self._accept_new = accept_new
        self._timeout = connect_timeout
        self._ssh_config = Configuration(ssh_config)
        self._known: dict[tuple[str, ...], KnownHosts] = {}
        self._change = threading.Lock()
        logger = logging.getLogger("paramiko")
        logger.addHandler(
            logging.NullHandler()
        )  # its errors come as exceptions; it would print tracebacks besides
        logger.propagate = False

    def connect(self, node: Node) -> Connection:
        """Log in and start the agent."""
        channel, opened = self._session(node, shell_command(agent_argv(node.python)))
        return LinkConnection(Link(node.name, _ChannelPipe(channel, opened), node.workdir))

    def start(self, node: Node, command: str) -> ChannelStream:
        """Log in and give one command line to the login shell; the caller closes the stream."""
        channel, opened = self._session(node, command)
        return ChannelStream(node.name, channel, opened)

    def _session(self, node: Node, command: str) -> tuple[paramiko.Channel, _Opened]:
        way = way_to(node, self._ssh_config)
        opened = retried(lambda: self._log_in(node.name, way))
        try:
            channel = opened.transport.open_session(window_size=WINDOW, timeout=self._timeout)
            channel.exec_command(command)
        except (paramiko.SSHException, OSError, EOFError) as problem:
            opened.close()
            raise Unreachable(node.name, f"logged in, but no session was given: {problem}") from None
        return channel, opened

    def seen(self, node: Node) -> SeenKey:
        """The host key that a node shows now, without logging in, beside what is recorded."""
        way = way_to(node, self._ssh_config)
        key = retried(lambda: self._scan(node.name, way))
        recorded = tuple(as_value(one) for one in self._known_hosts(way).of(way.name))
        return SeenKey(node.name, way.name, as_value(key), recorded)

    def record(self, node: Node, key: HostKey) -> Path:
        """Record a host key for a node; the file that it went to."""
        way = way_to(node, self._ssh_config)
        known = self._known_hosts(way)
        known.record(way.name, key)
        return known.files[0]

    def _known_hosts(self, way: Way) -> KnownHosts:
        files = tuple(str(Path(one).expanduser()) for one in way.known_hosts if one.lower() != "none")
        if self._own_known_hosts is not None:
            files = (str(self._own_known_hosts), *files)
        with self._change:
            if files not in self._known:
                self._known[files] = KnownHosts(
                    [Path(one) for one in files or (os.path.expanduser(KNOWN_HOSTS),)]
                )
            return self._known[files]

    # ---- connecting

    def _log_in(self, node: str, way: Way) -> _Opened:
        """A connection that is logged in, through its gateways; a Dropped may be tried again."""
        connection, before = self._stream(node, way)
        client = _StrictClient(node, self._known_hosts(way), self._accept_new)
        client.expect(way.name)
        opened = [*before, client]
        try:
            client.connect(
                way.host,
                port=way.port,
                username=way.user,
                sock=connection,
                transport_factory=_HearsSignals,
                **self._login(way),  # type: ignore[arg-type]
            )
        except BaseException as problem:
            said = connection.last_words() if isinstance(connection, ProxySocket) else ""
            _close(opened)
            raise _worded(node, way, problem, said) from None
        return _Opened(_transport_of(client), opened)

    def _stream(self, node: str, way: Way) -> tuple[socket.socket | paramiko.Channel, list[_StrictClient]]:
        """The bytes' way to an SSH server, and the clients of the gateways that it goes through."""
        if way.gateway is None:
            return self._tcp(node, way), []
        from fabric import Config
        from fabric import Connection as FabricConnection

        before = self._log_in(f"{node} (gateway {way.gateway.name})", way.gateway)
        # Without an empty configuration of its own fabric would read the user's a second time, in its own
        # way.
        config = Config(ssh_config=paramiko.SSHConfig(), lazy=True)
        outer = FabricConnection(
            way.gateway.host, user=way.gateway.user, port=way.gateway.port, config=config
        )
        outer.client, outer.transport = before.clients[-1], before.transport  # never fabric's own client
        try:
            return FabricConnection(
                way.host, port=way.port, config=config, gateway=outer
            ).open_gateway(), before.clients
        except BaseException as problem:
            before.close()
            raise _worded(node, way, problem) from None

    def _login(self, way: Way) -> dict[str, object]:
        return {
            "key_filename": list(way.identities),
            "look_for_keys": False,
            "allow_agent": way.use_agent,
            "timeout": self._timeout,
            "banner_timeout": HANDSHAKE_LIMIT,
            "auth_timeout": HANDSHAKE_LIMIT,
        }

    def _tcp(self, node: str, way: Way) -> socket.socket:
        try:
            return connected(way, self._timeout)
        except socket.gaierror as problem:
            raise Unreachable(
                node, f"no address for {way.host!r} ({problem.strerror})", "check `host`"
            ) from None
        except ConnectionRefusedError:
            what = f"nothing listens at {way.host} port {way.port}"
            raise Unreachable(node, what, "check `host` and `port`, and that sshd runs there") from None
        except TimeoutError:
            what = f"{way.host} port {way.port} did not answer within {self._timeout:g} s"
            raise Unreachable(node, what, "check the address, the network and the firewall") from None
        except OSError as problem:
            raise Unreachable(node, f"{way.host} port {way.port}: {problem.strerror or problem}") from None

    def _scan(self, node: str, way: Way) -> paramiko.PKey:
        connection, before = self._stream(node, way)
        transport = paramiko.Transport(connection)
        try:
            transport.start_client(timeout=HANDSHAKE_LIMIT)
            return transport.get_remote_server_key()
        except (paramiko.SSHException, EOFError, OSError) as problem:
            raise Dropped(node, str(problem) or "the connection ended") from problem
        finally:
            transport.close()
            _close(before)


@dataclass
class _Opened:
    """A login and the clients that it goes through."""

    transport: paramiko.Transport
    clients: list[_StrictClient]

    def close(self) -> None:
        _close(self.clients)


def _close(clients: Sequence[paramiko.SSHClient]) -> None:
    for client in reversed(clients):
        with contextlib.suppress(EOFError, OSError, paramiko.SSHException):  # the other side was quicker
            client.close()


class _ChannelPipe:
    """One exec channel as a pipe."""

    def __init__(self, channel: paramiko.Channel, opened: _Opened) -> None:
        self._channel = channel
        self._opened = opened
        self._words = bytearray()
        channel.settimeout(BEAT)  # one for both directions: it must not change under a thread that sends

    def receive(self, size: int, timeout: float) -> bytes:
        while self._channel.recv_stderr_ready():  # unread, it would fill the window in the end
            self._words = (self._words + self._channel.recv_stderr(65536))[-2000:]
        return self._channel.recv(size)

    def send(self, data: bytes) -> None:
        _send_all(self._channel, data)

    def close(self) -> None:
        self._opened.close()

    def last_words(self) -> str:
        deadline = time.monotonic() + 1.0
        while (
            not self._channel.exit_status_ready() and not self._channel.closed and time.monotonic() < deadline
        ):
            time.sleep(0.01)
        while self._channel.recv_stderr_ready():
            self._words = (self._words + self._channel.recv_stderr(65536))[-2000:]
        return self._words.decode(errors="replace")


class _Wake(threading.Event):
    """Set by either of two buffers; cleared by the reader alone, who looks at both."""

    def clear(self) -> None:
        pass

    def rearm(self) -> None:
        super().clear()


class _HearsSignals(paramiko.Transport):
    """A transport whose channels keep the name of the signal that ended their program, which paramiko
    drops."""

    def __init__(self, *args: Any, **more: Any) -> None:
        super().__init__(*args, **more)
        table = dict(paramiko.Transport._channel_handler_table)  # type: ignore[attr-defined]
        table[MSG_CHANNEL_REQUEST] = _keep_signal
        self._channel_handler_table = table


def _keep_signal(channel: paramiko.Channel, message: paramiko.Message) -> None:
    ahead = paramiko.Message(message.asbytes())
    ahead.get_int()  # the channel
    if ahead.get_text() == "exit-signal":
        ahead.get_boolean()
        channel.exit_signal = ahead.get_text()  # type: ignore[attr-defined]
    channel._handle_request(message)  # type: ignore[attr-defined]


class ChannelStream:
    """One exec channel as a program's three streams."""

    def __init__(self, node: str, channel: paramiko.Channel, opened: _Opened) -> None:
        self._node = node
        self._channel = channel
        self._opened = opened
        self._wake = _Wake()
        channel.settimeout(BEAT)
        for buffer in (channel.in_buffer, channel.in_stderr_buffer):
            buffer.set_event(self._wake)

    def read(self, size: int, timeout: float) -> tuple[str, bytes]:
        while True:
            self._wake.rearm()
            over = self._channel.closed or self._channel.eof_received
            if self._channel.recv_ready():
                return "stdout", self._channel.recv(size)
            if self._channel.recv_stderr_ready():
                return "stderr", self._channel.recv_stderr(size)
            if over:
                self._check_whole()
                return "", b""
            if not self._wake.wait(timeout):
                raise TimeoutError

    def _check_whole(self) -> None:
        """An end without a word from the node is a connection that broke."""
        self._channel.status_event.wait(END_WAIT)
        if self.ended() == (None, None) and not self._opened.transport.is_active():
            raise LinkLost(self._node, "the connection ended in the middle")

    def send(self, data: bytes) -> None:
        try:
            _send_all(self._channel, data)
        except OSError as problem:
            raise LinkLost(self._node, f"it takes no more input ({problem})") from None

    def finish(self) -> None:
        with contextlib.suppress(OSError, EOFError):
            self._channel.shutdown_write()

    def exited(self) -> bool:
        return bool(self._channel.status_event.is_set())

    def ended(self) -> tuple[int | None, int | None]:
        name = getattr(self._channel, "exit_signal", None)
        if name is not None:
            number = getattr(signal, f"SIG{name}", None)
            return None, int(number) if number is not None else None
        status = self._channel.exit_status if self._channel.status_event.is_set() else -1
        return (status, None) if status >= 0 else (None, None)

    def close(self) -> None:
        self._opened.close()


def _send_all(channel: paramiko.Channel, data: bytes) -> None:
    view = memoryview(data)
    while view:
        try:
            sent = channel.send(bytes(view[:PIECE]))
        except TimeoutError:
            continue  # how long silence may last is not decided here
        if not sent:
            raise BrokenPipeError("the channel is closed")
        view = view[sent:]


def _transport_of(client: paramiko.SSHClient) -> paramiko.Transport:
    transport = client.get_transport()
    assert transport is not None
    return transport


def _worded(node: str, way: Way, problem: BaseException, proxy: str = "") -> BaseException:
    """What paramiko says, in our own errors; `proxy` is what a ProxyCommand said."""
    if isinstance(problem, paramiko.BadHostKeyException):
        return host_keys.changed(node, way.name, as_value(problem.expected_key), as_value(problem.key))
    if isinstance(problem, paramiko.PasswordRequiredException):
        hint = "add it to an ssh agent with `ssh-add`, or name another one in the inventory (`key`)"
        return LoginRefused(node, f"the key {', '.join(way.identities)} is locked by a passphrase", hint)
    no_key = isinstance(problem, paramiko.SSHException) and "No authentication methods" in str(problem)
    if isinstance(problem, paramiko.AuthenticationException) or no_key:
        tried = [*way.identities, *(["the keys of the ssh agent"] if way.use_agent else [])]
        who = f"{way.user or 'the default user'}@{way.host}"
        hint = f"try `ssh -p {way.port} {who}`; name `user` and `key` in the inventory"
        return LoginRefused(node, f"no key was accepted for {who} (tried {', '.join(tried) or 'none'})", hint)
    if isinstance(problem, paramiko.ssh_exception.IncompatiblePeer):
        return Unreachable(node, f"no common way to encrypt: {problem}")
    if isinstance(problem, paramiko.ChannelException):
        what = f"the gateway {way.gateway.name if way.gateway else ''} can't reach {way.name}: {problem.text}"
        return Unreachable(node, what, "check `host` and `port` as the gateway sees them")
    if proxy and isinstance(problem, (paramiko.SSHException, EOFError, OSError)):
        return Unreachable(node, f"its ProxyCommand said: {proxy}", f"try `{way.proxy_command}`")
    if isinstance(problem, (paramiko.SSHException, EOFError, OSError)):
        return Dropped(node, str(problem) or "the connection ended during the handshake")
    return problem


def transport_of(cluster: Cluster) -> SshTransport:
    """The transport that records new keys where a cluster keeps them."""
    return SshTransport(known_hosts=Path(cluster.known_hosts) if cluster.known_hosts else None)
