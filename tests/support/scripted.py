"""Nodes whose replies come from a table, to test the code above the transport."""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from clusterctl.agent.frames import Frame
from clusterctl.errors import ClusterctlError
from clusterctl.json_types import JsonObject
from clusterctl.transport.connection import Completed, Connection
from clusterctl.transport.link import PendingRequest, RequestFailed

if TYPE_CHECKING:
    from clusterctl.inventory.cluster import Node

Answer = Any
"""A dict (the result), a Completed (for run and start), a list of (fields, payload), result last, or an
error."""


class ScriptedTransport:
    """Nodes whose replies come from a table.

    A key is (node, key), or ("*", key) for every node; the key is the name of an operation, for `run` the
    command line as typed in a shell, for `start` the command itself. Requests are recorded in `asked` as
    (node, key, params); the input of a started program is recorded in its params as `stdin`.
    """

    def __init__(self, table: Mapping[tuple[str, str], Answer]) -> None:
        self.table = dict(table)
        self.asked: list[tuple[str, str, JsonObject]] = []

    def connect(self, node: Node) -> Connection:
        answer = self.table.get((node.name, "connect"), self.table.get(("*", "connect")))
        if isinstance(answer, ClusterctlError):
            raise answer
        return _ScriptedConnection(node.name, self)

    def start(self, node: Node, command: str) -> _ScriptedStream:
        params: JsonObject = {"stdin": b""}
        self.asked.append((node.name, command, params))
        answer = self.answer(node.name, command, "start")
        if not isinstance(answer, Completed):
            raise TypeError(f"a started program's answer is a Completed, not {answer!r}")
        return _ScriptedStream(answer, params)

    def answer(self, node: str, command: str, op: str) -> Answer:
        """Return the table's entry for a request; raise it if it is an error."""
        for key in ((node, command), ("*", command), (node, op), ("*", op)):
            if key in self.table:
                answer = self.table[key]
                if isinstance(answer, ClusterctlError):
                    raise answer
                return answer
        raise RequestFailed(node, "unscripted", f"the script has no answer to {command!r}")


class _ScriptedStream:
    """A program with a given output and end."""

    def __init__(self, answer: Completed, params: JsonObject) -> None:
        self._answer = answer
        self._params = params
        self._parts = [("stdout", answer.stdout), ("stderr", answer.stderr)]

    def read(self, size: int, timeout: float) -> tuple[str, bytes]:
        while self._parts:
            name, data = self._parts.pop(0)
            if data[size:]:
                self._parts.insert(0, (name, data[size:]))
            if data:
                return name, data[:size]
        return "", b""

    def send(self, data: bytes) -> None:
        self._params["stdin"] += data

    def finish(self) -> None:
        pass

    def exited(self) -> bool:
        return not self._parts

    def ended(self) -> tuple[int | None, int | None]:
        return self._answer.exit_code, self._answer.signal

    def close(self) -> None:
        pass


class _ScriptedConnection(Connection):
    def __init__(self, node: str, script: ScriptedTransport) -> None:
        super().__init__(node)
        self._script = script

    def open(self, op: str, params: Mapping[str, Any]) -> PendingRequest:
        command = shlex.join(params["argv"]) if op == "run" else op
        self._script.asked.append((self.node, command, dict(params)))
        return _ScriptedRequest(op, self._script.answer(self.node, command, op))

    def close(self) -> None:
        pass


class _ScriptedRequest(PendingRequest):
    """A request with a given reply."""

    def __init__(self, op: str, answer: Answer) -> None:
        self.op = op
        self.result = None
        if isinstance(answer, Completed):
            ends = {"exit_code": answer.exit_code, "signal": answer.signal, "timed_out": answer.timed_out}
            answer = [({"stream": "stdout"}, answer.stdout), ({"stream": "stderr"}, answer.stderr), ends]
        self._chunks = answer[:-1] if isinstance(answer, list) else []
        self._last = answer[-1] if isinstance(answer, list) else answer

    def send(self, data: bytes) -> None:
        pass

    def finish(self) -> None:
        pass

    def cancel(self) -> None:
        pass

    def within(self, seconds: float) -> Iterator[Frame]:
        return iter(self)

    def __iter__(self) -> Iterator[Frame]:
        for fields, payload in self._chunks:
            yield Frame(1, "data", fields, payload)
        self.result = dict(self._last)
