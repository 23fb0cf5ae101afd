"""The host keys that are recorded, held in memory, and the judgement of one that is shown."""

from __future__ import annotations

import base64
import binascii
import fnmatch
import hmac
import re
import threading
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from clusterctl import host_keys
from clusterctl.errors import HostKeyChanged, UsageError
from clusterctl.host_keys import HostKey, host_key


class _Table:
    """One known_hosts file: plain names by lookup (a cluster's file has hundreds), the rest by trying."""

    def __init__(self, path: Path) -> None:
        self._plain: dict[str, list[HostKey]] = {}
        self._tried: list[tuple[str, HostKey]] = []
        self.revoked: set[str] = set()
        lines = path.read_text(encoding="utf-8", errors="replace").splitlines() if path.is_file() else []
        for number, line in enumerate(lines, 1):
            self._take(line.split(), f"{path}:{number}")

    def _take(self, words: list[str], where: str) -> None:
        marker = words.pop(0) if words and words[0].startswith("@") else ""
        if len(words) < 3 or words[0].startswith("#") or marker == "@cert-authority":
            return
        try:
            base64.b64decode(words[2], validate=True)
        except binascii.Error:
            raise UsageError(f"{where}: unreadable key {words[2]!r:.60}", "mend or remove the line") from None
        key = host_key(words[1], words[2])
        if marker == "@revoked":
            self.revoked.add(key.fingerprint)
        elif re.search(r"[*?!|]", words[0]):
            self._tried.append((words[0], key))
        else:
            for name in words[0].split(","):
                self.add(name, key)

    def add(self, name: str, key: HostKey) -> None:
        self._plain.setdefault(name.lower(), []).append(key)

    def of(self, name: str) -> list[HostKey]:
        return self._plain.get(name.lower(), []) + [key for said, key in self._tried if _names(said, name)]


def _names(said: str, name: str) -> bool:
    """Whether a line's first word, hashed or with patterns, means a host."""
    if said.startswith("|1|"):
        _, _, salt, digest = said.split("|")
        found = hmac.new(base64.b64decode(salt), name.encode(), "sha1").digest()
        return hmac.compare_digest(found, base64.b64decode(digest))
    patterns = [one.replace("[", "[[]") for one in said.lower().split(",")]  # brackets are the name's own
    if any(fnmatch.fnmatchcase(name.lower(), one[1:]) for one in patterns if one.startswith("!")):
        return False
    return any(fnmatch.fnmatchcase(name.lower(), one) for one in patterns if not one.startswith("!"))


@dataclass
class KnownHosts:
    """The recorded host keys: first those of the cluster's own file, then the user's; new ones go into the
    first file."""

    files: Sequence[Path]
    _tables: list[_Table] = field(default_factory=list)
    _change: threading.Lock = field(default_factory=threading.Lock)

    def __post_init__(self) -> None:
        self._tables.extend(_Table(path) for path in self.files)

    def of(self, name: str) -> list[HostKey]:
        """The keys recorded for a host, in the first file that names it."""
        with self._change:
            return next((found for table in self._tables if (found := table.of(name))), [])

    def record(self, name: str, key: HostKey) -> None:
        """Append a key to the first file; what stands there is not touched."""
        with self._change:
            if key in self._tables[0].of(name):
                return
            host_keys.append(self.files[0], name, key)
            self._tables[0].add(name, key)

    def judge(self, node: str, name: str, key: HostKey, accept_new: bool) -> None:
        """Take a host's key, or say why not; called before anything but the handshake was sent."""
        if any(key.fingerprint in table.revoked for table in self._tables):
            what = f"its host key {key} is marked as revoked in your known_hosts"
            raise HostKeyChanged(node, what, "do not connect; ask who runs this node")
        recorded = self.of(name)
        if key in recorded:
            return
        if recorded:
            kept = next((one for one in recorded if one.kind == key.kind), recorded[0])
            raise host_keys.changed(node, name, kept, key)
        if not accept_new:
            raise host_keys.unknown(node, key)
        self.record(name, key)
