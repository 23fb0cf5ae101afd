"""Facts about a run that is about to start, which only the nodes and the clock know."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Facts:
    """Facts that only the nodes or the clock know; a plan that contacts no node uses the defaults."""

    run_id: str = "<run>"
    saved_as: str = ""
    """The name of the run's folder on a shared disk or in a store; "" for `run_id`."""
    parts: tuple[str, ...] = ()
    """In a pod the names of all nodes of the job, each of which starts its own ranks; else empty."""
    attempt: int = 1
    master_port: int = 29500
    workdirs: Mapping[str, str] = field(default_factory=dict)
    """The work folder of each node, with `~` resolved on the node."""
    homes: Mapping[str, str] = field(default_factory=dict)
    """The home folder on each node, for a Python such as `~/venv/bin/python`."""
    cpus: Mapping[str, int] = field(default_factory=dict)
    code_paths: Mapping[str, str] = field(default_factory=dict)
    """The folder of the pushed code on each node."""
    data_paths: Mapping[str, str] = field(default_factory=dict)
    forwarded: Mapping[str, str] = field(default_factory=dict)
    rank_table: str = ""
    """The text of the rank table, the same on every node; empty if the run has none."""
