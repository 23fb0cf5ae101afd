"""Merge the pieces of several streams in the order of their arrival."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence

from trainer.serve.faults import ApiError
from trainer.serve.runner import Piece, Stream


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
