"""One thread reads all links: what it must notice, and what must not stop it."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable

import pytest

from clusterctl.agent.frames import ALL_BEAT, BadFrame, Frame, encode
from clusterctl.errors import LinkLost
from clusterctl.transport import link as link_module
from clusterctl.transport import poller as poller_module
from clusterctl.transport.later import Later
from clusterctl.transport.link import Link, next_beat
from clusterctl.transport.pipe import StreamPipe
from clusterctl.transport.poller import Poller, poller
from clusterctl.transport.splitter import FrameSplitter
from tests.support.nodes import wait_for

HAVE = b'\nCLUSTERCTL-AGENT have ""\n'


class Wire:
    """One end of a socket pair as a stream that can be read without waiting; the test plays the node."""

    def __init__(self) -> None:
        self.mine, self.theirs = socket.socketpair()
        self.writable = True

    def read(self, size: int, timeout: float) -> tuple[str, bytes]:
        self.mine.settimeout(max(timeout, 0.001))
        return "stdout", self.mine.recv(size)

    def poll_file(self, on_read: Callable[[], None]) -> int | None:
        return self.mine.fileno()

    def arrived(self) -> tuple[list[tuple[str, bytes]], bool]:
        self.mine.settimeout(0.0)
        try:
            data = self.mine.recv(65536)
        except BlockingIOError:
            return [], True
        return ([("stdout", data)] if data else []), bool(data)

    def can_send(self) -> bool:
        return self.writable

    def send(self, data: bytes) -> None:
        self.mine.settimeout(10.0)
        self.mine.sendall(data)

    def close(self) -> None:
        self.mine.close()


def linked(wire: Wire, after: bytes = b"") -> Link:
    wire.theirs.sendall(HAVE + after)
    return Link("node1", StreamPipe(wire), "~/w")


def test_many_links_share_one_thread() -> None:
    before = threading.active_count()
    wires = [Wire() for _ in range(50)]
    links = [linked(wire) for wire in wires]
    requests = [link.open("hello", {}) for link in links]
    for wire in wires:
        wire.theirs.sendall(encode(Frame(1, "end", {}, b'{"ok": 1}')))
    assert [request.end()["ok"] for request in requests] == [1] * 50
    assert threading.active_count() <= before + 1
    for link in links:
        link.close()


def test_what_came_with_the_greeting_is_read_too() -> None:
    wire = Wire()
    link = linked(wire, encode(Frame(0, "beat", {})) + encode(Frame(1, "end", {}, b"{}"))[:7])
    request = link.open("hello", {})
    wire.theirs.sendall(encode(Frame(1, "end", {}, b"{}"))[7:])
    assert request.end() == {}
    link.close()


def test_a_link_that_ends_fails_its_requests_and_no_others() -> None:
    ended, other = Wire(), Wire()
    first, second = linked(ended), linked(other)
    lost, answered = first.open("hello", {}), second.open("hello", {})
    ended.theirs.close()
    with pytest.raises(LinkLost, match="the connection ended"):
        lost.end()
    other.theirs.sendall(encode(Frame(1, "end", {}, b"{}")))
    assert answered.end() == {}
    second.close()


def test_an_invalid_answer_right_after_the_greeting_ends_the_link() -> None:
    link = linked(Wire(), b"garbage" * 100)
    with pytest.raises(LinkLost, match="its answer is invalid"):
        link.open("hello", {}).end()


@pytest.mark.parametrize("garbage", [b"garbage" * 100, encode(Frame(1, "end", {}, b"not JSON"))])
def test_an_invalid_answer_ends_its_link_only(garbage: bytes) -> None:
    bad, good = Wire(), Wire()
    first, second = linked(bad), linked(good)
    broken, answered = first.open("hello", {}), second.open("hello", {})
    bad.theirs.sendall(garbage)
    with pytest.raises(LinkLost, match="its answer is invalid"):
        broken.end()
    good.theirs.sendall(encode(Frame(1, "end", {}, b"{}")))
    assert answered.end() == {}
    second.close()


def test_a_silent_link_is_given_up_and_a_blocked_one_gets_no_beat(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(link_module, "SILENCE", 1.5)
    monkeypatch.setattr(link_module, "ALL_BEAT", 0.1)
    silent, blocked = Wire(), Wire()
    blocked.writable = False
    links = [linked(silent), linked(blocked)]
    wait_for(lambda: all(link.is_closed for link in links))
    silent.theirs.setblocking(False)
    blocked.theirs.setblocking(False)
    assert b'"beat"' in silent.theirs.recv(1 << 20)
    assert b'"beat"' not in blocked.theirs.recv(1 << 20)
    with pytest.raises(LinkLost, match="nothing was received"):
        links[0].open("hello", {})


def test_beats_of_all_links_are_due_at_the_same_moments() -> None:
    moments = {next_beat(100.0 + index / 7) for index in range(280)}
    assert moments == {100.0 + ALL_BEAT * number for number in range(1, 11)}
    assert all(0 < next_beat(now) - now <= ALL_BEAT for now in (0.0, 3.999, 4.0, 1e6 + 0.1))


def test_links_of_any_age_get_their_beats_in_one_wake_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(link_module, "ALL_BEAT", 1.0)
    wires, links = [], []
    for _ in range(12):
        wires.append(Wire())
        links.append(linked(wires[-1]))
        time.sleep(0.03)
    wake_ups: list[float] = []
    beats: list[float] = []
    for link in links:
        monkeypatch.setattr(
            link, "check", lambda now, check=link.check: (wake_ups.append(now), check(now))[1]
        )
        monkeypatch.setattr(link, "_beat", lambda: beats.append(wake_ups[-1]))
    wait_for(lambda: len(beats) >= 36)
    for link in links:
        link.close()
    # Three beats of each link; one more wake-up if the first links were there before the first beat.
    assert len(set(beats[:36])) <= 4


def test_what_another_thread_read_reaches_the_poller() -> None:
    class Link:
        calls = 0

        def pump(self) -> bool:
            self.calls += 1
            return True

        def check(self, now: float) -> float:
            return now + 60.0

    mine, theirs = socket.socketpair()
    link, made = Link(), Poller()
    made.add(mine.fileno(), link)
    wait_for(lambda: link.calls == 1)
    made.wake(mine.fileno())
    wait_for(lambda: link.calls == 2)
    made.remove(mine.fileno(), link)
    theirs.send(b"x")
    made.wake(mine.fileno())
    time.sleep(0.1)
    assert link.calls == 2
    mine.close()
    theirs.close()


def test_a_process_has_one_poller_though_many_threads_ask_for_the_first_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class SlowPoller(Poller):
        def __init__(self) -> None:
            time.sleep(0.1)
            super().__init__()

    monkeypatch.setattr(poller_module, "_POLLERS", {})
    monkeypatch.setattr(poller_module, "Poller", SlowPoller)
    found: list[Poller] = []
    threads = [threading.Thread(target=lambda: found.append(poller())) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 8 and len(set(found)) == 1 and poller() is found[0]


def test_frames_come_out_of_pieces_of_any_size() -> None:
    frames = [Frame(number, "data", {"n": number}, b"x" * number * 50) for number in range(40)]
    data = b"".join(encode(frame) for frame in frames)
    for size in (1, 7, 10, 333, len(data)):
        splitter = FrameSplitter()
        found = [frame for at in range(0, len(data), size) for frame in splitter.feed(data[at : at + size])]
        assert found == frames
        splitter.end()
    list(splitter.feed(data[:20]))
    with pytest.raises(BadFrame, match="ended inside a frame"):
        splitter.end()


def test_later_calls_in_order_of_their_time_with_few_threads() -> None:
    done: list[int] = []
    later = Later(most=2)
    before = threading.active_count()
    later.call(lambda: done.append(2), 0.2)
    later.call(lambda: done.append(1), 0.1)
    for _ in range(20):
        later.call(lambda: done.append(0))
    assert threading.active_count() <= before + 2
    wait_for(lambda: len(done) == 22)
    assert done == [0] * 20 + [1, 2]
    wait_for(lambda: threading.active_count() <= before)
    later.call(lambda: done.append(3), 30.0)
    later.close()
    wait_for(lambda: threading.active_count() <= before)
    assert len(done) == 22
