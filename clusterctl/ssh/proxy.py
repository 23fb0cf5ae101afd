"""The bytes' way to an SSH server: TCP as the configuration wants it, or the user's own ProxyCommand."""

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
from clusterctl.ssh.config import Way

FAMILIES = {"any": socket.AF_UNSPEC, "inet": socket.AF_INET, "inet6": socket.AF_INET6}
# Seconds between asking a program to end and ending it.
END_WAIT = 2.0
LAST_WORDS = 2000


def connected(way: Way, timeout: float) -> socket.socket:
    """A socket that leads to a server; what goes wrong with the network is raised as the OSError that it is."""
    if way.proxy_command:
        return ProxySocket(way.proxy_command)
    problem: OSError = OSError("no address")
    for family, kind, number, _, address in socket.getaddrinfo(
        way.host, way.port, FAMILIES.get(way.family, socket.AF_UNSPEC), socket.SOCK_STREAM
    ):
        made = socket.socket(family, kind, number)
        try:
            made.settimeout(timeout)
            if way.bind_address:
                made.bind((way.bind_address, 0))
            made.connect(address)
            made.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            return made
        except OSError as failed:
            # The next address may do.
            made.close()
            problem = failed
    raise problem


class ProxySocket(socket.socket):
    """One end of a pair; the other is the standard input and output of a ProxyCommand, which ends with it."""

    def __init__(self, command: str) -> None:
        ours, theirs = socket.socketpair()
        super().__init__(ours.family, ours.type, ours.proto, ours.detach())
        self._said = b""
        # Whoever closes it may be another than who asks.
        self._change = threading.Lock()
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115  closed with the socket
        env = environment()
        shell = env.get("SHELL") or "/bin/sh"
        try:
            self._process: subprocess.Popen[bytes] | None = subprocess.Popen(
                # As ssh does it.
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
        """The end of what the program said on its standard error, also after it was closed."""
        with self._change:
            if not self._errors.closed:
                size = os.fstat(self._errors.fileno()).st_size
                self._said = os.pread(self._errors.fileno(), LAST_WORDS, max(0, size - LAST_WORDS))
        return self._said.decode(errors="replace").strip()

    def close(self) -> None:
        super().close()
        process, self._process = self._process, None
        if process is not None:
            end_group(process)
            self.last_words()
            with self._change:
                self._errors.close()


def end_group(process: subprocess.Popen[bytes], patience: float = END_WAIT) -> None:
    """End a program and everything in its group; its leader is waited for last, so that no other group has
    its number."""
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
    # macOS says the latter of one that ended.
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(group, number)


def has_ended(pid: int) -> bool:
    """Whether a child ended, without taking its status."""
    try:
        return os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None
    except ChildProcessError:
        return True
