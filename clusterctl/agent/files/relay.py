"""Pass the pieces of a push from node to node.

Each node serves pieces that it has verified. It requests missing pieces from the next node, then from another one, then
from the launcher.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import struct
import threading
import time
from types import TracebackType
from typing import Any, Dict, List, Optional, Protocol, Sequence, Tuple, Type

from clusterctl.agent import compact_json
from clusterctl.agent.files.peer import PeerFailed, Wire
from clusterctl.agent.files.pieces import read_answer, take_pieces
from clusterctl.agent.files.tree import BadTree, Pieces, Range, ranges_of
from clusterctl.agent.files.tree_build import Builder
from clusterctl.agent.network import connected, places_of
from clusterctl.agent.request import Refused, Request


class Served(Protocol):
    """A tree whose pieces are served: complete, or still being received."""

    pieces: Pieces
    ready: bytearray
    is_shared: bool

    def await_piece(self, number: int, timeout: float) -> bool:
        """Return whether a piece is there after at most `timeout` seconds."""

    def open_file(self, file: int) -> int:
        """Open a file of the tree for reading."""


# Header of a piece: its size + 1. A 0 only means that the sender is alive.
LENGTH = struct.Struct(">I")
# Bytes of a request: ranges of pieces.
MAX_ASK = 16 << 20
BEAT = 2.0
# Limit in seconds to connect: nodes of a cluster answer quickly, unless a firewall is between them.
CONNECT = 3.0
# Number of failed connections after which the launcher is asked instead.
TRIES = 2
EVERYWHERE = ("0.0.0.0", "::", "::ffff:0.0.0.0")
# Limit of connections at the same time; further ones are refused and go to another node.
CHILDREN = 16
# Pieces up to this size are sent together.
SMALL = 64 << 10
GATHERED = 256 << 10
# Seconds between two reports of progress.
REPORT = 0.5


class Giver:
    """Serves this node's pieces to the others of the transfer while it receives them itself."""

    def __init__(self, builder: Served, terms: Dict[str, Any]) -> None:
        """Listen on this node's address in the cluster, and nowhere else; raise OSError if that is not possible."""
        builder.is_shared = True
        self._builder = builder
        self._terms = terms
        family, _, address = places_of(terms["address"], 0)[0]
        if address[0] in EVERYWHERE:
            raise OSError(f"{terms['address']} is not the address of an interface")
        self._listener = socket.socket(family, socket.SOCK_STREAM)
        try:
            self._listener.bind(address)
            self._listener.listen(CHILDREN)
        except OSError:
            self._listener.close()
            raise
        self.port = int(self._listener.getsockname()[1])
        self._open: "set[socket.socket]" = set()
        self._change = threading.Lock()
        self._closed = False
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        while True:
            try:
                connection, _ = self._listener.accept()
            except OSError:
                return
            with self._change:
                if self._closed or len(self._open) >= CHILDREN:
                    connection.close()
                    continue
                self._open.add(connection)
            threading.Thread(target=self._serve, args=(connection,), daemon=True).start()

    def _serve(self, connection: socket.socket) -> None:
        try:
            stream = opened(connection, self._terms, accepts=True)
            size = LENGTH.unpack(stream.read(LENGTH.size))[0]
            if size > MAX_ASK:
                raise PeerFailed("it asks for too much")
            ranges = self._builder.pieces.checked(json.loads(stream.read(size)))
            _Serving(self._builder, stream).send(ranges)
        except (OSError, ValueError, BadTree, RecursionError):
            # The other node is gone, or does not belong to this transfer; or this transfer has ended.
            pass
        finally:
            with self._change:
                self._open.discard(connection)
            _end(connection)

    def close(self) -> None:
        with self._change:
            self._closed = True
            present = list(self._open)
        for entry in (self._listener, *present):
            _end(entry)


def _end(connection: socket.socket) -> None:
    """Close a socket, and wake the thread that waits in it."""
    with contextlib.suppress(OSError):
        connection.shutdown(socket.SHUT_RDWR)
    connection.close()


class _Serving:
    """Answers the requests of one node in order, as the pieces arrive here."""

    def __init__(self, builder: Served, stream: Wire) -> None:
        self._builder = builder
        self._stream = stream
        self._small = bytearray()
        self._file: Optional[Tuple[int, int]] = None

    def send(self, ranges: Sequence[Range]) -> None:
        try:
            for begin, end in ranges:
                for number in range(begin, end):
                    self._await(number)
                    self._send_piece(number)
            self._flush()
            with contextlib.suppress(OSError):
                # The other side closes once it has everything.
                self._stream.read(1)
        finally:
            self._close_file()

    def _await(self, number: int) -> None:
        if self._builder.ready[number]:
            return
        self._flush()
        while not self._builder.await_piece(number, BEAT):
            self._stream.send(LENGTH.pack(0))

    def _send_piece(self, number: int) -> None:
        piece = self._builder.pieces[number]
        handle = self._handle(piece.file)
        header = LENGTH.pack(piece.size + 1)
        if piece.size > SMALL:
            self._flush()
            self._stream.send_file(header, handle, piece.offset, piece.size)
            return
        self._small += header + os.pread(handle, piece.size, piece.offset)
        if len(self._small) > GATHERED:
            self._flush()

    def _flush(self) -> None:
        if self._small:
            self._stream.send(bytes(self._small))
            self._small.clear()

    def _handle(self, file: int) -> int:
        if self._file is None or self._file[0] != file:
            self._close_file()
            self._file = file, self._builder.open_file(file)
        return self._file[1]

    def _close_file(self) -> None:
        if self._file is not None:
            os.close(self._file[1])
            self._file = None


