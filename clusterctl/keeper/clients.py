"""Serve the commands that use a keeper's links.

Commands send frames (frames.py) over the socket, with a node's key in each `open`. Each frame is forwarded
to that node's link under another request number, and the replies are sent back; the keeper does not
interpret the data. A stream's flow-control window spans from the command to the agent, so at most 1 MB per
stream waits here for a slow reader.
"""

from __future__ import annotations

import contextlib
import queue
import socket
import threading
from collections import deque

from clusterctl.agent.frames import (
    LEAST,
    MAX_PAYLOAD,
    WINDOW,
    BadFrame,
    ByteReader,
    Frame,
    Inbox,
    StreamEnded,
    Window,
    credit_of,
    encode,
    parse_payload,
    read_frame,
    to_payload,
)
from clusterctl.backends.reach import transport_to
from clusterctl.errors import ClusterctlError, LinkLost, NodeError
from clusterctl.inventory.cluster import Cluster
from clusterctl.keeper import address as place
from clusterctl.keeper.links import LinkHolder
from clusterctl.keeper.messages import LinkRequest, WayOptions
from clusterctl.transport.connection import LinkConnection
from clusterctl.transport.fanout import Transport
from clusterctl.transport.link import Link, PendingRequest, RequestFailed
from clusterctl.wire.typed_json import BadValue, decode
from clusterctl.wire.typed_json import encode as encode_value

RECEIVE = 256 << 10
# Frames from an agent are smaller apart from the payload; the window does not count fields.
LONG_FIELDS = 8192


def welcome(line: socket.socket, holder: LinkHolder) -> None:
    """Serve the command at the other end in a thread; refuse one of another user."""
    try:
        place.check_peer(line)
    except place.WrongPlace:
        line.close()
        return
    client = CommandClient(line, holder)
    holder.enter(client)
    threading.Thread(target=client.serve, name="client", daemon=True).start()


class _ReplyForwarder(Inbox):
    """Forwards a node's reply to the command."""

    def __init__(self, client: CommandClient, number: int) -> None:
        self._client = client
        self._id = number
        self.under_way = 0

    def put(self, frame: Frame) -> None:
        fields = len(repr(frame.fields))
        self.under_way += max(len(frame.payload), LEAST) + (fields if fields > LONG_FIELDS else 0)
        if self.under_way > WINDOW + MAX_PAYLOAD:
            raise BadFrame("the peer sends more than its window")
        self._client.send(Frame(self._id, frame.kind, frame.fields, frame.payload))
        if frame.kind == "end":
            self._client.done(self._id)

    def close(self, problem: BaseException | None = None) -> None:
        if problem is not None:
            self._client.fail(self._id, problem)
            self._client.done(self._id)


class _CreditForwarder(Window):
    """Forwards a node's flow-control credit for the request body to the command."""

    def __init__(self, client: CommandClient, number: int) -> None:
        self._client = client
        self._id = number

    def give(self, count: int) -> None:
        self._client.send(Frame(self._id, "credit", {"bytes": count}))

    def close(self) -> None:
        # The reply reports the end.
        pass


class _ForwardedRequest(PendingRequest):
    """A request that belongs to a command; the keeper only forwards it."""

    def __init__(self, client: CommandClient, number: int, link: Link, link_number: int) -> None:
        self.link, self.there = link, link_number
        self.inbox: _ReplyForwarder = _ReplyForwarder(client, number)
        self.window = _CreditForwarder(client, number)


