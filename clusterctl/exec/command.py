"""Prepare one command for many nodes with each node's values, and run it without an agent where possible.

Standard input of any size is sent to many nodes with little memory.
"""

from __future__ import annotations

import os
import re
import stat
import threading
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from clusterctl.agent.frames import CHUNK
from clusterctl.errors import Fault, InputFaults, RequestFailed
from clusterctl.inventory.setup import Setup, request_for
from clusterctl.transport.shell import carries

if TYPE_CHECKING:
    from clusterctl.inventory.cluster import Node
    from clusterctl.transport.completed import Completed
    from clusterctl.transport.fanout import Connections
    from clusterctl.transport.shell import ShellSession


VALUE = re.compile(r"\{\{(node|n|address)\}\}|\{(node|n|address)\}")


@dataclass(frozen=True)
class Command:
    """A command before each node's values are filled in."""

    words: tuple[str, ...]
    shell: bool = False
    """Run the words as one line for /bin/sh instead of a program and its arguments."""
    literal: bool = False
    """Do not replace braces."""
    timeout: float | None = None
    setup: bool = False
    """Run it in the environment of the node's setup."""
    of_job: Setup | None = None
    """With `setup`: a job's setup, which is run after the node's."""
    code: Mapping[str, str] = field(default_factory=dict, hash=False)
    """By node, the folder of the job's code, in which its setup starts."""

    sudo: bool = False
    """Run it as root by sudo, with the password in the first line of the input; an empty one if none is known."""

    def __post_init__(self) -> None:
        faults = [
            Fault(
                f"word {index} of the command",
                "holds a null byte, which no argument can",
                "give it in a file",
            )
            for index, word in enumerate(self.words, 1)
            if "\0" in word
        ]
        if faults:
            raise InputFaults(faults)

    def setup_on(self, node: Node) -> dict[str, object] | None:
        """Return the setup that a node's agent runs before the command; None without one."""
        return request_for(node.setup, self.of_job, self.code.get(node.name, "")) if self.setup else None

    def on(self, node: Node, index: int) -> list[str]:
        """Return the argv for one node; `place` counts the chosen nodes from 0."""
        values = {"node": node.name, "n": str(index), "address": node.address}
        argv = [word if self.literal else _filled(word, values) for word in self.words]
        argv = ["/bin/sh", "-c", " ".join(argv)] if self.shell else argv
        return ["/bin/sh", "-c", AS_ROOT, "sudo", *argv] if self.sudo else argv


# The password is for sudo alone: the command never reads it, also where sudo asks for none. Both calls of sudo have the
# same parent, for which sudo remembers that the password was right.
AS_ROOT = """IFS= read -r password
[ -z "$password" ] || printf '%s\\n' "$password" | sudo -S -p '' -v || exit
unset password
sudo -n -- "$@" </dev/null
"""


def _filled(word: str, values: dict[str, str]) -> str:
    """Return a word with `{node}`, `{n}` and `{address}` filled in, `{{node}}` as `{node}`; other braces stay."""
    return VALUE.sub(lambda found: f"{{{found[1]}}}" if found[1] else values[found[2]], word)


class Everywhere:
    """Runs one command on any node, without an agent where possible."""

    def __init__(
        self,
        command: Command,
        nodes: Sequence[Node],
        connections: Connections,
        once: ShellSession | None,
        stdin: FileInput | PipeInput | SecretInput | None = None,
    ) -> None:
        """`once` is None if agents are already running."""
        self._command = command
        self._places = {node.name: index for index, node in enumerate(nodes)}
        self._connections = connections
        self._once = once
        self._stdin = stdin

    def run(self, node: Node, on_output: Callable[[str, bytes], None]) -> Completed:
        argv = self._command.on(node, self._places[node.name])
        timeout = self._command.timeout
        if self._is_light(node, argv):
            assert self._once is not None
            return self._once.run(node, argv, env=node.env, timeout=timeout, on_output=on_output)
        try:
            body = self._stdin.view(node.name) if self._stdin is not None else None
            link = self._connections.of(node)
            setup = self._command.setup_on(node)
            return link.run(argv, env=node.env, setup=setup, stdin=body, timeout=timeout, on_output=on_output)
        except RequestFailed as failed:
            if failed.kind == "setup":
                failed.hint = failed.hint or "correct `setup`; a command that may fail ends with || true"
            raise
        finally:
            if self._stdin is not None:
                self._stdin.leave(node.name)

    def _is_light(self, node: Node, argv: Sequence[str]) -> bool:
        alone = self._stdin is None and self._command.setup_on(node) is None
        return self._once is not None and alone and carries(argv, node.env)


# Pieces that the fastest node may be ahead of the slowest: 1 MB.
AHEAD = 8


def broadcast(number: int, nodes: Sequence[str]) -> FileInput | PipeInput:
    """Return the input behind a file descriptor, for all given nodes."""
    is_file = stat.S_ISREG(os.fstat(number).st_mode)
    return FileInput(number) if is_file else PipeInput(number, nodes)


class FileInput:
    """A regular file: every node reads it independently."""

    together = False

    def __init__(self, number: int) -> None:
        self._number = number
        self._from = os.lseek(number, 0, os.SEEK_CUR)

    def view(self, node: str) -> Iterator[bytes]:
        offset = self._from
        while data := os.pread(self._number, CHUNK, offset):
            offset += len(data)
            yield data

    def leave(self, node: str) -> None:
        """Do nothing: no node waits for another."""


class SecretInput:
    """A short secret, which every node gets."""

    together = False

    def __init__(self, secret: bytes) -> None:
        self._secret = secret

    def view(self, node: str) -> Iterator[bytes]:
        yield self._secret

    def leave(self, node: str) -> None:
        """Do nothing: no node waits for another."""


class PipeInput:
    """A pipe or a terminal, which can be read only once.

    A fast node waits for the slow ones when it is AHEAD pieces in front.
    """

    together = True
    """All nodes have to start at the same time."""

    def __init__(self, number: int, nodes: Sequence[str]) -> None:
        self._number = number
        self._queues: dict[str, deque[bytes]] = {name: deque() for name in nodes}
        self._change = threading.Condition()
        self._ended = False
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._begun = False

    def view(self, node: str) -> Iterator[bytes]:
        """Yield the pieces for one node; `leave` ends the iteration."""
        with self._change:
            if not self._begun:
                self._begun = True
                self._reader.start()
        while True:
            with self._change:
                queue = self._queues.get(node)
                while queue is not None and not queue and not self._ended:
                    self._change.wait()
                    queue = self._queues.get(node)
                if not queue:
                    return
                data = queue.popleft()
                self._change.notify_all()
            yield data

    def leave(self, node: str) -> None:
        """Remove a node, so that the others do not wait for it."""
        with self._change:
            self._queues.pop(node, None)
            self._change.notify_all()

    def _read(self) -> None:
        while self._wait_for_room():
            try:
                data = os.read(self._number, CHUNK)
            except OSError:
                # The terminal is gone.
                data = b""
            with self._change:
                for queue in self._queues.values() if data else ():
                    queue.append(data)
                self._ended = not data
                self._change.notify_all()

    def _wait_for_room(self) -> bool:
        """Return whether any node still wants input."""
        with self._change:
            while any(len(queue) >= AHEAD for queue in self._queues.values()):
                self._change.wait()
            return bool(self._queues) and not self._ended
