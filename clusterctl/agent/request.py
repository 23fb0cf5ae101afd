"""One request of the launcher to this node's agent: its parameters, its body, its reply, its cancellation."""

from __future__ import annotations

import os
import threading
from typing import Any, Callable, Dict, List, Optional

from clusterctl.agent.frames import ByteReader, Frame, Inbox, StreamEnded, Window
from clusterctl.agent.reaper import Watcher


class Refused(Exception):
    """A request that cannot be done, with a message for the user; `kind` is for programs."""

    def __init__(self, kind: str, message: str) -> None:
        super().__init__(message)
        self.kind = kind


class Request:
    """One request of the launcher, with its own body and its own reply stream."""

    def __init__(
        self,
        number: int,
        op: str,
        params: Dict[str, Any],
        *,
        workdir: str,
        watcher: Watcher,
        send_frame: Callable[[Frame], None],
    ) -> None:
        self.workdir = workdir
        self.watcher = watcher
        self._send_frame = send_frame
        self.id = number
        self.op = op
        self.params = params
        self.window = Window()
        self.inbox = Inbox(lambda count: send_frame(Frame(number, "credit", {"bytes": count})))
        self.body = ByteReader(self._next_chunk)
        self.cancelled = threading.Event()
        self.on_cancel: List[Callable[[], object]] = []

    def _next_chunk(self) -> bytes:
        frame = self.inbox.get()
        return frame.payload if frame else b""

    def need(self, name: str, kind: type) -> Any:
        """Return a required parameter of type `kind`."""
        value = self.params.get(name)
        if not isinstance(value, kind) or (kind is str and not value):
            raise Refused("usage", f"{self.op}: {name!r} must be {kind.__name__}, not {value!r:.100}")
        return value

    def path(self, name: str = "path") -> str:
        """Return a path on this node; `~` is the login's home."""
        path = os.path.expanduser(self.need(name, str))
        if "\0" in path:
            raise Refused("usage", f"{self.op}: a path can't hold a null byte")
        return os.path.abspath(os.path.join(os.path.expanduser("~"), path))

    def send(self, payload: bytes, **fields: Any) -> None:
        """Send one chunk of the reply; wait while the launcher has too much unread."""
        self.window.take(len(payload))
        self._send_frame(Frame(self.id, "data", fields, payload))

    def cancel(self) -> None:
        """End the request: the launcher does not want its result any more, or is gone."""
        self.cancelled.set()
        self.window.close()
        self.inbox.close(StreamEnded("the request was cancelled"))
        for action in self.on_cancel:
            action()


Operation = Callable[[Request], Optional[Dict[str, object]]]
"""What an agent does for a request; it returns the fields of the answer."""
