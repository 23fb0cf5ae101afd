"""Open a byte stream to an SSH server: a TCP connection, or the user's ProxyCommand."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import tempfile
import threading
import time

from clusterctl.settings import environment
from clusterctl.ssh.config import Route
from clusterctl.transport.dial import bound

FAMILIES = {"any": socket.AF_UNSPEC, "inet": socket.AF_INET, "inet6": socket.AF_INET6}
# Seconds between SIGTERM and SIGKILL.
END_WAIT = 2.0
LAST_WORDS = 2000


Place = tuple[int, tuple[object, ...]]
"""A family of addresses, and an address of it."""


def connected(route: Route, timeout: float, worked: dict[tuple[str, int], Place]) -> socket.socket:
    """Return a socket that leads to a server; raise an OSError if the network fails.

    `worked` has the last address of each server that answered: it is tried before the name is looked up again, so that
    a name server that fails keeps nobody from a node that was reached before.
    """
    if route.proxy_command:
        return ProxySocket(route.proxy_command)
    server, problem = (route.host, route.port), OSError("no address")
    last = worked.get(server)
    if last is not None:
        try:
            return _connected_to(last, route, timeout)
        except OSError as failed:
            problem = failed
    family = FAMILIES.get(route.family, socket.AF_UNSPEC)
    try:
        # Python would load its table of international names, which takes 5 ms, also for a name of plain letters.
        name = route.host.encode() if route.host.isascii() else route.host
        found = socket.getaddrinfo(name, route.port, family, socket.SOCK_STREAM)
    except (socket.gaierror, UnicodeError):
        if last is not None:
            raise problem from None
        raise
    for place in [(entry[0], entry[4]) for entry in found if (entry[0], entry[4]) != last]:
        try:
            made = _connected_to(place, route, timeout)
        except OSError as failed:
            # Try the next address.
            problem = failed
            continue
        worked[server] = place
        return made
    raise problem


def _connected_to(place: Place, route: Route, timeout: float) -> socket.socket:
    made = bound(place[0], route.bind_address or "")
    try:
        made.settimeout(timeout)
        made.connect(place[1])
        made.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    except OSError:
        made.close()
        raise
    return made


class ProxySocket(socket.socket):
    """A socket connected to the standard input and output of a ProxyCommand; closing it ends the command."""

    def __init__(self, command: str) -> None:
        ours, theirs = socket.socketpair()
        super().__init__(ours.family, ours.type, ours.proto, ours.detach())
        self._last_output = b""
        # `close` and `last_words` may be called from different threads.
        self._change = threading.Lock()
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115  closed with the socket
        env = environment()
        shell = env.get("SHELL") or "/bin/sh"
        try:
            self._process: subprocess.Popen[bytes] | None = subprocess.Popen(
                # ssh runs the command in the same way.
                [shell, "-c", f"exec {command}"],
                stdin=theirs.fileno(),
                stdout=theirs.fileno(),
                stderr=self._errors,
                env=env,
                start_new_session=True,
            )
        except BaseException:
            super().close()
            self._errors.close()
            raise
        finally:
            theirs.close()

    def last_words(self) -> str:
        """Return the end of the program's standard error; this also works after `close`."""
        with self._change:
            if not self._errors.closed:
                size = os.fstat(self._errors.fileno()).st_size
                self._last_output = os.pread(self._errors.fileno(), LAST_WORDS, max(0, size - LAST_WORDS))
        return self._last_output.decode(errors="replace").strip()

    def close(self) -> None:
        super().close()
        process, self._process = self._process, None
        if process is not None:
            end_group(process)
            self.last_words()
            with self._change:
                self._errors.close()


def end_group(process: subprocess.Popen[bytes], patience: float = END_WAIT) -> None:
    """End a program and its process group.

    The group's leader is reaped last, so that no other process group can get its number before.
    """
    if process.returncode is not None:
        return
    _signal(process.pid, signal.SIGTERM)
    deadline = time.monotonic() + patience
    pause = 0.001
    while not has_ended(process.pid) and time.monotonic() < deadline:
        time.sleep(pause)
        pause = min(pause * 2, 0.05)
    _signal(process.pid, signal.SIGKILL)
    process.wait()


def _signal(group: int, number: int) -> None:
    # macOS raises PermissionError for a process that has ended.
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(group, number)


def has_ended(pid: int) -> bool:
    """Return whether a child process has ended, without reaping it."""
    try:
        return os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None
    except ChildProcessError:
        return True
