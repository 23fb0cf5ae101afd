"""The agent's end of the link: it reads frames and runs each request in its own thread.

When the link ends, it ends the commands that it started.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from typing import Any, Callable, Dict, List, Optional

from clusterctl.agent.frames import (
    AGENT_BEAT,
    AGENT_SILENCE,
    FRESH,
    BadFrame,
    Frame,
    StreamEnded,
    credit_of,
    encode,
    parse_payload,
    read_frame,
    to_payload,
)
from clusterctl.agent.processes import boot_id
from clusterctl.agent.reaper import Watcher
from clusterctl.agent.request import Operation, Refused, Request


class Agent:
    """Answers one launcher over one byte stream."""

    def __init__(self, workdir: str, find: Callable[[str], Optional[Operation]], output: int) -> None:
        self.workdir = workdir
        self._find = find
        self._output = output
        self._sending = threading.Lock()
        self._requests: Dict[int, Request] = {}
        self._threads: List[threading.Thread] = []
        self._change = threading.Lock()
        self._last_received = self._last_sent = time.monotonic()
        self._is_ending = False
        self._must_answer = False
        # Wakes the thread of `serve`: the agent ends, or a beat must be answered.
        self._wake = threading.Event()
        self.watcher = Watcher()

    def send(self, frame: Frame) -> None:
        """Write a whole frame; if the launcher is gone, the agent ends."""
        data = memoryview(encode(frame))
        with self._sending:
            try:
                while data:
                    data = data[os.write(self._output, data) :]
            except OSError as problem:
                self.stop()
                raise StreamEnded("the launcher is gone") from problem
            self._last_sent = time.monotonic()

    def serve(self, read: Callable[[int], bytes]) -> None:
        """Answer until the link ends, whichever side ends it; then end all that still runs.

        `read(n)` returns what is available, at most n bytes, and nothing at the end.
        """
        threading.Thread(target=self._listen, args=(read,), daemon=True).start()
        while not self._is_ending:
            silent_at, beat_at = self._last_received + AGENT_SILENCE, self._last_sent + AGENT_BEAT
            # At least half a second: a thread in the middle of a long write sends nothing new.
            self._wake.wait(max(0.5, min(silent_at, beat_at) - time.monotonic()))
            self._wake.clear()
            now = time.monotonic()
            if self._is_ending or now - self._last_received > AGENT_SILENCE:
                break
            must_answer, self._must_answer = self._must_answer, False
            is_due = must_answer or now - self._last_sent >= AGENT_BEAT
            if is_due and self._sending.acquire(blocking=False):
                # No thread is in the middle of a long write.
                self._sending.release()
                try:
                    self.send(Frame(0, "beat", {}))
                except StreamEnded:
                    break
        self._end_all()

    def stop(self, *_: object) -> None:
        self._is_ending = True
        self._wake.set()

    def _end_all(self) -> None:
        with self._change:
            requests, threads = list(self._requests.values()), list(self._threads)
        enders = [threading.Thread(target=request.cancel, daemon=True) for request in requests]
        for thread in enders:
            thread.start()
        for thread in enders + threads:
            thread.join(10.0)

    def _listen(self, read: Callable[[int], bytes]) -> None:
        def exactly(count: int) -> bytes:
            parts = []
            while count:
                data = read(count)
                if not data:
                    break
                # A long frame over a slow line counts as a sign of life.
                self._last_received = time.monotonic()
                parts.append(data)
                count -= len(data)
            return b"".join(parts)

        try:
            while True:
                frame = read_frame(exactly)
                if frame is None:
                    break
                self._take(frame)
        except (BadFrame, StreamEnded, OSError, ValueError) as problem:
            sys.stderr.write(f"the link broke: {problem}\n")
        self.stop()

    def _take(self, frame: Frame) -> None:
        if frame.kind == "open":
            self._open(frame)
            return
        if frame.kind == "beat":
            if time.monotonic() - self._last_sent > FRESH:
                # Not sent here: a write that waits for the launcher must not keep this thread from reading.
                self._must_answer = True
                self._wake.set()
            return
        with self._change:
            request = self._requests.get(frame.id)
        if request is None:
            # A frame that was on its way when the request ended.
            return
        if frame.kind == "data":
            request.inbox.put(frame)
        elif frame.kind == "eof":
            request.inbox.close()
        elif frame.kind == "credit":
            request.window.give(credit_of(frame))
        elif frame.kind == "cancel":
            threading.Thread(target=request.cancel, daemon=True).start()

    def _open(self, frame: Frame) -> None:
        op = str(frame.fields.get("op"))
        request = Request(
            frame.id,
            op,
            parse_payload(frame.payload),
            workdir=self.workdir,
            watcher=self.watcher,
            send_frame=self.send,
        )
        thread = threading.Thread(target=self._answer, args=(request,), daemon=True)
        with self._change:
            # The first one could not be cancelled any more.
            if frame.id in self._requests:
                raise BadFrame(f"two requests have the number {frame.id}")
            self._requests[frame.id] = request
            self._threads = [entry for entry in self._threads if entry.is_alive()]
            self._threads.append(thread)
            thread.start()

    def _answer(self, request: Request) -> None:
        try:
            last = self._do(request)
            self.send(last)
        except StreamEnded:
            pass
        finally:
            with self._change:
                self._requests.pop(request.id, None)

    def _do(self, request: Request) -> Frame:
        operation = self._find(request.op)
        if operation is None:
            return _fail(request, "usage", f"this agent does not know {request.op!r}")
        # The outermost handler of the agent: the launcher gets the error, and other requests continue.
        try:
            return Frame(request.id, "end", {}, to_payload(operation(request) or {}))
        except Refused as refusal:
            return _fail(request, refusal.kind, str(refusal))
        except OSError as problem:
            # A full disk is found by a write, whose error does not name the file.
            folder = request.params.get("run_dir") if problem.filename is None else None
            return _fail(request, "os", f"{request.op}: {problem}" + (f": {folder!r}" if folder else ""))
        except StreamEnded as problem:
            return _fail(request, "cancelled", str(problem))
        except Exception as bug:
            import traceback

            return _fail(request, "bug", f"{request.op}: {bug!r}", traceback.format_exc())


def _operation(op: str) -> Optional[Operation]:
    if op == "hello":
        return hello
    # Imported here, because a short-lived agent mostly does not need it.
    from clusterctl.agent.operations import find

    return find(op)


def _fail(request: Request, kind: str, message: str, trace: str = "") -> Frame:
    return Frame(request.id, "fail", {}, to_payload({"kind": kind, "message": message, "traceback": trace}))


def hello(request: Request) -> Dict[str, Any]:
    """Return the facts about this node."""
    workdir = request.workdir
    return {
        "hostname": os.uname().nodename,
        "python": sys.version.split()[0],
        "boot_id": boot_id(),
        "pid": os.getpid(),
        "home": os.path.expanduser("~"),
        "workdir": workdir,
        "cpus": len(os.sched_getaffinity(0)),
        "machine_cpus": os.cpu_count() or 1,
        "monotonic": time.monotonic(),
        "wall": time.time(),
    }


def _keep_files() -> None:
    """Prevent programs that are started here from inheriting files of the login, except the standard streams."""
    for name in os.listdir("/proc/self/fd") if os.path.isdir("/proc/self/fd") else ():
        try:
            os.set_inheritable(int(name), int(name) <= 2)
        except OSError:
            # The file of the listing itself.
            continue


def _ignore(*_: object) -> None:
    pass


def main(workdir: str) -> None:
    """Be the agent on this process's standard input and output until the launcher ends the link."""
    # The type declares no read1.
    source: Any = sys.stdin.buffer
    _keep_files()
    output = os.dup(1)
    # Output of a stray print must not get between frames.
    os.dup2(2, 1)
    os.chdir(os.path.expanduser("~"))
    agent = Agent(workdir, _operation, output)
    # A manager of jobs signals every process of a job; the launcher then ends the agent, after the ranks.
    outlives = os.environ.pop("CLUSTERCTL_OUTLIVE_SIGNALS", "")
    for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGINT):
        # A handler, not SIG_IGN: programs that the agent starts must not ignore signals.
        signal.signal(number, _ignore if outlives else agent.stop)
    agent.serve(source.read1)
    sys.stderr.flush()
    # The listening thread may still wait in a read that never returns.
    os._exit(0)
