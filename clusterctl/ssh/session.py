"""Run paramiko's protocol for one SSH connection without a thread per connection.

The thread that waits for a result reads the socket. A thread per connection costs more than the protocol:
two context switches per message and ten idle wake-ups per second. Only a gateway gets a thread (`start`),
because many threads wait for its channels.
"""

from __future__ import annotations

import base64
import contextlib
import select
import socket
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import paramiko
from paramiko.common import (
    MSG_CHANNEL_CLOSE,
    MSG_CHANNEL_DATA,
    MSG_CHANNEL_EOF,
    MSG_CHANNEL_EXTENDED_DATA,
    MSG_CHANNEL_FAILURE,
    MSG_CHANNEL_REQUEST,
    MSG_CHANNEL_SUCCESS,
    MSG_CHANNEL_WINDOW_ADJUST,
    MSG_DEBUG,
    MSG_DISCONNECT,
    MSG_IGNORE,
    MSG_KEXINIT,
    MSG_SERVICE_ACCEPT,
    MSG_UNIMPLEMENTED,
    cMSG_CHANNEL_OPEN,
    cMSG_GLOBAL_REQUEST,
    cMSG_UNIMPLEMENTED,
)
from paramiko.ssh_exception import SSHException

from clusterctl.agent.frames import BEAT, SILENCE
from clusterctl.errors import ClusterctlError
from clusterctl.ssh.host_keys import HostKey, host_key
from clusterctl.ssh.packets import NoKeyExchange, NoSshServer, Packets

# Bytes that a node may send before we read them. Unread data stays in the kernel anyway.
WINDOW = 4 << 20
# The largest packet, in bytes, that a server may send.
PACKET = 64 << 10
# Far below the 2^32 blocks that AES-GCM allows. Each new key exchange interrupts the stream.
REKEY_BYTES = 1 << 34
REKEY_PACKETS = 1 << 31
# Seconds allowed for a key exchange in the middle of a session.
NEW_KEYS_LIMIT = 30.0
FAST_KEX = ("ecdh-sha2-nistp256", "curve25519-sha256@libssh.org")
GCM = ("aes128-gcm@openssh.com", "aes256-gcm@openssh.com")
CTR = ("aes128-ctr", "aes192-ctr", "aes256-ctr")
SHA2 = ("hmac-sha2-256-etm@openssh.com", "hmac-sha2-512-etm@openssh.com", "hmac-sha2-256", "hmac-sha2-512")
SIGNED_BY = {"ssh-rsa": ("rsa-sha2-512", "rsa-sha2-256")}
NEVER = float("inf")
# Lines that a server may send before its version line.
MAX_LINES = 100

# paramiko's table holds functions; names let a subclass of its channel override the methods.
_BY_NAME = {
    MSG_CHANNEL_SUCCESS: "_request_success",
    MSG_CHANNEL_FAILURE: "_request_failed",
    MSG_CHANNEL_DATA: "_feed",
    MSG_CHANNEL_EXTENDED_DATA: "_feed_extended",
    MSG_CHANNEL_WINDOW_ADJUST: "_window_adjust",
    MSG_CHANNEL_REQUEST: "_handle_request",
    MSG_CHANNEL_EOF: "_handle_eof",
    MSG_CHANNEL_CLOSE: "_handle_close",
}


class ChannelRefused(SSHException):
    """Raised when the server refuses to open a channel; carries the server's message."""


# The type stubs of paramiko omit what this class overrides.
_Transport: Any = paramiko.Transport


