"""Memory that requests hold together: large bodies, and answers with many log probabilities."""

from __future__ import annotations

from dataclasses import dataclass, field

from aiohttp import web

from trainer.serve.faults import ApiError

FREE = 64 << 10
"""Bytes of a body that are not counted: what small requests hold is bounded by the number of connections."""
PER_BYTE = 8
"""Bytes of Python's objects for a byte of JSON, as lists of numbers have them."""
PER_LOGPROB = 120
"""Bytes of one log probability with its id."""
PER_ENTRY = 280
"""Bytes of a log probability with its text, in an answer that is sent as a whole."""


@dataclass
class Budget:
    """Bytes that all requests may hold together. Only the event loop uses it."""

    most: int
    used: int = 0
    _held: dict[int, int] = field(default_factory=dict)

    def take(self, request: web.Request, size: int) -> None:
        """Count `size` more bytes for a request until `release`; refuse it if there is no room."""
        own = self._held.get(id(request), 0) + size
        if own > self.most:
            raise ApiError(
                400, f"the request needs {own} bytes of memory, and all have {self.most}: ask for less"
            )
        if self.used + size > self.most:
            raise ApiError(503, "other requests hold the memory of the server: try again", code="memory_full")
        self.used += size
        self._held[id(request)] = own

    def release(self, request: web.Request) -> None:
        """Forget what a request held."""
        self.used -= self._held.pop(id(request), 0)
