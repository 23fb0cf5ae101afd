"""Run one command on a node with /bin/sh alone, without an agent.

Starting Python costs a node 20 to 50 ms of CPU; a shell that reads a script costs 1 to 2 ms. The result is
the same. The login shell gets one constant line; the user's command is in the script, quoted for /bin/sh.
The command replaces the shell, so its exit code or signal is that of the session. A watcher process reads
the rest of the input. If the input ends, or is silent for too long, the watcher ends the command and every
process with its marker. dash, bash and busybox's ash run the script in the same way; it costs one fork and
no other program.
"""

from __future__ import annotations

import contextlib
import os
import re
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from types import TracebackType
from typing import TYPE_CHECKING

from clusterctl.agent.frames import AGENT_SILENCE
from clusterctl.agent.reaper import AFTERMATH, ENDING, MARKER, POLITE
from clusterctl.errors import NODE_ENDS_COMMAND, LinkLost, RequestFailed, Unreachable
from clusterctl.transport.completed import Completed
from clusterctl.transport.pipe import ENDLESS, ENDLESS_HINT, MAX_NOISE, START_LIMIT, last_line

if TYPE_CHECKING:
    from clusterctl.inventory.cluster import Node
    from clusterctl.transport.fanout import Stream, Transport


OnOutput = Callable[[str, bytes], None]
# Seconds before the first heartbeat: most commands end earlier, and then the node needs no timer.
FIRST_BEAT = 1.0
PIECE = 256 << 10


class ShellSession:
    """Runs commands on nodes, each over its own connection. Leaving the `with` block ends running commands."""

    def __init__(self, transport: Transport, silence: float = AGENT_SILENCE) -> None:
        """`silence`: seconds without a heartbeat after which a node ends this session's commands."""
        self._transport = transport
        self._silence = silence
        self._under_way: set[_RunningCommand] = set()
        self._change = threading.Condition()
        self._closed = False

    def __enter__(self) -> ShellSession:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def run(
        self,
        node: Node,
        argv: Sequence[str],
        *,
        env: Mapping[str, str] | None = None,
        cwd: str | None = None,
        timeout: float | None = None,
        on_output: OnOutput | None = None,
    ) -> Completed:
        """Run a command and return its result, as `Connection.run` does, for commands that `carries` accepts."""
        running = _RunningCommand(node.name, self._transport.start(node, LINE), timeout, cwd)
        self._enter(running)
        parts: dict[str, list[bytes]] = {"stdout": [], "stderr": []}
        try:
            text = script(argv, env or {}, running.marker, cwd, self._silence)
            done = running.run(text, on_output or (lambda name, data: parts[name].append(data)))
        finally:
            running.close()
            with self._change:
                self._under_way.discard(running)
                self._change.notify_all()
        out, err = b"".join(parts["stdout"]), b"".join(parts["stderr"])
        return Completed(done.exit_code, done.signal, out, err, done.timed_out)

    def _enter(self, running: _RunningCommand) -> None:
        with self._change:
            closed = self._closed
            if not self._under_way and not closed:
                threading.Thread(target=self._beat, name="beats", daemon=True).start()
            self._under_way.add(running)
        if closed:
            running.close()
            raise LinkLost(running.node, "interrupted")

    def _beat(self) -> None:
        """Send heartbeats from a separate thread: the reader of a command's output may be a slow terminal."""
        while True:
            time.sleep(FIRST_BEAT)
            with self._change:
                under_way = list(self._under_way)
                if not under_way:
                    return
            for running in under_way:
                running.beat(self._silence / 3)

    def close(self) -> None:
        """End the running commands on every node and wait for them; an interrupt closes the connections."""
        with self._change:
            self._closed = True
            under_way = list(self._under_way)
        try:
            for running in under_way:
                running.end()
            with self._change:
                self._change.wait_for(lambda: not self._under_way, POLITE + KILLING)
        finally:
            for running in under_way:
                running.close()


