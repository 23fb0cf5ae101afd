"""How an SSH server is reached: the inventory first, then the user's SSH configuration as OpenSSH itself
reads it."""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from clusterctl.errors import UsageError

if TYPE_CHECKING:
    from clusterctl.inventory import Node

KNOWN_HOSTS = "~/.ssh/known_hosts"


def lookup_name(host: str, port: int) -> str:
    """A host as known_hosts files name it."""
    return host if port == 22 else f"[{host}]:{port}"


@dataclass(frozen=True)
class Way:
    """How to reach one SSH server, after the inventory and the user's SSH configuration were read."""

    host: str
    port: int = 22
    user: str | None = None
    identities: tuple[str, ...] = ()
    known_hosts: tuple[str, ...] = ()
    use_agent: bool = True
    gateway: Way | None = None

    @property
    def name(self) -> str:
        return lookup_name(self.host, self.port)


def way_to(node: Node, config: str | None = None) -> Way:
    """How a node is reached; `config` takes the place of the user's configuration, "none" stands for an empty
    one."""
    way = _resolved(node.host, node.user, node.port if node.port != 22 else None, node.gateway, config)
    return way if node.key is None else _with_identity(way, os.path.expanduser(node.key))


def _resolved(
    host: str, user: str | None, port: int | None, gateway: str | None, config: str | None, depth: int = 0
) -> Way:
    if depth > 8:
        raise UsageError(f"{host}: its chain of gateways does not end", "see ProxyJump in ~/.ssh/config")
    asked = _ask_openssh(host, user, port, config)
    jump = gateway or next((one for one in asked.get("proxyjump", []) if one != "none"), None)
    if jump is None and asked.get("proxycommand", ["none"])[0] != "none":
        raise UsageError(
            f"{host}: its ProxyCommand is not run", "name the bastion as ProxyJump, or as `gateway`"
        )
    user_files = asked.get("userknownhostsfile", [KNOWN_HOSTS])
    found = tuple(os.path.expanduser(one) for one in asked.get("identityfile", []))
    before = None
    for one in (jump or "").split(","):
        if one.strip():
            before = _jump(one.strip(), before, config, depth)
    return Way(
        host=asked.get("hostname", [host])[0],
        port=int(asked.get("port", [str(port or 22)])[0]),
        user=asked.get("user", [user])[0],
        identities=tuple(one for one in found if os.path.isfile(one)),
        known_hosts=tuple(" ".join([*user_files, *asked.get("globalknownhostsfile", [])]).split()),
        use_agent=asked.get("identitiesonly", ["no"])[0] != "yes",
        gateway=before,
    )


def _jump(text: str, before: Way | None, config: str | None, depth: int) -> Way:
    """One `user@host:port` of a chain; what it goes through itself only counts for the first."""
    user, _, place = text.removeprefix("ssh://").rpartition("@")
    host, port = host_and_port(place)
    way = _resolved(host, user or None, port, None, config, depth + 1)
    return way if before is None else replace(way, gateway=before)


def _ask_openssh(host: str, user: str | None, port: int | None, config: str | None) -> dict[str, list[str]]:
    """What OpenSSH itself makes of a host, by its own reading of its files; nothing where there is no ssh."""
    program = shutil.which("ssh")
    if program is None:
        return {}
    argv = [program, "-G", *(["-F", config] if config else [])]
    argv += ["-l", user] if user else []
    argv += ["-p", str(port)] if port else []
    answer = subprocess.run(
        [*argv, "--", host], capture_output=True, stdin=subprocess.DEVNULL, timeout=20, check=False
    )
    if answer.returncode != 0:
        said = answer.stderr.decode(errors="replace").strip()
        raise UsageError(
            f"ssh can't read its configuration for {host}: {said}", f"try `ssh -G {shlex.quote(host)}`"
        )
    found: dict[str, list[str]] = {}
    for line in answer.stdout.decode(errors="replace").splitlines():
        key, _, value = line.partition(" ")
        found.setdefault(key, []).append(value)
    return found


def host_and_port(text: str) -> tuple[str, int | None]:
    """`host`, `host:22`, `[::1]:22` or a bare IPv6 address."""
    if text.startswith("["):
        host, _, rest = text[1:].partition("]")
        return host, int(rest[1:]) if rest[1:].isdigit() else None
    host, colon, port = text.rpartition(":")
    if colon and port.isdigit() and ":" not in host:
        return host, int(port)
    return text, None


def _with_identity(way: Way, key: str) -> Way:
    """The inventory's key and no other, for the node and, where they say nothing themselves, for its
    gateways."""
    gateway = way.gateway
    return replace(
        way,
        identities=(key,),
        use_agent=False,
        gateway=gateway and replace(gateway, identities=(key, *gateway.identities)),
    )
