"""A byte stream between two nodes of one transfer.

It uses TLS with a certificate of that transfer alone, or plain TCP after each side has proved that it knows a secret.
"""

from __future__ import annotations

import hashlib
import hmac
import os
import socket
import struct
from typing import Any, Dict

# Seconds without a byte after which a node fetches from another one.
SILENCE = 10.0
# Seconds after which a node stops sending to another one that reads nothing.
STUCK = 30.0
HANDSHAKE = 5.0
NONCE = DIGEST = 32


class PeerFailed(OSError):
    """The other node did not follow the protocol."""


class Wire:
    """Plain bytes over TCP, after the connecting side has proved that it knows the secret."""

    def __init__(self, connection: socket.socket, terms: Dict[str, Any], accepts: bool) -> None:
        self._socket = connection
        _limit(connection, HANDSHAKE, HANDSHAKE)
        self._greet(terms, accepts)
        _limit(connection, SILENCE, STUCK)

    def _greet(self, terms: Dict[str, Any], accepts: bool) -> None:
        secret = bytes.fromhex(terms["secret"])
        if accepts:
            nonce = os.urandom(NONCE)
            self.send(nonce)
            if not hmac.compare_digest(self.read(DIGEST), _proof(secret, nonce)):
                raise PeerFailed("it does not know the secret of this transfer")
        else:
            self.send(_proof(secret, self.read(NONCE)))

    def send(self, data: bytes) -> None:
        self._socket.sendall(data)

    def send_file(self, header: bytes, handle: int, offset: int, size: int) -> None:
        """Send a header and a part of a file; the file's bytes do not pass through this process."""
        self._socket.sendall(header, socket.MSG_MORE)
        while size:
            count = os.sendfile(self._socket.fileno(), handle, offset, size)
            if not count:
                raise PeerFailed("the file became shorter while it was sent")
            offset, size = offset + count, size - count

    def read_into(self, view: memoryview) -> None:
        """Fill the view."""
        while view:
            count = self._socket.recv_into(view, 0, socket.MSG_WAITALL)
            if not count:
                raise PeerFailed("it ended the connection")
            view = view[count:]

    def read(self, count: int) -> bytes:
        data = bytearray(count)
        self.read_into(memoryview(data))
        return bytes(data)


def _proof(secret: bytes, nonce: bytes) -> bytes:
    return hmac.new(secret, b"clusterctl relay" + nonce, hashlib.sha256).digest()


def _limit(connection: socket.socket, receive: float, send: float) -> None:
    """Set the kernel's own time limits: a blocking socket with them saves a poll before every call."""
    connection.settimeout(None)
    for option, seconds in ((socket.SO_RCVTIMEO, receive), (socket.SO_SNDTIMEO, send)):
        connection.setsockopt(socket.SOL_SOCKET, option, struct.pack("ll", int(seconds), 0))
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
