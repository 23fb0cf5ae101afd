"""Both ends of a link: the answers of a node, the requests to an agent, and the manifests of trees."""

from __future__ import annotations

import contextlib
import io
import json
import os
import struct
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from random import Random
from typing import Any

from clusterctl.agent.files import tree
from clusterctl.agent.frames import MAX_PAYLOAD, PREFIX, ByteReader, Frame, StreamEnded, encode
from clusterctl.agent.request import Request
from clusterctl.agent.server import Agent
from clusterctl.transport.link import Link
from tests.fuzz.inputs import Reader

# The time limit for an answer, in seconds.
WITHIN = 5.0
GREETING = b'\nCLUSTERCTL-AGENT have ""\n'
VALUES = (
    "null",
    "true",
    "-1",
    "0",
    "1e999",
    "NaN",
    '""',
    "[]",
    "{}",
    '"\\ud800"',
    "9" * 400,
    "[" * 3000,
    '"x"',
)


def _frames(*frames: Frame) -> bytes:
    return b"".join(map(encode, frames))


SAID, ENDED = Frame(1, "data", {"stream": "stdout"}, b"said\n"), Frame(1, "end", {}, b'{"exit_code":0}')
FAILED = Frame(1, "fail", {}, b'{"kind":"os","message":"no"}')
CREDIT, OPEN = Frame(1, "credit", {"bytes": 4096}), Frame(1, "open", {"op": "echo"}, b'{"a":1}')
ANSWERS = (
    GREETING + _frames(SAID, ENDED),
    GREETING + _frames(CREDIT, FAILED),
    GREETING + _frames(Frame(0, "beat", {}), Frame(7, "data", {}, b"x"), ENDED),
    b'Welcome\nCLUSTERCTL-AGENT error "no room"\n',
    b'\nCLUSTERCTL-AGENT old "3.6.8"\n',
)
REQUESTS = (
    _frames(OPEN, SAID, Frame(1, "eof", {})),
    _frames(OPEN, Frame(2, "open", {"op": "none"}, b"{}")),
    _frames(OPEN, CREDIT, Frame(1, "cancel", {})),
)
EMPTY = "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855"
TREES = (
    json.dumps([["a", "d", 493, 0, ""], ["a/b", "f", 420, 0, EMPTY], ["a/l", "l", 511, 0, "b"]]),
    json.dumps(
        [["new\nline", "f", 420, 3, "0" * 64], ["\udcff", "f", 420, 0, EMPTY], ["é", "d", 448, 0, ""]]
    ),
)


def mutate(random: Random, seeds: Sequence[bytes]) -> bytes:
    """Return a seed with a few changed bytes, pieces or JSON values; lengths of frames are often corrected."""
    data = bytearray(random.choice(seeds))
    # Usually leave the greeting unchanged.
    spared = max(0, data.find(b"C\x01")) if random.random() < 0.9 else 0
    for _ in range(random.choice((1, 1, 1, 2, 4))):
        at = random.randrange(min(spared, len(data)), len(data) + 1)
        kind = random.random()
        if kind < 0.25 and at < len(data):
            data[at] = random.randrange(256)
        elif kind < 0.4:
            del data[at : at + random.randint(1, 20)]
        elif kind < 0.55:
            data[at:at] = random.choice(seeds)[random.randrange(40) :]
        elif kind < 0.65:
            data[at:at] = struct.pack(">I", random.choice((0, 1, 255, 1 << 16, MAX_PAYLOAD, (1 << 32) - 1)))
        else:
            _replace_value(random, data, spared)
    return bytes(data)


def _replace_value(random: Random, data: bytearray, spared: int) -> None:
    """Replace one JSON value; usually also correct the length in the header of its frame."""
    places = [at for at in range(spared, len(data)) if data[at : at + 1] in (b":", b",", b"[")]
    if not places:
        return
    begin = random.choice(places) + 1
    end = begin
    while end < len(data) and data[end : end + 1] not in (b",", b"}", b"]"):
        end += 1
    value = random.choice(VALUES).encode()
    frame = data.rfind(b"C\x01", 0, begin)
    if 0 <= frame <= len(data) - PREFIX.size and random.random() < 0.9:
        magic, version, header, payload = PREFIX.unpack(data[frame : frame + PREFIX.size])
        grown = len(value) - (end - begin)
        inside = begin - frame - PREFIX.size
        sizes = (header + grown, payload) if inside < header else (header, payload + grown)
        if all(0 <= size < 1 << 32 for size in sizes):
            data[frame : frame + PREFIX.size] = PREFIX.pack(magic, version, *sizes)
    data[begin:end] = value


