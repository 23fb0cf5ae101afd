"""Use the keeper from a command: start it if there is none, and reach the nodes over its links."""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import json
import os
import select
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from socket import socket
from typing import TYPE_CHECKING, Any

from clusterctl import errors
from clusterctl.agent.frames import (
    MAX_PAYLOAD,
    BadFrame,
    ByteReader,
    Frame,
    encode,
    parse_payload,
    read_frame,
    to_payload,
)
from clusterctl.backends.reach import transport_to
from clusterctl.errors import ClusterctlError, LinkLost, UsageError
from clusterctl.keeper import address as place
from clusterctl.keeper.messages import KeeperHello, KeeperStatus, LinkRequest, WayOptions
from clusterctl.transport.connection import Connection, read_answer
from clusterctl.transport.fanout import Stream, Transport
from clusterctl.transport.link import PendingRequest, RequestFailed
from clusterctl.wire.typed_json import decode
from clusterctl.wire.typed_json import encode as encode_value

if TYPE_CHECKING:
    from clusterctl.inventory.cluster import Cluster, Node

AskSecret = Callable[[str], str | None]
RECEIVE = 256 << 10
# Seconds to wait for a new keeper to listen: starting a process takes long on a busy machine.
START_LIMIT = 30.0
# Seconds to wait for a keeper that another command is starting, or that is ending.
OTHER_LIMIT = 15.0
# These settings of ssh change how a link is made, so they are part of its key.
SSH_FILES = ("~/.ssh/config", "/etc/ssh/ssh_config")
FIRST_LINES = (
    "import sys; sys.path.insert(0, sys.argv[1]); "
    "from clusterctl.keeper.process import main; main(*sys.argv[2:])"
)
ASK_WITHOUT = "the command with `--persist off` makes connections of its own"


class KeeperTransport:
    """Reaches nodes over the links of this user's keeper."""

    def __init__(
        self, cluster: Cluster, options: WayOptions, persist: float, ask: AskSecret | None = None
    ) -> None:
        """Connect to the keeper, or start it.

        `options` and `ask` are those of `transport_to`; `persist` is in seconds.
        """
        self._cluster = cluster
        self._options = options
        self._persist = persist
        self._source = os.path.abspath(cluster.source)
        self._known_hosts = _absolute(cluster.known_hosts)
        self._ask = ask
        self._line = _greeted(persist, ask)
        self._own: Transport | None = None
        self._change = threading.Lock()
        shared = [self._source, self._known_hosts, self._options.ssh, *map(_stamp, SSH_FILES)]
        self._shared = json.dumps(shared).encode()

    def connect(self, node: Node) -> Connection:
        """Return a connection over the keeper's link to the node; the keeper opens the link if necessary."""
        line = self._open_line()
        own = replace(node, key=_absolute(node.key))
        description = json.dumps(encode_value(own), sort_keys=True).encode()
        key = hashlib.sha256(self._shared + description).hexdigest()[:32]
        if key not in line.fresh:
            request = LinkRequest(key, own, self._known_hosts, self._source, self._options)
            line.ask(node.name, "reach", {}, to_payload(encode_value(request))).end()
        return _KeeperConnection(node.name, key, line)

    def start(self, node: Node, command: str) -> Stream:
        """Run a program without an agent; it always has a connection to itself."""
        with self._change:
            self._own = self._own or transport_to(self._cluster, ask=self._ask, **vars(self._options))
        return self._own.start(node, command)

    def _open_line(self) -> Line:
        with self._change:
            if self._line.is_closed:
                self._line = _greeted(self._persist, self._ask)
            return self._line


def _absolute(path: str | None) -> str | None:
    """Return a path that means the same in the keeper's working folder."""
    return path if path is None or path.startswith("~") else os.path.abspath(path)


def _stamp(path: str) -> list[int]:
    try:
        about = os.stat(os.path.expanduser(path))
    except OSError:
        return []
    return [about.st_mtime_ns, about.st_size]


