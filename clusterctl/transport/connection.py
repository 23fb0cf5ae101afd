"""Send requests to one node over its connection."""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, TypeVar

from clusterctl.agent.frames import CHUNK, Frame
from clusterctl.errors import ClusterctlError
from clusterctl.transport.agent_code import agent_argv
from clusterctl.transport.completed import Completed as Completed
from clusterctl.transport.link import Link, PendingRequest, RequestFailed, shell_command
from clusterctl.transport.pipe import Stream, StreamPipe

if TYPE_CHECKING:
    from clusterctl.inventory.cluster import Node
    from clusterctl.transport.answers import Directory, Fingerprint, Hello

Body = bytes | Iterable[bytes]
# Bytes of output or of a file that are collected in memory; more is an error.
MOST_OUTPUT = 256 << 20
T = TypeVar("T")


class Connection:
    """A link to the agent of one node. Several threads may send requests over it at the same time."""

    def __init__(self, node: str) -> None:
        self.node = node
        self._hello: Hello | None = None

    def open(self, op: str, params: Mapping[str, object]) -> PendingRequest:
        """Send a request whose body and reply are streams. Most callers want `request`, `call` or `run`."""
        raise NotImplementedError

    def close(self) -> None:
        """Close the link; the node then ends all requests that still run."""
        raise NotImplementedError

    def silent_for(self) -> float:
        """Return the seconds since the last byte arrived from the node; 0 if unknown."""
        return 0.0

    def request(
        self, op: str, params: Mapping[str, object] | None = None, body: Body | None = None
    ) -> Iterator[Frame]:
        """Yield the chunks of the reply (`.fields`, `.payload`) as they arrive.

        Closing the iterator early cancels the request on the node.
        """
        request = self.open(op, dict(params or {}))
        finished = False
        try:
            _send_body(request, body)
            yield from request
            finished = True
        except ClusterctlError:
            # The request failed on the node, or the connection is lost: there is nothing to cancel.
            finished = True
            raise
        finally:
            if not finished:
                request.cancel()

    def call(
        self, op: str, params: Mapping[str, object] | None = None, body: Body | None = None
    ) -> dict[str, object]:
        """Return the result of an operation that sends no chunks."""
        request = self.open(op, dict(params or {}))
        _send_body(request, body)
        return request.end()

    def ask(self, kind: type[T], op: str, params: Mapping[str, object] | None = None) -> T:
        """Return the result of an operation as a `kind`."""
        return read_answer(kind, self.call(op, params), self.node, op)

    def run(
        self,
        argv: Sequence[str],
        *,
        env: Mapping[str, str] | None = None,
        cwd: str | None = None,
        setup: Mapping[str, object] | None = None,
        stdin: Body | None = None,
        timeout: float | None = None,
        on_output: Callable[[str, bytes], None] | None = None,
    ) -> Completed:
        """Run a command without a shell and return its result; `setup` prepares its environment.

        `on_output("stdout" or "stderr", bytes)` receives the output as it arrives; without it the output is
        collected, at most MOST_OUTPUT bytes.
        """
        params: dict[str, object] = {
            "argv": list(argv),
            "env": dict(env or {}),
            "cwd": cwd,
            "timeout": timeout,
        }
        params["stdin"] = stdin is not None
        if setup is not None:
            params["setup"] = dict(setup)
        request = self.open("run", params)
        parts: dict[str, list[bytes]] = {"stdout": [], "stderr": []}
        size = 0
        try:
            _send_body(request, stdin)
            for frame in request if timeout is None else request.within(timeout):
                stream = "stderr" if frame.fields.get("stream") == "stderr" else "stdout"
                if on_output is None:
                    size += len(frame.payload)
                    self._check_size(size, MOST_OUTPUT, "its output")
                    parts[stream].append(frame.payload)
                else:
                    on_output(stream, frame.payload)
        except BaseException:
            request.cancel()
            raise
        result = request.end() if request.result is None else request.result
        out, err = b"".join(parts["stdout"]), b"".join(parts["stderr"])
        code, number = (_status(self.node, result.get(key)) for key in ("exit_code", "signal"))
        return Completed(code, number, out, err, bool(result.get("timed_out")))

    def hello(self, fresh: bool = False) -> Hello:
        """Return facts about the node, which is queried only once; `fresh` asks again, for its clock."""
        if self._hello is None or fresh:
            from clusterctl.transport.answers import Hello

            self._hello = self.ask(Hello, "hello")
        return self._hello

    def directory(self, path: str) -> Directory:
        """Return the names in a folder."""
        from clusterctl.transport.answers import Directory

        return self.ask(Directory, "list", {"path": path})

    def fingerprint(self, path: str) -> Fingerprint:
        """Return what is at a path, without following a link."""
        from clusterctl.transport.answers import Fingerprint

        return self.ask(Fingerprint, "fingerprint", {"path": path})

    def put(self, path: str, data: bytes, mode: int = 0o600) -> None:
        """Write one file on the node; an interrupted write leaves the old file."""
        self.call("put", {"path": path, "mode": mode, "sha256": hashlib.sha256(data).hexdigest()}, data)

    def get(self, path: str, offset: int = 0, limit: int | None = None) -> bytes:
        """Return the bytes of a file from an offset on, at most `limit` bytes."""
        parts: list[bytes] = []
        size, most = 0, MOST_OUTPUT if limit is None else limit
        for frame in self.request("get", {"path": path, "offset": offset, "limit": limit}):
            size += len(frame.payload)
            self._check_size(size, most, path)
            parts.append(frame.payload)
        return b"".join(parts)

    def _check_size(self, size: int, most: int, source: str) -> None:
        if size > most:
            raise RequestFailed(self.node, "too-large", f"{source}: more than {most} bytes came")


