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


def connected(route: Route, timeout: float) -> socket.socket:
    """Return a socket that leads to a server; raise an OSError if the network fails."""
    if route.proxy_command:
        return ProxySocket(route.proxy_command)
    problem: OSError = OSError("no address")
    for family, _, _, _, address in socket.getaddrinfo(
        route.host, route.port, FAMILIES.get(route.family, socket.AF_UNSPEC), socket.SOCK_STREAM
    ):
        try:
            made = bound(family, route.bind_address or "")
        except OSError as failed:
            problem = failed
            continue
        try:
            made.settimeout(timeout)
            made.connect(address)
            made.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            return made
        except OSError as failed:
            # Try the next address.
            made.close()
            problem = failed
    raise problem


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
