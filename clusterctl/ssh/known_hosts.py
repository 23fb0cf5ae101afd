"""Read known_hosts files and decide whether to trust the host key that a server shows.

This module does not import paramiko, because it is imported before the first connection is open, and paramiko after.
"""

from __future__ import annotations

import base64
import fnmatch
import hmac
import logging
import re
import threading
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from clusterctl.ssh import host_keys
from clusterctl.ssh.config import KNOWN_HOSTS, Route, route_to
from clusterctl.ssh.config_query import Configuration
from clusterctl.ssh.host_keys import HostKey, host_key
from clusterctl.text import plural

if TYPE_CHECKING:
    from clusterctl.inventory.cluster import Node


class _Table:
    """One known_hosts file.

    Plain names are looked up in a dictionary (a cluster's file has hundreds); other lines are tried one
    after another. Lines that cannot be read are skipped, as OpenSSH does, and reported in one warning.
    """

    def __init__(self, path: Path) -> None:
        self._plain: dict[str, list[HostKey]] = {}
        self._patterns: list[tuple[str, HostKey]] = []
        # Salt and digest of each hashed name.
        self._hashed: list[tuple[bytes, bytes, HostKey]] = []
        self.revoked: set[str] = set()
        lines = path.read_text(encoding="utf-8", errors="replace").splitlines() if path.is_file() else []
        skipped = [str(number) for number, line in enumerate(lines, 1) if not self._take(line.split())]
        if skipped:
            shown = ", ".join(skipped[:5]) + (", ..." if len(skipped) > 5 else "")
            logging.getLogger("clusterctl").warning(
                "%s: skipped %s that cannot be read: %s", path, plural(len(skipped), "line"), shown
            )

    def _take(self, fields: list[str]) -> bool:
        """Add one line's key; return False if the line is not valid."""
        marker = fields.pop(0) if fields and fields[0].startswith("@") else ""
        if not fields or fields[0].startswith("#") or marker == "@cert-authority":
            return True
        # A key of SSH protocol 1: size in bits, exponent, modulus.
        if len(fields) > 1 and fields[1].isdecimal():
            return True
        if len(fields) < 3 or marker not in ("", "@revoked"):
            return False
        try:
            key = host_key(fields[1], fields[2])
            base64.b64decode(fields[2], validate=True)
            if marker == "@revoked":
                self.revoked.add(key.fingerprint)
            elif fields[0].startswith("|"):
                self._hashed.append((*_salt_and_digest(fields[0]), key))
            elif re.search(r"[*?!]", fields[0]):
                self._patterns.append((fields[0], key))
            else:
                for name in fields[0].split(","):
                    self.add(name, key)
        except ValueError:
            return False
        return True

    def add(self, name: str, key: HostKey) -> None:
        self._plain.setdefault(name.lower(), []).append(key)

    def of(self, name: str) -> list[HostKey]:
        """Return the keys recorded for a host."""
        hashed = [key for salt, digest, key in self._hashed if _is_hash_of(salt, digest, name)]
        return (
            self._plain.get(name.lower(), [])
            + hashed
            + [key for patterns, key in self._patterns if _matches(patterns, name)]
        )


def _salt_and_digest(text: str) -> tuple[bytes, bytes]:
    """Return the two halves of a hashed name, `|1|SALT|DIGEST`; raise ValueError if it has another form."""
    empty, version, salt, digest = text.split("|")
    if empty or version != "1":
        raise ValueError(text)
    return base64.b64decode(salt, validate=True), base64.b64decode(digest, validate=True)


def _is_hash_of(salt: bytes, digest: bytes, name: str) -> bool:
    return hmac.compare_digest(hmac.new(salt, name.encode(), "sha1").digest(), digest)


def _matches(patterns: str, name: str) -> bool:
    """Return whether a line's patterns match a host; a pattern that begins with `!` excludes a host."""
    # Brackets are part of the name, not a pattern.
    escaped = [pattern.replace("[", "[[]") for pattern in patterns.lower().split(",")]
    excluded = [pattern[1:] for pattern in escaped if pattern.startswith("!")]
    if any(fnmatch.fnmatchcase(name.lower(), pattern) for pattern in excluded):
        return False
    return any(
        fnmatch.fnmatchcase(name.lower(), pattern) for pattern in escaped if not pattern.startswith("!")
    )


@dataclass
class KnownHosts:
    """The recorded host keys: the cluster's file first, then the user's. New keys go to the first file."""

    files: Sequence[Path]
    _tables: list[_Table] = field(default_factory=list)
    _change: threading.Lock = field(default_factory=threading.Lock)

    def __post_init__(self) -> None:
        self._tables.extend(_Table(path) for path in self.files)

    def of(self, name: str) -> list[HostKey]:
        """Return the keys recorded for a host in the first file that names it."""
        with self._change:
            return next((found for table in self._tables if (found := table.of(name))), [])

    def of_all(self, name: str) -> tuple[HostKey, ...]:
        """Return the keys recorded for a host in all files, as OpenSSH accepts them."""
        with self._change:
            return tuple(dict.fromkeys(key for table in self._tables for key in table.of(name)))

    def record(self, name: str, key: HostKey) -> None:
        """Append a key to the first file."""
        with self._change:
            if key in self._tables[0].of(name):
                return
            host_keys.append(self.files[0], name, key)
            self._tables[0].add(name, key)

    def judge(self, node: str, name: str, key: HostKey, accept_new: bool) -> None:
        """Accept a host key or raise an error; called during the handshake, before anything else is sent."""
        if any(key.fingerprint in table.revoked for table in self._tables):
            raise host_keys.revoked(node, key)
        recorded = self.of(name)
        if key in recorded:
            return
        if recorded:
            entry = next((candidate for candidate in recorded if candidate.kind == key.kind), recorded[0])
            raise host_keys.changed(node, name, entry, key)
        if not accept_new:
            raise host_keys.unknown(node, key)
        self.record(name, key)


class Recorder:
    """The known_hosts files of each route: the cluster's own, if there is one, then the user's. Each is read once."""

    def __init__(self, own: Path | None, config: Configuration | str | None) -> None:
        """`config` replaces the user's configuration; "none" means an empty one."""
        self._own = own
        self._config = config if isinstance(config, Configuration) else Configuration(config)
        self._known: dict[tuple[str, ...], KnownHosts] = {}
        self._change = threading.Lock()

    def record(self, node: Node, key: HostKey) -> Path:
        """Record a host key for a node; return the file it was written to."""
        route = route_to(node, self._config)
        known = self._known_hosts(route)
        known.record(route.name, key)
        return known.files[0]

    def _known_hosts(self, route: Route) -> KnownHosts:
        with self._change:
            known = self._known.get(route.known_hosts)
            if known is None:
                named = [Path(name).expanduser() for name in route.known_hosts if name.lower() != "none"]
                files = [*([self._own] if self._own else []), *named]
                known = self._known[route.known_hosts] = KnownHosts(files or [Path(KNOWN_HOSTS).expanduser()])
            return known
