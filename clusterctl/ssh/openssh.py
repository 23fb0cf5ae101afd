"""Reach nodes with OpenSSH's `ssh` program.

The user's whole configuration applies, except for the options that the command line sets. `LoginQueue`
limits handshakes with one server and remembers failed gateways: the child processes do not know about each
other.
"""

from __future__ import annotations

import shlex
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from clusterctl.agent.frames import SILENCE
from clusterctl.errors import HostKeyUnknown, NodeError, Unreachable, UsageError
from clusterctl.settings import environment
from clusterctl.ssh import host_keys
from clusterctl.ssh.config import Route, chain, route_to
from clusterctl.ssh.config_query import Configuration
from clusterctl.ssh.gateways import HANDSHAKES_AT_ONCE, REMEMBERED
from clusterctl.ssh.host_keys import HostKey, SeenKey
from clusterctl.ssh.known_hosts import Recorder
from clusterctl.ssh.openssh_child import ENDING, Child, ChildStream, Logs
from clusterctl.ssh.openssh_log import HopLog, Unrecorded, culprit, plain, refusal
from clusterctl.ssh.retry import HANDSHAKE_LIMIT, retried
from clusterctl.transport.open_files import raise_limit

if TYPE_CHECKING:
    from clusterctl.inventory.cluster import Node
    from clusterctl.transport.connection import Connection


CONNECT_TIMEOUT = 10.0
TALKING = ("sshconnect.c:*", "sshconnect2.c:*", "mux.c:*", "channels.c:channel_input_open_failure():*")
# The cheapest algorithms that both sides support; mlkem768 is as fast as the elliptic curves.
QUICK = {
    "KexAlgorithms": ("mlkem768x25519-sha256", "curve25519-sha256", "curve25519-sha256@libssh.org"),
    "Ciphers": ("aes128-gcm@openssh.com", "aes256-gcm@openssh.com"),
}
SCANNING = {"PreferredAuthentications": "none", "ControlPath": "none", "GlobalKnownHostsFile": "none"}
FIXED = {
    "BatchMode": "yes",
    "ClearAllForwardings": "yes",
    "ConnectionAttempts": "1",
    "ControlMaster": "no",
    "ControlPersist": "no",
    "FingerprintHash": "sha256",
    "ForwardAgent": "no",
    "ForwardX11": "no",
    "HashKnownHosts": "no",
    "NoHostAuthenticationForLocalhost": "no",
    "NumberOfPasswordPrompts": "0",
    "PermitLocalCommand": "no",
    "RemoteCommand": "none",
    "RequestTTY": "no",
    "Tunnel": "no",
    "UpdateHostKeys": "no",
}


