"""Run OpenSSH's program as a child process for one login, with separate streams and logs."""

from __future__ import annotations

import contextlib
import os
import re
import secrets
import select
import shlex
import socket
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable, Mapping, Sequence

from clusterctl.errors import LinkLost
from clusterctl.ssh.proxy import end_group, has_ended
from clusterctl.transport.pipe import MAX_NOISE

# Bytes of a log that are kept; a login writes about 3 KB.
LOG_TAIL = 64 << 10
WORDS = 2000
READ_ONLY = select.POLLIN | select.POLLHUP | select.POLLERR
# The only lines that ssh writes into a node's output: those about a broken connection.
OWN_WORDS = re.compile(
    rb"(?:\A|\n)((?:Connection to|Connection reset|Read from remote host|Timeout, server|Write failed|client_loop:)"
    rb"[^\n]{0,300}\r\n)\Z"
)
# Seconds that ssh may take to end after its streams have ended.
ENDING = 5.0


class Logs:
    """The logs of the servers in the chain, read through named pipes, apart from the node's output.

    ssh closes every descriptor except its three streams when it starts, so a log needs a path. The folder
    is removed once ssh has opened the pipes.
    """

    def __init__(self, count: int) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="clusterctl-ssh-")
        self.paths = [os.path.join(self._folder.name, str(index)) for index in range(count)]
        self.files: list[int] = []
        for path in self.paths:
            os.mkfifo(path, 0o600)
            self.files.append(os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC))
        self.texts = [b""] * count

    def take(self, file: int) -> bool:
        """Read what one log holds now; return False at its end."""
        index = self.files.index(file)
        try:
            data = os.read(file, 65536)
        except BlockingIOError:
            return True
        self.texts[index] = (self.texts[index] + data)[-LOG_TAIL:]
        return bool(data)

    def take_all(self) -> None:
        for file in self.files:
            self.take(file)

    def forget_names(self) -> None:
        self._folder.cleanup()

    def close(self) -> None:
        for file in self.files:
            os.close(file)
        self.files = []


class Child:
    """One ssh process, in a session of its own so that Ctrl-C does not reach it directly.

    If the launcher dies, ssh's input ends, and so does the program on the node.
    """

    def __init__(self, node: str, argv: Sequence[str], env: Mapping[str, str], logs: Logs) -> None:
        self.node = node
        self.logs = logs
        self._turn = 0
        self._closed = False
        self._reading = threading.Lock()
        self._closing = threading.Lock()
        self._socket, theirs = socket.socketpair()
        self._errors, their_errors = os.pipe()
        os.set_blocking(self._errors, False)
        try:
            self._process = subprocess.Popen(
                list(argv),
                stdin=theirs.fileno(),
                stdout=theirs.fileno(),
                stderr=their_errors,
                env=dict(env),
                start_new_session=True,
            )
        except BaseException:
            self._socket.close()
            os.close(self._errors)
            raise
        finally:
            theirs.close()
            os.close(their_errors)
        self._poll = select.poll()
        self._open = {self._socket.fileno(): "stdout", self._errors: "stderr"}
        for file in (*self._open, *logs.files):
            self._poll.register(file, READ_ONLY)

    def log_in(self, logged_in: Callable[[], bool], limit: float) -> bool:
        """Wait until the log reports the login; return False if ssh ended or after `limit` seconds."""
        deadline = time.monotonic() + limit
        with contextlib.suppress(KeyError):
            self._poll.unregister(self._errors)
        while not logged_in():
            left = deadline - time.monotonic()
            ready = [file for file, _ in self._poll.poll(max(left, 0) * 1000)]
            for file in ready:
                if file in self.logs.files and not self.logs.take(file):
                    self._poll.unregister(file)
            if self._socket.fileno() in ready:
                self.logs.take_all()
                return bool(self._socket.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT)) or logged_in()
            if left <= 0:
                return logged_in()
        self._poll.register(self._errors, READ_ONLY)
        self.logs.forget_names()
        return True

    # ---- reading

    def read(self, size: int, timeout: float) -> tuple[str, bytes]:
        """Return ("stdout" or "stderr", bytes), or ("", b"") once both have ended.

        Raise TimeoutError if nothing arrives in time.
        """
        deadline = time.monotonic() + timeout
        with self._reading:
            while self._open and not self._closed:
                ready = [file for file, _ in self._poll.poll(max(deadline - time.monotonic(), 0) * 1000)]
                if not ready:
                    raise TimeoutError
                found = self._take(ready, size)
                if found:
                    return found
            return "", b""

    def _take(self, ready: Sequence[int], size: int) -> tuple[str, bytes] | None:
        for file in ready:
            if file in self.logs.files and not self.logs.take(file):
                self._poll.unregister(file)
        # A stream that never pauses delays the other stream by at most one read.
        self._turn += 1
        for file in sorted(
            (descriptor for descriptor in ready if descriptor in self._open), reverse=bool(self._turn % 2)
        ):
            try:
                data = os.read(file, size)
            except BlockingIOError:
                continue
            except ConnectionResetError:
                # ssh ended before it read all of our input.
                data = b""
            if data:
                return self._open[file], data
            self._poll.unregister(file)
            del self._open[file]
        return None

    # ---- writing and ending

    def send(self, data: bytes) -> None:
        self._socket.sendall(data)

    def finish(self) -> None:
        """Close ssh's standard input."""
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_WR)

    def has_ended(self, within: float = 0.0) -> bool:
        """Return whether ssh has ended, without reaping it: its process id stays reserved for its group."""
        deadline = time.monotonic() + within
        while self._process.returncode is None and not has_ended(self._process.pid):
            if time.monotonic() >= deadline:
                return False
            time.sleep(0.005)
        return True

    def status(self) -> int:
        """Return ssh's exit status, after its streams have ended."""
        self.has_ended(ENDING)
        with self._closing:
            end_group(self._process, 0)
        return int(self._process.returncode)

    def words_left(self) -> bytes:
        """Return the end of what standard error holds now, without waiting; read at most MAX_NOISE bytes."""
        output, size = b"", 0
        with contextlib.suppress(BlockingIOError), self._reading:
            while size < MAX_NOISE and not self._closed and (data := os.read(self._errors, 65536)):
                output, size = (output + data)[-WORDS:], size + len(data)
        return output

    def close(self) -> None:
        """End ssh, and so the program that it runs on the node."""
        with self._closing:
            if self._closed:
                return
            with contextlib.suppress(OSError):
                # Wake a thread that waits for this socket.
                self._socket.shutdown(socket.SHUT_RDWR)
            end_group(self._process)
            with self._reading:
                self._closed = True
                self._socket.close()
                os.close(self._errors)
                self.logs.close()
            self.logs.forget_names()


