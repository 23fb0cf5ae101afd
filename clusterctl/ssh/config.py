"""Find out how to reach an SSH server: from the inventory first, then from the user's SSH configuration.

The configuration is read as OpenSSH reads it.
"""

from __future__ import annotations

import os
import pwd
import re
import socket
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from clusterctl.errors import UsageError
from clusterctl.inventory.addresses import host_and_port
from clusterctl.settings import inherited
from clusterctl.ssh.config_query import Answers, Configuration
from clusterctl.ssh.host_keys import PLAIN_KINDS, key_file

if TYPE_CHECKING:
    from clusterctl.inventory.cluster import Node

KNOWN_HOSTS = "~/.ssh/known_hosts"
IDENTITIES = ("~/.ssh/id_rsa", "~/.ssh/id_ecdsa", "~/.ssh/id_ed25519")
LONGEST_CHAIN = 8
AGENT = "SSH_AUTH_SOCK"
TICKETS = "KRB5CCNAME"


def lookup_name(host: str, port: int) -> str:
    """Return the name that known_hosts files use for a host and port."""
    return host if port == 22 else f"[{host}]:{port}"


@dataclass(frozen=True)
class Route:
    """How to reach one SSH server, from the inventory and the user's SSH configuration."""

    host: str
    port: int = 22
    user: str | None = None
    identities: tuple[str, ...] = ()
    """Existing key files, in the order in which they are offered."""
    known_hosts: tuple[str, ...] = ()
    use_agent: bool = True
    """Whether every key of the ssh agent may be offered."""
    gateway: Route | None = None
    destination: str = ""
    """The host name by which OpenSSH's configuration was queried."""
    key: str | None = None
    """The key file from the inventory. A node uses only this key; its gateways try it first."""
    alias: str | None = None
    """HostKeyAlias: the name used in known_hosts files."""
    family: str = "any"
    """any, inet or inet6."""
    bind_address: str | None = None
    connect_timeout: float | None = None
    proxy_command: str | None = None
    """A shell command whose standard input and output lead to the server."""
    joins_master: bool = False
    """Whether the user's configuration sets ControlMaster (shared connections)."""
    key_exchanges: str = ""
    ciphers: str = ""
    only_openssh: str = ""
    """The first configured option that only OpenSSH's program supports; "" if there is none."""

    @property
    def name(self) -> str:
        return self.alias or lookup_name(self.host, self.port)

    @property
    def first(self) -> Route:
        """Return the server that this machine connects to directly."""
        return self.gateway.first if self.gateway else self


def route_to(node: Node, config: Configuration | str | None = None) -> Route:
    """Return how to reach a node; pass a Configuration to query OpenSSH only once for many nodes.

    A string is the path of a file that replaces the user's configuration; "none" means an empty one.
    """
    configuration = config if isinstance(config, Configuration) else Configuration(config)
    key = (node.host, node.user, node.port, node.gateway, node.key)
    route: Route | None = configuration.routes.get(key)
    if route is None:
        route = _resolved(
            node.host, node.user, node.port if node.port != 22 else None, node.gateway, configuration
        )
        route = route if node.key is None else _with_identity(route, os.path.expanduser(node.key))
        configuration.routes[key] = route
    return route


def _resolved(
    host: str, user: str | None, port: int | None, gateway: str | None, config: Configuration, depth: int = 0
) -> Route:
    if depth > LONGEST_CHAIN:
        problem = f"{host}: there are more than {LONGEST_CHAIN} gateways before it, or they form a loop"
        raise UsageError(problem, "see ProxyJump in ~/.ssh/config")
    answers = config.of(host, user, port)
    before = None
    for jump in (gateway or _one(answers, "proxyjump") or "").split(","):
        if jump.strip():
            before = _jump(jump.strip(), before, config, depth)
    route = Route(
        host=_one(answers, "hostname") or host,
        port=int(_one(answers, "port") or port or 22),
        user=_one(answers, "user") or user,
        gateway=before,
        destination=host,
        alias=_one(answers, "hostkeyalias"),
        family=_one(answers, "addressfamily") or "any",
        bind_address=_one(answers, "bindaddress"),
        connect_timeout=_seconds(_one(answers, "connecttimeout")),
        joins_master=_one(answers, "controlmaster") not in (None, "no", "false"),
        key_exchanges=_one(answers, "kexalgorithms") or "",
        ciphers=_one(answers, "ciphers") or "",
    )
    tokens = _tokens(route)
    names = answers.get("identityfile", IDENTITIES)
    identities = [_expanded(identity, tokens) for identity in names]
    command = None if before else _one(answers, "proxycommand")
    route = replace(
        route,
        identities=tuple(identity for identity in identities if os.path.isfile(identity)),
        known_hosts=_known_hosts(answers),
        use_agent=_one(answers, "identitiesonly") != "yes" and answers.get("identityagent") != ("none",),
        proxy_command=command and _filled(command, tokens),
    )
    return replace(route, only_openssh=_only_openssh(route, answers, config, tokens) if answers else "")


def _one(answers: Answers, key: str) -> str | None:
    """Return the value of an option; None if it is not set or is set to `none`."""
    value = answers.get(key, ("none",))[0]
    return None if value.lower() == "none" else value


def _seconds(text: str | None) -> float | None:
    return float(text) if text and text.isdigit() else None


def _known_hosts(answers: Answers) -> tuple[str, ...]:
    """Return the user's and the system's known_hosts files.

    `ssh -G` prints names with spaces unquoted: words are joined if a file of that name exists.
    """
    found: list[str] = []
    for key, default in (("userknownhostsfile", KNOWN_HOSTS), ("globalknownhostsfile", "")):
        paths = answers.get(key, (default,))[0].split()
        while paths:
            many = next((n for n in range(len(paths), 1, -1) if os.path.isfile(" ".join(paths[:n]))), 1)
            found.append(_home(" ".join(paths[:many])))
            paths = paths[many:]
    return tuple(found)


