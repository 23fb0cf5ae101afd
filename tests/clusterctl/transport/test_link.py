from __future__ import annotations

import select
import socket
import threading
import time
from collections.abc import Callable

import pytest

from clusterctl.agent.frames import CHUNK, WINDOW, Frame, encode
from clusterctl.errors import LinkLost, Unreachable
from clusterctl.transport import link as link_module
from clusterctl.transport.link import Link, PendingRequest


class Wire:
    """One end of a socket pair as a pipe; the other end is the test's, which plays a node."""

    def __init__(self) -> None:
        self.mine, self.theirs = socket.socketpair()

    def receive(self, size: int, timeout: float) -> bytes:
        if not select.select([self.mine], [], [], timeout)[0]:
            raise TimeoutError
        return self.mine.recv(size)

    def send(self, data: bytes) -> None:
        self.mine.sendall(data)

    def close(self) -> None:
        self.mine.close()

    def last_words(self) -> str:
        return ""

    def poll_file(self, on_read: Callable[[], None]) -> int | None:
        return None

    def arrived(self) -> tuple[bytes, bool]:
        raise NotImplementedError

    def can_send(self) -> bool:
        return False


def played(answer: bytes, then: Callable[[socket.socket], None] = lambda theirs: None) -> Wire:
    """A node that answers the start with `answer` and then does as it likes."""
    wire = Wire()

    def play() -> None:
        wire.theirs.sendall(answer)
        if answer.endswith(HAVE):
            seen = b""
            while b'"open"' not in seen:
                seen = (seen + wire.theirs.recv(65536))[-100:]
        then(wire.theirs)

    threading.Thread(target=play, daemon=True).start()
    return wire


HAVE = b'\nCLUSTERCTL-AGENT have ""\n'


def test_what_login_scripts_print_before_the_agent_does_not_matter() -> None:
    noise = b"Welcome!\n\x00\xff" + b"=" * 5000 + b"\nCLUSTERCTL is nice\n"
    wire = played(noise + HAVE, lambda theirs: theirs.sendall(encode(Frame(1, "end", {}, b'{"ok":1}'))))
    link = Link("node1", wire, "~/w")
    asked = link.open("hello", {})
    assert asked.end() == {"ok": 1}
    link.close()


@pytest.mark.parametrize(
    "garbage", [b"\xff" * 100, b"C\x01\xff\xff\xff\xff\xff\xff\xff\xff", b"C\x01\0\0\0\x05\0\0\0\0hello"]
)
def test_a_node_that_speaks_garbage_loses_its_link_with_words(garbage: bytes) -> None:
    link = Link("node1", played(HAVE, lambda theirs: theirs.sendall(garbage)), "~/w")
    with pytest.raises(LinkLost, match="node1"):
        link.open("hello", {}).end()


def test_a_node_that_floods_a_request_beyond_its_window_loses_its_link() -> None:
    def flood(theirs: socket.socket) -> None:
        chunk = encode(Frame(1, "data", {}, bytes(1 << 20)))
        try:
            while True:
                theirs.sendall(chunk)
        except OSError:
            pass

    link = Link("node1", played(HAVE, flood), "~/w")
    asked = link.open("hello", {})
    wire_lost = time.monotonic() + 20
    while not link.is_closed and time.monotonic() < wire_lost:
        # Nobody reads the reply.
        time.sleep(0.01)
    assert link.is_closed
    with pytest.raises(LinkLost, match="window"):
        asked.end()


def test_endless_login_noise_is_given_up() -> None:
    def noise(theirs: socket.socket) -> None:
        try:
            while True:
                theirs.sendall(b"noise\n" * 10_000)
        except OSError:
            pass

    with pytest.raises(Unreachable, match="without end"):
        Link("node1", played(b"", noise), "~/w")


def test_a_frozen_node_is_noticed_and_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(link_module, "SILENCE", 0.6)
    monkeypatch.setattr(link_module, "BEAT", 0.1)
    link = Link("node1", played(HAVE), "~/w")
    began = time.monotonic()
    with pytest.raises(LinkLost, match="nothing was received"):
        link.open("hello", {}).end()
    assert time.monotonic() - began < 5


def test_a_stream_that_ends_at_once_is_no_agent() -> None:
    with pytest.raises(Unreachable, match="no agent could be started"):
        Link("node1", played(b"", lambda theirs: theirs.close()), "~/w")


class BrokenLink:
    """A link whose connection has just ended."""

    node = "node1"

    def send(self, frame: Frame) -> None:
        raise LinkLost("node1", "the connection ended")


def test_every_piece_that_came_before_the_end_of_a_connection_is_read() -> None:
    """The reader confirms pieces on the way: a confirmation that could not be sent took one of them with it."""
    request = PendingRequest(BrokenLink(), 1, "follow")  # type: ignore[arg-type]
    count = WINDOW // CHUNK
    for number in range(count):
        request.take(
            Frame(1, "data", {"offset": number * CHUNK}, b"x" * CHUNK), lambda value: LinkLost("", "")
        )
    request.end_with(LinkLost("node1", "the connection ended"))
    offsets = []
    with pytest.raises(LinkLost, match="the connection ended"):
        while frame := request.arrived():
            offsets.append(frame.fields["offset"])
    assert offsets == [number * CHUNK for number in range(count)]
