"""What every route uses: the model, its limits, and how a client gets its answer."""

from __future__ import annotations

import asyncio
import json
import secrets
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

from aiohttp import web

from trainer.errors import InputError
from trainer.generate.decoder import Decoder, Text
from trainer.generate.request import Request
from trainer.serve.faults import ApiError, Json
from trainer.serve.metrics import Metrics
from trainer.serve.runner import Runner, Stream


@dataclass(frozen=True)
class Limits:
    """What one client can take."""

    body: int = 4 << 20
    """Bytes of a request's body."""
    head_seconds: float = 10.0
    """Until a connection's first request must have arrived."""
    body_seconds: float = 30.0
    request_seconds: float = 600.0
    write_seconds: float = 30.0
    """Until a client must have read a piece of its answer."""
    queue: int = 256
    """Requests that wait for their turn."""
    connections: int = 2048


@dataclass
class Service:
    """One served model."""

    name: str
    decoder: Decoder
    runner: Runner
    limits: Limits
    template: str = ""
    tokenizer_config: Json = field(default_factory=dict)
    api_key: str = ""
    metrics: Metrics = field(default_factory=Metrics)
    created: int = field(default_factory=lambda: int(time.time()))
    draining: bool = False

    async def body(self, request: web.Request) -> bytes:
        """Return the body of a request, if it is small and arrives in time."""
        if (request.content_length or 0) > self.limits.body:
            raise ApiError(413, f"the body is larger than {self.limits.body} bytes")
        try:
            return await asyncio.wait_for(request.read(), self.limits.body_seconds)
        except asyncio.TimeoutError:
            raise ApiError(408, f"the body did not arrive in {self.limits.body_seconds:g} s") from None
        except web.HTTPRequestEntityTooLarge:
            raise ApiError(413, f"the body is larger than {self.limits.body} bytes") from None

    @asynccontextmanager
    async def running(self, requests: Sequence[tuple[Request, Text]]) -> AsyncIterator[list[Stream]]:
        """Run requests; they are cancelled if the client leaves or their time is over."""
        if self.draining:
            raise ApiError(503, "the server is stopping")
        try:
            streams = self.runner.submit(requests)
        except InputError as error:
            raise ApiError(400, error.message) from None
        try:
            yield streams
        finally:
            self.runner.release(streams)
            self.metrics.add_streams(streams)

    async def texts(self, streams: Sequence[Stream]) -> list[Text]:
        """Wait for all texts."""
        try:
            return await asyncio.wait_for(
                asyncio.gather(*(stream.text() for stream in streams)), self.limits.request_seconds
            )
        except asyncio.TimeoutError:
            raise ApiError(
                503, f"no answer within {self.limits.request_seconds:g} s", code="timeout"
            ) from None

    async def events(self, request: web.Request, lines: AsyncIterator[Json]) -> web.StreamResponse:
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

    def usage(self, prompts: int, streams: Sequence[Stream]) -> Json:
        """Return the token counts of a request."""
        written = sum(len(stream.sink.tokens) for stream in streams)
        return {"prompt_tokens": prompts, "completion_tokens": written, "total_tokens": prompts + written}


def new_id(prefix: str) -> str:
    return f"{prefix}-{secrets.token_hex(12)}"