def _jump(text: str, before: Route | None, config: Configuration, depth: int) -> Route:
    """Return the route to one `user@host:port` of a chain; only the first one may have a gateway itself."""
    user, _, address = text.removeprefix("ssh://").rpartition("@")
    host, port = host_and_port(address)
    route = _resolved(host, user or None, port, None, config, depth + 1)
    return route if before is None else replace(route, gateway=before, proxy_command=None)


def _with_identity(route: Route, key: str) -> Route:
    """Return the route with the inventory's key as its only key; its gateways try this key before their own."""
    of_others = route.only_openssh in _LOGIN_ONLY or route.only_openssh.startswith(_KINDS)
    return replace(
        route,
        identities=(key,),
        use_agent=False,
        key=key,
        only_openssh=_key_only_openssh(key) or ("" if of_others else route.only_openssh),
        gateway=route.gateway and _with_key_too(route.gateway, key),
    )


def _with_key_too(route: Route, key: str) -> Route:
    gateway = route.gateway and _with_key_too(route.gateway, key)
    return replace(route, identities=(key, *route.identities), key=key, gateway=gateway)


# ---- how OpenSSH expands %h and other tokens


def _home(path: str) -> str:
    """Expand a leading `~` as OpenSSH does: to the home folder of the account, not to $HOME."""
    if path == "~" or path.startswith("~/"):
        return pwd.getpwuid(os.getuid()).pw_dir + path[1:]
    return os.path.expanduser(path)


def _tokens(route: Route) -> dict[str, str]:
    login = pwd.getpwuid(os.getuid())
    local = socket.gethostname()
    return {
        "%": "%",
        "d": login.pw_dir,
        "h": route.host,
        "i": str(login.pw_uid),
        "k": route.alias or route.destination,
        "L": local.partition(".")[0],
        "l": local,
        "n": route.destination,
        "p": str(route.port),
        "r": route.user or login.pw_name,
        "u": login.pw_name,
    }


def _filled(text: str, tokens: Mapping[str, str]) -> str:
    return re.sub("%(.)", lambda found: tokens.get(found[1], found[0]), text)


def _expanded(path: str, tokens: Mapping[str, str]) -> str:
    """Expand `~`, `%h` and other tokens, and `${NAME}` in a file name of the configuration."""
    names = tuple(re.findall(r"\$\{(\w+)\}", path))
    variables = inherited(names)
    filled = re.sub(r"\$\{(\w+)\}", lambda found: variables.get(found[1], found[0]), _filled(path, tokens))
    return _home(filled)


# ---- what paramiko does not support

_BY_AGENT = "the key of the ssh agent that IdentitiesOnly allows"
_BY_TICKET = "GSSAPIAuthentication with a Kerberos ticket"
_OTHER_AGENT = "IdentityAgent"
MARKS = "certificate authorities or revoked keys in known_hosts"
_KINDS = "keys of the kind"
_LOGIN_ONLY = (
    _BY_AGENT,
    _BY_TICKET,
    _OTHER_AGENT,
    "CertificateFile",
    "PKCS11Provider",
    "HostbasedAuthentication",
)


def _only_openssh(route: Route, answers: Answers, config: Configuration, tokens: Mapping[str, str]) -> str:
    """Return the first configured option that needs OpenSSH's program; "" if paramiko can do everything."""
    if _one(answers, "proxyusefdpass") == "yes" and route.proxy_command:
        return "ProxyUseFdpass"
    for key, name in (
        ("knownhostscommand", "KnownHostsCommand"),
        ("revokedhostkeys", "RevokedHostKeys"),
        ("bindinterface", "BindInterface"),
    ):
        if _one(answers, key):
            return name
    if any(config.has_marks(file) for file in route.known_hosts):
        return MARKS
    # The options below have no effect if the inventory names a key.
    if _one(answers, "pkcs11provider"):
        return "PKCS11Provider"
    if _one(answers, "hostbasedauthentication") == "yes":
        return "HostbasedAuthentication"
    certificates = {_expanded(certificate, tokens) for certificate in answers.get("certificatefile", ())}
    if certificates - {f"{identity}-cert.pub" for identity in route.identities}:
        # Paramiko loads a certificate file that is next to its key.
        return "CertificateFile"
    return _keys_only_openssh(route, answers)


def _keys_only_openssh(route: Route, answers: Answers) -> str:
    named = answers.get("identityagent", (AGENT,))[0]
    here = inherited((AGENT, TICKETS))
    if named not in (AGENT, f"${AGENT}", here.get(AGENT), "none"):
        return _OTHER_AGENT
    kinds = [key_file(identity) for identity in route.identities]
    for kind in kinds:
        if kind.kind not in PLAIN_KINDS and kind.kind != "public":
            return f"{_KINDS} {kind.kind}"
    if not route.use_agent and here.get(AGENT) and any(kind.kind == "public" for kind in kinds):
        return _BY_AGENT
    tickets = here.get(TICKETS) or os.path.exists(f"/tmp/krb5cc_{os.getuid()}")
    if not kinds and not here.get(AGENT) and tickets and _one(answers, "gssapiauthentication") == "yes":
        return _BY_TICKET
    return ""


def _key_only_openssh(path: str) -> str:
    found = key_file(path)
    if found.kind == "public":
        return _BY_AGENT
    return "" if found.kind in PLAIN_KINDS else f"{_KINDS} {found.kind}"


def chain(route: Route) -> Sequence[Route]:
    """Return the routes to all gateways and to the server, first the one that this machine connects to directly."""
    return [*(chain(route.gateway) if route.gateway else []), route]
