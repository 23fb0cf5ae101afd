"""Close connections that are too many or too slow before they reach the server, and answer broken requests.

Errors are in OpenAI's shape, and no broken request leaves a traceback in the log.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from aiohttp import web
from aiohttp.http_exceptions import LineTooLong

from trainer.serve.faults import ApiError

BUSY = (
    b"HTTP/1.1 503 Service Unavailable\r\nContent-Type: application/json\r\nConnection: close\r\n"
    b"Content-Length: %d\r\n\r\n%s"
)
BODY = b'{"error": {"message": "too many connections", "type": "server_error", "param": null, "code": null}}'


@dataclass
class Counts:
    """Counts of the server's connections."""

    most: int
    open: int = 0
    refused: int = 0
    slow: int = 0


class Guard(asyncio.Protocol):
    """Passes a connection on to the server's protocol; closes it if the first request does not arrive in time."""

    def __init__(self, inner: asyncio.Protocol, counts: Counts, seconds: float) -> None:
        self._inner, self._counts, self._seconds = inner, counts, seconds
        self._head: bytearray | None = bytearray()
        self._timer: asyncio.TimerHandle | None = None
        self._passes = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._counts.open += 1
        if self._counts.open > self._counts.most:
            self._counts.refused += 1
            transport.write(BUSY % (len(BODY), BODY))
            transport.close()
            return
        self._passes = True
        self._timer = asyncio.get_running_loop().call_later(self._seconds, self._too_slow, transport)
        self._inner.connection_made(transport)

    def data_received(self, data: bytes) -> None:
        if not self._passes:
            return
        if self._head is not None:
            self._head += data
            if b"\r\n\r\n" in self._head or b"\n\n" in self._head:
                self._end_of_head()
        self._inner.data_received(data)

    def eof_received(self) -> bool | None:
        return self._inner.eof_received() if self._passes else None

    def connection_lost(self, error: Exception | None) -> None:
        self._counts.open -= 1
        self._end_of_head()
        if self._passes:
            self._inner.connection_lost(error)

    def pause_writing(self) -> None:
        if self._passes:
            self._inner.pause_writing()

    def resume_writing(self) -> None:
        if self._passes:
            self._inner.resume_writing()

    def _end_of_head(self) -> None:
        self._head = None
        if self._timer is not None:
            self._timer.cancel()

    def _too_slow(self, transport: asyncio.Transport) -> None:
        self._counts.slow += 1
        transport.abort()


def guarded(make: Callable[[], asyncio.Protocol], counts: Counts, seconds: float) -> Callable[[], Guard]:
    """Return a factory of protocols that are wrapped in a Guard."""
    return lambda: Guard(make(), counts, seconds)


KEEP_ALIVE = 30.0
"""Seconds that a connection stays open between two requests."""


class _Protocol(web.RequestHandler):
    """The library's protocol with other answers to broken requests; its own would fill the log with tracebacks."""

    __slots__ = ()

    def handle_error(
        self,
        request: web.BaseRequest,
        status: int = 500,
        exc: BaseException | None = None,
        message: str | None = None,
    ) -> web.StreamResponse:
        if isinstance(exc, ConnectionError):
            # The client closed the connection.
            raise ConnectionError from exc
        if status >= 500:
            answer: web.StreamResponse = super().handle_error(request, status, exc, message)
            return answer
        if isinstance(exc, LineTooLong):
            status, text = 431, "the request's line or a header has more than 8190 bytes"
        else:
            reason = getattr(exc, "message", "").partition("\n")[0].rstrip(":")[:200]
            text = f"the request is not valid HTTP: {reason or 'broken'}"
        broken = web.json_response(ApiError(status, text).as_json(), status=status)
        broken.force_close()
        return broken


def protocol_of(server: Any) -> Callable[[], asyncio.Protocol]:
    """Return a function that makes the protocol of a new connection."""
    loop = asyncio.get_running_loop()
    # Compressed bodies are not accepted, because a few bytes can expand to very many.
    options: Any = {"access_log": None, "keepalive_timeout": KEEP_ALIVE, "auto_decompress": False}
    return lambda: _Protocol(server, loop=loop, **options)
