"""The keeper: a user's background process that starts commands quickly and keeps connections open.

It consists of two processes. The front process has the modules of the program loaded. For each command it forks a child
that takes over the arguments, folder, environment and streams of the calling process, and then runs as the ordinary
program. The other process (clusterctl/keeper/clients.py) keeps the links to the nodes and uses threads, because a
process with threads cannot fork safely. Both end when the links have been idle for long enough, on `keeper stop`, or
when one of them dies.
"""

from __future__ import annotations

import contextlib
import fcntl
import gc
import importlib
import io
import json
import os
import select
import selectors
import signal
import socket
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import NoReturn

from clusterctl.cli.entry import TAKEN
from clusterctl.environment import replace_environment
from clusterctl.errors import EXIT_BUG
from clusterctl.hostfile.cache import Which, inventories
from clusterctl.keeper import address as place

# Linux limits the size of arguments and environment to less than 4 MB.
MAX_REQUEST = 16 << 20
# Signals that a terminal sends to the whole process group of a command.
GROUP = (
    signal.SIGINT,
    signal.SIGQUIT,
    signal.SIGSTOP,
    signal.SIGCONT,
)
# Seconds that running commands may take to end after the keeper has stopped.
LINGER = 15.0
BACKLOG = 128
# Modules per message to the front process.
NAMES = 40
# The descriptor on which a child reports the inventory and the modules that it loaded.
NOTE = 3
# Descriptors up to this number are closed in a child; each running command uses one.
MAX_HANDLES = 4096
# Modules of clusterctl.ssh that load paramiko.
SPEAK_SSH = frozenset(
    ("fabric", "gateways", "load_paramiko", "login", "packets", "program", "session", "transport")
)


def start(idle: str, ready: str) -> None:
    """Run the keeper in a background process; it writes to the descriptor `ready` once it listens."""
    if os.fork() == 0:
        main(float(idle), int(ready))


def main(idle: float, ready: int) -> None:
    """Run the keeper of this user and code until it has been idle for `idle` seconds."""
    path = place.folder()
    assert path is not None
    folder = place.opened(path)
    name = place.name()
    lock = _lock(place.address(folder, name + place.LOCK))
    if lock is None:
        # Another keeper is running or about to start.
        return
    door, links = (_listen(folder, name + kind) for kind in (place.DOOR, place.LINKS))
    watched, watching = os.pipe()
    holder = os.fork()
    if holder == 0:
        for handle in (door.detach(), watching, lock, ready):
            os.close(handle)
        from clusterctl.keeper.clients import serve

        serve(links, watched, idle)
        os._exit(0)
    os.close(watched)
    links.close()
    os.write(ready, b"ready\n")
    os.close(ready)
    _import_all()

    def leave() -> None:
        for kind in (place.DOOR, place.LINKS, place.LOG, place.LOCK):
            with contextlib.suppress(FileNotFoundError):
                os.unlink(place.address(folder, name + kind))
        # From now on a new keeper may start.
        os.close(lock)

    Front(door, holder, leave).serve()


def _lock(path: str) -> int | None:
    """Return the descriptor that holds the keeper's lock; None if another process holds the lock."""
    lock = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        # Otherwise a keeper that has just ended has removed this file.
        if os.fstat(lock).st_ino == os.stat(path).st_ino:
            return lock
    except (BlockingIOError, FileNotFoundError):
        pass
    os.close(lock)
    return None


def _listen(folder: int, file: str) -> socket.socket:
    """Return a listening socket that only this user can open; replace one left by a killed keeper."""
    with contextlib.suppress(FileNotFoundError):
        os.unlink(place.address(folder, file))
    listening = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    before = os.umask(0o177)
    try:
        listening.bind(place.address(folder, file))
    finally:
        os.umask(before)
    listening.listen(BACKLOG)
    return listening


def _import_all() -> None:
    """Import what commands need, and freeze it so that children keep sharing its memory."""
    from clusterctl.cli.main import warm_up

    warm_up()
    gc.collect()
    gc.freeze()


