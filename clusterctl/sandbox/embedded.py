"""A node without OpenSSH: a small SSH server, run as `python -m clusterctl.sandbox.embedded CONFIG`.

It listens on one loopback address, accepts one key of one user, and runs commands: no shell, no forwarding, no
terminal. Only this file and the folder `ssh`, the client, use paramiko.
"""

from __future__ import annotations

import base64
import contextlib
import json
import logging
import os
import pwd
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import IO

import paramiko
from paramiko.common import (
    AUTH_FAILED,
    AUTH_SUCCESSFUL,
    OPEN_FAILED_ADMINISTRATIVELY_PROHIBITED,
    OPEN_SUCCEEDED,
    cMSG_CHANNEL_REQUEST,
)
from paramiko.message import Message

CHUNK = 256 << 10
# Bytes in flight to this server; with paramiko's 2 MB a push waits for every acknowledgement.
WINDOW = 16 << 20
# Seconds that a command may take to end after its connection was lost.
GRACE = 10.0


@dataclass(frozen=True)
class Config:
    """The configuration of a server."""

    address: str
    port: int
    host_key: str
    authorized_keys: str
    user: str
    env: dict[str, str]


class Children:
    """Reap every child, including adopted orphans, and keep the exit status of the commands."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._ours: set[int] = set()
        self._ended: dict[int, int] = {}
        threading.Thread(target=self._reap, daemon=True).start()

    def start(self, argv: list[str], env: dict[str, str]) -> subprocess.Popen[bytes]:
        """Start a command in a new session, with its three streams as pipes."""
        with self._changed:
            child = subprocess.Popen(
                argv,
                env=env,
                cwd=env["HOME"],
                bufsize=0,
                start_new_session=True,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
            )
            self._ours.add(child.pid)
            self._changed.notify_all()
        return child

    def wait(self, pid: int, timeout: float | None = None) -> int | None:
        """Return the exit code of a child, negative for a signal; None if it still runs after `timeout` s."""
        with self._changed:
            self._changed.wait_for(lambda: pid in self._ended, timeout)
            return self._ended.get(pid)

    def _reap(self) -> None:
        while True:
            try:
                pid, status = os.waitpid(-1, 0)
            except ChildProcessError:
                with self._changed:
                    # Wait until a child is started; an orphan may arrive without a notice.
                    self._changed.wait(0.2)
                continue
            with self._changed:
                if pid in self._ours:
                    self._ours.discard(pid)
                    self._ended[pid] = os.waitstatus_to_exitcode(status)
                    self._changed.notify_all()


class Session(paramiko.ServerInterface):
    """One connection: accept the key and start commands."""

    def __init__(self, config: Config, children: Children, peer: str) -> None:
        self.config = config
        self.children = children
        self.peer = peer
        kind, data = Path(config.authorized_keys).read_text().split()[:2]
        self.allowed = paramiko.PKey.from_type_string(kind, _decode(data))

    def get_allowed_auths(self, username: str) -> str:
        return "publickey"

    def check_auth_publickey(self, username: str, key: paramiko.PKey) -> int:
        known = username == self.config.user and key == self.allowed
        return AUTH_SUCCESSFUL if known else AUTH_FAILED

    def check_channel_request(self, kind: str, chanid: int) -> int:
        if kind == "session":
            return OPEN_SUCCEEDED
        return OPEN_FAILED_ADMINISTRATIVELY_PROHIBITED

    def check_channel_exec_request(self, channel: paramiko.Channel, command: bytes) -> bool:
        threading.Thread(target=self._run, args=(channel, os.fsdecode(command)), daemon=True).start()
        return True

    def _run(self, channel: paramiko.Channel, command: str) -> None:
        entry = pwd.getpwuid(os.getuid())
        shell = entry.pw_shell or "/bin/sh"
        known = {"USER": entry.pw_name, "LOGNAME": entry.pw_name, "SHELL": shell, "SSH_CONNECTION": self.peer}
        try:
            child = self.children.start([shell, "-c", command], {**known, **self.config.env})
        except OSError as error:
            channel.sendall_stderr(f"{shell}: {error.strerror}\n".encode())
            channel.send_exit_status(127)
            channel.close()
            return
        _serve(channel, child, self.children)


def _decode(data: str) -> bytes:
    return base64.b64decode(data)


def _serve(channel: paramiko.Channel, child: subprocess.Popen[bytes], children: Children) -> None:
    """Copy the three streams until the command has ended with all its output, or the connection is lost."""
    assert child.stdin and child.stdout and child.stderr
    threading.Thread(target=_feed, args=(channel, child.stdin), daemon=True).start()
    pumps = [
        threading.Thread(target=_drain, args=(child.stdout, channel.sendall), daemon=True),
        threading.Thread(target=_drain, args=(child.stderr, channel.sendall_stderr), daemon=True),
    ]
    for pump in pumps:
        pump.start()
    while (code := children.wait(child.pid, 0.5)) is None and not channel.closed:
        pass
    # The connection is lost: the command has read the end of its input, and gets time to react.
    if code is None:
        if children.wait(child.pid, GRACE) is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(child.pid, signal.SIGKILL)
    else:
        for pump in pumps:
            pump.join()
        _send_exit(channel, code)
    channel.close()


def _feed(channel: paramiko.Channel, stdin: IO[bytes]) -> None:
    # A command may stop reading at any time.
    with contextlib.suppress(OSError), stdin:
        while data := channel.recv(CHUNK):
            view = memoryview(data)
            while view:
                view = view[stdin.write(view) :]


def _drain(stream: IO[bytes], send: Callable[[bytes], object]) -> None:
    with stream:
        while data := os.read(stream.fileno(), CHUNK):
            # Keep reading without a connection, so that the command can end.
            with contextlib.suppress(OSError):
                send(data)


def _send_exit(channel: paramiko.Channel, code: int) -> None:
    with contextlib.suppress(OSError, EOFError, paramiko.SSHException):
        if code >= 0:
            channel.send_exit_status(code)
            return
        # RFC 4254, 6.10; paramiko has no call for it.
        message = Message()
        message.add_byte(cMSG_CHANNEL_REQUEST)
        message.add_int(channel.remote_chanid)
        message.add_string("exit-signal")
        message.add_boolean(False)
        message.add_string(signal.Signals(-code).name.removeprefix("SIG"))
        message.add_boolean(False)
        message.add_string("")
        message.add_string("")
        channel.get_transport()._send_user_message(message)  # type: ignore[attr-defined]


def serve(config: Config) -> None:
    """Listen and serve until killed."""
    host_key = paramiko.Ed25519Key(filename=config.host_key)
    children = Children()
    with socket.create_server((config.address, config.port), backlog=128) as listener:
        _log(f"listening on {config.address}:{config.port}")
        while True:
            connection, peer = listener.accept()
            text = f"{peer[0]} {peer[1]} {config.address} {config.port}"
            session = Session(config, children, text)
            threading.Thread(target=_connect, args=(connection, host_key, session), daemon=True).start()


def _connect(connection: socket.socket, host_key: paramiko.PKey, session: Session) -> None:
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    transport = paramiko.Transport(connection, default_window_size=WINDOW)
    transport.add_server_key(host_key)
    try:
        transport.start_server(server=session)
        # paramiko closes a channel to which no reference is left.
        open_channels: list[paramiko.Channel] = []
        while transport.is_active():
            if channel := transport.accept(1.0):
                open_channels = [existing for existing in open_channels if not existing.closed] + [channel]
    except (paramiko.SSHException, EOFError, OSError) as error:
        _log(f"{session.peer}: {type(error).__name__}: {error}")
    finally:
        transport.close()


def _log(text: str) -> None:
    sys.stderr.write(text + "\n")


def main(path: str) -> int:
    """Run the server that a configuration file describes."""
    value = json.loads(Path(path).read_text())
    # _connect logs the end of each connection once.
    logging.getLogger("paramiko").setLevel(logging.CRITICAL)
    try:
        serve(Config(**value))
    except OSError as error:
        _log(f"bind to {value['address']}:{value['port']} failed: {error.strerror}")
    return 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
