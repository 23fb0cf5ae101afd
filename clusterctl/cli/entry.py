"""Start the program: pass `exec`, `push` and `pull` to a running keeper, and run other commands in this process.

A keeper (fork_server.py) has all modules imported and its connections open. This process imports almost
nothing; it sends its arguments, folder, environment and standard streams, and returns the exit code, so the
user sees no difference. If anything unusual happens before the keeper accepts the command, the command runs
here.
"""

from __future__ import annotations

import os
import signal
import sys
from socket import SCM_RIGHTS, SOL_SOCKET, socket

from clusterctl import interrupts
from clusterctl.environment import raw_environment
from clusterctl.keeper import address as place

# These commands are often short, so most of their time is the program's start.
VERBS = ("exec", "push", "pull")
FORWARDED = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)
# The keeper's first answer: from now on it runs the command, and this process does not.
TAKEN = b"+"
LOST = 255


def main() -> None:
    """Run the program `clusterctl`."""
    interrupts.while_loading()
    if sys.argv[1:] == ["--version"] and sys.stdout:
        from clusterctl import __version__

        try:
            print(f"clusterctl {__version__}", flush=True)
            return
        except OSError:
            # The ordinary way reports it.
            pass
    code = _by_keeper(sys.argv[1:]) if sys.argv[1:2] and sys.argv[1] in VERBS else None
    if code is None:
        from clusterctl.cli.main import main as ordinary

        ordinary()
    sys.exit(code)


def _by_keeper(argv: list[str]) -> int | None:
    """Return the exit code of a command that a keeper ran; None if no keeper did."""
    try:
        path = place.folder()
        request = _request(argv)
        if path is None or request is None:
            return None
        folder = place.opened(path)
        try:
            line = place.connected(folder, place.name() + place.DOOR)
        finally:
            os.close(folder)
    except (OSError, place.WrongPlace):
        return None
    return _KeptCommand(line).run(request)


def _request(argv: list[str]) -> bytes | None:
    """Return the process state that a command can see (arguments, folder, environment), as bytes; None if a standard
    stream is closed.
    """
    streams = (sys.stdin, sys.stdout, sys.stderr)
    if any(stream is None for stream in streams):
        return None
    mask = os.umask(0o077)
    os.umask(mask)
    codings = [f"{stream.encoding} {stream.errors}" for stream in streams]
    fields = [b"%d" % mask, *map(os.fsencode, codings), b"%d" % len(argv), *map(os.fsencode, argv)]
    fields += [name + b"=" + value for name, value in raw_environment().items()]
    body = b"\0".join(fields)
    return len(body).to_bytes(4, "big") + body


class _KeptCommand:
    """The client side of a command that the keeper runs: forwards signals and receives the exit code."""

    def __init__(self, line: socket) -> None:
        self._line = line
        self._signals: list[int] = []

    def run(self, request: bytes) -> int | None:
        before = {
            number: signal.signal(number, self._forward)
            for number in FORWARDED
            # Signals are ignored under nohup and in a script's background: leave them so.
            if signal.getsignal(number) is not signal.SIG_IGN
        }
        before[signal.SIGTSTP] = signal.signal(signal.SIGTSTP, self._pause)
        taken = self._hand_over(request)
        code = self._receive() if taken else b""
        for number, handler in before.items():
            signal.signal(number, handler)
        if code:
            return code[0]
        if not taken:
            # Deliver the received signals to the command, which now runs here.
            for meant in self._signals:
                os.kill(os.getpid(), meant)
            return None
        sys.stderr.write("error: the keeper of the connections ended, and with it what it ran on the nodes\n")
        sys.stderr.write("  try: the command again, with --persist off for connections of its own\n")
        return LOST

    def _hand_over(self, request: bytes) -> bool:
        try:
            here = os.open(".", os.O_RDONLY | os.O_DIRECTORY)
            handles = b"".join(number.to_bytes(4, sys.byteorder) for number in (0, 1, 2, here))
            self._line.sendmsg([request[:1]], [(SOL_SOCKET, SCM_RIGHTS, handles)])
            os.close(here)
            self._line.sendall(request[1:])
            return self._receive() == TAKEN
        except OSError:
            return False

    def _receive(self) -> bytes:
        try:
            return self._line.recv(1)
        except OSError:
            return b""

    def _forward(self, number: int, frame: object) -> None:
        self._signals.append(number)
        self._send(number)

    def _pause(self, number: int, frame: object) -> None:
        self._send(signal.SIGSTOP)
        os.kill(os.getpid(), signal.SIGSTOP)
        self._send(signal.SIGCONT)

    def _send(self, number: int) -> None:
        try:
            self._line.send(bytes([number]))
        except OSError:
            # The command has just ended; its exit code is on the way.
            return