class Line:
    """A connection to a keeper: one thread reads frames, and any number of threads send requests."""

    def __init__(self, connected: socket, ask: AskSecret | None = None) -> None:
        self._ask = ask
        self.fresh: set[str] = set()
        """The keys of the links that can be used without a check."""
        self._socket = connected
        self._numbers = itertools.count(1)
        self._requests: dict[int, PendingRequest] = {}
        self._change = threading.Lock()
        self._sending = threading.Lock()
        self.is_closed = False
        self._reader = threading.Thread(target=self._listen, name="keeper", daemon=True)
        self._reader.start()

    def greet(self, persist: float) -> None:
        """Send how long links are to be kept; store which links exist."""
        answer = read_answer(
            KeeperHello, self.ask("keeper", "hello", {"persist": persist}).end(), "keeper", "hello"
        )
        self.fresh = set(answer.fresh)

    def ask(self, node: str, kind: str, fields: dict[str, object], payload: bytes = b"{}") -> PendingRequest:
        """Send one request; its reply is read from the returned object."""
        number = next(self._numbers)
        # _LineEnd has the methods of a link that PendingRequest uses.
        request = PendingRequest(_LineEnd(self, node), number, kind)  # type: ignore[arg-type]
        with self._change:
            if self.is_closed:
                raise _lost(node)
            self._requests[number] = request
        self.send(node, Frame(number, kind, fields, payload))
        return request

    def send(self, node: str, frame: Frame) -> None:
        with self._sending:
            try:
                self._socket.sendall(encode(frame))
            except OSError:
                raise _lost(node) from None

    def forget(self, number: int) -> None:
        with self._change:
            self._requests.pop(number, None)

    def ended(self, within: float) -> bool:
        """Return whether the keeper closes the connection within this many seconds."""
        self._reader.join(within)
        return self.is_closed

    def _listen(self) -> None:
        reader = ByteReader(lambda: self._socket.recv(RECEIVE))
        with contextlib.suppress(OSError, BadFrame):
            while True:
                frame = read_frame(reader.read)
                if frame is None:
                    break
                self._take(frame)
        with self._change:
            self.is_closed = True
            requests, self._requests = list(self._requests.values()), {}
        for request in requests:
            request.end_with(_lost("keeper"))
        self._socket.close()

    def _take(self, frame: Frame) -> None:
        with self._change:
            request = self._requests.get(frame.id)
        if frame.kind == "ask":
            threading.Thread(target=self._answer, args=(frame,), daemon=True).start()
        if request is None:
            # A late frame of a cancelled request.
            return
        request.take(frame, error_from_json)
        if frame.kind in ("end", "fail"):
            self.forget(frame.id)

    def _answer(self, frame: Frame) -> None:
        """Ask the user for a passphrase that the keeper needs: the keeper has no terminal."""
        secret = self._ask(str(parse_payload(frame.payload).get("prompt"))) if self._ask else None
        with contextlib.suppress(LinkLost):
            self.send("keeper", Frame(frame.id, "answer", {}, to_payload({"secret": secret})))


class _LineEnd:
    """The part of a link's interface that a request uses, over the connection to the keeper."""

    def __init__(self, line: Line, node: str) -> None:
        self.node = node
        self._line = line

    @property
    def is_closed(self) -> bool:
        return self._line.is_closed

    def send(self, frame: Frame) -> None:
        self._line.send(self.node, frame)

    def forget(self, number: int) -> None:
        self._line.forget(number)


class _KeeperConnection(Connection):
    """A connection to one node over the keeper's link. Closing it cancels its requests and keeps the link."""

    def __init__(self, node: str, key: str, line: Line) -> None:
        super().__init__(node)
        self._key = key
        self._line = line
        self._requests: list[PendingRequest] = []

    def open(self, op: str, params: Mapping[str, Any]) -> PendingRequest:
        payload = to_payload(dict(params))
        if len(payload) > MAX_PAYLOAD:
            raise RequestFailed(self.node, "usage", f"{op}: {len(payload)} bytes of parameters are too many")
        request = self._line.ask(self.node, "open", {"op": op, "key": self._key, "node": self.node}, payload)
        self._requests = [pending for pending in self._requests if pending.result is None] + [request]
        return request

    def close(self) -> None:
        # If a request failed or was interrupted, the next use must check the link first.
        self._line.fresh.discard(self._key)
        for request in self._requests:
            if request.result is None:
                with contextlib.suppress(ClusterctlError):
                    request.cancel()


def _lost(node: str) -> LinkLost:
    return LinkLost(node, "the keeper of its connection ended", f"the command again; {ASK_WITHOUT}")