class OpenSshTransport(Recorder):
    """Reaches nodes over SSH with one child process each; thread-safe, one instance serves a whole command."""

    def __init__(
        self,
        *,
        known_hosts: Path | None = None,
        accept_new: bool = False,
        connect_timeout: float = CONNECT_TIMEOUT,
        ssh_config: Configuration | str | None = None,
    ) -> None:
        """`known_hosts` is the cluster's file, read before the user's.

        `ssh_config` replaces the user's configuration; "none" means an empty one.
        """
        super().__init__(known_hosts, ssh_config)
        if self._config.program is None:
            raise UsageError(
                "this machine has no `ssh` program", "install OpenSSH's client, or use --ssh paramiko"
            )
        self._accept_new = accept_new
        self._timeout = connect_timeout
        self._queues: dict[tuple[str, int, str | None], LoginQueue] = {}
        raise_limit()

    def connect(self, node: Node) -> Connection:
        """Log in and start the agent; return the connection to it."""
        from clusterctl.transport.connection import connect_agent

        return connect_agent(node, self._log_in)

    def start(self, node: Node, command: str) -> ChildStream:
        """Log in and run one command line; return its streams."""
        line, mark = ChildStream.wrapped(command)
        beat = ["-o", f"ServerAliveInterval={SILENCE / 2:.0f}", "-o", "ServerAliveCountMax=1"]
        return ChildStream(self._log_in(node, line, beat), mark)

    def seen(self, node: Node) -> SeenKey:
        """Return the host key that a node shows now, and the recorded ones, without logging in."""
        route = route_to(node, self._config)
        recorded = self._known_hosts(route).of_all(route.name)
        key = retried(lambda: self._scan(node.name, route, [entry.kind for entry in recorded]))
        return SeenKey(node.name, route.name, key, recorded)

    # ---- logging in

    def _log_in(self, node: Node, command: str, more: Sequence[str] = ()) -> Child:
        """Return a logged-in child; with `accept_new`, record new host keys after a successful login."""
        route = route_to(node, self._config)
        with tempfile.TemporaryDirectory(prefix="clusterctl-ssh-") as folder:
            new: dict[int, Path] = {}
            # Find unknown hosts here: otherwise ssh would fail first and a second handshake would be
            # needed.
            if self._accept_new:
                for index, hop in enumerate(chain(route)):
                    if not self._known_hosts(hop).of_all(hop.name):
                        new[index] = Path(folder) / str(index)
            while True:
                try:
                    child = retried(lambda: self._attempt(node.name, route, [*more], command, new))
                    break
                except Unrecorded as found:
                    if found.place in new:
                        raise found.error from None
                    new[found.place] = Path(folder) / str(found.place)
            for index, path in new.items():
                self._keep(chain(route)[index], path)
        return child

    def _keep(self, route: Route, path: Path) -> None:
        """Record the host keys that ssh wrote into a separate file."""
        for key in _keys_in(path):
            self._known_hosts(route).record(route.name, key)

    def _attempt(self, node: str, route: Route, more: list[str], command: str, new: dict[int, Path]) -> Child:
        routes = chain(route)
        with self._queue(route).passed(node, len(routes) > 1):
            logs = Logs(len(routes))
            argv = [*self._argv(routes, logs.paths, new), *more, "-T", "--", route.destination, command]
            child = self._child(node, argv, logs, len(routes) > 1)
            try:
                limit = len(routes) * self._limit(route) + HANDSHAKE_LIMIT
                if child.log_in(lambda: _hops(node, routes, logs)[-1].logged_in, limit):
                    return child
                problem = self._refusal(node, routes, child)
            except BaseException:
                child.close()
                raise
            child.close()
            raise problem

    def _refusal(self, node: str, routes: Sequence[Route], child: Child) -> BaseException:
        ended = child.has_ended(ENDING)
        child.logs.take_all()
        hops = _hops(node, routes, child.logs)
        hop = culprit(hops)
        output = child.words_left().decode(errors="replace").strip()
        recorded = self._known_hosts(hop.route).of_all(hop.route.name)
        problem = refusal(hops, output, recorded, self._limit(hop.route), ended)
        if isinstance(problem, HostKeyUnknown) and self._accept_new:
            return Unrecorded(hops.index(hop), problem)
        if isinstance(problem, NodeError) and hop is hops[0] and len(hops) > 1:
            self._queue(routes[-1]).failed(routes[0].name, problem)
        return problem

    def _queue(self, route: Route) -> LoginQueue:
        """Return the login queue of the server that this machine connects to directly."""
        first = route.first
        with self._change:
            return self._queues.setdefault((first.host, first.port, first.user), LoginQueue())

    def _limit(self, route: Route) -> float:
        """Return the connect timeout: the user's flag, else ssh_config's ConnectTimeout."""
        return route.connect_timeout or self._timeout if self._timeout == CONNECT_TIMEOUT else self._timeout

    def _scan(self, node: str, route: Route, kinds: Sequence[str]) -> HostKey:
        """Return the server's host key, of a recorded kind if the server has one.

        The login to the server itself offers no credentials; gateways before it are logged in to normally.
        """
        with (
            tempfile.TemporaryDirectory(prefix="clusterctl-ssh-") as folder,
            self._queue(route).passed(node, route.gateway is not None),
        ):
            routes = chain(route)
            last, path = len(routes) - 1, Path(folder) / "key"
            logs = Logs(len(routes))
            options = {**SCANNING, **self._kinds(kinds)}
            first = [word for key, value in options.items() for word in ("-o", f"{key}={value}")]
            argv = [
                *first,
                *self._argv(routes, logs.paths, {last: path}, alone=True),
                "--",
                route.destination,
                "exit",
            ]
            child = self._child(node, argv, logs, len(routes) > 1)
            try:
                limit = len(routes) * self._limit(route) + HANDSHAKE_LIMIT
                child.log_in(lambda: path.exists(), limit)
                found = _keys_in(path)
                if found:
                    return found[0]
                problem = self._refusal(node, routes, child)
            finally:
                child.close()
            raise problem.error if isinstance(problem, Unrecorded) else problem

    # ---- the command line

    def _child(self, node: str, argv: Sequence[str], logs: Logs, through_shell: bool) -> Child:
        env = {**environment(), "SSH_ASKPASS_REQUIRE": "never"}
        if through_shell:
            # This shell reads the ProxyCommand, which is quoted for /bin/sh.
            env["SHELL"] = "/bin/sh"
        try:
            return Child(node, [str(self._config.program), *argv], env, logs)
        except OSError as problem:
            logs.close()
            raise Unreachable(node, f"ssh can't be started: {problem.strerror}") from None

    def _argv(
        self, routes: Sequence[Route], logs: Sequence[str], new: Mapping[int, Path], alone: bool = False
    ) -> list[str]:
        """Return the options for the last server of a chain, including the commands for the servers before
        it."""
        route, index = routes[-1], len(routes) - 1
        files = [str(file) for file in self._known_hosts(route).files]
        if index in new:
            files = [str(new[index])] if alone else [str(new[index]), *files]
        options = {
            **FIXED,
            **self._quick(route),
            "ConnectTimeout": f"{max(self._limit(route), 1):.0f}",
            "StrictHostKeyChecking": "accept-new" if index in new else "yes",
            "UserKnownHostsFile": " ".join(_quoted(file) for file in files),
            **_log_level(self._config.version),
        }
        if not route.joins_master:
            options["ControlPath"] = "none"
        if index:
            options["ProxyCommand"] = self._proxy_command(routes, logs, new)
            options["ProxyUseFdpass"] = "no"
        argv = ["-F", self._config.file] if self._config.file else []
        argv += ["-E", logs[index], "-p", str(route.port), *(["-l", route.user] if route.user else [])]
        if route.key:
            argv += ["-i", route.key.replace("%", "%%")]
            options |= {} if route.use_agent else {"IdentitiesOnly": "yes"}
        return argv + [word for key, value in options.items() for word in ("-o", f"{key}={value}")]

    def _proxy_command(self, routes: Sequence[Route], logs: Sequence[str], new: Mapping[int, Path]) -> str:
        """Return the ssh command that connects through the previous server; -J would not pass our options
        on."""
        route, before = routes[-1], routes[-2]
        host = f"[{route.host}]" if ":" in route.host else route.host
        argv = [str(self._config.program), *self._argv(routes[:-1], logs, new), "-W", f"{host}:{route.port}"]
        return shlex.join([*argv, "--", before.destination]).replace("%", "%%")

    def _kinds(self, kinds: Sequence[str]) -> dict[str, str]:
        """Return options that prefer keys of these kinds; exclude certificates, since only keys are
        recorded."""
        names = self._config.built_in().get("hostkeyalgorithms", ("",))[0].split(",")
        plain = [name for name in names if name and "-cert-" not in name]
        wanted = {"rsa-sha2-512", "rsa-sha2-256", *kinds} if "ssh-rsa" in kinds else set(kinds)
        # `sorted` is stable: equal elements keep their order.
        ordered = sorted(plain, key=lambda name: name not in wanted)
        return {"HostKeyAlgorithms": ",".join(ordered)} if ordered else {}

    def _quick(self, route: Route) -> dict[str, str]:
        """Return the same algorithms with the fast ones first; an order that the user chose is kept."""
        usual = self._config.built_in()
        found = {}
        for key, ours, usually in (
            ("KexAlgorithms", route.key_exchanges, usual.get("kexalgorithms", ("",))[0]),
            ("Ciphers", route.ciphers, usual.get("ciphers", ("",))[0]),
        ):
            if ours and ours == usually:
                names = ours.split(",")
                quick = [name for name in QUICK[key] if name in names]
                found[key] = ",".join([*quick, *(name for name in names if name not in quick)])
        return found


