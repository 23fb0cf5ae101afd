"""One node's connection: what can be asked of it, in the words that callers use."""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from clusterctl.agent.frames import CHUNK, Frame
from clusterctl.errors import ClusterctlError
from clusterctl.transport.link import Asked, Link, RequestFailed

Body = bytes | Iterable[bytes]


@dataclass(frozen=True)
class Completed:
    """How a command on a node ended, and what it said."""

    exit_code: int | None
    """None when a signal ended it."""
    signal: int | None = None
    stdout: bytes = b""
    stderr: bytes = b""
    timed_out: bool = False

    @property
    def ok(self) -> bool:
        return self.exit_code == 0

    @property
    def code(self) -> int:
        """The exit code as shells say it: 128+n for signal n, 124 for a time-out."""
        if self.timed_out:
            return 124
        return self.exit_code if self.exit_code is not None else 128 + (self.signal or 0)

    @property
    def text(self) -> str:
        """stdout as text; bytes that are no UTF-8 are kept as surrogates."""
        return self.stdout.decode("utf-8", "surrogateescape")

    @property
    def error_text(self) -> str:
        return self.stderr.decode("utf-8", "surrogateescape")


class Connection:
    """One link to one node's agent; requests of several threads run side by side over it."""

    def __init__(self, node: str) -> None:
        self.node = node
        self._hello: dict[str, Any] | None = None

    def open(self, op: str, params: Mapping[str, Any]) -> Asked:
        """Ask for something in both directions at once; most callers want `request`, `call` or `run`."""
        raise NotImplementedError

    def close(self) -> None:
        """End the link; what still runs for it on the node is ended there."""
        raise NotImplementedError

    def silent_for(self) -> float:
        """Seconds since anything was heard from the node; 0 where that can't be told."""
        return 0.0

    def request(
        self, op: str, params: Mapping[str, Any] | None = None, body: Body | None = None
    ) -> Iterator[Frame]:
        """The reply's chunks (`.fields`, `.payload`) as they come; leaving early cancels the request on the
        node."""
        asked = self.open(op, dict(params or {}))
        finished = False
        try:
            _send_body(asked, body)
            yield from asked
            finished = True
        except ClusterctlError:
            # The node itself ended it, or is gone.
            finished = True
            raise
        finally:
            if not finished:
                asked.cancel()

    def call(
        self, op: str, params: Mapping[str, Any] | None = None, body: Body | None = None
    ) -> dict[str, Any]:
        """The result of an operation whose reply is nothing but that."""
        asked = self.open(op, dict(params or {}))
        _send_body(asked, body)
        return asked.end()

    def run(
        self,
        argv: Sequence[str],
        *,
        env: Mapping[str, str] | None = None,
        cwd: str | None = None,
        stdin: Body | None = None,
        timeout: float | None = None,
        on_output: Callable[[str, bytes], None] | None = None,
    ) -> Completed:
        """Run a command, never through a shell; `on_output("stdout" or "stderr", bytes)` gets what would be
        collected."""
        params: dict[str, Any] = {"argv": list(argv), "env": dict(env or {}), "cwd": cwd, "timeout": timeout}
        params["stdin"] = stdin is not None
        asked = self.open("run", params)
        parts: dict[str, list[bytes]] = {"stdout": [], "stderr": []}
        try:
            _send_body(asked, stdin)
            for frame in asked if timeout is None else asked.within(timeout):
                stream = "stderr" if frame.fields.get("stream") == "stderr" else "stdout"
                if on_output is None:
                    parts[stream].append(frame.payload)
                else:
                    on_output(stream, frame.payload)
        except BaseException:
            asked.cancel()
            raise
        result = asked.end() if asked.result is None else asked.result
        out, err = b"".join(parts["stdout"]), b"".join(parts["stderr"])
        code, number = (_status(self.node, result.get(key)) for key in ("exit_code", "signal"))
        return Completed(code, number, out, err, bool(result.get("timed_out")))

    def hello(self) -> dict[str, Any]:
        """Who the node is: hostname, python, boot_id, home, workdir, cpus, disk_free, wall, monotonic; asked
        once."""
        if self._hello is None:
            self._hello = self.call("hello")
        return self._hello

    def put(self, path: str, data: bytes, mode: int = 0o600) -> None:
        """Write one file on the node, whole or not at all."""
        self.call("put", {"path": path, "mode": mode, "sha256": hashlib.sha256(data).hexdigest()}, data)

    def get(self, path: str, offset: int = 0, limit: int | None = None) -> bytes:
        """A file's bytes from an offset on, at most `limit` of them."""
        return b"".join(
            frame.payload for frame in self.request("get", {"path": path, "offset": offset, "limit": limit})
        )


def _status(node: str, value: object) -> int | None:
    """An exit code or a signal, if it is one."""
    if value is None or (isinstance(value, int) and 0 <= value < 256):
        return value
    raise RequestFailed(node, "bad-answer", f"it ended with {value!r:.80}, which is no exit code")


def _send_body(asked: Asked, body: Body | None) -> None:
    """Send a body while its reply is read: a large one from a thread, since either side may wait for the
    other."""
    if body is None:
        return
    if isinstance(body, bytes) and len(body) <= CHUNK:
        asked.send(body)
        asked.finish()
        return

    def feed(pieces: Iterable[bytes]) -> None:
        try:
            for piece in pieces:
                asked.send(piece)
            asked.finish()
        except ClusterctlError:
            # The reader of the reply hears of it.
            pass

    threading.Thread(target=feed, args=([body] if isinstance(body, bytes) else body,), daemon=True).start()


class LinkConnection(Connection):
    """A connection to a real agent."""

    def __init__(self, link: Link) -> None:
        super().__init__(link.node)
        self.link = link

    def open(self, op: str, params: Mapping[str, Any]) -> Asked:
        return self.link.open(op, dict(params))

    def close(self) -> None:
        self.link.close()

    def silent_for(self) -> float:
        return self.link.silent_for()
