"""Present a program on a node as one byte stream; limit what login scripts may print before it starts."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable
from typing import Protocol, runtime_checkable

from clusterctl.errors import LinkLost

# Bytes that login scripts may print before the program on the node prints its first line.
MAX_NOISE = 1 << 20
# Seconds for a node to log in, run its login scripts and start the program.
START_LIMIT = 30.0
# Bytes of standard error that are kept for an error message.
LAST_WORDS = 2000
# Seconds to collect what a program wrote to standard error before it ended.
LAST_WORDS_LIMIT = 1.0
# Characters of one line of a node's output in an error message.
LINE_LENGTH = 120
ENDLESS = "its login scripts print without end"
ENDLESS_HINT = (
    "make ~/.bashrc and the like print nothing if the shell is not interactive: `[[ $- == *i* ]] || return`"
)


class Pipe(Protocol):
    """A byte stream to and from a program on a node."""

    def receive(self, size: int, timeout: float) -> bytes:
        """Return the next bytes, b"" at the end; raise TimeoutError if nothing arrives in time."""

    def send(self, data: bytes) -> None: ...

    def close(self) -> None: ...

    def last_words(self) -> str:
        """Return the end of the program's standard error; wait at most LAST_WORDS_LIMIT seconds for it."""

    def poll_file(self, on_read: Callable[[], None]) -> int | None:
        """Return the file to wait for, or None if only a waiting thread can read this pipe.

        `on_read` is called after another thread has read from that file.
        """

    def arrived(self) -> tuple[bytes, bool]:
        """Return the bytes that have arrived, and False if `receive` must read the rest; never wait."""

    def can_send(self) -> bool:
        """Return whether a few bytes can be sent now without waiting."""


class Stream(Protocol):
    """The part of fanout.Stream that a pipe uses."""

    def read(self, size: int, timeout: float) -> tuple[str, bytes]: ...

    def send(self, data: bytes) -> None: ...

    def close(self) -> None: ...


@runtime_checkable
class Pollable(Protocol):
    """The interface of a stream that can be read without waiting, as a Pipe defines it."""

    def poll_file(self, on_read: Callable[[], None]) -> int | None: ...

    def arrived(self) -> tuple[list[tuple[str, bytes]], bool]:
        """Return (stream, bytes) that have arrived, and whether more may come."""

    def can_send(self) -> bool: ...


class StreamPipe:
    """A program's standard input and output as a pipe; the end of its standard error is kept for messages."""

    def __init__(self, stream: Stream) -> None:
        self._stream = stream
        # Looked up once, because the lookup takes as long as the rest of reading a heartbeat.
        self._pollable = stream if isinstance(stream, Pollable) else None
        self._errors = b""
        # Bytes of standard error since the last byte of standard output.
        self._error_bytes = 0

    def receive(self, size: int, timeout: float) -> bytes:
        deadline = time.monotonic() + timeout
        while True:
            name, data = self._stream.read(size, max(deadline - time.monotonic(), 0.0))
            if name != "stderr":
                self._error_bytes = 0
                return data
            self._keep(data)
            if self._error_bytes > MAX_NOISE:
                raise OSError("its standard error does not end")
            if time.monotonic() >= deadline:
                raise TimeoutError

    def poll_file(self, on_read: Callable[[], None]) -> int | None:
        return self._pollable.poll_file(on_read) if self._pollable else None

    def arrived(self) -> tuple[bytes, bool]:
        assert self._pollable
        parts, more = self._pollable.arrived()
        result = []
        for name, data in parts:
            if name == "stderr":
                self._keep(data)
            else:
                self._error_bytes = 0
                result.append(data)
        return b"".join(result), more and self._error_bytes <= MAX_NOISE

    def can_send(self) -> bool:
        return self._pollable is not None and self._pollable.can_send()

    def send(self, data: bytes) -> None:
        try:
            self._stream.send(data)
        except LinkLost as lost:
            raise BrokenPipeError(lost.reason) from None

    def close(self) -> None:
        self._stream.close()

    def last_words(self) -> str:
        deadline = time.monotonic() + LAST_WORDS_LIMIT
        with contextlib.suppress(TimeoutError, LinkLost, OSError):
            while self._error_bytes <= MAX_NOISE and (left := deadline - time.monotonic()) > 0:
                name, data = self._stream.read(65536, left)
                if not name:
                    break
                if name == "stderr":
                    self._keep(data)
        return self._errors.decode(errors="replace")

    def _keep(self, data: bytes) -> None:
        self._error_bytes += len(data)
        self._errors = (self._errors + data)[-LAST_WORDS:]


def last_line(output: bytes) -> str:
    """Return the last line of a node's output that is not blank, shortened for an error message."""
    lines = [line for line in output[-4096:].splitlines() if line.strip()]
    text = lines[-1].decode(errors="replace").strip() if lines else ""
    return text if len(text) <= LINE_LENGTH else f"{text[:LINE_LENGTH]}..."
