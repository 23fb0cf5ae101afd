"""One command for many nodes: its words with each node's own values, and the cheaper way that can carry it."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from clusterctl.errors import Fault, InputFaults
from clusterctl.once_script import carries

if TYPE_CHECKING:
    from clusterctl.broadcast import FileInput, PipeInput
    from clusterctl.connection import Completed
    from clusterctl.inventory import Node
    from clusterctl.once import Once
    from clusterctl.transport import Connections

VALUE = re.compile(r"\{\{(node|n|address)\}\}|\{(node|n|address)\}")


@dataclass(frozen=True)
class Command:
    """What is to be run, before a node's own values stand in it."""

    words: tuple[str, ...]
    shell: bool = False
    """One line for /bin/sh instead of a program and its arguments."""
    literal: bool = False
    """Braces mean nothing."""
    timeout: float | None = None

    def __post_init__(self) -> None:
        faults = [
            Fault(
                f"word {place} of the command",
                "holds a null byte, which no argument can",
                "give it in a file",
            )
            for place, word in enumerate(self.words, 1)
            if "\0" in word
        ]
        if faults:
            raise InputFaults(faults)

    def on(self, node: Node, place: int) -> list[str]:
        """The argv for one node; `place` counts the chosen nodes from 0."""
        values = {"node": node.name, "n": str(place), "address": node.address}
        words = [word if self.literal else _filled(word, values) for word in self.words]
        return ["/bin/sh", "-c", " ".join(words)] if self.shell else words


def _filled(word: str, values: dict[str, str]) -> str:
    """`{node}`, `{n}` and `{address}` as values, `{{node}}` as `{node}`; every other brace is the program's own."""
    return VALUE.sub(lambda found: f"{{{found[1]}}}" if found[1] else values[found[2]], word)


class Everywhere:
    """Runs one command on any node, without an agent where that does."""

    def __init__(
        self,
        command: Command,
        nodes: Sequence[Node],
        connections: Connections,
        once: Once | None,
        stdin: FileInput | PipeInput | None = None,
    ) -> None:
        """`once` is None where agents are there already."""
        self._command = command
        self._places = {node.name: place for place, node in enumerate(nodes)}
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
            return link.run(argv, env=node.env, stdin=body, timeout=timeout, on_output=on_output)
        finally:
            if self._stdin is not None:
                self._stdin.leave(node.name)

    def _is_light(self, node: Node, argv: Sequence[str]) -> bool:
        return self._once is not None and self._stdin is None and carries(argv, node.env)