class _Played:
    """A pipe to a node with prepared answers; after the greeting it waits for a request."""

    def __init__(self, data: bytes) -> None:
        self._parts = list(data.partition(b"C\x01"))
        self._requested = threading.Event()

    def receive(self, size: int, timeout: float) -> bytes:
        if self._parts[0]:
            greeting, self._parts[0] = self._parts[0], b""
            return greeting
        # After an invalid greeting no request will come, so wait only briefly.
        self._requested.wait(0.01)
        rest, self._parts = b"".join(self._parts), [b""]
        return rest

    def send(self, data: bytes) -> None:
        if b'"open"' in data:
            self._requested.set()

    def close(self) -> None:
        self._requested.set()

    def last_words(self) -> str:
        return ""

    def poll_file(self, on_read: Callable[[], None]) -> int | None:
        return None

    def arrived(self) -> tuple[bytes, bool]:
        raise NotImplementedError

    def can_send(self) -> bool:
        return False


@contextlib.contextmanager
def no_lost_thread() -> Iterator[None]:
    lost: list[object] = []
    before, threading.excepthook = threading.excepthook, lambda raised: lost.append(raised.exc_value)
    try:
        yield
    finally:
        threading.excepthook = before
    assert not lost, f"a thread ended by {lost[0]!r}"


def answers(data: bytes) -> bool:
    """Pass bytes to a link as a node's answer: it must return a result or a ClusterctlError, and lose no thread."""
    link = None
    with no_lost_thread():
        try:
            link = Link("node1", _Played(data), "~/w")
            request = link.open("run", {"argv": ["true"]})
            began = time.monotonic()
            assert isinstance(request.end(), dict)
            assert time.monotonic() - began < WITHIN, "the answer came late"
        finally:
            if link is not None:
                link.close()
    return True


def requests(data: bytes) -> bool:
    """Pass bytes to an agent as requests: it must answer or close the link, without lost requests or threads."""
    sink, errors = os.open(os.devnull, os.O_WRONLY), io.StringIO()
    agent = Agent("/nowhere", {"echo": _echo}.get, sink)
    stream = ByteReader(_one_request(data))
    try:
        with no_lost_thread(), contextlib.redirect_stderr(errors):
            agent._listen(stream.read)
            agent._end_all()
        assert not agent._requests, "a request was never finished"
    finally:
        os.close(sink)
    return not errors.getvalue()


def _echo(request: Request) -> dict[str, object]:
    with contextlib.suppress(StreamEnded):
        while (frame := request.inbox.get()) is not None:
            request.send(frame.payload)
    return {}


def _one_request(data: bytes) -> Any:
    left = [data]
    return lambda: left.pop() if left else b""


def is_inside(entries: Any) -> bool:
    """A manifest may contain only valid names inside the tree."""
    for entry in entries:
        entry.path.encode("utf-8", "surrogateescape")
        path = os.path.normpath(os.path.join("/root/of/tree", entry.path))
        assert path.startswith("/root/of/tree/"), entry.path
        if entry.kind == "l":
            target = os.path.normpath(os.path.join(os.path.dirname(path), entry.content))
            assert (target + "/").startswith("/root/of/tree/"), (entry.path, entry.content)
    assert tree.parse(tree.to_bytes(entries)) == entries
    return True


READERS = {
    "answer": Reader(lambda random: mutate(random, ANSWERS), answers, own=190),
    "request": Reader(lambda random: mutate(random, REQUESTS), requests, refusals=(), own=190),
    "tree": Reader(
        lambda random: mutate(random, [text.encode() for text in TREES]),
        tree.parse,
        is_inside,
        refusals=(tree.BadTree,),
    ),
}
