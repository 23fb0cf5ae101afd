"""Values for the answers of agents: facts about a node, its folders and files."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True)
class Hello:
    """Facts about a node, which its agent sends in reply to the first request."""

    hostname: str = ""
    boot_id: str = ""
    """Changes with each boot of the machine."""
    home: str = ""
    workdir: str = ""
    cpus: int = 1
    """Processors that this login may use."""
    machine_cpus: int = 1
    """Processors of the machine, which may be several nodes."""
    python: str = ""
    """Version of the agent's Python."""
    pid: int = 0
    """The agent's process."""
    monotonic: float = 0.0
    wall: float = 0.0
    """The node's clock, in seconds since the epoch."""


@dataclass(frozen=True)
class DirectoryEntry:
    """A name in a folder on a node."""

    name: str
    kind: str
    """f, d, or another letter."""
    size: int
    mtime: float


@dataclass(frozen=True)
class Directory:
    """A folder on a node; `missing`: no such folder."""

    missing: bool
    entries: tuple[DirectoryEntry, ...]

    def names(self, kind: str) -> list[str]:
        """Return the names of one kind."""
        return [entry.name for entry in self.entries if entry.kind == kind]


@dataclass(frozen=True)
class Fingerprint:
    """What is at a path on a node."""

    path: str
    """The path without `~`."""
    kind: str
    """f, d, l for a link, other; "" for nothing."""
    mode: int = 0
    sha256: str = ""
    """Of a file that this login can read."""


@dataclass(frozen=True)
class FolderFingerprint:
    """What is in a folder with data on a node."""

    path: str
    missing: bool
    sizes: dict[str, int] = field(hash=False)
    """In bytes, by file."""
    hashes: dict[str, str] = field(hash=False)
    """Of the content, or of samples of it; by file."""
    faults: tuple[str, ...] = ()
