"""The HTTP protocol of a connection: answers to broken requests have OpenAI's shape, and they do not fill the log."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

from aiohttp import web

from trainer.serve.faults import ApiError

KEEP_ALIVE = 30.0
"""Seconds that a connection may wait between two requests."""


class _Protocol(web.RequestHandler):
    """The library's, but for its answers to broken requests; they would fill the log with tracebacks."""

    __slots__ = ()

    def handle_error(
        self,
        request: web.BaseRequest,
        status: int = 500,
        exc: BaseException | None = None,
        message: str | None = None,
    ) -> web.StreamResponse:
        if isinstance(exc, ConnectionError):
            # The client left.
            raise ConnectionError from exc
        if status >= 500:
            answer: web.StreamResponse = super().handle_error(request, status, exc, message)
            return answer
        text = f"the request is not HTTP as the server reads it: {type(exc).__name__ if exc else 'broken'}"
        broken = web.json_response(ApiError(status, text).as_json(), status=status)
        broken.force_close()
        return broken


def protocol_of(server: Any) -> Callable[[], asyncio.Protocol]:
    """Return what makes the protocol of a new connection to a server."""
    loop = asyncio.get_running_loop()
    # Bodies are not decompressed: a few bytes would become many.
    options: Any = {"access_log": None, "keepalive_timeout": KEEP_ALIVE, "auto_decompress": False}
    return lambda: _Protocol(server, loop=loop, **options)
