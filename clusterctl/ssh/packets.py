"""Read paramiko's packets with few, large reads. A read that times out loses no data."""

from __future__ import annotations

import contextlib
import socket
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from paramiko.packet import Packetizer
from paramiko.ssh_exception import SSHException

if TYPE_CHECKING:
    import paramiko

LEAST_READ = 16 << 10
# Bytes per read; a busy stream fills it with eight packets.
MOST_READ = 256 << 10
# Bytes that a server may send before its version line.
MAX_BANNER = 64 << 10
# Seconds without data in the middle of a packet after which the connection counts as broken.
STALL = 10.0
# Reads that are acknowledged immediately: a login and the start of a program need 12.
QUICK_READS = 40
# Bytes of a packet: paramiko's largest, and room for what servers add.
LARGEST_PACKET = 256 << 10
# Exists only on Linux.
QUICKACK = getattr(socket, "TCP_QUICKACK", None)


class NoSshServer(SSHException):
    """The server at the other end does not speak SSH."""


class NoKeyExchange(SSHException):
    """The server sent its first line, but the key exchange did not end in time."""


class Packets(Packetizer):
    """Packets that are collected during the handshake and sent together.

    The first reads are acknowledged immediately: a server that waits for an acknowledgement (Nagle) would
    lose 40 ms per step.
    """

    def __init__(self, sock: socket.socket | paramiko.Channel) -> None:
        super().__init__(sock)  # type: ignore[arg-type]
        self.reads = 0
        self._from = sock
        self._ahead = b""
        self._at = 0
        # Where the packet that is being read begins.
        self._start = 0
        self._size = LEAST_READ
        self._held: list[bytes] | None = []
        self._until = 0.0
        self.reads_twice: Callable[[], bool] = lambda: True
        """Whether a packet that has arrived in part can be read again from its beginning."""
        self._quick = QUICKACK if isinstance(sock, socket.socket) else None

    def next_message(self, until: float) -> tuple[int, Any]:
        """Return the next message (kind, content); raise TimeoutError at the monotonic time `until`."""
        self._start = self._at
        self._until = until
        try:
            return self.read_message()
        except TimeoutError:
            self._at = self._start
            raise

    def has_more(self) -> bool:
        """Return whether bytes of the last read are left."""
        return self._at < len(self._ahead)

    def let_go(self) -> None:
        """Send the collected packets; from now on each write is sent immediately."""
        held, self._held = self._held, None
        if held:
            super().write_all(b"".join(held))

    def write_all(self, out: bytes) -> None:  # type: ignore[override]
        if self._held is None:
            super().write_all(out)
        else:
            self._held.append(out)

    def read_all(self, n: int, check_rekey: bool = False) -> bytes:
        if not 0 <= n <= LARGEST_PACKET:
            raise SSHException(f"a packet of {n} bytes")
        while len(self._ahead) - self._at < n:
            self._read()
        self._at += n
        return self._ahead[self._at - n : self._at]

    def readline(self, until: float) -> str:
        """Return the next line of the text before the packets."""
        self._until = until
        self._start = self._at
        while (end := self._ahead.find(b"\n", self._at)) < 0:
            if len(self._ahead) > MAX_BANNER:
                raise NoSshServer("it sends data without end")
            self._read()
            self._at = self._start
        line = self._ahead[self._at : end]
        self._at = end + 1
        return line.rstrip(b"\r").decode(errors="replace")

    def _read(self) -> None:
        """Read from the socket once."""
        if self._held:
            held, self._held = self._held, []
            super().write_all(b"".join(held))
        if self._quick is not None and self.reads < QUICK_READS:
            with contextlib.suppress(OSError):
                self._from.setsockopt(socket.IPPROTO_TCP, self._quick, 1)  # type: ignore[union-attr]
        whole = self._at == self._start or self.reads_twice()
        try:
            self._from.settimeout(max(self._until - time.monotonic(), 0.001) if whole else STALL)
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