@dataclass
class _Client:
    """A process that requests a command, and the child that runs it."""

    line: socket.socket
    data: bytearray = field(default_factory=bytearray)
    handles: list[int] = field(default_factory=list)
    pid: int = 0

    def read(self) -> bool:
        """Read what has arrived; return False at the end of the stream."""
        data, handles, _, _ = socket.recv_fds(self.line, 1 << 20, 4)
        self.handles += handles
        self.data += data
        return bool(data)

    @property
    def body(self) -> bytes | None:
        """Return the request, or None while it is incomplete."""
        size = int.from_bytes(self.data[:4], "big")
        if len(self.data) < 4 or size > MAX_REQUEST or len(self.data) < 4 + size or len(self.handles) != 4:
            return None
        return bytes(self.data[4 : 4 + size])

    def close(self) -> None:
        for handle in self.handles:
            os.close(handle)
        self.handles = []
        self.line.close()


class Front:
    """Accepts requests: forks for each command, forwards signals, and returns exit codes."""

    def __init__(self, door: socket.socket, holder: int, leave: Callable[[], None]) -> None:
        """`leave` is called once no new request is accepted."""
        self._door = door
        self._holder = holder
        self._leave_place = leave
        self._clients: dict[int, _Client] = {}
        self._selector = selectors.DefaultSelector()
        self._stopped = False
        self._noted, self._note = os.pipe()

    def serve(self) -> None:
        """Serve until the process that holds the links has ended, then wait for the running commands."""
        wake_end, wake = os.pipe()
        for handle in (wake_end, wake):
            os.set_blocking(handle, False)
        signal.set_wakeup_fd(wake, warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, lambda number, frame: None)
        signal.signal(signal.SIGHUP, signal.SIG_IGN)
        signal.signal(signal.SIGTERM, self._stop)
        signal.signal(signal.SIGINT, self._stop)
        self._selector.register(self._door, selectors.EVENT_READ, self._answer)
        self._selector.register(wake_end, selectors.EVENT_READ, lambda: os.read(wake_end, 4096))
        self._selector.register(self._noted, selectors.EVENT_READ, self._remember)
        # It may have ended before the signal handler was installed.
        self._reap()
        while not self._stopped:
            for key, _ in self._selector.select():
                key.data()
            self._reap()
        self._selector.unregister(self._door)
        self._door.close()
        self._leave_place()
        deadline = time.monotonic() + LINGER
        while any(client.pid for client in self._clients.values()) and time.monotonic() < deadline:
            for key, _ in self._selector.select(1.0):
                key.data()
            self._reap()

    def _remember(self) -> None:
        """Read which inventory and modules a command had to load, and load them, so that the next command need not."""
        for line in os.read(self._noted, 1 << 16).splitlines():
            topic, names = json.loads(line)
            if topic == "inventory":
                inventories().remember(Which(*names))
            for name in names if topic == "modules" else ():
                importlib.import_module(name)
        gc.freeze()

    def _stop(self, number: int, frame: object) -> None:
        with contextlib.suppress(ProcessLookupError):
            # When the process that holds the links ends, the whole keeper ends.
            os.kill(self._holder, signal.SIGTERM)

    def _answer(self) -> None:
        line, _ = self._door.accept()
        try:
            place.check_peer(line)
        except place.WrongPlace:
            line.close()
            return
        line.setblocking(False)
        client = _Client(line)
        self._clients[line.fileno()] = client
        self._selector.register(line, selectors.EVENT_READ, lambda: self._receive(client))

    def _receive(self, client: _Client) -> None:
        try:
            connected = client.read()
        except BlockingIOError:
            return
        except OSError:
            connected = False
        if not connected:
            self._leave(client)
        elif client.pid:
            self._pass_on(client)
        else:
            body = client.body
            if body is not None:
                self._fork(client, body)

    def _leave(self, client: _Client) -> None:
        """End a command whose calling process is gone, as a closed terminal would."""
        self._selector.unregister(client.line)
        self._clients.pop(client.line.fileno())
        if client.pid:
            self._signal(client.pid, signal.SIGCONT)
            self._signal(client.pid, signal.SIGHUP)
        client.close()

    def _pass_on(self, client: _Client) -> None:
        for number in client.data:
            self._signal(client.pid, number)
        client.data.clear()

    def _signal(self, pid: int, number: int) -> None:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            if number in GROUP:
                os.killpg(pid, number)
            else:
                os.kill(pid, number)

    def _fork(self, client: _Client, body: bytes) -> None:
        del client.data[: 4 + len(body)]
        # Block signals until the child has its own handlers.
        signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
        pid = os.fork()
        if pid == 0:
            self._be(client, body)
        with contextlib.suppress(ProcessLookupError, PermissionError):
            # Also set it here: a signal may arrive before the child has done it.
            os.setpgid(pid, pid)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, signal.valid_signals())
        client.pid = pid
        for handle in client.handles:
            os.close(handle)
        client.handles = []
        with contextlib.suppress(OSError):
            client.line.send(TAKEN)
        self._pass_on(client)

    def _be(self, client: _Client, body: bytes) -> NoReturn:
        """Become the command in the child process: drop the keeper's handlers and descriptors, then run it."""
        code = EXIT_BUG
        try:
            os.setpgid(0, 0)
            signal.set_wakeup_fd(-1)
            for number in (signal.SIGCHLD, signal.SIGHUP, signal.SIGTERM):
                signal.signal(number, signal.SIG_DFL)
            signal.signal(signal.SIGINT, signal.default_int_handler)
            for stream, handle in enumerate(client.handles[:3]):
                os.dup2(handle, stream)
            os.fchdir(client.handles[3])
            os.dup2(self._note, NOTE, inheritable=False)
            os.closerange(NOTE + 1, MAX_HANDLES)
            signal.pthread_sigmask(signal.SIG_UNBLOCK, signal.valid_signals())
            code = _run(body)
        except KeyboardInterrupt:
            code = 130
        finally:
            os._exit(code)

    def _reap(self) -> None:
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                self._stopped = True
                return
            if pid == 0:
                return
            if pid == self._holder:
                self._stopped = True
            for client in list(self._clients.values()):
                if client.pid == pid:
                    self._dismiss(client, status)

    def _dismiss(self, client: _Client, status: int) -> None:
        code = os.waitstatus_to_exitcode(status)
        with contextlib.suppress(OSError):
            client.line.send(bytes([code if code >= 0 else 128 - code]))
        self._selector.unregister(client.line)
        self._clients.pop(client.line.fileno())
        client.close()