def _hops(node: str, routes: Sequence[Route], logs: Logs) -> list[HopLog]:
    last = len(routes) - 1
    return [
        HopLog(node if index == last else f"{node} (gateway {route.name})", route, plain(logs.texts[index]))
        for index, route in enumerate(routes)
    ]


def _log_level(version: tuple[int, int]) -> dict[str, str]:
    """Return the log options that show why a login failed.

    At level ERROR the server's banner stays out of a node's output. OpenSSH before 8.5 needs level DEBUG1
    instead, which lets the banner through.
    """
    if version >= (8, 5):
        return {"LogLevel": "ERROR", "LogVerbose": ",".join(TALKING)}
    return {"LogLevel": "DEBUG1"}


def _quoted(path: str) -> str:
    """Return a path quoted for ssh's configuration."""
    return '"' + path.replace("%", "%%") + '"'


def _keys_in(path: Path) -> list[HostKey]:
    """Return the keys that ssh wrote into a new file."""
    lines = path.read_text(encoding="utf-8").splitlines() if path.is_file() else []
    return [host_keys.host_key(*line.split()[1:3]) for line in lines if len(line.split()) >= 3]


class LoginQueue:
    """Limits the logins to one server.

    The first node behind a gateway logs in alone. If the gateway refuses the login or does not answer, this
    happens once and not for every node.
    """

    def __init__(self) -> None:
        self._places = threading.Semaphore(HANDSHAKES_AT_ONCE)
        self._first = threading.Lock()
        self._open = threading.Event()
        self._failed: NodeError | None = None
        self._failed_at = 0.0

    @contextmanager
    def passed(self, node: str, is_gateway: bool) -> Iterator[None]:
        """Wait for a free place for one handshake; raise the gateway's error if it has just failed."""
        alone = is_gateway and self._goes_first()
        try:
            if self._failed is not None and time.monotonic() - self._failed_at < REMEMBERED:
                raise type(self._failed)(node, self._failed.reason, self._failed.hint)
            with self._places:
                yield
            self._open.set()
        finally:
            if alone:
                self._first.release()

    def _goes_first(self) -> bool:
        if not self._open.is_set():
            self._first.acquire()
            if not self._open.is_set():
                return True
            self._first.release()
        return False

    def failed(self, name: str, problem: NodeError) -> None:
        """Record that the gateway itself failed, not a node behind it."""
        self._failed = type(problem)(problem.node, f"its gateway {name}: {problem.reason}", problem.hint)
        self._failed_at = time.monotonic()
        self._open.clear()
