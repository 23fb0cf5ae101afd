"""A byte stream between two nodes of one transfer: TLS with a certificate of that transfer alone, or plain with
a proof that the other one knows its secret."""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import os
import socket
import ssl
import struct
from typing import Any, Dict, Iterator

SILENCE = 10.0  # seconds without a byte after which a node turns to another one
STUCK = 30.0  # seconds after which a node gives up one that takes nothing
HANDSHAKE = 5.0
RECEIVE = 256 << 10
NONCE = DIGEST = 32


class PeerFailed(OSError):
    """The other node did not keep to what was agreed."""


class Wire:
    """Plain bytes over TCP, after the one who connects has proved that it knows the secret."""

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
        """A header and a part of a file; the file's bytes do not pass through this process."""
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

    def close(self) -> None:
        """From any thread: also ends a read or a write that waits."""
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()


def _proof(secret: bytes, nonce: bytes) -> bytes:
    return hmac.new(secret, b"clusterctl relay" + nonce, hashlib.sha256).digest()


class TlsWire(Wire):
    """TLS over buffers in memory: one system call moves many records, a fifth less work than a TLS socket's."""

    def _greet(self, terms: Dict[str, Any], accepts: bool) -> None:
        self._incoming, self._outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
        self._raw, self._read = (memoryview(bytearray(RECEIVE)) for _ in range(2))
        self._tls = terms["context"](accepts).wrap_bio(self._incoming, self._outgoing, server_side=accepts)
        while True:
            try:
                self._tls.do_handshake()
                break
            except ssl.SSLWantReadError:
                self._flush()
                self._more()
            except ssl.SSLError:
                self._flush()  # the alert, so that the other side knows why
                raise
        self._flush()
        shown = self._tls.getpeercert(binary_form=True) or b""
        if not hmac.compare_digest(hashlib.sha256(shown).hexdigest(), terms["fingerprint"]):
            raise PeerFailed("its certificate is not that of this transfer")

    def _flush(self) -> None:
        if self._outgoing.pending:
            self._socket.sendall(self._outgoing.read())

    def _more(self) -> None:
        count = self._socket.recv_into(self._raw)
        if not count:
            raise PeerFailed("it ended the connection")
        self._incoming.write(self._raw[:count])

    def send(self, data: bytes) -> None:
        self._tls.write(data)
        self._flush()

    def send_file(self, header: bytes, handle: int, offset: int, size: int) -> None:
        self._tls.write(header)
        while size:
            count = os.preadv(handle, [self._read[:size]], offset)
            if not count:
                raise PeerFailed("the file became shorter while it was sent")
            self._tls.write(self._read[:count])
            self._flush()
            offset, size = offset + count, size - count

    def read_into(self, view: memoryview) -> None:
        while view:
            try:
                count = self._tls.read(len(view), view)
            except ssl.SSLWantReadError:
                self._more()
                continue
            if not count:
                raise PeerFailed("it ended the connection")
            view = view[count:]


def _limit(connection: socket.socket, receive: float, send: float) -> None:
    """Time limits kept by the kernel: a blocking socket with them spares a poll before every call."""
    connection.settimeout(None)
    for option, seconds in ((socket.SO_RCVTIMEO, receive), (socket.SO_SNDTIMEO, send)):
        connection.setsockopt(socket.SOL_SOCKET, option, struct.pack("ll", int(seconds), 0))
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)


def prepared(terms: Dict[str, Any], folder: str) -> Dict[str, Any]:
    """The terms with what opening a stream needs besides: for TLS a maker of contexts out of its certificate."""
    if terms["mode"] != "tls":
        return terms
    certificate = ssl.PEM_cert_to_DER_cert(terms["certificate"])

    def context(accepts: bool) -> ssl.SSLContext:
        made = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER if accepts else ssl.PROTOCOL_TLS_CLIENT)
        made.minimum_version = ssl.TLSVersion.TLSv1_2
        made.check_hostname = False  # the certificate itself is compared, which no name could add to
        made.verify_mode = ssl.CERT_REQUIRED
        made.load_verify_locations(cadata=terms["certificate"])
        with _as_file(terms["certificate"] + terms["key"], folder) as path:
            made.load_cert_chain(path)
        return made

    contexts = {accepts: context(accepts) for accepts in (True, False)}
    return {**terms, "fingerprint": hashlib.sha256(certificate).hexdigest(), "context": contexts.__getitem__}


@contextlib.contextmanager
def _as_file(text: str, folder: str) -> Iterator[str]:
    """A text under a path for a moment: OpenSSL takes a key from a file only. In memory where the kernel can."""
    if hasattr(os, "memfd_create"):
        handle = os.memfd_create("key")
        path = f"/proc/self/fd/{handle}"
    else:
        os.makedirs(folder, mode=0o700, exist_ok=True)
        path = os.path.join(folder, f"key.{os.getpid()}")
        handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
    try:
        os.write(handle, text.encode())
        yield path
    finally:
        os.close(handle)
        if not path.startswith("/proc/"):
            os.unlink(path)


def opened(connection: socket.socket, terms: Dict[str, Any], accepts: bool) -> Wire:
    """The stream that the terms ask for, once both sides know that the other one belongs to the transfer."""
    kind = TlsWire if terms["mode"] == "tls" else Wire
    return kind(connection, terms, accepts)
