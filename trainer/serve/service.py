"""What all routes use: the model, the limits, and ways to send answers."""

from __future__ import annotations

import asyncio
import json
import secrets
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import TypeVar

from aiohttp import web

from clusterctl.wire.requests import ServerOptions
from trainer.chat_template import ChatTemplate
from trainer.errors import InputError
from trainer.generate.decoder import Decoder, Text
from trainer.generate.request import Request
from trainer.serve.faults import ApiError, refused
from trainer.serve.metrics import Metrics
from trainer.serve.runner import Runner, Stream

Answer = TypeVar("Answer")
SHORT = 8 << 10
"""The texts of larger bodies are encoded in a thread, so that the event loop is not blocked."""


FREE = 64 << 10
"""Smaller bodies are not counted, because the limit of connections bounds their memory."""
PER_BYTE = 8
"""Bytes of Python objects per byte of JSON, for lists of numbers."""
PER_LOGPROB = 120
"""Bytes of one log probability with its id."""
PER_ENTRY = 280
"""Bytes of one log probability and its text in an answer that is not streamed."""


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


@dataclass(frozen=True)
class Limits:
    """Limits of the server."""

    body: int = ServerOptions.max_body
    """The most bytes of a request's body."""
    head_seconds: float = 10.0
    """Seconds until a connection's first request must have arrived."""
    body_seconds: float = 30.0
    request_seconds: float = ServerOptions.request_timeout
    write_seconds: float = 30.0
    """Seconds until a client must have read a piece of its answer."""
    queue: int = ServerOptions.queue
    """The most requests that wait in the queue."""
    connections: int = ServerOptions.connections
    memory: int = 512 << 20
    """The most bytes that large bodies and answers with log probabilities may use together."""


@dataclass
class Service:
    """A served model."""

    name: str
    decoder: Decoder
    runner: Runner
    limits: Limits
    template: ChatTemplate | None = None
    """The chat template; None: the model has none."""
    tokens: Mapping[str, str] = field(default_factory=dict)
    """The tokenizer's special tokens, such as `eos_token`."""
    api_key: str = ""
    metrics: Metrics = field(default_factory=Metrics)
    created: int = field(default_factory=lambda: int(time.time()))
    draining: bool = False

    def __post_init__(self) -> None:
        self.budget = Budget(max(self.limits.memory, 2 * PER_BYTE * self.limits.body))
        self._encoding = ThreadPoolExecutor(1, "encoding")

    async def body(self, request: web.Request) -> bytes:
        """Return the body of a request; refuse a body that is too large or arrives too slowly."""
        if (request.content_length or 0) > self.limits.body:
            raise ApiError(413, f"the body is larger than {self.limits.body} bytes")
        try:
            return await asyncio.wait_for(self._read(request), self.limits.body_seconds)
        except asyncio.TimeoutError:
            raise ApiError(408, f"the body did not arrive in {self.limits.body_seconds:g} s") from None

    async def _read(self, request: web.Request) -> bytes:
        content = bytearray()
        async for chunk in request.content.iter_any():
            if len(content) + len(chunk) > self.limits.body:
                raise ApiError(413, f"the body is larger than {self.limits.body} bytes")
            counted = max(0, len(content) + len(chunk) - FREE) - max(0, len(content) - FREE)
            self.budget.take(request, PER_BYTE * counted)
            content += chunk
        return bytes(content)

    async def encode(self, size: int, work: Callable[[], Answer]) -> Answer:
        """Return the result of `work`, which handles `size` bytes; for a large size it runs in a thread."""
        if size <= SHORT:
            return work()
        return await asyncio.get_running_loop().run_in_executor(self._encoding, work)

    def reserve(self, request: web.Request, requests: Sequence[Request], *, in_pieces: bool = False) -> None:
        """Reserve memory for the log probabilities of an answer."""
        entries = 0
        for own in requests:
            if own.sampling.logprobs is not None:
                tokens = own.course.most() - (0 if own.score_prompt else len(own.prompt))
                entries += tokens * (1 + own.sampling.logprobs)
        self.budget.take(request, (PER_LOGPROB + (0 if in_pieces else PER_ENTRY)) * entries)

    @asynccontextmanager
    async def running(
        self, requests: Sequence[tuple[Request, Text]], *, in_pieces: bool = False
    ) -> AsyncIterator[list[Stream]]:
        """Run requests; cancel them if the client disconnects or they take too long.

        in_pieces: whether the texts are sent piece by piece.
        """
        if self.draining:
            raise ApiError(503, "the server is stopping")
        try:
            streams = self.runner.submit(requests, in_pieces=in_pieces)
        except InputError as error:
            raise refused(error) from None
        try:
            yield streams
        finally:
            self.runner.release(streams)
            for stream in streams:
                self.metrics.add_request(stream.first, time.monotonic() - stream.started)

    async def texts(self, streams: Sequence[Stream]) -> list[Text]:
        """Wait for all texts and return them."""
        try:
            return await asyncio.wait_for(_texts(streams), self.limits.request_seconds)
        except asyncio.TimeoutError:
            raise ApiError(
                503, f"no answer within {self.limits.request_seconds:g} s", code="timeout"
            ) from None

    async def events(
        self, request: web.Request, lines: AsyncIterator[dict[str, object]]
    ) -> web.StreamResponse:
        """Answer with server-sent events."""
        response = web.StreamResponse(
            headers={"Content-Type": "text/event-stream", "Cache-Control": "no-cache"}
        )
        await response.prepare(request)
        deadline = time.monotonic() + self.limits.request_seconds
        try:
            while True:
                line = await asyncio.wait_for(anext(lines), deadline - time.monotonic())
                await self._write(response, json.dumps(line, ensure_ascii=False, separators=(",", ":")))
        except StopAsyncIteration:
            pass
        except (asyncio.TimeoutError, ApiError) as error:
            fault = error if isinstance(error, ApiError) else ApiError(503, "the request took too long")
            await self._write(response, json.dumps(fault.as_json()))
        await self._write(response, "[DONE]")
        await response.write_eof()
        return response

    async def _write(self, response: web.StreamResponse, line: str) -> None:
        await asyncio.wait_for(response.write(f"data: {line}\n\n".encode()), self.limits.write_seconds)

    def usage(self, prompts: int, streams: Sequence[Stream]) -> dict[str, object]:
        """Return the token counts of a request."""
        written = sum(len(stream.sink.tokens) for stream in streams)
        return {"prompt_tokens": prompts, "completion_tokens": written, "total_tokens": prompts + written}


async def _texts(streams: Sequence[Stream]) -> list[Text]:
    return [await stream.text() for stream in streams]


def new_id(prefix: str) -> str:
    return f"{prefix}-{secrets.token_hex(12)}"
