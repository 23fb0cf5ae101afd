"""Worker processes over pipes: parts go out to whoever is idle, what comes back is handed on in order."""

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

from trainer.data_inputs import Part
from trainer.data_part import Made, Maker, Recipe
from trainer.env import preset
from trainer.errors import DataError, DataFailed, TrainerError
from trainer.tokenizer import Tokenizer

AHEAD = 4  # parts a worker may be ahead of the slowest: bounds what waits for its turn in memory


def make_all(parts: Iterable[Part], recipe: Recipe, tokenizer: Tokenizer, workers: int) -> Iterator[Made]:
    """All parts made, in their order. One worker, or one part, is this process's own work."""
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
    """So many processes of this program, which end when this one does: their pipes close."""

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

    def make(self, parts: Iterator[Part]) -> Iterator[Made]:
        """Parts are read no faster than they are made; workers start as there is work for them."""
        ready: dict[int, Made] = {}
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
            argv = [sys.executable, "-m", "trainer.data_pool", str(theirs.fileno())]
            process = subprocess.Popen(argv, stdin=subprocess.DEVNULL, pass_fds=[theirs.fileno()])
        link = Connection(ours.detach())
        self._workers[link] = process
        link.send_bytes(self._start)
        return link


def _send(link: Connection, part: Part, process: subprocess.Popen[bytes]) -> None:
    try:
        link.send(part)
    except (BrokenPipeError, ConnectionResetError):
        _receive(link, process)  # raises what it said last, or that it died


def _receive(link: Connection, process: subprocess.Popen[bytes]) -> Made:
    try:
        answer = link.recv()
    except (EOFError, ConnectionResetError):
        raise _died(process.wait()) from None
    if isinstance(answer, TrainerError):
        raise answer
    made: Made = answer
    return made


def _died(code: int) -> DataFailed:
    killed = f"by {signal.Signals(-code).name}" if code < 0 else f"with exit code {code}"
    hint = "run it again: it goes on where it was"
    if code == -signal.SIGKILL:
        hint = "memory may have run out: give fewer --workers and " + hint
    return DataFailed(f"a worker process ended {killed}", hint)


def serve(link: Any) -> None:
    """A worker's life: made ready once, then part after part until the pipe closes."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent hears it too, and closes the pipe
    preset("TOKENIZERS_PARALLELISM", "false")  # each core has a worker; its own threads would crowd them
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
                DataFailed(
                    "memory ran out", "give fewer --workers, and run it again: it goes on where it was"
                )
            )
    except (EOFError, BrokenPipeError, ConnectionResetError):
        return


def _portable(error: TrainerError) -> TrainerError:
    """An error of any class as one whose arguments a pickle can give back."""
    kind = DataError if isinstance(error, DataError) else DataFailed
    return kind(error.message, error.hint)


if __name__ == "__main__":
    serve(Connection(int(sys.argv[1])))
