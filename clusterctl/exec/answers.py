"""Collect the output of one command on many nodes until all have ended, in memory or, if large, on disk."""

from __future__ import annotations

import difflib
import hashlib
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import IO

from clusterctl.exec.output import ending, ending_as_json, printable
from clusterctl.inventory import nodeset
from clusterctl.transport.completed import Completed
from clusterctl.transport.fanout import Outcome

# Bytes per stream of a node that are kept in memory.
IN_MEMORY = 256 << 10
PIECE = 256 << 10
# Lines; the time of a comparison grows with their square.
COMPARABLE = 20_000
STREAMS = ("stdout", "stderr")


class SpooledStream:
    """One output stream of one node."""

    def __init__(self) -> None:
        self._file: IO[bytes] = tempfile.SpooledTemporaryFile(IN_MEMORY)  # noqa: SIM115  lives as long as this
        self._hash = hashlib.sha256()
        self.size = 0

    def add(self, data: bytes) -> None:
        self._file.write(data)
        self._hash.update(data)
        self.size += len(data)

    @property
    def digest(self) -> bytes:
        return self._hash.digest()

    def pieces(self) -> Iterator[bytes]:
        """Yield the whole stream in pieces that end at line ends where possible."""
        self._file.seek(0)
        rest = b""
        while data := self._file.read(PIECE):
            data = rest + data
            end = data.rfind(b"\n") + 1 or len(data)
            rest = data[end:]
            yield data[:end]
        if rest:
            yield rest

    def bytes(self) -> bytes:
        return b"".join(self.pieces())

    def close(self) -> None:
        """Delete what is kept."""
        self._file.close()


class Answers:
    """Collects the output of nodes; each node is fed by one thread."""

    def __init__(self, nodes: Sequence[str]) -> None:
        self._of = {node: {stream: SpooledStream() for stream in STREAMS} for node in nodes}

    def feed(self, node: str, stream: str, data: bytes) -> None:
        self._of[node][stream].add(data)

    def end(self, node: str) -> None:
        """Do nothing: everything is shown at the end."""

    def ended(self, outcome: Outcome[Completed]) -> None:
        """Do nothing: everything is shown at the end."""

    def of(self, node: str) -> dict[str, SpooledStream]:
        return self._of[node]

    def close(self) -> None:
        """Delete what is collected."""
        for streams in self._of.values():
            for file in streams.values():
                file.close()


@dataclass
class Group:
    """Nodes with the same output and the same end."""

    completed: Completed
    output: dict[str, SpooledStream]
    names: list[str] = field(default_factory=list)

    def header(self) -> str:
        """Return `node[1-3] (3)`, and how the command ended if it failed."""
        how = ending(self.completed)
        return f"{nodeset.fold(self.names)} ({len(self.names)})" + (f": {how}" if how else "")


def folded(outcomes: Sequence[Outcome[Completed]], answers: Answers) -> list[Group]:
    """Return the groups of nodes with the same output and end, ordered by their first node."""
    groups: dict[object, Group] = {}
    for outcome in outcomes:
        if outcome.value is not None:
            output = answers.of(outcome.node.name)
            key = (outcome.value, *(output[stream].digest for stream in STREAMS))
            group = groups.setdefault(key, Group(outcome.value, output))
            group.names.append(outcome.node.name)
    return list(groups.values())


def differences(groups: Sequence[Group], against: str | None) -> Iterator[str]:
    """Yield a diff between each group and that of the node `against`, or else the largest group."""
    base = next((group for group in groups if against in group.names), None)
    base = base or max(groups, key=lambda group: len(group.names))
    for other in groups:
        if other is not base:
            yield from _compared(base, other)


def _compared(base: Group, other: Group) -> Iterator[str]:
    yield f"--- {base.header()}\n"
    yield f"+++ {other.header()}\n"
    for stream in STREAMS:
        base_output, other_output = base.output[stream], other.output[stream]
        if base_output.digest == other_output.digest:
            continue
        if stream == "stderr":
            yield "stderr:\n"
        before, after = _lines(base_output), _lines(other_output)
        if before is None or after is None:
            yield f"they differ ({base_output.size} and {other_output.size} bytes, too much to compare)\n"
            continue
        found = list(difflib.unified_diff(before, after, lineterm=""))[2:]
        yield from (line + "\n" for line in found or ["they differ in line ends only"])


def _lines(entry: SpooledStream) -> list[str] | None:
    lines: list[str] = []
    for piece in entry.pieces():
        lines += printable(piece).split("\n")
        if len(lines) > COMPARABLE:
            return None
    return lines


def as_json(outcome: Outcome[Completed], answers: Answers) -> dict[str, object]:
    """Return one node's result as JSON values."""
    row = ending_as_json(outcome)
    if outcome.value is not None:
        output = answers.of(outcome.node.name)
        row.update({stream: output[stream].bytes().decode("utf-8", "backslashreplace") for stream in STREAMS})
    return row
