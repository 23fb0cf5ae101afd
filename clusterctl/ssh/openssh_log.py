"""Turn OpenSSH's log of a failed login into one of clusterctl's errors."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from clusterctl.errors import ClusterctlError, HostKeyUnknown, LoginRefused, NoAddress, Unreachable
from clusterctl.ssh import host_keys
from clusterctl.ssh.config import Route
from clusterctl.ssh.host_keys import HostKey, key_file
from clusterctl.ssh.retry import STALLED, Dropped

# The prefix of a message, as in `debug1: sshconnect2.c:ssh_userauth2():580 (pid=7): `. A server can put lines of its
# own into its disconnect message, and so choose the error that is shown for it; nothing else depends on these lines.
_BEFORE = re.compile(r"^(?:debug\d: )?(?:[\w.-]+\.c:\w+\(\):\d+ \([^()]*\): )?(?:debug\d: )?", re.MULTILINE)
_LOGGED_IN = re.compile(
    r"^(?:Authenticated to .* using \"|(?:mux_client_request_session: )?master session id: \d)", re.MULTILINE
)
_SHOWN = re.compile(r"^Server host (?:key|certificate): (\S+) (SHA256:[^\s,]+)", re.MULTILINE)
_CHANGED = re.compile(r"^@ +WARNING: REMOTE HOST IDENTIFICATION HAS CHANGED", re.MULTILINE)
_REVOKED = re.compile(
    r"^@ +WARNING: REVOKED HOST KEY|^Host key \S+ \S+ revoked|host key for .* is marked as revoked",
    re.MULTILINE,
)
_UNKNOWN = re.compile(r"^(?:No \S+ host key is known for|Host key verification failed)", re.MULTILINE)
_REFUSED = re.compile(
    r"^(?:\S+: Permission denied|Received disconnect from .*Too many authentication|No more authentication methods|"
    r"Disconnected from .*Too many authentication)",
    re.MULTILINE,
)
_NO_ADDRESS = re.compile(r"^(?:ssh: )?Could not resolve hostname [^:]*: (.*)", re.MULTILINE)
_NO_CONNECTION = re.compile(r"^(?:ssh: )?connect to host \S+ port \d+: (.*)", re.MULTILINE)
_NO_WAY_ON = re.compile(r"^(?:channel \d+: )?open failed: (.*)", re.MULTILINE)
_NO_CIPHER = re.compile(r"^Unable to negotiate .*", re.MULTILINE)
_DROPPED = re.compile(
    r"^(?:(?:kex|ssh)_exchange_identification|banner exchange|Connection (?:closed|reset|timed out)|"
    r"Connection to \S+ port \d+ timed|ssh_dispatch_run_fatal|ssh_packet|Exceeded MaxStartups|"
    r"Not allowed at this time|Received disconnect|Disconnected from|Broken pipe)",
    re.MULTILINE,
)
# The server has sent its first line.
_ANSWERED = re.compile(r"^Authenticating to \S+ as ", re.MULTILINE)
# The last words of a process that waited in vain for the key exchange.
_STALLED = re.compile(
    r"^(?:Authenticating to|SSH2_MSG_KEX|kex: |expecting SSH2)|hostkeyalg|algorithms matched|timed out|not responding",
    re.IGNORECASE,
)


class Unrecorded(Exception):
    """The host key of the server at index `place` of the chain is not recorded; the user may allow recording it."""

    def __init__(self, place: int, error: HostKeyUnknown) -> None:
        super().__init__(place, error)
        self.place = place
        self.error = error


@dataclass(frozen=True)
class HopLog:
    """What one OpenSSH process logged about one server of the chain."""

    node: str
    route: Route
    text: str

    @property
    def logged_in(self) -> bool:
        return _LOGGED_IN.search(self.text) is not None

    @property
    def shown(self) -> HostKey | None:
        """Return the host key that the server showed."""
        found = _SHOWN.search(self.text)
        return HostKey(found[1], found[2]) if found else None


def plain(data: bytes) -> str:
    """Return a log without the prefix of each message."""
    return _BEFORE.sub("", data.decode(errors="replace").replace("\r\n", "\n"))


def culprit(hops: Sequence[HopLog]) -> HopLog:
    """Return the first server without a login; the last server if all have one."""
    return next((hop for hop in hops if not hop.logged_in), hops[-1])


def refusal(
    hops: Sequence[HopLog], proxy_words: str, recorded: Sequence[HostKey], timeout: float, ended: bool
) -> ClusterctlError | Dropped:
    """Return the error for a failed login; `proxy_words`: a ProxyCommand's output; `recorded`: the
    keys known for the server at fault; `ended`: whether ssh has ended."""
    hop = culprit(hops)
    node, route, text = hop.node, hop.route, hop.text
    if hop.logged_in:
        return Unreachable(node, f"logged in, but the server opened no session: {_last_line(text)}")
    if _REVOKED.search(text):
        return host_keys.revoked(node, hop.shown)
    if _CHANGED.search(text) or _UNKNOWN.search(text):
        return _host_key(hop, recorded)
    if _REFUSED.search(text):
        return _login(hop)
    network_error = _network_error(hop, hops, proxy_words)
    if network_error is not None:
        return network_error
    if _NO_CIPHER.search(text):
        return Unreachable(node, f"no common encryption algorithm: {_last_line(text)}")
    if not ended and not hop.shown and "Connection established." not in text and not route.gateway:
        return _no_answer(node, route, timeout)
    if _ANSWERED.search(text) and not hop.shown and (not ended or _STALLED.search(_last_line(text))):
        return Dropped(node, "it answered, but there was no key exchange", STALLED)
    if not ended or _DROPPED.search(text):
        return Dropped(node, _last_line(text) if ended else "the server stopped answering")
    return Unreachable(node, f"ssh: {_last_line(text) or proxy_words or 'it ended without a message'}")


def _host_key(hop: HopLog, recorded: Sequence[HostKey]) -> ClusterctlError:
    shown = hop.shown
    if recorded and shown is not None:
        alike = [entry for entry in recorded if entry.kind == shown.kind]
        return host_keys.changed(hop.node, hop.route.name, (alike or recorded)[0], shown)
    # The key is recorded in a file that only OpenSSH knows.
    if _CHANGED.search(hop.text):
        return host_keys.changed(
            hop.node, hop.route.name, HostKey("another", "key"), shown or HostKey("", "")
        )
    return host_keys.unknown(hop.node, shown)


def _login(hop: HopLog) -> LoginRefused:
    route = hop.route
    if route.identities and all(key_file(identity).locked for identity in route.identities):
        hint = "add the key to an ssh agent with `ssh-add`, or name another key in the inventory (`key`)"
        return LoginRefused(
            hop.node, f"the key {', '.join(route.identities)} is locked by a passphrase", hint
        )
    tried = [*route.identities, *(["the keys of the ssh agent"] if route.use_agent else [])]
    who = f"{route.user or 'the default user'}@{route.host}"
    hint = f"try `ssh -p {route.port} {who}`; name `user` and `key` in the inventory"
    return LoginRefused(hop.node, f"no key was accepted for {who} (tried {', '.join(tried) or 'none'})", hint)


def _network_error(hop: HopLog, hops: Sequence[HopLog], proxy_words: str) -> Unreachable | None:
    """Return what the network, a gateway or a ProxyCommand reports."""
    node, route, text = hop.node, hop.route, hop.text
    index = list(hops).index(hop)
    refused = _NO_WAY_ON.search(hops[index - 1].text) if index else None
    if refused and route.gateway:
        problem = f"the gateway {route.gateway.name} can't reach {route.name}: {refused[1]}"
        return Unreachable(node, problem, "check `host` and `port` as the gateway sees them")
    if route.proxy_command and proxy_words:
        return Unreachable(node, f"its ProxyCommand printed: {proxy_words}", f"try `{route.proxy_command}`")
    unresolved = _NO_ADDRESS.search(text)
    if unresolved:
        message = f"no address for {route.host!r} ({unresolved[1]})"
        return NoAddress(node, message, "check `host`, and the name server of this machine")
    failed = _NO_CONNECTION.search(text)
    if failed is None:
        return None
    if "refused" in failed[1]:
        problem = f"nothing listens at {route.host} port {route.port}"
        return Unreachable(node, problem, "check `host` and `port`, and that sshd runs there")
    if "timed out" in failed[1]:
        return _no_answer(node, route, 0)
    return Unreachable(node, f"{route.host} port {route.port}: {failed[1]}")


def _no_answer(node: str, route: Route, timeout: float) -> Unreachable:
    within = f" within {timeout:g} s" if timeout else " in time"
    problem = f"{route.host} port {route.port} did not answer{within}"
    return Unreachable(node, problem, "check the address, the network and the firewall")


def _last_line(text: str) -> str:
    lines = [line for line in text.splitlines() if line.strip()]
    return lines[-1].strip()[:300] if lines else ""