class _RunningCommand:
    """One command that runs on a node."""

    def __init__(self, node: str, stream: Stream, timeout: float | None, cwd: str | None) -> None:
        self.node = node
        self._stream = stream
        self._timeout = timeout
        self._cwd = cwd
        self.marker = os.urandom(16).hex()
        self._mark = f"{MARK} {self.marker}".encode()
        # Output of login scripts so far.
        self._noise = {"stdout": bytearray(), "stderr": bytearray()}
        # The node's status when the command began: `ok`, or why it could not begin.
        self._began = ""
        self._timed_out = False
        self._gone_since: float | None = None
        now = time.monotonic()
        self._next_beat, self._deadline = now + FIRST_BEAT, now + START_LIMIT
        self._ending = False

    def run(self, text: bytes, on_output: OnOutput) -> Completed:
        """Run the command to its end; pass its output to `on_output` as it arrives."""
        # A login that has already ended may have printed the reason.
        with contextlib.suppress(LinkLost):
            self._stream.send(text)
        while self._is_awaited():
            try:
                name, data = self._stream.read(PIECE, AFTERMATH)
            except TimeoutError:
                if self._gone_since is not None:
                    # Only processes that the command left behind hold its streams, and they are silent.
                    break
                continue
            if not name:
                break
            if name in self._noise:
                data = self._after_mark(name, data)
            if data:
                on_output(name, data)
        return self._completed()

    def beat(self, pause: float) -> None:
        """Send a heartbeat if one is due."""
        now = time.monotonic()
        if now >= self._next_beat and not self._ending:
            self._next_beat = now + pause
            # read() raises an error with the reason.
            with contextlib.suppress(LinkLost):
                self._stream.send(b"\n")

    def end(self) -> None:
        """Make the node end the command; `run` returns once it has ended."""
        self._ending = True
        self._stream.finish()

    def close(self) -> None:
        self._stream.close()

    def _is_awaited(self) -> bool:
        """Return whether to keep waiting for the node; end the command if its timeout has passed."""
        now = time.monotonic()
        if self._gone_since is None and self._stream.exited():
            self._gone_since = now
        if now < self._deadline:
            return True
        if not self._began:
            raise self._nothing_began(f"within {START_LIMIT:.0f} s")
        if self._timed_out:
            # The command cannot be killed: it hangs in the kernel.
            return False
        self._timed_out = True
        self._deadline = now + POLITE + KILLING + 1
        self.end()
        return True

    def _after_mark(self, name: str, data: bytes) -> bytes:
        """Return the command's part of the first output, without what login scripts printed before it."""
        noise = self._noise[name]
        noise += data
        # No regular expression: compiling one for a single use takes 0.3 ms.
        begin = noise.find(self._mark)
        end = noise.find(b"\n", begin) if begin >= 0 else -1
        if end < 0:
            if len(noise) > MAX_NOISE:
                problem = (
                    f"its login shell did not start the command: {ENDLESS}, as in {last_line(bytes(noise))!r}"
                )
                raise Unreachable(self.node, problem, ENDLESS_HINT)
            return b""
        del self._noise[name]
        if name == "stdout":
            self._began = noise[begin + len(self._mark) : end].strip().decode()
            self._deadline = time.monotonic() + self._timeout if self._timeout else float("inf")
        return bytes(noise[end + 1 :])

    def _completed(self) -> Completed:
        if not self._began:
            raise self._nothing_began()
        if self._began != "ok":
            raise RequestFailed(self.node, "not-found", f"no folder {self._cwd or '~'} to run in")
        # The command hangs in the kernel and could not be killed.
        held = self._timed_out and self._gone_since is None
        code, number = (None, None) if held else self._stream.ended()
        if code is None and number is None and not self._timed_out:
            raise LinkLost(self.node, "the connection ended in the middle", NODE_ENDS_COMMAND)
        return Completed(code, number, timed_out=self._timed_out)

    def _nothing_began(self, problem: str = "it printed nothing") -> Unreachable:
        lines = [last_line(bytes(output)) for output in self._noise.values()]
        reason = next((line for line in reversed(lines) if line), problem)
        hint = "check that login scripts neither read input nor exit, and that /bin/sh is there"
        return Unreachable(self.node, f"its login shell did not start the command: {reason}", hint)