class CommandClient:
    """The connection to one command."""

    def __init__(self, line: socket.socket, holder: LinkHolder) -> None:
        self.held: set[str] = set()
        self.used: set[str] = set()
        self.is_command = False
        self._line = line
        self._holder = holder
        self._out = _Outgoing(line)
        self._carried: dict[int, _ForwardedRequest] = {}
        self._ways: dict[tuple[str | None, str, WayOptions], Transport] = {}
        self._change = threading.Lock()
        self._questions: dict[int, queue.SimpleQueue[str | None]] = {}

    def serve(self) -> None:
        """Serve the command's requests until it has ended, then cancel its unfinished requests."""
        reader = ByteReader(lambda: self._line.recv(RECEIVE))
        try:
            while True:
                frame = read_frame(reader.read)
                if frame is None:
                    break
                self._take(frame)
        except (BadFrame, OSError, ValueError, KeyError, TypeError):
            # The command was killed in the middle of a frame.
            pass
        self._holder.leave(self)
        for answer in list(self._questions.values()):
            answer.put(None)
        for carried in self._forget_all():
            with contextlib.suppress(ClusterctlError):
                carried.link.forget(carried.there)
                carried.link.send(Frame(carried.there, "cancel", {}))
        self.close()

    def close(self) -> None:
        self._out.close()

    def send(self, frame: Frame) -> None:
        self._out.put(encode(frame))

    def fail(self, number: int, problem: BaseException) -> None:
        self.send(Frame(number, "fail", {}, to_payload(error_to_json(problem))))

    def done(self, number: int) -> None:
        with self._change:
            self._carried.pop(number, None)

    def _forget_all(self) -> list[_ForwardedRequest]:
        with self._change:
            carried, self._carried = list(self._carried.values()), {}
        return carried

    def _take(self, frame: Frame) -> None:
        if frame.kind == "open":
            self._open(frame)
        elif frame.kind == "reach":
            threading.Thread(target=self._reach, args=(frame,), daemon=True).start()
        elif frame.kind == "hello":
            self.is_command = True
            self._holder.idle = float(frame.fields.get("persist") or self._holder.idle)
            self.send(Frame(frame.id, "end", {}, to_payload({"fresh": self._holder.fresh(self)})))
        elif frame.kind == "answer":
            self._questions[frame.id].put(parse_payload(frame.payload)["secret"])
        elif frame.kind == "status":
            self.send(Frame(frame.id, "end", {}, to_payload(encode_value(self._holder.status()))))
        elif frame.kind == "stop":
            self._holder.stop()
            self.send(Frame(frame.id, "end", {}, b"{}"))
        else:
            self._hand_on(frame)

    def _open(self, frame: Frame) -> None:
        key = str(frame.fields["key"])
        entry = self._holder.find(key)
        link = entry.link if entry is not None else None
        if entry is None or link is None:
            self.fail(frame.id, LinkLost(str(frame.fields.get("node")), "the link was closed"))
            return
        self.used.add(key)
        made: list[_ForwardedRequest] = []

        def carried(link_number: int) -> _ForwardedRequest:
            request = _ForwardedRequest(self, frame.id, link, link_number)
            made.append(request)
            with self._change:
                self._carried[frame.id] = request
            return request

        try:
            link.ask(str(frame.fields["op"]), frame.payload, carried)
        except ClusterctlError as problem:
            # Otherwise the broken link has already reported the error.
            if not made or self._carried.get(frame.id) is made[0]:
                self.fail(frame.id, problem)
                self.done(frame.id)

    def _hand_on(self, frame: Frame) -> None:
        with self._change:
            carried = self._carried.get(frame.id)
        if carried is None:
            # The request has ended in the meantime.
            return
        if frame.kind == "credit":
            carried.inbox.under_way -= credit_of(frame)
        elif frame.kind == "cancel":
            carried.link.forget(carried.there)
            self.done(frame.id)
        # The broken link reports the error.
        with contextlib.suppress(ClusterctlError):
            carried.link.send(Frame(carried.there, frame.kind, frame.fields, frame.payload))

    # ---- reaching nodes

    def _reach(self, frame: Frame) -> None:
        try:
            self._connect(decode(LinkRequest, parse_payload(frame.payload)))
        except (ClusterctlError, BadValue) as problem:
            self.fail(frame.id, problem)
        else:
            self.send(Frame(frame.id, "end", {}, b"{}"))

    def _connect(self, request: LinkRequest) -> None:
        entry = self._holder.of(request.key, request.node, self)
        with entry.making:
            if entry.is_there():
                return
            entry.drop()
            made = self._way(request).connect(request.node)
            assert isinstance(made, LinkConnection)
            entry.take(made.link)

    def _way(self, request: LinkRequest) -> Transport:
        """Return a transport for this command alone, so that the known host keys are read again."""
        key = (request.known_hosts, request.source, request.options)
        with self._change:
            if key not in self._ways:
                cluster = Cluster("", (), known_hosts=request.known_hosts, source=request.source)
                self._ways[key] = transport_to(cluster, ask=self._ask, **vars(request.options))
            return self._ways[key]

    def _ask(self, prompt: str) -> str | None:
        """Return a passphrase that the user types at the command's terminal, or None."""
        with self._change:
            number = -1 - len(self._questions)
            answer = self._questions[number] = queue.SimpleQueue()
        self.send(Frame(number, "ask", {}, to_payload({"prompt": prompt})))
        return answer.get()


class _Outgoing:
    """Sends frames to one command.

    It writes directly while the command reads; otherwise a thread writes, so that no link has to wait for
    the command.
    """

    def __init__(self, line: socket.socket) -> None:
        self._line = line
        self._waiting: deque[memoryview] = deque()
        self._change = threading.Lock()
        self._busy = False
        self._closed = False

    def put(self, data: bytes) -> None:
        with self._change:
            if self._closed:
                return
            rest = memoryview(data)
            if not self._busy:
                rest = rest[self._try(rest) :]
            if rest:
                self._waiting.append(rest)
                if not self._busy:
                    self._busy = True
                    threading.Thread(target=self._drain, daemon=True).start()

    def _try(self, data: memoryview) -> int:
        try:
            return self._line.send(data, socket.MSG_DONTWAIT | socket.MSG_NOSIGNAL)
        except BlockingIOError:
            return 0
        except OSError:
            self._closed = True
            return len(data)

    def _drain(self) -> None:
        while True:
            with self._change:
                if not self._waiting or self._closed:
                    self._waiting.clear()
                    self._busy = False
                    return
                data = self._waiting.popleft()
            try:
                self._line.sendall(data)
            except OSError:
                self._closed = True

    def close(self) -> None:
        self._closed = True
        with contextlib.suppress(OSError):
            self._line.shutdown(socket.SHUT_RDWR)
        self._line.close()


def error_to_json(problem: BaseException) -> dict[str, object]:
    """Return an error as the name of its class and its arguments; the command raises it again."""
    if isinstance(problem, RequestFailed):
        arguments = [problem.node, problem.kind, problem.reason, problem.hint]
    elif isinstance(problem, NodeError):
        arguments = [problem.node, problem.reason, problem.hint]
    elif isinstance(problem, ClusterctlError):
        arguments = [problem.message, problem.hint]
    else:
        return {
            "class": "LinkLost",
            "args": ["", str(problem) if isinstance(problem, StreamEnded) else repr(problem)],
        }
    return {"class": type(problem).__name__, "args": arguments}
