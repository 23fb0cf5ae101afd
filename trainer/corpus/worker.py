"""Turn one part of the inputs into tokens; run workers as processes connected by pipes.

Idle workers receive the next part; results are passed on in order.
"""

from __future__ import annotations

import pickle
import signal
import socket
import subprocess
import sys
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from itertools import chain, islice
from multiprocessing.connection import Connection, wait
from typing import Any

import numpy as np
from numpy.typing import NDArray

from trainer.corpus.documents import Bad, documents, sentences
from trainer.corpus.filters import Filters, Sieve, content_hash
from trainer.corpus.indexed import token_type
from trainer.corpus.inputs import Part
from trainer.corpus.tokenizer import Tokenizer
from trainer.env import preset
from trainer.errors import DataError, DataFailed, TrainerError

UNITS = ("document", "sentence")
# Of a part; all are counted.
BAD_TOLD = 20


@dataclass(frozen=True)
class Recipe:
    """Everything that determines the tokens of a document; the same for all parts."""

    key: str = "text"
    each: str = "file"
    unit: str = "document"
    append_eod: bool = False
    dedup: bool = False
    filters: Filters = field(default_factory=Filters)


@dataclass(frozen=True)
class Made:
    """The documents of a part as tokens."""

    number: int
    mark: str
    tokens: NDArray[Any]
    # Of the sequences.
    lengths: NDArray[np.int32]
    # Sequences of each document.
    counts: NDArray[np.int32]
    hashes: bytes
    facts: dict[str, int]
    bad: list[str]
    slow: str
    """Why `tokenizers` encoded it, which is about ten times slower; empty if it did not."""


class Maker:
    """Makes parts; one per process."""

    def __init__(self, recipe: Recipe, tokenizer: Tokenizer, threads: int = 1) -> None:
        from trainer.corpus.encoder import encoder_for

        self.recipe = recipe
        self._vocab = tokenizer.vocab
        self._eod = tokenizer.eod
        self._dtype = token_type(tokenizer.vocab)
        self._encoder = encoder_for(tokenizer, threads)
        self._sieve = Sieve(recipe.filters)

    def make(self, part: Part) -> Made:
        facts: Counter[str] = Counter()
        bad: list[str] = []
        kept: list[str | list[int]] = []
        for piece in part.pieces:
            for one in documents(piece, self.recipe.key, self.recipe.each, self._vocab):
                if isinstance(one, Bad):
                    facts["bad"] += 1
                    bad += [str(one)] if len(bad) < BAD_TOLD else []
                    continue
                refusal = self._sieve.refusal(one)
                facts[refusal or "documents"] += 1
                if not refusal:
                    facts["characters"] += len(one) if isinstance(one, str) else 0
                    kept.append(one)
        tokens, lengths, counts = self._encoded(kept)
        facts["empty"] += int((counts == 0).sum())
        hashes = b"".join(map(content_hash, kept)) if self.recipe.dedup else b""
        slow = self._encoder.why
        return Made(part.number, part.mark, tokens, lengths, counts, hashes, dict(facts), bad, slow)

    def _encoded(
        self, kept: list[str | list[int]]
    ) -> tuple[NDArray[Any], NDArray[np.int32], NDArray[np.int32]]:
        """Return all tokens, the length of each sequence, and the number of sequences of each document,
        none of them 0."""
        units: list[str | list[int]] = []
        counts = np.ones(len(kept), np.int64)
        for number, one in enumerate(kept):
            some = sentences(one) if self.recipe.unit == "sentence" and isinstance(one, str) else [one]
            units += some
            counts[number] = len(some)
        tokens, lengths = self._ids(units)
        owners = np.repeat(np.arange(len(kept)), counts)[lengths > 0]
        lengths = lengths[lengths > 0].astype(np.int64)
        counts = np.bincount(owners, minlength=len(kept))
        if self.recipe.append_eod:
            last = np.cumsum(counts)[counts > 0] - 1
            tokens = np.insert(tokens, np.cumsum(lengths)[last], self._eod)
            lengths[last] += 1
        return tokens, lengths.astype(np.int32), counts.astype(np.int32)

    def _ids(self, units: list[str | list[int]]) -> tuple[NDArray[Any], NDArray[np.int32]]:
        texts = [one for one in units if isinstance(one, str)]
        tokens, lengths = self._encoder.encode_many(texts)
        if len(texts) == len(units):
            return tokens.astype(self._dtype, copy=False), lengths
        ends = np.cumsum(lengths)
        encoded = iter(np.split(tokens, ends[:-1]) if len(texts) else [])
        rows = [next(encoded) if isinstance(one, str) else np.asarray(one, self._dtype) for one in units]
        joined = np.concatenate(rows).astype(self._dtype) if rows else np.zeros(0, self._dtype)
        return joined, np.fromiter(map(len, rows), np.int32, len(rows))


# Parts that a worker may be ahead of the slowest one: bounds the results that wait in memory.
AHEAD = 4


def make_all(parts: Iterable[Part], recipe: Recipe, tokenizer: Tokenizer, workers: int) -> Iterator[Made]:
    """Yield all parts in order. With one worker or one part, this process does the work itself."""
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

    def make(self, parts: Iterator[Part]) -> Iterator[Made]:
        """Yield finished parts. Parts are read no faster than they are made; workers start when there is
        work."""
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
            argv = [sys.executable, "-m", "trainer.corpus.worker", str(theirs.fileno())]
            process = subprocess.Popen(argv, stdin=subprocess.DEVNULL, pass_fds=[theirs.fileno()])
        link = Connection(ours.detach())
        self._workers[link] = process
        link.send_bytes(self._start)
        return link


def _send(link: Connection, part: Part, process: subprocess.Popen[bytes]) -> None:
    try:
        link.send(part)
    except (BrokenPipeError, ConnectionResetError):
        # Raises the last error of the worker, or that it died.
        _receive(link, process)


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
    """Run a worker: load once, then make part after part until the pipe closes."""
    # The parent receives it too, and closes the pipe.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    # There is one worker per core; threads of its own would compete.
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
                DataFailed(
                    "memory ran out", "give fewer --workers, and run it again: it goes on where it was"
                )
            )
    except (EOFError, BrokenPipeError, ConnectionResetError):
        return


def _portable(error: TrainerError) -> TrainerError:
    """Return an error of any class as one whose arguments can be pickled."""
    kind = DataError if isinstance(error, DataError) else DataFailed
    return kind(error.message, error.hint)


if __name__ == "__main__":
    serve(Connection(int(sys.argv[1])))
