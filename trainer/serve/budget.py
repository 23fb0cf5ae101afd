"""The memory that requests may use together for large bodies and for answers with many log probabilities."""

from __future__ import annotations

from dataclasses import dataclass, field

from aiohttp import web

from trainer.serve.faults import ApiError

FREE = 64 << 10
"""Smaller bodies are not counted, because the limit of connections bounds their memory."""
PER_BYTE = 8
"""Bytes of Python objects per byte of JSON, for lists of numbers."""
PER_LOGPROB = 120
"""Bytes of one log probability with its id."""
PER_ENTRY = 280
"""Bytes of a log probability with its text, in an answer that is sent at once."""


@dataclass
class Budget:
    """Limits the bytes that all requests hold together. Only the event loop uses it."""

    most: int
    used: int = 0
    _held: dict[int, int] = field(default_factory=dict)

    def take(self, request: web.Request, size: int) -> None:
        """Reserve `size` more bytes for a request until `release`; raise an ApiError if they are not available."""
        own = self._held.get(id(request), 0) + size
        if own > self.most:
            raise ApiError(
                400, f"the request needs {own} bytes of memory, and the limit is {self.most}: ask for less"
            )
        if self.used + size > self.most:
            raise ApiError(
                503, "other requests use all memory of the server: try again later", code="memory_full"
            )
        self.used += size
        self._held[id(request)] = own

    def release(self, request: web.Request) -> None:
        """Release all bytes of a request."""
        self.used -= self._held.pop(id(request), 0)
