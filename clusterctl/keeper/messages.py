"""The JSON messages between commands and a keeper: requests for links, and the keeper's state."""

from __future__ import annotations

from dataclasses import dataclass

from clusterctl.inventory.cluster import Node


@dataclass(frozen=True)
class WayOptions:
    """How a link may be made; the options of `transport_to`."""

    accept_new: bool = False
    connect_timeout: float = 10.0
    ssh: str = "auto"


@dataclass(frozen=True)
class LinkRequest:
    """A command's request for a link to a node; links with the same key are the same."""

    key: str
    node: Node
    known_hosts: str | None
    source: str
    options: WayOptions


@dataclass(frozen=True)
class KeeperHello:
    """A keeper's greeting: the keys of the links that need no test."""

    fresh: tuple[str, ...]


@dataclass(frozen=True)
class KeptLink:
    """A link that a keeper holds, and the seconds since its last use."""

    node: str
    host: str
    idle: float


@dataclass(frozen=True)
class KeeperStatus:
    """The values that `keeper status` shows."""

    began: float
    persist: float
    commands: int
    memory_mb: int
    links: tuple[KeptLink, ...]
    pid: int = 0
    """Filled in by the command, which knows the process that listens."""