def _run(body: bytes) -> int:
    """Apply the request's arguments, environment and streams, run the program, and return its exit code."""
    mask, first, second, third, count, *fields = body.split(b"\0")
    argv = [os.fsdecode(word) for word in fields[: int(count)]]
    replace_environment(dict(word.split(b"=", 1) for word in fields[int(count) :]))
    time.tzset()
    loaded = set(sys.modules)
    inventories().on_read = lambda which: _tell("inventory", which)
    os.umask(int(mask))
    sys.argv = ["clusterctl", *argv]
    sys.stdin, sys.stdout, sys.stderr = (
        _stream(n, coding) for n, coding in enumerate((first, second, third))
    )
    from clusterctl.cli.main import run

    code = run(argv)
    new = sorted(name for name in set(sys.modules) - loaded if _may_be_loaded(name))
    for start in range(0, len(new), NAMES):
        _tell("modules", new[start : start + NAMES])
    try:
        sys.stdout.flush()
        sys.stderr.flush()
    except OSError:
        # Python itself uses this exit code.
        return 120
    return code & 0xFF


def _may_be_loaded(name: str) -> bool:
    """Return whether the front process may load a module: not those that load paramiko and keep its state."""
    top = name.partition(".")[0]
    ours = top == "clusterctl" and name.removeprefix("clusterctl.ssh.") not in SPEAK_SSH
    return ours or top in ("rich", "yaml", "typer") or top in sys.stdlib_module_names


def _tell(topic: str, names: Sequence[str]) -> None:
    line = json.dumps([topic, names]).encode() + b"\n"
    # A longer line might be mixed with another child's.
    if len(line) <= select.PIPE_BUF:
        os.write(NOTE, line)


def _stream(number: int, coding: bytes) -> io.TextIOWrapper:
    """Return a standard stream with the encoding that the calling process used."""
    encoding, errors = coding.decode().split(" ")
    tty = os.isatty(number)
    raw = io.FileIO(number, "r" if number == 0 else "w", closefd=False)
    buffer = io.BufferedReader(raw) if number == 0 else io.BufferedWriter(raw)
    line = number == 2 or (tty and number == 1)
    newline = None if number == 0 else "\n"
    return io.TextIOWrapper(buffer, encoding=encoding, errors=errors, line_buffering=line, newline=newline)
