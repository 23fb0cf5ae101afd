"""The HTTP protocol of a connection: broken requests get errors in OpenAI's shape, and no traceback in the log."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

from aiohttp import web
from aiohttp.http_exceptions import LineTooLong

from trainer.serve.faults import ApiError

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
