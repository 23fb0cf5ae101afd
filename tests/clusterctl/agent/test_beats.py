"""The beats of an agent: it answers those of the launcher, and sends its own when none come."""

from __future__ import annotations

import os
import select
import threading
from dataclasses import dataclass
from functools import partial

import pytest

from clusterctl.agent import server
from clusterctl.agent.frames import AGENT_BEAT, ALL_BEAT, SILENCE, Frame, encode

BEAT = encode(Frame(0, "beat", {}))


@dataclass
class Wire:
    """An agent in a thread, and the launcher's ends of its pipes."""

    thread: threading.Thread
    to_agent: int
    from_agent: int

    def answer(self, seconds: float) -> bytes:
        """Return what the agent sends within so many seconds, or nothing."""
        ready, _, _ = select.select([self.from_agent], [], [], seconds)
        return os.read(self.from_agent, 1000) if ready else b""


def start() -> Wire:
    """Start an agent that knows no operation."""
    (receives, to_agent), (from_agent, sends) = os.pipe(), os.pipe()
    agent = server.Agent("/", lambda op: None, sends)
    thread = threading.Thread(target=agent.serve, args=(partial(os.read, receives),), daemon=True)
    thread.start()
    return Wire(thread, to_agent, from_agent)


def end(wire: Wire) -> None:
    os.close(wire.to_agent)
    wire.thread.join(10.0)
    assert not wire.thread.is_alive()


def test_a_beat_is_answered_by_an_agent_that_has_sent_nothing_lately(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server, "FRESH", 0.0)
    wire = start()
    for _ in range(3):
        os.write(wire.to_agent, BEAT)
        assert wire.answer(AGENT_BEAT - 1.0) == BEAT
    end(wire)


def test_a_beat_is_not_answered_right_after_another_frame() -> None:
    wire = start()
    os.write(wire.to_agent, BEAT)
    assert wire.answer(server.FRESH / 2) == b""
    end(wire)


def test_an_agent_that_is_asked_nothing_sends_a_beat_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server, "AGENT_BEAT", 0.5)
    wire = start()
    assert wire.answer(5.0) == BEAT
    end(wire)


def test_an_agent_ends_when_its_launcher_is_silent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server, "AGENT_SILENCE", 0.3)
    wire = start()
    wire.thread.join(5.0)
    assert not wire.thread.is_alive()
    end(wire)


def test_two_beats_fit_into_the_silence_that_ends_a_link() -> None:
    assert 2 * ALL_BEAT < SILENCE and AGENT_BEAT < SILENCE
