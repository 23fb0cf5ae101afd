"""The launcher's end of a link to one agent: start it, multiplex requests, and notice a silent node."""

from __future__ import annotations

import contextlib
import errno
import itertools
import json
import shlex
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import TypeVar

from clusterctl.agent.bootstrap import MARK
from clusterctl.agent.frames import (
    ALL_BEAT,
    BEAT,
    CHUNK,
    MAX_PAYLOAD,
    SILENCE,
    BadFrame,
    ByteReader,
    Frame,
    Inbox,
    StreamEnded,
    Window,
    credit_of,
    encode,
    parse_payload,
    to_payload,
)
from clusterctl.errors import NODE_ENDS_COMMAND, ClusterctlError, LinkLost, Unreachable
from clusterctl.errors import RequestFailed as RequestFailed
from clusterctl.transport.agent_code import agent_files, agent_hash, first_lines, wanted_files
from clusterctl.transport.pipe import ENDLESS, ENDLESS_HINT, MAX_NOISE, START_LIMIT, Pipe, last_line
from clusterctl.transport.poller import poller
from clusterctl.transport.splitter import FrameSplitter

# Seconds after which a beat is tried again if the node's connection accepts no bytes.
NEXT_TRY = 0.5
BEAT_FRAME = encode(Frame(0, "beat", {}))
# Seconds that an agent may be late after a command's timeout: it takes up to 7 to end the command.
LATE = 20.0


def shell_command(argv: Sequence[str]) -> str:
    """Return a command line for a login shell that runs `argv`; the shell expands a leading `~/`."""
    program = argv[0]
    first = "~/" + shlex.quote(program[2:]) if program.startswith("~/") else shlex.quote(program)
    return " ".join([first, *[shlex.quote(argument) for argument in argv[1:]]])


