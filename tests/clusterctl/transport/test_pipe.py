from __future__ import annotations

import time

import pytest

from clusterctl.errors import LinkLost, Unreachable
from clusterctl.transport import pipe
from clusterctl.transport.link import Link
from clusterctl.transport.pipe import MAX_NOISE, StreamPipe, last_line
from clusterctl.transport.shell import _RunningCommand


class Flood:
    """A program that prints the same line without end on one of its streams, or two in turn."""

    def __init__(self, *names: str, line: bytes = b"noise of a login script\n" * 400) -> None:
        self.names, self.line, self.reads, self.closed = names, line, 0, False

    def read(self, size: int, timeout: float) -> tuple[str, bytes]:
        if self.closed:
            raise LinkLost("node1", "closed")
        self.reads += 1
        return self.names[self.reads % len(self.names)], self.line[:size]

    def send(self, data: bytes) -> None: ...

    def finish(self) -> None: ...

    def exited(self) -> bool:
        return False

    def ended(self) -> tuple[int | None, int | None]:
        return None, None

    def close(self) -> None:
        self.closed = True


@pytest.mark.parametrize("names", [("stdout",), ("stderr",), ("stdout", "stderr")])
def test_a_login_script_that_prints_without_end_is_named_in_five_seconds(names: tuple[str, ...]) -> None:
    began = time.monotonic()
    flood = Flood(*names)
    with pytest.raises(Unreachable) as refused:
        Link("node1", StreamPipe(flood), "~/w")
    assert time.monotonic() - began < 5
    assert flood.closed
    assert "end" in str(refused.value)
    assert "noise of a login script" in str(refused.value)
    assert "\n" not in str(refused.value)
    assert len(str(refused.value)) < 300


def test_the_last_words_of_a_program_that_never_ends_are_read_for_a_second(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(pipe, "MAX_NOISE", float("inf"))
    began = time.monotonic()
    words = StreamPipe(Flood("stdout", "stderr")).last_words()
    assert time.monotonic() - began < 2
    assert words.endswith("noise of a login script\n")


def test_a_login_script_that_prints_slowly_is_given_up_after_the_start_limit(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class Slow(Flood):
        def read(self, size: int, timeout: float) -> tuple[str, bytes]:
            time.sleep(0.02)
            return "stdout", b"still busy\n"

    monkeypatch.setattr("clusterctl.transport.link.START_LIMIT", 0.3)
    began = time.monotonic()
    with pytest.raises(Unreachable, match="did not end within"):
        Link("node1", StreamPipe(Slow("stdout")), "~/w")
    assert time.monotonic() - began < 5


@pytest.mark.parametrize("name", ["stdout", "stderr"])
def test_a_flooding_login_script_is_one_line_of_an_exec_error(name: str) -> None:
    running = _RunningCommand("node1", Flood(name), None, None)
    with pytest.raises(Unreachable) as refused:
        running.run(b"", lambda name, data: None)
    assert str(refused.value).count("\n") == 0
    assert str(refused.value).count("noise of a login script") == 1


def test_a_line_of_noise_is_shortened() -> None:
    assert last_line(b"one\n\n two \n \n") == "two"
    assert last_line(b"") == ""
    assert len(last_line(b"x" * MAX_NOISE)) < 200
