"""The compute thread: requests come from the event loop, and generated texts go back to it."""

from __future__ import annotations

import asyncio
import queue
import threading
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field

from trainer.generate.decoder import Decoder, Text
from trainer.generate.request import Request
from trainer.generate.sampling import Drawn
from trainer.serve.faults import ApiError

Piece = tuple[str, Sequence[Drawn]]

GAP = 0.002
"""After a pause, wait this many seconds for another request, so that both start in the same step."""
TOGETHER = 0.02
"""The first request waits at most this many seconds for others."""
UNREAD = 4
"""The most requests, in multiples of the limit, whose answers the clients have not read completely."""


@dataclass
class Stream:
    """A request, and its text while it is generated."""

    request: Request
    sink: Text
    loop: asyncio.AbstractEventLoop
    in_pieces: bool = True
    """Whether the text is sent piece by piece, not at once."""
    pieces: asyncio.Queue[Piece | None] = field(default_factory=asyncio.Queue)
    started: float = field(default_factory=time.monotonic)
    first: float = 0.0
    """Seconds until the first piece of text; 0 before that."""

    def __post_init__(self) -> None:
        self.sink.on_text = self._on_text
        self.sink.on_end = lambda: self._put(None)

    def _on_text(self, text: str, tokens: Sequence[Drawn]) -> None:
        self.first = self.first or time.monotonic() - self.started
        if self.in_pieces:
            self._put((text, tokens))

    def _put(self, piece: Piece | None) -> None:
        if not self.loop.is_closed():
            self.loop.call_soon_threadsafe(self.pieces.put_nowait, piece)

    async def __aiter__(self) -> AsyncIterator[Piece]:
        while (piece := await self.pieces.get()) is not None:
            yield piece
        if self.sink.message:
            raise ApiError(500, self.sink.message)

    async def text(self) -> Text:
        """Wait for the end; return the text."""
        async for _ in self:
            pass
        return self.sink


class Runner:
    """Runs the batcher in a thread; at most `queued` requests wait in the queue."""

    def __init__(self, decoder: Decoder, queued: int) -> None:
        self.decoder, self.queued = decoder, queued
        self.active: dict[int, Stream] = {}
        self._inbox: queue.SimpleQueue[Request | None] = queue.SimpleQueue()
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._work, name="decoder", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """End the thread and drop running requests."""
        self._stopped.set()
        self._inbox.put(None)
        self._thread.join(30)

    @property
    def busy(self) -> int:
        """Return how many requests are computed or wait; a client may not have read the answers of the others."""
        return sum(stream.sink.reason is None for stream in self.active.values())

    def submit(self, requests: Sequence[tuple[Request, Text]], *, in_pieces: bool) -> list[Stream]:
        """Start all requests and return their streams; refuse all if too many wait."""
        batcher = self.decoder.batcher
        limit, busy = batcher.most_running + self.queued, self.busy
        if busy + len(requests) > limit or len(self.active) + len(requests) > UNREAD * limit:
            raise ApiError(
                429, f"{busy} requests are active, which is the limit: try again", code="queue_full"
            )
        for request, _ in requests:
            batcher.need(request)
        loop = asyncio.get_running_loop()
        streams = [Stream(request, sink, loop, in_pieces) for request, sink in requests]
        for stream in streams:
            self.active[id(stream)] = stream
            self._inbox.put(stream.request)
        return streams

    def release(self, streams: Sequence[Stream]) -> None:
        """Remove requests from the active ones; cancel those that have not ended."""
        for stream in streams:
            if stream.sink.reason is None:
                stream.request.cancelled = True
                self._inbox.put(None)
            self.active.pop(id(stream), None)

    def _work(self) -> None:
        batcher = self.decoder.batcher
        while not self._stopped.is_set():
            with suppress(queue.Empty):
                self._take()
            if batcher.idle:
                continue
            try:
                batcher.step()
            except (RuntimeError, MemoryError) as error:
                batcher.fail_all(f"the model failed: {type(error).__name__}: {error}")

    def _take(self) -> None:
        """Pass new requests to the batcher; wait for requests only if there is nothing to compute.

        After a pause, requests that arrive together start in the same step: their prompts are computed as one large
        part and not as many small ones, each of which would read all weights. The wait ends with None in the queue, or
        by raising `queue.Empty`.
        """
        batcher = self.decoder.batcher
        paused = batcher.idle
        request = self._inbox.get(block=paused)
        until = time.monotonic() + TOGETHER
        while request is not None:
            batcher.submit(request)
            left = until - time.monotonic()
            request = self._inbox.get(paused and left > 0, min(GAP, max(left, 0.0)))


async def merged(streams: Sequence[Stream]) -> AsyncIterator[tuple[int, Piece | None]]:
    """Yield the index of a stream with its next piece, and with None at its end.

    Pieces of a stream that have already arrived are joined, so that a slow client gets fewer and larger pieces.
    """
    tasks = {asyncio.ensure_future(stream.pieces.get()): index for index, stream in enumerate(streams)}
    try:
        while tasks:
            done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                index = tasks.pop(task)
                stream, piece = streams[index], task.result()
                while piece is not None and not stream.pieces.empty():
                    following = stream.pieces.get_nowait()
                    if following is None:
                        yield index, piece
                        piece = None
                        break
                    piece = (piece[0] + following[0], [*piece[1], *following[1]])
                if piece is None:
                    if stream.sink.message:
                        raise ApiError(500, stream.sink.message)
                    yield index, None
                else:
                    yield index, piece
                    tasks[asyncio.ensure_future(stream.pieces.get())] = index
    finally:
        for task in tasks:
            task.cancel()
