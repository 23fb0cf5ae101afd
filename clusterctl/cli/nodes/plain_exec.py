"""Run an `exec` that has few options, without the library that reads command lines, whose import takes 50 ms.

Only what is plainly right is read here; every other command line, and every error in one, is left to that library.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from clusterctl.cli import choices
from clusterctl.cli.nodes.execution import Form, run_command
from clusterctl.exec.command import Command
from clusterctl.settings import load_settings

NODES = ("-n", "-w", "--nodes")
CLUSTER = ("-c", "--cluster", "--hostfile")


@dataclass(frozen=True)
class PlainExec:
    """The words of `exec [-c FILE] SET -- CMD...`, where SET may also be the value of -n or -w."""

    selection: str
    words: tuple[str, ...]
    cluster: Path | None = None

    def run(self) -> int:
        """Run the command on the nodes; return the exit code."""
        chosen = choices.cluster_of(self.cluster, self.selection)
        with choices.connected(chosen, at_once=load_settings().fanout) as connections:
            return run_command(Command(self.words), chosen, Form(), connections)


def read(argv: Sequence[str]) -> PlainExec | None:
    """Return the command of a command line that begins with `exec`; None if it has more than a PlainExec."""
    if argv[:1] != ["exec"]:
        return None
    given, index = dict[str, str](), 1
    while index < len(argv) and argv[index] != "--":
        word = argv[index]
        name = "cluster" if word in CLUSTER else "selection" if word in NODES else ""
        if not name and "selection" in given:
            break
        if name:
            index += 1
        value = argv[index] if index < len(argv) else ""
        if not value.strip() or value.startswith("-") or (name or "selection") in given:
            return None
        given[name or "selection"] = value
        index += 1
    ended = argv[index : index + 1] == ["--"]
    words = tuple(argv[index + ended :])
    # Without `--`, an option may belong to either program.
    unclear = not ended and any(word.startswith("-") for word in words)
    if unclear or not words or not words[0].strip() or "selection" not in given:
        return None
    return PlainExec(given["selection"], words, Path(given["cluster"]) if "cluster" in given else None)
