"""Host keys as values, the errors for keys that are refused, and what a private key file contains."""

from __future__ import annotations

import base64
import binascii
import hashlib
import os
import re
import struct
from dataclasses import dataclass
from pathlib import Path

from clusterctl.errors import HostKeyChanged, HostKeyUnknown


@dataclass(frozen=True)
class HostKey:
    """A public key: its kind, as in ssh-ed25519, and its fingerprint, as ssh-keygen shows it."""

    kind: str
    fingerprint: str
    base64: str = ""
    """The key itself; empty if only its fingerprint is known."""

    def __str__(self) -> str:
        return f"{self.kind} {self.fingerprint}"


def host_key(kind: str, text: str) -> HostKey:
    """Return the key of a line in a known_hosts file."""
    try:
        digest = hashlib.sha256(base64.b64decode(text)).digest()
    except binascii.Error:
        digest = b""
    return HostKey(kind, "SHA256:" + base64.b64encode(digest).decode().rstrip("="), text)


@dataclass(frozen=True)
class SeenKey:
    """The host key that a node showed, and those recorded for it."""

    node: str
    name: str
    key: HostKey
    recorded: tuple[HostKey, ...]

    @property
    def state(self) -> str:
        """Return known, new or changed."""
        if not self.recorded:
            return "new"
        return "known" if self.key in self.recorded else "changed"

    @property
    def fingerprint(self) -> str:
        return self.key.fingerprint

    def refusal(self) -> HostKeyChanged:
        """Return the error for a changed key."""
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
    """Return the error of a host key that differs from the recorded one."""
    problem = f"its host key changed: recorded is {recorded}, shown was {shown}; this can be an attack"
    hint = (
        f"only if you know why it changed: `ssh-keygen -R '{name}' -f FILE`, "
        f"then `clusterctl nodes trust {node}`"
    )
    return HostKeyChanged(node, problem, hint)


def revoked(node: str, shown: HostKey | None) -> HostKeyChanged:
    """Return the error of a host key that known_hosts marks as revoked."""
    problem = f"its host key {shown or ''} is marked as revoked in your known_hosts".replace("  ", " ")
    return HostKeyChanged(node, problem, "do not connect; ask the administrator of this node")


def unknown(node: str, shown: HostKey | None) -> HostKeyUnknown:
    """Return the error of a host without a recorded key."""
    # The hint is the same for every node, so that it is shown once.
    hint = "`clusterctl nodes trust` shows and records new keys; --accept-new-host-keys records them without asking"
    return HostKeyUnknown(node, f"its host key is not known: {shown or 'it showed none'}", hint)


def append(path: Path, name: str, key: HostKey) -> None:
    """Append a key to a file."""
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    existing = path.read_bytes() if path.is_file() else b""
    line = f"{name} {key.kind} {key.base64}\n"
    if existing and not existing.endswith(b"\n"):
        line = "\n" + line
    handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    with os.fdopen(handle, "a", encoding="utf-8") as file:
        file.write(line)


PLAIN_KINDS = (
    "",
    "ssh-rsa",
    "ssh-ed25519",
    "ecdsa-sha2-nistp256",
    "ecdsa-sha2-nistp384",
    "ecdsa-sha2-nistp521",
    "ssh-dss",
)
"""Key types that every SSH library reads, and ssh-dss, which servers no longer accept.

"" stands for older formats of key files, whose type `key_file` does not read.
"""
_OPENSSH = re.compile(rb"-----BEGIN OPENSSH PRIVATE KEY-----(.*?)-----END", re.DOTALL)
_MAGIC = b"openssh-key-v1\0"


@dataclass(frozen=True)
class KeyFile:
    """One identity file."""

    kind: str = ""
    """The key type, such as ssh-ed25519; `public` if the file has only the public key; "" if it is not known."""
    locked: bool = False
    """Whether it needs a passphrase."""


def key_file(path: str) -> KeyFile:
    """Return the key type of an identity file and whether it is locked; the defaults if it cannot be read."""
    try:
        data = Path(path).read_bytes()[: 1 << 20]
    except OSError:
        return KeyFile()
    if data.startswith((b"ssh-", b"ecdsa-", b"sk-")):
        return KeyFile("public")
    found = _OPENSSH.search(data)
    if found is None:
        return KeyFile("", b"ENCRYPTED" in data)
    try:
        return _openssh_format(base64.b64decode(found[1]))
    except (binascii.Error, struct.error, UnicodeDecodeError, ValueError):
        return KeyFile()


def _openssh_format(data: bytes) -> KeyFile:
    """Parse OpenSSH's own format: cipher, kdf, kdf options, number of keys, the public key, the private key."""
    if not data.startswith(_MAGIC):
        return KeyFile()
    cipher, rest = _field(data[len(_MAGIC) :])
    _, rest = _field(rest)
    _, rest = _field(rest)
    public, _ = _field(rest[4:])
    kind, _ = _field(public)
    return KeyFile(kind.decode("ascii"), cipher != b"none")


def _field(data: bytes) -> tuple[bytes, bytes]:
    (length,) = struct.unpack(">I", data[:4])
    return data[4 : 4 + length], data[4 + length :]
