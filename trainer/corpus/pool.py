"""Run workers as processes connected by pipes: idle workers receive the next part, results keep their order."""

from __future__ import annotations

import pickle
import signal
import socket
import subprocess
import sys
from collections.abc import Iterable, Iterator
from itertools import chain, islice
from multiprocessing.connection import Connection, wait
from typing import Any

from clusterctl.wire.data_requests import Recipe
from trainer.corpus.inputs import Part
from trainer.corpus.tokenizer import Tokenizer
from trainer.corpus.worker import EncodedPart, Maker
from trainer.env import preset
from trainer.errors import DataError, DataFailed, TrainerError

# Parts per worker that may be started before an unfinished one: bounds the results that wait in memory.
AHEAD = 4


def make_all(
    parts: Iterable[Part], recipe: Recipe, tokenizer: Tokenizer, workers: int
) -> Iterator[EncodedPart]:
    """Yield all encoded parts in order. With one worker or one part, this process does the work itself."""
    waiting = iter(parts)
    first = list(islice(waiting, 2))
    parts = chain(first, waiting)
    if workers == 1 or len(first) < 2:
        maker = Maker(recipe, tokenizer)
        for part in parts:
            yield maker.make(part)
        return
    with Pool(workers, recipe, tokenizer) as pool:
        yield from pool.make(parts)


class Pool:
    """Worker processes of this program; they end when this process ends, because their pipes close."""

    def __init__(self, workers: int, recipe: Recipe, tokenizer: Tokenizer) -> None:
        self._size = workers
        self._start = pickle.dumps((recipe, tokenizer.source, tokenizer.token_of(tokenizer.eod)))
        self._workers: dict[Connection, subprocess.Popen[bytes]] = {}

    def __enter__(self) -> Pool:
        return self

    def __exit__(self, *_: object) -> None:
        for link, process in self._workers.items():
            link.close()
            process.terminate()
        for process in self._workers.values():
            process.wait()

    def make(self, parts: Iterator[Part]) -> Iterator[EncodedPart]:
        """Yield encoded parts in order. Parts are read no faster than they are encoded; a worker starts when
        there is a part for it."""
        ready: dict[int, EncodedPart] = {}
        busy: dict[Connection, int] = {}
        part = next(parts, None)
        due = part.number if part is not None else 0
        while part is not None or busy:
            if part is not None and part.number < due + AHEAD * self._size:
                idle = self._idle(busy)
                if idle is not None:
                    _send(idle, part, self._workers[idle])
                    busy[idle] = part.number
                    part = next(parts, None)
                    continue
            for link in wait(list(busy)):
                made = _receive(link, self._workers[link])  # type: ignore[index, arg-type]
                del busy[link]  # type: ignore[arg-type]
                ready[made.number] = made
            while due in ready:
                yield ready.pop(due)
                due += 1

    def _idle(self, busy: dict[Connection, int]) -> Connection | None:
        free = next((link for link in self._workers if link not in busy), None)
        if free is None and len(self._workers) < self._size:
            free = self._begin()
        return free

    def _begin(self) -> Connection:
        ours, theirs = socket.socketpair()
        with theirs:
            argv = [sys.executable, "-m", "trainer.corpus.pool", str(theirs.fileno())]
            process = subprocess.Popen(argv, stdin=subprocess.DEVNULL, pass_fds=[theirs.fileno()])
        link = Connection(ours.detach())
        self._workers[link] = process
        link.send_bytes(self._start)
        return link


def _send(link: Connection, part: Part, process: subprocess.Popen[bytes]) -> None:
    try:
        link.send(part)
    except (BrokenPipeError, ConnectionResetError):
        # It raises the worker's error, or one that says how the worker ended.
        _receive(link, process)


def _receive(link: Connection, process: subprocess.Popen[bytes]) -> EncodedPart:
    try:
        answer = link.recv()
    except (EOFError, ConnectionResetError):
        raise _died(process.wait()) from None
    if isinstance(answer, TrainerError):
        raise answer
    made: EncodedPart = answer
    return made


def _died(code: int) -> DataFailed:
    killed = f"by {signal.Signals(-code).name}" if code < 0 else f"with exit code {code}"
    hint = "run it again: the build resumes"
    if code == -signal.SIGKILL:
        hint = "memory may have run out: give fewer --workers and " + hint
    return DataFailed(f"a worker process ended {killed}", hint)


def serve(link: Any) -> None:
    """Run a worker: load the tokenizer once, then encode part after part until the pipe closes."""
    # The parent receives Ctrl-C too, and closes the pipe.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    # There is one worker per core, so that threads in a worker would compete.
    preset("TOKENIZERS_PARALLELISM", "false")
    try:
        recipe, source, end = pickle.loads(link.recv_bytes())
        try:
            from pathlib import Path

            maker = Maker(recipe, Tokenizer.load(Path(source), end))
            while True:
                link.send(maker.make(link.recv()))
        except TrainerError as error:
            link.send(_portable(error))
        except MemoryError:
            link.send(
                DataFailed("memory ran out", "give fewer --workers, and run it again: the build resumes")
            )
    except (EOFError, BrokenPipeError, ConnectionResetError):
        return


def _portable(error: TrainerError) -> TrainerError:
    """Return an error with the same message and hint that can be pickled."""
    kind = DataError if isinstance(error, DataError) else DataFailed
    return kind(error.message, error.hint)


if __name__ == "__main__":
    serve(Connection(int(sys.argv[1])))
