"""paramiko's packets over few, large reads: a read that comes too early takes nothing away."""

from __future__ import annotations

import contextlib
import socket
import time
from typing import TYPE_CHECKING, Any

from paramiko.packet import Packetizer
from paramiko.ssh_exception import SSHException

if TYPE_CHECKING:
    import paramiko

LEAST_READ = 16 << 10
MOST_READ = 256 << 10  # bytes a read; a busy stream fills it with eight packets
MAX_BANNER = 64 << 10  # bytes that a server may say before its version
STALL = 10.0  # seconds in the middle of a packet after which the connection counts as broken
QUICK_READS = 40  # reads of which each is acknowledged at once: a login and the start of a program need 12
QUICKACK = getattr(socket, "TCP_QUICKACK", None)  # Linux


class NoSshServer(SSHException):
    """Something else answers there."""


class Packets(Packetizer):
    """In the handshake what is written goes out when the answer is awaited, as one segment; the first answers
    are acknowledged at once, since a server that waits for that before it sends on (Nagle) loses 40 ms a step.
    """

    def __init__(self, sock: socket.socket | paramiko.Channel) -> None:
        super().__init__(sock)  # type: ignore[arg-type]
        self.reads = 0
        self._from = sock
        self._ahead = b""
        self._at = 0
        self._start = 0  # of the packet that is being read
        self._size = LEAST_READ
        self._held: list[bytes] | None = []
        self._until = 0.0
        self._quick = QUICKACK if isinstance(sock, socket.socket) else None

    def next_message(self, until: float) -> tuple[int, Any]:
        """The next message (kind, content); TimeoutError when it is not there by then (monotonic)."""
        self._start = self._at
        self._until = until
        try:
            return self.read_message()
        except TimeoutError:
            self._at = self._start
            raise

    def has_more(self) -> bool:
        """Whether bytes are left over from the last read."""
        return self._at < len(self._ahead)

    def let_go(self) -> None:
        """The handshake is over: from now on everything goes out at once."""
        held, self._held = self._held, None
        if held:
            super().write_all(b"".join(held))

    def write_all(self, out: bytes) -> None:  # type: ignore[override]
        if self._held is None:
            super().write_all(out)
        else:
            self._held.append(out)

    def read_all(self, n: int, check_rekey: bool = False) -> bytes:
        while len(self._ahead) - self._at < n:
            self._read()
        self._at += n
        return self._ahead[self._at - n : self._at]

    def readline(self, until: float) -> str:
        """A line before the packets begin."""
        self._until = until
        self._start = self._at
        while (end := self._ahead.find(b"\n", self._at)) < 0:
            if len(self._ahead) > MAX_BANNER:
                raise NoSshServer("it talks without end")
            self._read()
            self._at = self._start
        line = self._ahead[self._at : end]
        self._at = end + 1
        return line.rstrip(b"\r").decode(errors="replace")

    def _read(self) -> None:
        """One read, whatever it brings."""
        if self._held:
            held, self._held = self._held, []
            super().write_all(b"".join(held))
        if self._quick is not None and self.reads < QUICK_READS:
            with contextlib.suppress(OSError):
                self._from.setsockopt(socket.IPPROTO_TCP, self._quick, 1)  # type: ignore[union-attr]
        whole = self._at == self._start or self._reads_twice()
        self._from.settimeout(max(self._until - time.monotonic(), 0.001) if whole else STALL)
        try:
            data = self._from.recv(self._size)
        except TimeoutError:
            if whole:
                raise
            raise EOFError(f"nothing came for {STALL:.0f} s in the middle of a packet") from None
        if not data:
            raise EOFError("the connection ended")
        self.reads += 1
        if len(data) == self._size and self._size < MOST_READ:
            self._size *= 4
        self._ahead = self._ahead[self._start :] + data
        self._at -= self._start
        self._start = 0

    def _reads_twice(self) -> bool:
        """Whether a packet that came in part can be read again from its beginning; else it must come whole
        once it has begun."""
        private = vars(self)
        return bool(
            private["_Packetizer__aead_in"]
            or private["_Packetizer__etm_in"]
            or private["_Packetizer__block_engine_in"] is None
        )