def read_answer(kind: type[T], answer: object, node: str, op: str) -> T:
    """Return the answer of a node's agent as a `kind`; raise RequestFailed if no agent of this version sends it."""
    from clusterctl.wire.typed_json import BadValue, decode

    try:
        return decode(kind, answer)
    except BadValue as error:
        raise RequestFailed(node, "bad-answer", f"its answer to {op!r} is invalid: {error}") from None


def _status(node: str, value: object) -> int | None:
    """Return an exit code, a signal number or None; raise RequestFailed for any other value."""
    if value is None or (isinstance(value, int) and 0 <= value < 256):
        return value
    raise RequestFailed(node, "bad-answer", f"it ended with {value!r:.80}, which is not an exit code")


def _send_body(request: PendingRequest, body: Body | None) -> None:
    """Send the body of a request.

    A large body is sent from a thread: the node may stop reading it until its reply is read.
    """
    if body is None:
        return
    if isinstance(body, bytes) and len(body) <= CHUNK:
        request.send(body)
        request.finish()
        return

    def feed(pieces: Iterable[bytes]) -> None:
        try:
            for piece in pieces:
                request.send(piece)
            request.finish()
        except ClusterctlError:
            # The reader of the reply gets the error.
            pass

    threading.Thread(target=feed, args=([body] if isinstance(body, bytes) else body,), daemon=True).start()


class LinkConnection(Connection):
    """A connection over a link to a real agent."""

    def __init__(self, link: Link) -> None:
        super().__init__(link.node)
        self.link = link

    def open(self, op: str, params: Mapping[str, object]) -> PendingRequest:
        return self.link.open(op, dict(params))

    def close(self) -> None:
        self.link.close()

    def silent_for(self) -> float:
        return self.link.silent_for()


def connect_agent(node: Node, start: Callable[[Node, str], Stream]) -> Connection:
    """Return a connection to the agent of a node; `start` runs a command line in its login shell."""
    stream = start(node, shell_command(agent_argv(node.python)))
    return LinkConnection(Link(node.name, StreamPipe(stream), node.workdir))
