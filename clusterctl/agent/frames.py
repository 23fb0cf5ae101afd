"""The protocol between launcher and agent: frames over one byte stream, many requests at the same time.

A frame is `C`, version 1, the header's length (4 bytes), the payload's length (4 bytes), the header as JSON, the
payload. Lengths are checked before anything is read, so that a hostile or faulty peer can neither hang its reader nor
fill its memory.

Runs on nodes too: standard library only, Python 3.8 and newer.
"""

from __future__ import annotations

import json
import struct
import threading
from typing import Any, Callable, Dict, Optional

from clusterctl.agent import compact_json

PREFIX = struct.Struct(">BBII")
MAGIC, VERSION = 0x43, 1
# Limit of bytes of a header, which has an id, a kind, a stream name or a path.
MAX_HEADER = 64 << 10
# The parameters of one request: argv and environment together stay under 2 MB on Linux.
MAX_PAYLOAD = 16 << 20
# One piece of a stream: big enough for 1 GB/s, small enough that no request waits for another.
CHUNK = 128 << 10
# Bytes of a stream that may be sent before its reader confirms any of them.
WINDOW = 1 << 20
# Bytes that each piece counts in addition to its size, because a flood of empty pieces takes memory too.
LEAST = 256
# Seconds of silence after which a launcher that reads with a thread per node sends a beat.
BEAT = 3.0
# Seconds between two beats of a launcher that reads all nodes in one thread.
ALL_BEAT = 4.0
# Seconds without sending after which an agent sends a beat that was not asked for: usually it answers the launcher's,
# so that one wake-up of the launcher reads the answers of many nodes.
AGENT_BEAT = 6.0
# Seconds after the last frame in which an agent leaves a beat unanswered.
FRESH = 1.0
# Seconds without a byte after which the launcher treats the connection to a node as lost.
SILENCE = 10.0
# The same for the node, which then ends the commands of the connection.
AGENT_SILENCE = 10.0


class BadFrame(Exception):
    """The received bytes are not a frame; the stream cannot be used any more."""


class StreamEnded(Exception):
    """The peer closed the stream, or the connection is lost."""


class Frame:
    """One message; id 0 is about the connection itself, every other id belongs to a request.

    `kind` is open, data, eof, cancel, credit, end, fail or beat.
    """

    __slots__ = ("fields", "id", "kind", "payload")

    def __init__(self, id: int, kind: str, fields: Dict[str, Any], payload: bytes = b"") -> None:
        self.id = id
        self.kind = kind
        self.fields = fields
        self.payload = payload

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Frame) and self._all() == other._all()

    def __repr__(self) -> str:
        return "Frame({!r}, {!r}, {!r}, {!r})".format(*self._all())

    def _all(self) -> "tuple[int, str, Dict[str, Any], bytes]":
        return self.id, self.kind, self.fields, self.payload


def encode(frame: Frame) -> bytes:
    """Return the bytes of one frame."""
    header = compact_json.dumps([frame.id, frame.kind, frame.fields]).encode()
    if len(header) > MAX_HEADER or len(frame.payload) > MAX_PAYLOAD:
        raise BadFrame(f"a frame of {len(header)} + {len(frame.payload)} bytes is too large")
    return PREFIX.pack(MAGIC, VERSION, len(header), len(frame.payload)) + header + frame.payload


def read_frame(read: Callable[[int], bytes]) -> Optional[Frame]:
    """Return the next frame, or None at the clean end; `read(n)` returns n bytes, or fewer at the end."""
    prefix = read(PREFIX.size)
    if not prefix:
        return None
    if len(prefix) < PREFIX.size:
        raise BadFrame("the stream ended inside a frame")
    header_size, payload_size = sizes_of(prefix)
    body = read(header_size + payload_size)
    if len(body) < header_size + payload_size:
        raise BadFrame("the stream ended inside a frame")
    return parse_frame(body[:header_size], body[header_size:])


def sizes_of(data: bytes, at: int = 0) -> "tuple[int, int]":
    """Return the bytes of the header and of the payload of the frame that begins at `at`."""
    magic, version, header_size, payload_size = PREFIX.unpack_from(data, at)
    if magic != MAGIC or version != VERSION:
        raise BadFrame(f"{data[at : at + 8]!r} is not the beginning of a frame")
    if header_size > MAX_HEADER or payload_size > MAX_PAYLOAD:
        raise BadFrame(f"a frame of {header_size} + {payload_size} bytes is too large")
    return header_size, payload_size


def parse_frame(header: bytes, payload: bytes) -> Frame:
    try:
        number, kind, fields = json.loads(header)
    except (ValueError, TypeError, RecursionError) as problem:
        raise BadFrame("a frame's header is not what it must be") from problem
    if not isinstance(number, int) or not isinstance(kind, str) or not isinstance(fields, dict):
        raise BadFrame("a frame's header is not what it must be")
    return Frame(number, kind, fields, payload)


def parse_payload(payload: bytes) -> Dict[str, Any]:
    """Return the JSON object of a payload; raise BadFrame for anything else."""
    try:
        value = json.loads(payload)
    except (ValueError, RecursionError) as problem:
        raise BadFrame("a payload is not JSON") from problem
    if not isinstance(value, dict):
        raise BadFrame("a payload is not a JSON object")
    return value


