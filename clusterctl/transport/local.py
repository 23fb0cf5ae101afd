"""Use this machine as a node without SSH: run an agent or another program as a child process."""

from __future__ import annotations

import contextlib
import os
import pwd
import select
import subprocess
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from clusterctl.errors import LinkLost, Unreachable
from clusterctl.transport.agent_code import agent_argv
from clusterctl.transport.completed import END_LIMIT
from clusterctl.transport.connection import Connection, LinkConnection
from clusterctl.transport.link import Link
from clusterctl.transport.pipe import StreamPipe

if TYPE_CHECKING:
    from clusterctl.inventory.cluster import Node

LOGIN_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"


class LocalTransport:
    """Runs programs as child processes, with the environment of a login."""

    def __init__(self, home: Path | None = None) -> None:
        self._home = home

    def connect(self, node: Node) -> Connection:
        argv = agent_argv(os.path.expanduser(node.python))
        stream = ChildStream(node.name, argv, self._login(), "/")
        return LinkConnection(Link(node.name, StreamPipe(stream), node.workdir))

    def start(self, node: Node, command: str) -> ChildStream:
        login = self._login()
        return ChildStream(node.name, [login["SHELL"], "-c", command], login, login["HOME"])

    def _login(self) -> dict[str, str]:
        try:
            login = pwd.getpwuid(os.getuid())
            home, user, shell = login.pw_dir, login.pw_name, login.pw_shell
        except KeyError:
            # In a container, the user may be a number only.
            home, user, shell = os.path.expanduser("~"), str(os.getuid()), ""
        return {
            "HOME": str(self._home or home),
            "USER": user,
            "LOGNAME": user,
            "SHELL": shell or "/bin/sh",
            "PATH": LOGIN_PATH,
        }


class ChildStream:
    """A child process and its three streams, in a session of its own, as under sshd."""

    def __init__(
        self, node: str, argv: Sequence[str], env: Mapping[str, str], cwd: str, patience: float = END_LIMIT
    ) -> None:
        """`patience`: seconds that the process may take to end after its input was closed; then it is killed."""
        self.node = node
        self._patience = patience
        try:
            self._process = subprocess.Popen(
                argv,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                bufsize=0,
                env=dict(env),
                cwd=cwd,
                start_new_session=True,
            )
        except OSError as problem:
            raise Unreachable(node, f"{argv[0]} in {cwd}: {problem.strerror}") from None
        assert self._process.stdin and self._process.stdout and self._process.stderr
        self._stdin = self._process.stdin
        self._streams = {"stdout": self._process.stdout, "stderr": self._process.stderr}
        self._reading = threading.Lock()
        self._closing = threading.Lock()
        self._closed = False

    def read(self, size: int, timeout: float) -> tuple[str, bytes]:
        # close() takes this lock too: otherwise a descriptor could belong to another file when it is read.
        with self._reading:
            open_ones = {file.fileno(): name for name, file in self._streams.items() if not file.closed}
            if self._closed:
                raise LinkLost(self.node, "the connection was closed")
            while open_ones:
                ready = _ready(list(open_ones), timeout)
                if not ready:
                    raise TimeoutError
                for number in ready:
                    data = os.read(number, size)
                    name = open_ones.pop(number)
                    if data:
                        return name, data
                    self._streams[name].close()
            return "", b""

    def send(self, data: bytes) -> None:
        view = memoryview(data)
        try:
            while view:
                view = view[self._stdin.write(view) or 0 :]
        except (OSError, ValueError) as problem:
            raise LinkLost(self.node, f"it no longer reads its input ({problem})") from None

    def finish(self) -> None:
        # No reader is left.
        with contextlib.suppress(BrokenPipeError):
            self._stdin.close()

    def exited(self) -> bool:
        return self._process.poll() is not None

    def ended(self) -> tuple[int | None, int | None]:
        code = self._process.wait()
        return (None, -code) if code < 0 else (code, None)

    def close(self) -> None:
        with self._closing:
            self._closed = True
            self.finish()
            try:
                self._process.wait(self._patience)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait()
            with self._reading:
                for file in self._streams.values():
                    file.close()


def _ready(numbers: Sequence[int], timeout: float) -> list[int]:
    """Return the descriptors that can be read; unlike select(), this works for descriptors of any number."""
    waiting = select.poll()
    for number in numbers:
        waiting.register(number, select.POLLIN)
    return [number for number, _ in waiting.poll(timeout * 1000)]