class Exchange:
    """This node's part in a relayed push; a context manager, since others fetch from here until it ends."""

    def __init__(self, request: Request, builder: Builder, terms: Dict[str, Any]) -> None:
        self._request = request
        self._builder = builder
        self._parents: List[Dict[str, Any]] = []
        self._giver: Optional[Giver] = None
        self._relayed = 0
        self._failed = 0
        self._reported = 0.0
        self._notes: List[str] = []
        self._terms = terms
        request.on_cancel.append(self.close)

    @property
    def report(self) -> Dict[str, Any]:
        """Return the report to the launcher at the end."""
        return {"relayed": self._relayed, "notes": self._notes}

    def __enter__(self) -> Exchange:
        if self._terms["mode"] != "off":
            why = ""
            try:
                folder = os.path.join(self._request.workdir, "tmp")
                self._terms = prepared(self._terms, folder)
                self._giver = Giver(self._builder, self._terms)
            except OSError as problem:
                why = str(problem)
            self._request.send(b"", listening=self._giver.port if self._giver else 0, why=why)
            self._parents = read_answer(self._request)
        return self

    def __exit__(
        self,
        kind: Optional[Type[BaseException]],
        error: Optional[BaseException],
        trace: Optional[TracebackType],
    ) -> None:
        self.close()

    def close(self) -> None:
        if self._giver is not None:
            self._giver.close()

    def fetch(self, wanted: Sequence[Range]) -> None:
        """Get the pieces: from other nodes as long as one of them serves, else from the launcher."""
        for parent in self._parents:
            left = self._left(wanted)
            if not left or self._failed >= TRIES:
                break
            try:
                self._fetch_from(parent, left)
            except (OSError, Refused) as problem:
                self._failed += 1
                self._notes.append(
                    f"could not copy from {parent['node']} at {parent['address']}: {_words(problem)}"
                )
        left = self._left(wanted)
        if left:
            self._request.send(compact_json.dumps(left).encode(), feed=True, failed=self._failed)
            take_pieces(self._request, self._builder, left)

    def _left(self, wanted: Sequence[Range]) -> List[Range]:
        ready = self._builder.ready
        return ranges_of(
            [number for begin, end in wanted for number in range(begin, end) if not ready[number]]
        )

    def _fetch_from(self, parent: Dict[str, Any], wanted: Sequence[Range]) -> None:
        connection = connected(parent["address"], int(parent["port"]), CONNECT)
        self._request.on_cancel.append(lambda: _end(connection))
        if self._request.cancelled.is_set():
            _end(connection)
        try:
            stream = opened(connection, self._terms, accepts=False)
            ask = compact_json.dumps(wanted).encode()
            stream.send(LENGTH.pack(len(ask)) + ask)
            for begin, end in wanted:
                for number in range(begin, end):
                    self._take(stream, number)
        finally:
            connection.close()

    def _take(self, stream: Wire, number: int) -> None:
        expected = self._builder.pieces[number].size
        while True:
            size = LENGTH.unpack(stream.read(LENGTH.size))[0]
            if size:
                break
            self._report()
        if size != expected + 1:
            raise PeerFailed("it sends something else")
        self._builder.take_from(number, stream.read_into)
        self._relayed += expected
        self._report()

    def _report(self) -> None:
        """Report to the launcher periodically how much was received."""
        now = time.monotonic()
        if now - self._reported > REPORT:
            self._reported = now
            self._request.send(b"", got=self._relayed)


def _words(problem: BaseException) -> str:
    if isinstance(problem, BlockingIOError):
        return "nothing came from it any more"
    if isinstance(problem, Refused):
        return "what it sent was damaged"
    return str(problem) or type(problem).__name__


def prepared(terms: Dict[str, Any], folder: str) -> Dict[str, Any]:
    """Return the terms with the further values that opening a stream needs."""
    if terms["mode"] != "tls":
        return terms
    # Imported here, because a plain transfer needs no OpenSSL.
    from clusterctl.agent.files import peer_tls

    return peer_tls.prepared(terms, folder)


def opened(connection: socket.socket, terms: Dict[str, Any], accepts: bool) -> Wire:
    """Return a stream as the terms require, once both sides know that the other one belongs to the transfer."""
    kind: Type[Wire] = Wire
    if terms["mode"] == "tls":
        from clusterctl.agent.files.peer_tls import TlsWire as kind
    return kind(connection, terms, accepts)