class ChildStream:
    """A program on a node that a child process runs.

    ssh returns the program's exit code as its own, but 255 both for a signal and for its own failures, and
    only after every process that holds the streams has ended. A shell around the program therefore writes
    the exit code at the end of standard error, after a marker that nobody can guess.
    """

    MARK = "CLUSTERCTL-END"

    def __init__(self, child: Child, mark: bytes) -> None:
        self._child = child
        self._mark = b"\n" + mark + b" "
        self._held = b""
        self._code: int | None = None
        self._over = False

    @classmethod
    def wrapped(cls, command: str) -> tuple[str, bytes]:
        """Return a command line that any login shell accepts, and the marker that it writes."""
        mark = f"{cls.MARK} {secrets.token_hex(16)}"
        # 2>/dev/null hides the shell's message about a program that a signal ended; dash also needs the
        # subshell.
        run = 'exec 3>&2 2>/dev/null; (exec "${SHELL:-/bin/sh}" -c "$1" 2>&3 3>&-); s=$?'
        line = f'{run}; printf "\\n%s %d\\n" "{mark}" $s >&3; exit $s'
        return f"exec /bin/sh -c {shlex.quote(line)} sh {shlex.quote(command)}", mark.encode()

    def read(self, size: int, timeout: float) -> tuple[str, bytes]:
        deadline = time.monotonic() + timeout
        while not self._over:
            name, data = self._child.read(size, max(deadline - time.monotonic(), 0))
            if not name:
                return self._end()
            if name == "stdout":
                return name, data
            data = self._without_mark(data)
            if data:
                return name, data
        return "", b""

    def _without_mark(self, data: bytes) -> bytes:
        """Return standard error without the marker; hold back bytes that may be its beginning."""
        data = self._held + data
        self._held = b""
        index = data.find(self._mark)
        if index >= 0:
            code, line_break, rest = data[index + len(self._mark) :].partition(b"\n")
            if line_break:
                self._code = int(code)
                return data[:index] + rest
        else:
            own, index = OWN_WORDS.search(data), data.rfind(b"\n")
            if own is not None:
                index = own.start(1)
            elif index < 0 or not self._mark.startswith(data[index:]):
                return data
        self._held = data[index:]
        return data[:index]

    def _end(self) -> tuple[str, bytes]:
        status = self._child.status()
        data, self._held = self._held, b""
        lost = self._code is None and status == 255
        if data and not (lost and OWN_WORDS.search(data)):
            return "stderr", data
        self._over = True
        if lost:
            output = f": {data.decode(errors='replace').strip()}" if data else ""
            raise LinkLost(self._child.node, f"the connection ended in the middle{output}")
        # No marker arrived, so /bin/sh did not finish: ssh's status is the program's.
        if self._code is None:
            self._code = status
        return "", b""

    def send(self, data: bytes) -> None:
        try:
            self._child.send(data)
        except OSError as problem:
            raise LinkLost(self._child.node, f"it no longer reads its input ({problem})") from None

    def finish(self) -> None:
        self._child.finish()

    def exited(self) -> bool:
        return self._code is not None or self._child.has_ended()

    def ended(self) -> tuple[int | None, int | None]:
        return self._code, None

    def close(self) -> None:
        self._child.close()