def to_payload(value: Dict[str, Any]) -> bytes:
    """Return a value as JSON in ASCII; a name that is not UTF-8 survives as lone surrogates."""
    return compact_json.dumps(value).encode()


def credit_of(frame: Frame) -> int:
    """Return how many bytes the peer reports as read."""
    count = frame.fields.get("bytes")
    if type(count) is not int or count < 0:
        raise BadFrame("a credit is not a count of bytes")
    return count


def _weight(frame: Frame) -> int:
    """Return how much an unread frame counts: its fields too, or a peer could hide memory in them."""
    return max(len(frame.payload), LEAST) + len(repr(frame.fields))


class Window:
    """How many bytes of one stream may still be sent; the reader's credit adds to it."""

    def __init__(self, size: int = WINDOW) -> None:
        self._left = size
        self._closed = False
        self._change = threading.Condition()

    def take(self, count: int) -> None:
        """Wait until something may be sent, then count it; one chunk may exceed the window."""
        with self._change:
            while self._left <= 0 and not self._closed:
                self._change.wait()
            if self._closed:
                raise StreamEnded("the link is closed")
            self._left -= max(count, LEAST)

    def give(self, count: int) -> None:
        with self._change:
            self._left += count
            self._change.notify_all()

    def close(self) -> None:
        with self._change:
            self._closed = True
            self._change.notify_all()


class Inbox:
    """The received but unread chunks of one stream; the sender's window bounds them."""

    def __init__(self, credit: Callable[[int], None], size: int = WINDOW) -> None:
        self._credit = credit
        self._size = size
        self._chunks: "list[Frame]" = []
        self._held = 0
        self._taken = 0
        self._end: Optional[BaseException] = None
        self._finished = False
        self._change = threading.Condition()

    def put(self, frame: Frame) -> None:
        """Add a chunk without waiting; the link's reader calls this. A peer that ignores its window breaks the link."""
        with self._change:
            self._held += _weight(frame)
            if self._held > self._size + MAX_PAYLOAD:
                raise BadFrame("the peer sends more than its window")
            self._chunks.append(frame)
            self._change.notify_all()

    def close(self, problem: Optional[BaseException] = None) -> None:
        """Record that no more chunks will come: the stream has ended, or an error broke it."""
        with self._change:
            self._end = self._end or problem
            self._finished = True
            self._change.notify_all()

    def get(self, limit: Optional[float] = None) -> Optional[Frame]:
        """Return the next chunk, or None at the end; raise what broke the stream, or TimeoutError after `limit` s."""
        with self._change:
            if not self._change.wait_for(lambda: self._chunks or self._finished, limit):
                raise TimeoutError
            if not self._chunks:
                if self._end is not None:
                    raise self._end
                return None
            frame = self._chunks.pop(0)
            self._held -= _weight(frame)
            self._taken += max(len(frame.payload), LEAST)
            due = self._taken if self._taken >= self._size // 2 else 0
            self._taken -= due
        if due:
            self._credit(due)
        return frame


class ByteReader:
    """Reads exact numbers of bytes from chunks of any size."""

    def __init__(self, next_chunk: Callable[[], bytes]) -> None:
        # B"" at the end.
        self._next = next_chunk
        self._chunk = b""
        # How much of it was read.
        self._at = 0

    def read(self, count: int) -> bytes:
        """Return `count` bytes, fewer only at the end."""
        begin, end = self._at, self._at + count
        if end > len(self._chunk):
            return self._over_several(count)
        self._at = end
        return self._chunk[begin:end]

    def _over_several(self, count: int) -> bytes:
        parts = [self._chunk[self._at :]]
        left = count - len(parts[0])
        while left > 0:
            self._chunk, self._at = self._next(), 0
            if not self._chunk:
                break
            parts.append(self._chunk[:left])
            self._at = len(parts[-1])
            left -= self._at
        return b"".join(parts)

    def rest(self) -> bytes:
        """Return what is left of the present chunk; it counts as read."""
        begin, self._at = self._at, len(self._chunk)
        return self._chunk[begin:]

    def read_into(self, view: memoryview) -> None:
        """Fill the view, copying each byte once; raise EOFError if the stream ends before."""
        while view:
            if self._at == len(self._chunk):
                self._chunk, self._at = self._next(), 0
                if not self._chunk:
                    raise EOFError
            count = min(len(view), len(self._chunk) - self._at)
            view[:count] = memoryview(self._chunk)[self._at : self._at + count]
            self._at += count
            view = view[count:]

    def read_line(self, limit: int) -> bytes:
        """Return the bytes up to and with the next line break, at most `limit` of them."""
        parts: "list[bytes]" = []
        while limit > 0:
            if self._at == len(self._chunk):
                self._chunk, self._at = self._next(), 0
                if not self._chunk:
                    break
            end = self._chunk.find(b"\n", self._at) + 1
            parts.append(self.read(min(end or len(self._chunk), self._at + limit) - self._at))
            limit -= len(parts[-1])
            if end and self._at == end:
                break
        return b"".join(parts)
