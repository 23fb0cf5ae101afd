"""The program's front door: a command that a keeper can run at once goes there, every other the ordinary way.

A keeper (keeper.py) has all imported and its connections open. This side imports next to nothing, hands over its
arguments, folder, environment and its own three streams, and gives back the exit code: what the user sees is the
same either way. Whatever is unusual before the keeper took the command makes it an ordinary one.
"""

from __future__ import annotations

# The C half: the module around it brings enum.
import _signal as signal  # type: ignore[import-not-found]
import os
import sys
from _socket import SCM_RIGHTS, SOL_SOCKET, socket

from clusterctl.environment import raw_environment
from clusterctl.keeper import address as place

# Often short, and the start of a program most of the time.
VERBS = ("exec", "push", "pull")
FORWARDED = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)
# The keeper's first word: from here on the command runs there, and nowhere else.
TAKEN = b"+"
LOST = 255


def main() -> None:
    """Run the program `clusterctl`."""
    if sys.argv[1:] == ["--version"] and sys.stdout:
        from clusterctl import __version__

        sys.stdout.write(f"clusterctl {__version__}\n")
        return
    code = _by_keeper(sys.argv[1:]) if sys.argv[1:2] and sys.argv[1] in VERBS else None
    if code is None:
        before = signal.getsignal(signal.SIGINT)
        # A Ctrl-C while modules load ends it without a traceback.
        if callable(before):
            signal.signal(signal.SIGINT, signal.SIG_DFL)
        from clusterctl.cli.main import main as ordinary

        signal.signal(signal.SIGINT, before)
        ordinary()
    sys.exit(code)


def _by_keeper(argv: list[str]) -> int | None:
    """The exit code of a command that a keeper ran, or None where none did."""
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
    return _Errand(line).run(request)


def _request(argv: list[str]) -> bytes | None:
    """All that a command can see of the process that was started for it; None where a stream is closed."""
    streams = (sys.stdin, sys.stdout, sys.stderr)
    if any(stream is None for stream in streams):
        return None
    mask = os.umask(0o077)
    os.umask(mask)
    codings = [f"{stream.encoding} {stream.errors}" for stream in streams]
    words = [b"%d" % mask, *map(os.fsencode, codings), b"%d" % len(argv), *map(os.fsencode, argv)]
    words += [name + b"=" + value for name, value in raw_environment().items()]
    body = b"\0".join(words)
    return len(body).to_bytes(4, "big") + body


class _Errand:
    """This process while another one works for it: signals go on to that one, its exit code comes back."""

    def __init__(self, line: socket) -> None:
        self._line = line
        self._signals: list[int] = []

    def run(self, request: bytes) -> int | None:
        before = {
            number: signal.signal(number, self._forward)
            for number in FORWARDED
            # As under nohup, and in a script's background.
            if signal.getsignal(number) is not signal.SIG_IGN
        }
        before[signal.SIGTSTP] = signal.signal(signal.SIGTSTP, self._pause)
        taken = self._hand_over(request)
        code = self._hear() if taken else b""
        for number, handler in before.items():
            signal.signal(number, handler)
        if code:
            return code[0]
        if not taken:
            # for what now runs here.
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
            return self._hear() == TAKEN
        except OSError:
            return False

    def _hear(self) -> bytes:
        try:
            return self._line.recv(1)
        except OSError:
            return b""

    def _forward(self, number: int, frame: object) -> None:
        self._signals.append(number)
        self._tell(number)

    def _pause(self, number: int, frame: object) -> None:
        self._tell(signal.SIGSTOP)
        os.kill(os.getpid(), signal.SIGSTOP)
        self._tell(signal.SIGCONT)

    def _tell(self, number: int) -> None:
        try:
            self._line.send(bytes([number]))
        except OSError:
            # It ended meanwhile; its code is on the way.
            return
