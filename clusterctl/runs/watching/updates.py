"""The updates of a watched run: log lines, metrics, ends of nodes, notes."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from enum import Enum

from clusterctl.jobs.phase import Phase
from clusterctl.jobs.run_lines import Metric, read_metric
from clusterctl.logs.lines import LogChunk, shown
from clusterctl.runs.state import NodeFailure, SupervisorState
from clusterctl.runs.watching.stall import is_number
from clusterctl.wire import contract
from clusterctl.wire.typed_json import BadValue, decode, parse

# Kinds of events that are shown to a follower.
NOTED = ("note", "restart", "new_port", "straggler")


class Stream(str, Enum):
    """The content of a file of a run: output of a rank, or lines of JSON."""

    OUT = "out"
    ERR = "err"
    METRICS = "metrics"
    EVENTS = "events"


@dataclass(frozen=True)
class Source:
    """The node, the rank and the stream that a file belongs to."""

    node: str
    rank: int
    """-1 for metrics and events."""
    stream: Stream


@dataclass(frozen=True)
class Update:
    """One update of a run: complete log lines, the trainer's metrics, a node's end, or a note."""

    chunk: LogChunk | None = None
    metric: Metric | None = None
    node: str = ""
    ended: Phase | None = None
    note: str = ""
    failure: NodeFailure | None = None
    """A node's first failure, reported before the node has ended."""
    pace: dict[int, float] = field(default_factory=dict, hash=False)
    """By rank of one node, its own seconds for a step."""
    supervisor: SupervisorState | None = None
    """Whether the node's supervisor responds."""
    hung: bool = False
    """All ranks were silent for too long; `note` says for how long."""
    problem: BaseException | None = None
    """Why this node cannot be watched from here; it says nothing about the run itself."""


def from_report(node: str, word: str, payload: bytes) -> Update:
    """Return the update in a report of a node: the pace of its ranks, its supervisor, or its first failure."""
    try:
        value = parse(payload)
        if word == "pace":
            pace = value if isinstance(value, dict) else {}
            known = {
                int(rank): float(pace[rank]) for rank in pace if _is_rank(rank) and is_number(pace[rank])
            }
            return Update(node=node, pace=known)
        if word == "supervisor":
            return Update(node=node, supervisor=decode(SupervisorState, value))
        return Update(node=node, failure=decode(NodeFailure, value))
    except BadValue:
        # A failure that cannot be read still stops the other nodes; other reports that cannot be read are dropped.
        return Update(node=node, failure=NodeFailure(-1) if word == "failure" else None)


def _is_rank(text: str) -> bool:
    return text.isascii() and text.isdecimal() and len(text) < 10


def from_lines(source: Source, block: bytes, at: float) -> Iterator[Update]:
    """Yield the updates in complete lines of a file, of which the last was written at a time."""
    if source.rank >= 0:
        if block:
            yield Update(node=source.node, chunk=LogChunk(source.node, source.rank, source.stream, block, at))
        return
    for text in shown(block):
        try:
            value = parse(text)
        except BadValue:
            if source.stream is Stream.METRICS:
                yield Update(
                    node=source.node, note=f"a line of {contract.METRICS_FILE} is not JSON: {text[:80]!r}"
                )
            continue
        if source.stream is Stream.METRICS:
            if (metric := read_metric(value)) is not None:
                yield Update(node=source.node, metric=metric)
        elif isinstance(value, dict) and value.get("event") in NOTED and isinstance(value.get("text"), str):
            yield Update(node=str(value.get("node", "")), note=value["text"])
