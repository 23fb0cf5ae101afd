"""Run a program on a node over one session channel, and present it as three streams."""

from __future__ import annotations

import contextlib
import signal
import time
from collections import deque
from collections.abc import Callable
from typing import Any

import paramiko
from paramiko.common import cMSG_CHANNEL_REQUEST, cMSG_CHANNEL_WINDOW_ADJUST
from paramiko.ssh_exception import SSHException

from clusterctl.errors import LinkLost
from clusterctl.ssh.session import ChannelRefused, Session

# Seconds to wait for the exit code after both streams have ended.
END_LIMIT = 10.0
# Bytes of one stream per read.
AT_ONCE = 256 << 10
# Bytes that a node must accept for a beat to be sent.
LEAST_WINDOW = 1024
# The only kind of extended data that exists.
STDERR = 1


class Program(paramiko.Channel):
    """A channel that keeps stdout and stderr in order and records the signal that ended its program."""

    def __init__(self, chanid: int) -> None:
        super().__init__(chanid)
        self.came: deque[tuple[str, bytes]] = deque()
        self.signal: str | None = None

    @property
    def is_over(self) -> bool:
        """Return whether no more output will come."""
        return bool(self.eof_received or self.closed)

    def _log(self, level: int, msg: Any, *args: object) -> None:
        """Do nothing: nobody reads this log."""

    def _feed(self, m: Any) -> None:
        self.came.append(("stdout", m.get_binary()))

    def _feed_extended(self, m: Any) -> None:
        if m.get_int() == STDERR:
            self.came.append(("stderr", m.get_binary()))

    def _handle_request(self, m: Any) -> None:
        request = paramiko.Message(m.get_remainder())
        if request.get_text() == "exit-signal":
            request.get_boolean()
            self.signal = request.get_text()
        super()._handle_request(m)  # type: ignore[misc]


def start_program(session: Session, command: str, limit: float) -> Program:
    """Run one command line in the login shell; return its channel."""
    program: Program = session.open("session", make=Program, limit=limit)
    program._event_pending()  # type: ignore[attr-defined]
    ask = paramiko.Message()
    ask.add_byte(cMSG_CHANNEL_REQUEST)
    ask.add_int(program.remote_chanid)
    ask.add_string("exec")
    ask.add_boolean(True)
    ask.add_string(command.encode("utf-8", "surrogateescape"))
    session._send_user_message(ask)
    if not session.until(program.event.is_set, time.monotonic() + limit) or not program.event_ready:
        raise ChannelRefused("it does not start commands")
    return program


class ProgramStream:
    """The three streams of a program (fanout.Stream)."""

    def __init__(self, node: str, session: Session, program: Program, close: Callable[[], None]) -> None:
        self._node = node
        self._session = session
        self._program = program
        self._close = close

    def read(self, size: int, timeout: float) -> tuple[str, bytes]:
        program = self._program
        if not program.came:
            self._wait(lambda: bool(program.came) or program.is_over, time.monotonic() + timeout)
        if program.came:
            return self._next(size)
        self._wait(lambda: program.closed or program.status_event.is_set(), time.monotonic() + END_LIMIT)
        if self.ended() == (None, None) and not self._session.active:
            raise self._lost(self._session.problem)
        return "", b""

    def poll_file(self, on_read: Callable[[], None]) -> int | None:
        return self._session.poll_file(on_read)

    def arrived(self) -> tuple[list[tuple[str, bytes]], bool]:
        program, session = self._program, self._session
        session.poll()
        # Check this before taking the bytes; otherwise the last ones could be missed.
        more = session.active and not program.is_over
        parts = []
        while program.came:
            parts.append(self._next(AT_ONCE))
        return parts, more

    def can_send(self) -> bool:
        return self._program.out_window_size >= LEAST_WINDOW and self._session.can_send()

    def _next(self, size: int) -> tuple[str, bytes]:
        """Return the next bytes of one stream, joined from consecutive packets."""
        came = self._program.came
        name, data = came.popleft()
        if came and came[0][0] == name and len(data) < size:
            parts, length = [data], len(data)
            while came and came[0][0] == name and length < size:
                parts.append(came.popleft()[1])
                length += len(parts[-1])
            data = b"".join(parts)
        if len(data) > size:
            came.appendleft((name, data[size:]))
            data = data[:size]
        self._credit(len(data))
        return name, data

    def _credit(self, count: int) -> None:
        """Report to the node that the receive window has room again."""
        more = self._program._check_add_window(count)  # type: ignore[attr-defined]
        if more > 0:
            message = paramiko.Message()
            message.add_byte(cMSG_CHANNEL_WINDOW_ADJUST)
            message.add_int(self._program.remote_chanid)
            message.add_int(more)
            # The next read reports the error.
            with contextlib.suppress(SSHException, EOFError, OSError):
                self._session._send_user_message(message)

    def _wait(self, done: Callable[[], bool], deadline: float) -> None:
        try:
            if not self._session.until(done, deadline):
                raise TimeoutError
        except TimeoutError:
            raise
        except (SSHException, EOFError, OSError) as problem:
            raise self._lost(problem) from None

    def _lost(self, problem: object) -> LinkLost:
        return LinkLost(self._node, f"{problem or 'the connection ended'}")

    def send(self, data: bytes) -> None:
        program = self._program
        view = memoryview(data)
        try:
            while view:
                if not program.out_window_size and not self._over():
                    self._session.until(lambda: program.out_window_size > 0 or self._over())
                if self._over():
                    raise self._lost(self._session.problem or "its program accepts no more input")
                view = view[program.send(bytes(view[: program.out_max_packet_size])) :]
        except (SSHException, EOFError, OSError) as problem:
            raise self._lost(problem) from None

    def _over(self) -> bool:
        return bool(self._program.closed or self._program.eof_sent or not self._session.active)

    def finish(self) -> None:
        with contextlib.suppress(SSHException, EOFError, OSError):
            self._program.shutdown_write()

    def exited(self) -> bool:
        return self._program.signal is not None or self._program.status_event.is_set()

    def ended(self) -> tuple[int | None, int | None]:
        name = self._program.signal
        if name is not None:
            return None, int(getattr(signal, f"SIG{name}", 0)) or None
        status = self._program.exit_status if self._program.status_event.is_set() else -1
        return (status, None) if status >= 0 else (None, None)

    def close(self) -> None:
        self._close()
