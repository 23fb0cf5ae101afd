"""What a file with a login's key holds, without unlocking it."""

from __future__ import annotations

import base64
import binascii
import re
import struct
from dataclasses import dataclass
from pathlib import Path

PLAIN_KINDS = (
    "",
    "ssh-rsa",
    "ssh-ed25519",
    "ecdsa-sha2-nistp256",
    "ecdsa-sha2-nistp384",
    "ecdsa-sha2-nistp521",
    "ssh-dss",
)
"""What any SSH library reads, or no server takes any more (ssh-dss); the empty one is an older form, which names
its kind elsewhere."""
_OPENSSH = re.compile(rb"-----BEGIN OPENSSH PRIVATE KEY-----(.*?)-----END", re.DOTALL)
_MAGIC = b"openssh-key-v1\0"


@dataclass(frozen=True)
class KeyFile:
    """One identity file."""

    kind: str = ""
    """As in ssh-ed25519; `public` where only the public half is there; empty where the file does not say."""
    locked: bool = False
    """Whether it needs a passphrase."""


def key_file(path: str) -> KeyFile:
    """What an identity file holds; nothing known of one that can't be read."""
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
        return _own_form(base64.b64decode(found[1]))
    except (binascii.Error, struct.error, UnicodeDecodeError, ValueError):
        return KeyFile()


def _own_form(data: bytes) -> KeyFile:
    """OpenSSH's own form: cipher, kdf, its options, how many keys, the first public key, the private ones."""
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
