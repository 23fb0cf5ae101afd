"""Read paramiko's packets with few, large reads. A read that times out loses no data."""

from __future__ import annotations

import contextlib
import os
import socket
import struct
import time
from typing import TYPE_CHECKING, Any

from paramiko.common import MSG_CHANNEL_DATA
from paramiko.message import Message
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
# Bytes of a packet, without its length and tag: paramiko's largest, and room for what servers add.
LARGEST_PACKET = 256 << 10
GCM_TAG = 16
# Exists only on Linux.
QUICKACK = getattr(socket, "TCP_QUICKACK", None)
_LENGTH = struct.Struct(">I")
# Padding, message kind, channel, length.
_DATA = struct.Struct(">BBII")


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
        self._quick = QUICKACK if isinstance(sock, socket.socket) else None

    def next_message(self, until: float) -> tuple[int, Any]:
        """Return the next message (kind, content); raise TimeoutError at the monotonic time `until`."""
        self._start = self._at
        self._until = until
        try:
            return self._next_sealed() if self._is_plain_gcm() else self.read_message()
        except TimeoutError:
            self._at = self._start
            raise

    def _is_plain_gcm(self) -> bool:
        """Return whether the next packet is AES-GCM's without compression, and no new keys are due."""
        private = vars(self)
        return bool(
            private["_Packetizer__aead_in"]
            and private["_Packetizer__compress_engine_in"] is None
            and not private["_Packetizer__need_rekey"]
            and private["_Packetizer__received_packets"] < self.REKEY_PACKETS - 1
            and private["_Packetizer__received_bytes"] < self.REKEY_BYTES - LARGEST_PACKET
        )

    def _next_sealed(self) -> tuple[int, Any]:
        """Return the next message; paramiko's own way for all ciphers costs three times as much."""
        while len(self._ahead) - self._at < 4:
            self._read()
        (size,) = _LENGTH.unpack_from(self._ahead, self._at)
        if not 5 <= size <= LARGEST_PACKET:
            raise SSHException(f"a packet of {size} bytes")
        whole = 4 + size + GCM_TAG
        while len(self._ahead) - self._at < whole:
            self._read()
        begin = self._at
        private = vars(self)
        engine, nonce = private["_Packetizer__block_engine_in"], private["_Packetizer__iv_in"]
        body = engine.decrypt(nonce, self._ahead[begin + 4 : begin + whole], self._ahead[begin : begin + 4])
        padding = body[0]
        if padding > size - 2:
            raise SSHException(f"a packet of {size} bytes with {padding} of padding")
        self._at = begin + whole
        self._Packetizer__iv_in = self._inc_iv_counter(nonce)  # type: ignore[attr-defined]
        message: Any = Message(body[2 : size - padding])
        message.seqno = number = private["_Packetizer__sequence_number_in"]
        self._Packetizer__sequence_number_in = (number + 1) & 0xFFFFFFFF
        self._Packetizer__received_bytes += whole  # type: ignore[attr-defined]
        self._Packetizer__received_packets += 1  # type: ignore[attr-defined]
        return body[1], message

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

    def can_send_data(self) -> bool:
        """Return whether `send_data` supports the cipher: AES-GCM, which every OpenSSH since 6.2 accepts."""
        return bool(vars(self)["_Packetizer__aead_out"])

    def send_data(self, channel: int, data: memoryview, largest: int) -> None:
        """Send a channel's data as packets of at most `largest` bytes in one write; paramiko's way costs
        three times as much."""
        with self._Packetizer__write_lock:  # type: ignore[attr-defined]
            private = vars(self)
            engine, nonce = private["_Packetizer__block_engine_out"], private["_Packetizer__iv_out"]
            parts: list[bytes] = []
            for at in range(0, len(data), largest):
                piece = data[at : at + largest]
                padding = 19 - (len(piece) + 13) % 16
                head = _LENGTH.pack(len(piece) + padding + 10)
                body = b"".join(
                    (_DATA.pack(padding, MSG_CHANNEL_DATA, channel, len(piece)), piece, os.urandom(padding))
                )
                parts += (head, engine.encrypt(nonce, body, head))
                nonce = self._inc_iv_counter(nonce)  # type: ignore[attr-defined]
            self._count_sent(nonce, len(parts) // 2, sum(map(len, parts)))
            self.write_all(b"".join(parts))

    def _count_sent(self, nonce: bytes, packets: int, size: int) -> None:
        self._Packetizer__iv_out = nonce
        number = vars(self)["_Packetizer__sequence_number_out"] + packets
        self._Packetizer__sequence_number_out = number & 0xFFFFFFFF
        self._Packetizer__sent_packets += packets  # type: ignore[attr-defined]
        self._Packetizer__sent_bytes += size  # type: ignore[attr-defined]
        if self._Packetizer__sent_bytes >= self.REKEY_BYTES and not self.need_rekey():  # type: ignore[attr-defined]
            self._trigger_rekey()  # type: ignore[attr-defined]

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
            data = self._read_now() if whole and not self._until else self._read_within(whole)
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

    def _read_within(self, whole: bool) -> bytes:
        self._from.settimeout(max(self._until - time.monotonic(), 0.001) if whole else STALL)
        return self._from.recv(self._size)

    def _read_now(self) -> bytes:
        """Return what has arrived, with one system call; `recv` with a time limit takes three."""
        if not isinstance(self._from, socket.socket) or self._from.gettimeout() is None:
            return self._read_within(True)
        try:
            return os.read(self._from.fileno(), self._size)
        except BlockingIOError:
            raise TimeoutError from None

    def reads_twice(self) -> bool:
        """Return whether a packet that has arrived in part can be read again from its beginning."""
        private = vars(self)
        return bool(
            private["_Packetizer__aead_in"]
            or private["_Packetizer__etm_in"]
            or private["_Packetizer__block_engine_in"] is None
        )