def next_beat(now: float) -> float:
    """Return when the next beat is due: for all links at the same moments, so that one wake-up serves them all."""
    return (now // ALL_BEAT + 1) * ALL_BEAT


def _words(text: str) -> str:
    """Return the text that the agent sent as JSON; text that is not JSON is returned unchanged."""
    try:
        return str(json.loads(text or '""'))
    except (ValueError, RecursionError):
        return text[:500]


def _disk_hint(text: str) -> str:
    """Return the remedy for an error of a node's disk that is full or cannot be written, as its text says; or ""."""
    if any(f"[Errno {number}]" in text for number in (errno.ENOSPC, errno.EDQUOT)):
        return "free some space there (`df -h` and `df -i`), or name another `workdir` in the inventory"
    if f"[Errno {errno.EROFS}]" in text:
        return "mount the disk for writing, or name another `workdir` in the inventory"
    return ""


def _ignore() -> None:
    """Do nothing."""


class PendingRequest:
    """A request that has been sent: send its body, read its reply, get its result, or cancel it."""

    on_arrival: Callable[[], object] = staticmethod(_ignore)
    """Called in the reading thread after something has arrived; must not wait."""

    def __init__(self, link: Link, number: int, op: str) -> None:
        self.op = op
        self.result: dict[str, object] | None = None
        """The result of the operation, once the reply was read to its end."""
        self._link = link
        self._id = number
        self.window = Window()
        self.inbox = Inbox(self._give_credit)

    def _give_credit(self, count: int) -> None:
        # What was received before the connection broke is still read to its end, which then says why.
        with contextlib.suppress(LinkLost):
            self._link.send(Frame(self._id, "credit", {"bytes": count}))

    def send(self, data: bytes) -> None:
        """Send a piece of the body; wait while the node has too much unread data."""
        view = memoryview(data)
        while view:
            piece = bytes(view[:CHUNK])
            try:
                self.window.take(len(piece))
            except StreamEnded:
                # The reply contains the reason.
                return
            self._link.send(Frame(self._id, "data", {}, piece))
            view = view[CHUNK:]

    def finish(self) -> None:
        """End the body."""
        self._link.send(Frame(self._id, "eof", {}))

    def cancel(self) -> None:
        """Cancel the request; the agent ends what runs for it."""
        self._link.forget(self._id)
        if not self._link.is_closed:
            self._link.send(Frame(self._id, "cancel", {}))

    def take(self, frame: Frame, failure: Callable[[dict[str, object]], ClusterctlError]) -> None:
        """Process one frame of the reply in the reading thread; raise BadFrame if it is invalid."""
        if frame.kind == "credit":
            self.window.give(credit_of(frame))
        elif frame.kind == "data":
            self.inbox.put(frame)
            self.on_arrival()
        elif frame.kind == "end":
            # Check it in this thread, where an invalid payload can still break the link.
            parse_payload(frame.payload)
            self.inbox.put(frame)
            self.end_with(None)
        elif frame.kind == "fail":
            self.end_with(failure(parse_payload(frame.payload)))

    def end_with(self, problem: ClusterctlError | None) -> None:
        """Record that no more chunks will come, and why."""
        self.inbox.close(problem)
        self.window.close()
        self.on_arrival()

    def arrived(self) -> Frame | None:
        """Return the next chunk without waiting, or None at the end; raise TimeoutError if none has come yet."""
        return next(self._frames(lambda: self.inbox.get(0)), None)

    def __iter__(self) -> Iterator[Frame]:
        """Yield the chunks of the reply as they arrive; raise the error if the node sends one."""
        return self._frames(self.inbox.get)

    def within(self, seconds: float) -> Iterator[Frame]:
        """Yield the chunks; raise LinkLost if the node ends a request with a timeout of `seconds` too late.

        Only the time spent waiting for the node counts against its LATE seconds: the caller may be slow.
        """
        deadline, left = time.monotonic() + seconds, LATE

        def get() -> Frame | None:
            nonlocal left
            began = time.monotonic()
            due = max(began, deadline)
            try:
                return self.inbox.get(due - began + left)
            except TimeoutError:
                problem = f"{self.op!r} did not end within {LATE:g} s of its time-out"
                raise LinkLost(self._link.node, problem, "the node may still run it") from None
            finally:
                left -= max(0.0, time.monotonic() - due)

        return self._frames(get)

    def _frames(self, get: Callable[[], Frame | None]) -> Iterator[Frame]:
        while True:
            frame = get()
            if frame is None:
                return
            if frame.kind == "end":
                self.result = parse_payload(frame.payload)
                return
            yield frame

    def end(self) -> dict[str, object]:
        """Read the reply to its end and return the result."""
        size = 0
        for frame in self:
            size += len(frame.payload)
            if size > MAX_PAYLOAD:
                raise LinkLost(self._link.node, f"the answer to {self.op!r} does not end")
        if self.result is None:
            raise LinkLost(self._link.node, f"the answer to {self.op!r} has no end")
        return self.result


A = TypeVar("A", bound=PendingRequest)


class Link:
    """Frames over one pipe: the poller or a thread of its own reads, and any number of threads send requests."""

    def __init__(self, node: str, pipe: Pipe, workdir: str) -> None:
        """Start the agent behind the pipe. The caller must close the link."""
        self.node = node
        self._pipe = pipe
        self._bytes = ByteReader(self._receive)
        self._numbers = itertools.count(1)
        self._requests: dict[int, PendingRequest] = {}
        self._change = threading.Lock()
        self._sending = threading.Lock()
        self._sent = self._received = time.monotonic()
        self._limit = START_LIMIT
        self._start_deadline = self._received + START_LIMIT
        self._lost: ClusterctlError | None = None
        self.is_closed = False
        try:
            self._start(workdir)
        except BaseException:
            pipe.close()
            raise
        self._limit, self._start_deadline = SILENCE, float("inf")
        self._splitter = FrameSplitter()
        self._beat_due = next_beat(self._received)
        self._file = pipe.poll_file(self._wake)
        try:
            self._feed(self._bytes.rest())
        except (BadFrame, ValueError) as bad:
            self._file = None
            self._break(LinkLost(node, f"its answer is invalid: {bad}", NODE_ENDS_COMMAND))
            return
        if self._file is None:
            self._start_listening()
        else:
            poller().add(self._file, self)

    def open(self, op: str, params: dict[str, object]) -> PendingRequest:
        """Send a request; its reply is read from the returned object."""
        return self.ask(op, to_payload(params), lambda number: PendingRequest(self, number, op))

    def ask(self, op: str, payload: bytes, answered: Callable[[int], A]) -> A:
        """Send a request with parameters in JSON; `answered(number)` makes the object that receives the
        reply."""
        number = next(self._numbers)
        request = answered(number)
        with self._change:
            if self._lost is not None or self.is_closed:
                raise self._lost or LinkLost(self.node, "the link was closed")
            self._requests[number] = request
        if len(payload) > MAX_PAYLOAD:
            self.forget(number)
            raise RequestFailed(self.node, "usage", f"{op}: {len(payload)} bytes of parameters are too many")
        self.send(Frame(number, "open", {"op": op}, payload))
        return request

    def silent_for(self) -> float:
        """Return the seconds since the last byte arrived from the node."""
        return time.monotonic() - self._received

    def send(self, frame: Frame) -> None:
        """Write one complete frame."""
        self._write(encode(frame))

    def _write(self, data: bytes) -> None:
        with self._sending:
            try:
                self._pipe.send(data)
            except (OSError, EOFError) as problem:
                raise self._lost or LinkLost(self.node, f"the connection ended ({problem})") from None
            self._sent = time.monotonic()

    def forget(self, number: int) -> None:
        with self._change:
            self._requests.pop(number, None)

    def close(self) -> None:
        """Close the link; the agent then ends what still runs for it."""
        self._break(LinkLost(self.node, "the link was closed"), closed=True)

    # ---- starting

    def _start(self, workdir: str) -> None:
        encoded_workdir = workdir.encode("utf-8", "surrogateescape").hex()
        ask = f"{agent_hash()} {encoded_workdir} {wanted_files()}\n"
        try:
            self._pipe.send(first_lines() + ask.encode())
            word, text = self._answer()
            if word == "need":
                bundle = json.dumps(agent_files()).encode()
                self._pipe.send(b"%d\n" % len(bundle) + bundle)
                word, text = self._answer()
        except (OSError, EOFError) as problem:
            raise self._no_agent(str(problem)) from None
        if word == "old":
            hint = "name a newer one in the inventory: `python: /path/to/python3.8` or newer"
            raise Unreachable(self.node, f"its Python is {text}, too old for the agent", hint)
        if word != "have":
            hint = _disk_hint(text) or (
                "give `workdir` in the inventory a folder that is this login's alone, such as ~/.clusterctl"
            )
            raise Unreachable(self.node, f"the agent can't be installed: {text}", hint)

    def _answer(self) -> tuple[str, str]:
        """Return the agent's next keyword and its text; skip what login scripts print before it."""
        mark = f"{MARK} ".encode()
        noise, size = b"", 0
        while size < MAX_NOISE:
            line = self._bytes.read_line(MAX_NOISE)
            if not line:
                raise self._no_agent("")
            if line.startswith(mark):
                word, _, text = line[len(mark) :].decode(errors="replace").strip().partition(" ")
                return word, _words(text)
            noise, size = (noise + line)[-4096:], size + len(line)
        raise Unreachable(
            self.node, f"no agent could be started: {ENDLESS}, as in {last_line(noise)!r}", ENDLESS_HINT
        )

    def _no_agent(self, problem: str) -> Unreachable:
        line = last_line(self._pipe.last_words().encode())
        reason = f": {line}" if line else ""
        reason += f" ({problem})" if problem else ""
        hint = "check `python` in the inventory, and that login scripts neither wait, read input nor exit"
        return Unreachable(self.node, f"no agent could be started{reason}", hint)

    # ---- reading

    def _receive(self) -> bytes:
        """Return the next bytes from the node; send a heartbeat if nothing was sent for a while."""
        while True:
            now = time.monotonic()
            if now > self._start_deadline:
                raise TimeoutError(f"its login scripts did not end within {START_LIMIT:.0f} s")
            if now - self._received > self._limit:
                raise TimeoutError(f"nothing was received for {self._limit:.0f} s")
            if now - self._sent > BEAT and self._limit == SILENCE:
                self._beat()
            try:
                data = self._pipe.receive(CHUNK * 2, BEAT)
            except TimeoutError:
                continue
            self._received = time.monotonic()
            return data

    def _beat(self) -> None:
        # Otherwise another thread is sending, so no heartbeat is needed.
        if self._sending.acquire(blocking=False):
            self._sending.release()
            self._write(BEAT_FRAME)

    def _start_listening(self) -> None:
        threading.Thread(target=self._listen, name=f"link {self.node}", daemon=True).start()

    def _listen(self) -> None:
        """Read until the connection ends."""
        try:
            while data := self._receive():
                self._feed(data)
            self._splitter.end()
            line = last_line(self._pipe.last_words().encode())
            problem = "the connection ended" + (f": {line}" if line else "")
        except BadFrame as bad:
            problem = f"its answer is invalid: {bad}"
        except (OSError, EOFError, ClusterctlError, ValueError) as broken:
            problem = str(getattr(broken, "reason", broken)) or "the connection ended"
        self._break(LinkLost(self.node, problem, NODE_ENDS_COMMAND))

    def _feed(self, data: bytes) -> None:
        # An idle node sends nothing else.
        if data == BEAT_FRAME and self._splitter.is_empty:
            return
        for frame in self._splitter.feed(data):
            self._take(frame)

    # ---- read by the poller

    def _wake(self) -> None:
        if self._file is not None:
            poller().wake(self._file)

    def pump(self) -> bool:
        """Process what has arrived; return False if a thread of its own reads the rest, or nothing is left to read."""
        more = False
        # The outermost handler of the poller's thread: an error of one link must not end the others.
        try:
            data, more = self._pipe.arrived()
            if data:
                self._received = time.monotonic()
                self._feed(data)
        except (OSError, EOFError):
            # The link's own thread gets this error too, and finds out more.
            more = False
        except BaseException as bad:
            self._break(LinkLost(self.node, f"its answer is invalid: {bad}", NODE_ENDS_COMMAND))
        if self.is_closed:
            return False
        if not more:
            # A separate thread, which may wait, finds out how the connection ended.
            self._start_listening()
        return more

    def check(self, now: float) -> float | None:
        """Send a beat if one is due; return when to check again, or None if the link has ended."""
        silent_at = self._received + self._limit
        if now > silent_at:
            self._break(
                LinkLost(self.node, f"nothing was received for {self._limit:.0f} s", NODE_ENDS_COMMAND)
            )
        elif now >= self._beat_due:
            if not self._pipe.can_send():
                return min(silent_at, now + NEXT_TRY)
            self._beat_due = next_beat(now)
            # `pump` finds out how the connection ended.
            with contextlib.suppress(LinkLost):
                self._beat()
        return None if self.is_closed else min(silent_at, self._beat_due)

    def _take(self, frame: Frame) -> None:
        with self._change:
            request = self._requests.get(frame.id)
        if request is None:
            # A heartbeat, or a late frame of a cancelled request.
            return
        request.take(frame, self._failure)
        if frame.kind in ("end", "fail"):
            self.forget(frame.id)

    def _failure(self, value: dict[str, object]) -> RequestFailed:
        trace = f"\n{value['traceback']}" if value.get("traceback") else ""
        message = f"{value.get('message')}{trace}"
        hint = _disk_hint(message) if value.get("kind") == "os" else ""
        return RequestFailed(self.node, str(value.get("kind")), message, hint)

    def _break(self, problem: LinkLost, closed: bool = False) -> None:
        with self._change:
            self._lost = self._lost or problem
            self.is_closed = True
            requests, self._requests = list(self._requests.values()), {}
            file, self._file = self._file, None
        for request in requests:
            request.end_with(self._lost)
        if file is not None:
            # Do this before the number of its file is used again.
            poller().remove(file, self)
        self._pipe.close()