# Every login shell understands this line: sh, csh and fish.
LINE = "exec /bin/sh"
# Printed before the command's output on both streams.
MARK = "CLUSTERCTL-ONCE"
# Seconds after which the watcher gives up on processes that hang in the kernel.
KILLING = 5.0
CARRIED = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
# Variables that some shell does not allow to be set, or sets itself.
SHELLS_OWN = re.compile(
    "_|BASH.*|COMP_WORDBREAKS|DIRSTACK|EPOCH.*|EUID|FUNCNAME|GROUPS|HISTCMD|LINENO|OPTIND|PIPESTATUS|PPID|"
    "S?RANDOM|SECONDS|SHELLOPTS|SHLVL|UID"
)
SSH_NAMES = "SSH_CLIENT SSH_CONNECTION SSH_TTY SSH_AUTH_SOCK SSH_ORIGINAL_COMMAND SSH_USER_AUTH"

# The first lines that the shell reads. $$ is the shell's process id, which the command takes over; $k is
# the marker, which is only in the environment of the command and its children. The watcher is in the
# command's process group. Each line of input is a heartbeat and restarts the timer of $S seconds. The
# braces make the shell read the whole script before it starts the watcher, which reads the same input.
WATCHER = (
    "\n{"
    + ENDING
    + r"""q=$$
exec 3<&0
(trap '' HUP INT QUIT TERM PIPE
exec >/dev/null 2>&1
t= w=
while read -r x <&3;do
[ "$t" ]&&kill -USR1 $t
read -r w _ </proc/self/stat
(sleep $S 3<&-&
s=$!;trap 'kill -KILL $s;exit' USR1;exec 3<&-;wait $s;e)&
t=$!
done
[ "$t" ]&&kill -USR1 $t
read -r l </proc/$$/stat||exit
case ${l##*) } in [ZX]*)exit;;esac
e)&
"""
)


def carries(argv: Sequence[str], env: Mapping[str, str]) -> bool:
    """Return whether /bin/sh can pass exactly this argv and environment; if not, the agent runs the
    command."""
    names_fit = all(CARRIED.fullmatch(name) and not SHELLS_OWN.fullmatch(name) for name in env)
    return names_fit and bool(argv[0]) and not argv[0].startswith("-")


def script(
    argv: Sequence[str],
    env: Mapping[str, str],
    marker: str,
    cwd: str | None = None,
    silence: float = AGENT_SILENCE,
) -> bytes:
    """Return the script for /bin/sh: start the watcher, print the mark, and become the command."""
    limits = f"k={MARKER}={marker} P={POLITE:.0f} L={POLITE + KILLING:.0f} S={silence:.0f}"
    home, program = _at_home(argv[0])
    exports = "".join(f"export {name}={_quoted(value)}\n" for name, value in env.items())
    command_line = " ".join([program, *map(_quoted, argv[1:])])
    folder = _folder(cwd) if cwd else ""
    text = (
        f"{limits}{WATCHER}"
        f"cd {folder} >/dev/null 2>&1&&y=ok||y=no-folder\n"
        f"printf '%s\n' '{MARK} {marker}'>&2\n"
        f"printf '%s\n' \"{MARK} {marker} $y\"\n"
        "[ $y = ok ]||exit 1\n"
        f"{home}unset {SSH_NAMES} OLDPWD\n"
        f"{exports}export {MARKER}={marker}\n"
        f"exec {command_line} </dev/null 3<&-\n}}\n"
    )
    return text.encode("utf-8", "surrogateescape")


def _quoted(text: str) -> str:
    return "'" + text.replace("'", "'\\''") + "'"


def _at_home(program: str) -> tuple[str, str]:
    """Return a shell line to run first, and the word that then names the program.

    `~/` means the login's home folder, even if the command gets another HOME.
    """
    if program.startswith("~/"):
        return "h=$HOME\n", '"$h"/' + _quoted(program[2:])
    return "", _quoted(program)


def _folder(path: str) -> str:
    if path == "~" or path.startswith("~/"):
        return '"$HOME"' + (_quoted(path[1:]) if path[1:] else "")
    return _quoted(path if path.startswith("/") else f"./{path}")
