"""The greeting of an agent: facts about its node."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

from clusterctl.errors import ClusterctlError
from clusterctl.typed_json import BadValue, decode

T = TypeVar("T")


@dataclass(frozen=True)
class Hello:
    """Facts about a node, which its agent sends in reply to the first request."""

    hostname: str = ""
    boot_id: str = ""
    """Differs after each start of the machine."""
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
    disk_free: int = 0
    monotonic: float = 0.0
    wall: float = 0.0
    """The node's clock, in seconds since the epoch."""


def read_answer(kind: type[T], answer: Mapping[str, Any]) -> T:
    """Return an agent's answer as a `kind`; raise a ClusterctlError for one that no agent of this version sends."""
    try:
        return decode(kind, dict(answer))
    except BadValue as error:
        raise ClusterctlError(f"the agent's answer cannot be read: {error}", "try again") from None