class Session(_Transport):  # type: ignore[misc]
    """A connection to one SSH server; any number of threads may wait for events on it."""

    def __init__(
        self,
        sock: socket.socket | paramiko.Channel,
        judge: Callable[[HostKey], None],
        recorded: tuple[str, ...] = (),
        allowed_kex: str = "",
        allowed_ciphers: str = "",
    ) -> None:
        """Set up the session; `judge` raises if it rejects the host key, before any keys are agreed on.

        `recorded` holds the key kinds that are known for this host; they are requested first. Algorithms
        that the user's configuration does not allow are not offered.
        """
        super().__init__(sock, packetizer_class=Packets)
        self.packets: Packets = self.packetizer
        self.packets.REKEY_BYTES, self.packets.REKEY_PACKETS = REKEY_BYTES, REKEY_PACKETS
        self.packets.reads_twice = self._reads_twice
        recorded_kinds = [kind for name in recorded for kind in SIGNED_BY.get(name, (name,))]
        options = self.get_security_options()
        options.key_types = _with_first(recorded_kinds, options.key_types)
        options.kex = _allowed(_with_first(FAST_KEX, options.kex), allowed_kex)
        options.ciphers = _allowed(GCM + CTR, allowed_ciphers)
        options.digests = SHA2
        self._judge = judge
        self._turn = threading.Condition()
        # The id of the thread that reads for all threads.
        self._listener: int | None = None
        # Seconds waited since the last byte arrived.
        self._quiet = 0.0
        # Messages to send after the current key exchange.
        self._later: list[Any] = []
        self._refused: dict[int, str] = {}
        self._closing = threading.Lock()
        self._on_read: Callable[[], None] | None = None
        self.problem: BaseException | None = None
        """Why the connection ended; None while it is open."""
        self._handler_table[MSG_SERVICE_ACCEPT] = lambda message: None

    def _log(self, level: int, msg: Any, *args: object) -> None:
        """Do nothing: formatting log messages that nobody reads took a tenth of a handshake."""

    # ---- handshake

    def shake_hands(self, limit: float, first_word: float | None = None) -> None:
        """Agree on keys; when this returns, `judge` has accepted the server's host key.

        The server's first line must arrive within `first_word` seconds: the kernel of a frozen machine may
        accept a connection that sshd never answers, and it would be useless to wait for the whole `limit`.
        """
        deadline = time.monotonic() + limit
        self.active = True
        try:
            self.packets.write_all(f"{self.local_version}\r\n".encode())
            # Our key exchange message does not depend on the server's version.
            self._send_kex_init()
            self.remote_version = self._their_version(deadline, min(limit, first_word or limit))
            self._expect_packet(MSG_KEXINIT)
        except BaseException as problem:
            self.end(problem)
            raise
        if not self.until(lambda: self.initial_kex_done, deadline):
            self.end(EOFError(f"no key exchange within {limit:g} s"))
            raise NoKeyExchange(f"it answered, but there was no key exchange within {limit:g} s")

    def _their_version(self, deadline: float, first_word: float) -> str:
        """Return the server's version line; skip the lines that it prints before it."""
        first = time.monotonic() + first_word
        for number in range(MAX_LINES):
            try:
                line = self.packets.readline(deadline if number else first)
            except TimeoutError:
                raise NoSshServer(f"it sent nothing for {first_word:g} s") from None
            if line.startswith("SSH-"):
                if line.startswith(("SSH-2.0-", "SSH-1.99-")):
                    return line
                raise paramiko.ssh_exception.IncompatiblePeer(f"it speaks {line[:40]!r}")
        raise NoSshServer("it sends data without end")

    def _verify_key(self, shown: bytes, sig: bytes) -> None:
        super()._verify_key(shown, sig)
        kind = paramiko.Message(shown).get_text()
        self._judge(host_key(kind, base64.b64encode(shown).decode()))

    # ---- channels

    def open(
        self,
        kind: str,
        where: paramiko.Message | None = None,
        make: type = paramiko.Channel,
        limit: float = 30.0,
    ) -> Any:
        """Return a new channel of type `make`; `where` holds the extra fields that its kind needs."""
        if not self.active:
            raise self.problem or EOFError("the connection ended")
        with self.lock:
            number = self._next_channel()
            channel = make(number)
            self._channels.put(number, channel)
            self.channels_seen[number] = True
            channel._set_transport(self)
            channel._set_window(WINDOW, PACKET)
        ask = paramiko.Message()
        ask.add_byte(cMSG_CHANNEL_OPEN)
        ask.add_string(kind)
        for value in (number, WINDOW, PACKET):
            ask.add_int(value)
        if where is not None:
            ask.add_bytes(where.asbytes())
        self._send_user_message(ask)
        came = self.until(lambda: channel.active or number in self._refused, time.monotonic() + limit)
        if not came or number in self._refused:
            self._channels.delete(number)
            raise ChannelRefused(self._refused.pop(number, f"no answer within {limit:g} s"))
        return channel

    def _parse_channel_open_failure(self, m: paramiko.Message) -> None:
        number, code, text = m.get_int(), m.get_int(), m.get_text()
        known = {
            1: "it is prohibited there",
            2: "connect failed",
            3: "no such kind of channel",
            4: "too many",
        }
        reason = known.get(code, f"reason {code}")
        self._refused[number] = f"{text} ({reason})" if text else reason
        # A thread in paramiko's `open_channel` waits for this event; fabric uses that method.
        if number in self.channel_events:
            self._channels.delete(number)
            self.saved_exception: BaseException = paramiko.ChannelException(code, reason)
            self.channel_events.pop(number).set()

    # ---- sending

    def _send_user_message(self, data: Any) -> None:
        """Send a message, but not during a key exchange.

        The reading thread cannot wait for the end of the exchange, so its messages are sent after it.
        """
        if self._listener == threading.get_ident() and not self.clear_to_send.is_set():
            self._later.append(data)
        else:
            self._when_clear(lambda: self._send_message(data))

    def _when_clear(self, send: Callable[[], None]) -> None:
        while self.active:
            with self.clear_to_send_lock:
                if self.clear_to_send.is_set():
                    send()
                    return
            limit = time.monotonic() + NEW_KEYS_LIMIT
            if not self.until(lambda: self.clear_to_send.is_set() or not self.active, limit):
                raise SSHException("no new keys were agreed on in time")

    def _parse_newkeys(self, m: paramiko.Message) -> None:
        super()._parse_newkeys(m)
        later, self._later = self._later, []
        for message in later:
            self._send_message(message)

    # ---- listening

    def until(self, done: Callable[[], bool], deadline: float = NEVER) -> bool:
        """Process messages until `done()` is true; return False if the deadline passes first.

        Raise the reason if the connection ends. One thread reads for all waiting threads; each checks its
        own condition after every read.
        """
        while True:
            with self._turn:
                while True:
                    if done():
                        return True
                    if not self.active:
                        raise self.problem or EOFError("the connection ended")
                    if time.monotonic() >= deadline:
                        return False
                    if self._listener is None:
                        self._listener = threading.get_ident()
                        break
                    self._turn.wait(min(deadline - time.monotonic(), 3600.0))
            try:
                self._listen(deadline)
            finally:
                if self._on_read is not None:
                    self._on_read()

    # ---- without waiting

    def poll_file(self, on_read: Callable[[], None]) -> int | None:
        """Return the file to wait for before `poll`; None if a packet cannot be read in several parts.

        `on_read` is called after `until` has read, since the file then has nothing more to read.
        """
        if not self.packets.reads_twice():
            return None
        self._on_read = on_read
        return int(self.sock.fileno())

    def _reads_twice(self) -> bool:
        """Return whether a packet can be read again from its beginning: not where each block changes the cipher."""
        return self.remote_cipher in ("", *GCM) or "-etm@" in (self.remote_mac or "")

    def poll(self) -> None:
        """Process what has arrived, without waiting. Another thread that reads now does this instead."""
        with self._turn:
            if self._listener is not None or not self.active:
                return
            self._listener = threading.get_ident()
        self._listen(0.0)

    def can_send(self) -> bool:
        """Return whether a small message can be sent now without waiting."""
        if not self.active or not self.clear_to_send.is_set():
            return False
        if not isinstance(self.sock, socket.socket):
            return True
        writable = select.poll()
        writable.register(self.sock, select.POLLOUT)
        return any(event & select.POLLOUT for _, event in writable.poll(0))

    def run(self) -> None:
        """Process messages until the connection ends; this is the thread of a gateway."""
        with contextlib.suppress(SSHException, EOFError, OSError, ClusterctlError):
            self.until(lambda: False)

    def _listen(self, deadline: float) -> None:
        """Process the messages of one read, or return at the deadline.

        After the login, send a keepalive request to a server that is silent.
        """
        try:
            while True:
                now, reads_before = time.monotonic(), self.packets.reads
                step = min(deadline, now + BEAT)
                try:
                    self._take(*self.packets.next_message(step))
                    break
                except TimeoutError:
                    self._quiet = (
                        self._quiet + time.monotonic() - now if reads_before == self.packets.reads else 0.0
                    )
                    self._ask_whether_alive()
                    if time.monotonic() >= deadline:
                        return
            self._quiet = 0.0
            with contextlib.suppress(TimeoutError):
                while self.packets.has_more():
                    self._take(*self.packets.next_message(0.0))
        except BaseException as problem:
            # Record the reason for all waiting threads.
            self.end(problem)
            if not isinstance(problem, Exception):
                raise
        finally:
            with self._turn:
                self._listener = None
                self._turn.notify_all()

    def _ask_whether_alive(self) -> None:
        if self._quiet >= SILENCE and self.authenticated:
            raise EOFError(f"nothing was received for {SILENCE:.0f} s")
        if self._quiet >= BEAT and self.authenticated:
            ask = paramiko.Message()
            ask.add_byte(cMSG_GLOBAL_REQUEST)
            ask.add_string("keepalive@openssh.com")
            ask.add_boolean(True)
            self._send_user_message(ask)

    def _take(self, kind: int, message: Any) -> None:
        """Pass one message to its handler."""
        if kind in (MSG_IGNORE, MSG_DEBUG):
            self._enforce_strict_kex(kind)
            return
        if kind == MSG_DISCONNECT:
            message.get_int()
            raise EOFError(f"the server ended the connection: {message.get_text()[:200]}")
        if self._expected_packet:
            if kind not in self._expected_packet:
                raise SSHException(f"message {kind} arrived instead of one of {self._expected_packet}")
            self._expected_packet: tuple[int, ...] = ()
            if 30 <= kind <= 41:
                self.kex_engine.parse_next(kind, message)
                return
        if kind in self._handler_table:
            self._handler_table[kind](message)
        elif kind in _BY_NAME:
            self._to_channel(kind, message)
        elif self.auth_handler is not None and kind in self.auth_handler._handler_table:
            self.auth_handler._handler_table[kind](message)
        elif kind != MSG_UNIMPLEMENTED:
            answer = paramiko.Message()
            answer.add_byte(cMSG_UNIMPLEMENTED)
            answer.add_int(message.seqno)
            self._send_message(answer)
        if self.packets.need_rekey() and not self.in_kex:
            self._send_kex_init()

    def _to_channel(self, kind: int, message: Any) -> None:
        number = message.get_int()
        channel = self._channels.get(number)
        if channel is not None:
            getattr(channel, _BY_NAME[kind])(message)
        elif number not in self.channels_seen:
            raise SSHException(f"a message for channel {number}, which was never opened")

    # ---- ending

    def close(self) -> None:
        self.end(EOFError("the connection was closed"))

    def end(self, problem: BaseException) -> None:
        """Close the socket and wake all waiting threads; record `problem` as the reason."""
        with self._closing:
            if self.problem is not None:
                return
            self.problem = self.saved_exception = problem
        self.active = False
        if isinstance(self.sock, socket.socket):
            with contextlib.suppress(OSError):
                # This ends a blocked read in another thread.
                self.sock.shutdown(socket.SHUT_RDWR)
        with contextlib.suppress(OSError, EOFError, SSHException):
            self.packetizer.close()
        for channel in list(self._channels.values()):
            channel._unlink()
        if self.auth_handler is not None:
            self.auth_handler.abort()
        with self._turn:
            self._turn.notify_all()


def _with_first(first: Iterable[str], known: Sequence[str]) -> tuple[str, ...]:
    """Return the known names, those in `first` before the others."""
    return tuple(dict.fromkeys([*(name for name in first if name in known), *known]))


def _allowed(ours: tuple[str, ...], theirs: str) -> tuple[str, ...]:
    """Return those of `ours` that the user's configuration allows, or all of `ours` if none is left."""
    names = theirs.split(",")
    return tuple(name for name in ours if name in names) or ours
