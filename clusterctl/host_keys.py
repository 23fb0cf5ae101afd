"""Host keys as values: what was shown, what is recorded, and the words for a key that is not taken."""

from __future__ import annotations

import base64
import binascii
import hashlib
import os
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from clusterctl.errors import HostKeyChanged, HostKeyUnknown


@dataclass(frozen=True)
class HostKey:
    """A public key: its kind, as in ssh-ed25519, and its fingerprint, as ssh-keygen shows it."""

    kind: str
    fingerprint: str
    base64: str = ""
    """The key itself; empty where only its fingerprint was told."""

    def __str__(self) -> str:
        return f"{self.kind} {self.fingerprint}"


def host_key(kind: str, text: str) -> HostKey:
    """The key of a line in a known_hosts file."""
    try:
        digest = hashlib.sha256(base64.b64decode(text)).digest()
    except binascii.Error:
        digest = b""
    return HostKey(kind, "SHA256:" + base64.b64encode(digest).decode().rstrip("="), text)


@dataclass(frozen=True)
class SeenKey:
    """A host key as it was shown, and those that are recorded for that host."""

    node: str
    name: str
    key: HostKey
    recorded: tuple[HostKey, ...]

    @property
    def state(self) -> str:
        """known, new or changed."""
        if not self.recorded:
            return "new"
        return "known" if self.key in self.recorded else "changed"

    @property
    def fingerprint(self) -> str:
        return self.key.fingerprint

    def refusal(self) -> HostKeyChanged:
        """Why a changed key is not taken."""
        return changed(self.node, self.name, self.recorded[0], self.key)

    def as_json(self) -> dict[str, str]:
        return {
            "node": self.node,
            "host": self.name,
            "type": self.key.kind,
            "fingerprint": self.key.fingerprint,
            "state": self.state,
        }


def changed(node: str, name: str, recorded: HostKey, shown: HostKey) -> HostKeyChanged:
    """Refused: another key is recorded."""
    what = f"its host key changed: recorded is {recorded}, shown was {shown}; somebody may stand in between"
    hint = (
        f"only if you know why it changed: `ssh-keygen -R '{name}' -f FILE`, "
        f"then `clusterctl nodes trust {node}`"
    )
    return HostKeyChanged(node, what, hint)


def unknown(node: str, shown: HostKey | None) -> HostKeyUnknown:
    """Refused: no key is recorded."""
    hint = f"`clusterctl nodes trust {node}` shows and records it; --accept-new-host-keys records it unseen"
    return HostKeyUnknown(node, f"its host key is not known: {shown or 'it showed none'}", hint)


def recorded(name: str, files: Sequence[Path]) -> tuple[HostKey, ...]:
    """The keys that known_hosts files have for a host, by ssh-keygen's own reading: hashed names, patterns."""
    found: list[HostKey] = []
    for path in files:
        if not path.is_file():
            continue
        argv = ["ssh-keygen", "-F", name, "-f", str(path)]
        said = subprocess.run(argv, capture_output=True, stdin=subprocess.DEVNULL, check=False).stdout
        for line in said.decode(errors="replace").splitlines():
            words = line.split()
            if len(words) >= 3 and not line.startswith(("#", "@")):
                found.append(host_key(words[1], words[2]))
    return tuple(dict.fromkeys(found))


def surely_new(name: str, files: Sequence[Path]) -> bool:
    """Whether no line of these files can mean a host; hashed names, patterns and marks may mean any."""
    for path in files:
        try:
            data = path.read_bytes().lower()
        except OSError:
            continue
        if name.lower().encode() in data or any(one in data for one in (b"|1|", b"*", b"?", b"\n@")):
            return False
        if data.startswith(b"@"):
            return False
    return True


def append(path: Path, name: str, key: HostKey) -> None:
    """Record a key at the end of a file; what stands there is not touched."""
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    there = path.read_bytes() if path.is_file() else b""
    line = f"{name} {key.kind} {key.base64}\n"
    if there and not there.endswith(b"\n"):
        line = "\n" + line
    handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    with os.fdopen(handle, "a", encoding="utf-8") as file:
        file.write(line)