def error_from_json(value: Mapping[str, Any]) -> ClusterctlError:
    """Return the error that was raised in the keeper, which runs the same code."""
    made: ClusterctlError = getattr(errors, str(value["class"]), ClusterctlError)(*value["args"])
    return made


# ---- running keepers


class RunningKeeper:
    """A running keeper, as `keeper status` and `keeper stop` use it."""

    def __init__(self, connected: socket) -> None:
        self.pid = place.check_peer(connected)
        self._line = Line(connected)

    def status(self) -> KeeperStatus | None:
        """Return its start time, idle limit, links and number of commands; None if it is ending."""
        try:
            return replace(decode(KeeperStatus, self._line.ask("keeper", "status", {}).end()), pid=self.pid)
        except LinkLost:
            return None

    def stop(self) -> bool:
        """Stop it; return whether it closed its links in time."""
        with contextlib.suppress(LinkLost):
            self._line.ask("keeper", "stop", {}).end()
        return self._line.ended(OTHER_LIMIT)


def running_keepers() -> list[RunningKeeper]:
    """Return the running keepers of this user."""
    path = place.folder()
    if path is None:
        return []
    try:
        folder = place.opened(path)
    except FileNotFoundError:
        return []
    except place.WrongPlace as problem:
        raise UsageError(str(problem), "fix it (chmod 700), or remove it") from None
    keepers = []
    for file in sorted(os.listdir(folder)):
        if file.endswith(place.LINKS):
            # This socket was left by a keeper that was killed.
            with contextlib.suppress(OSError):
                keepers.append(RunningKeeper(place.connected(folder, file)))
    os.close(folder)
    return keepers


# ---- finding or starting the keeper


def _greeted(idle: float, ask: AskSecret | None) -> Line:
    """Return a connection to this user's keeper, with its links known; replace a keeper that is ending."""
    for _ in range(3):
        line = Line(_reached(idle), ask)
        try:
            line.greet(idle)
        except LinkLost:
            continue
        return line
    raise UsageError("--persist: the keeper ended right after its start", ASK_WITHOUT)


def _reached(idle: float) -> socket:
    """Return a connection to this user's keeper; start one if there is none."""
    path = place.folder()
    if path is None:
        raise UsageError(
            "--persist: no folder for the socket", "set $HOME or $XDG_RUNTIME_DIR, or --persist off"
        )
    try:
        _make(path)
        folder = place.opened(path)
        try:
            return _connected(folder, place.name(), idle)
        finally:
            os.close(folder)
    except (place.WrongPlace, OSError) as problem:
        hint = f"fix it (chmod 700), or remove it; or: {ASK_WITHOUT}"
        raise UsageError(f"--persist: {problem}", hint) from None


def _make(path: str) -> None:
    os.makedirs(os.path.dirname(path), mode=0o700, exist_ok=True)
    with contextlib.suppress(FileExistsError):
        os.mkdir(path, 0o700)


def _connected(folder: int, name: str, idle: float) -> socket:
    deadline = time.monotonic() + OTHER_LIMIT
    while True:
        with contextlib.suppress(FileNotFoundError, ConnectionRefusedError):
            return place.connected(folder, name + place.LINKS)
        if time.monotonic() > deadline:
            raise WrongKeeper(
                f"no keeper came up within {OTHER_LIMIT:.0f} s; see the end of {name}{place.LOG}"
            )
        if not _start(folder, name, idle):
            # Another command is starting a keeper, which will listen soon.
            time.sleep(0.05)


class WrongKeeper(place.WrongPlace):
    """Raised if a keeper does not answer."""


def _start(folder: int, name: str, idle: float) -> bool:
    """Start a keeper; return True once it listens, False if another keeper has the lock."""
    hear, tell = os.pipe()
    log = os.open(place.address(folder, name + place.LOG), os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    try:
        subprocess.Popen(
            [sys.executable, "-c", FIRST_LINES, os.path.dirname(place.PACKAGE), str(idle), str(tell)],
            pass_fds=[tell],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            cwd="/",
            start_new_session=True,
        )
        os.close(tell)
        ready, _, _ = select.select([hear], [], [], START_LIMIT)
        return bool(ready) and os.read(hear, 64) != b""
    finally:
        os.close(log)
        os.close(hear)
