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

# Options with a value, and the field that it is for.
VALUES = {
    **dict.fromkeys(("-n", "-w", "--nodes"), "selection"),
    **dict.fromkeys(("-c", "--cluster", "--hostfile"), "cluster"),
    **dict.fromkeys(("-x", "--exclude"), "exclude"),
    "--ssh": "ssh",
    "--persist": "persist",
}


@dataclass(frozen=True)
class PlainExec:
    """The words of `exec [OPTION VALUE]... SET -- CMD...`, where SET may also be the value of -n or -w."""

    words: tuple[str, ...]
    selection: str
    cluster: str | None = None
    exclude: str | None = None
    ssh: str | None = None
    persist: str | None = None

    def run(self) -> int:
        """Run the command on the nodes; return the exit code."""
        choices.SSH.set(self.ssh)
        chosen = choices.cluster_of(
            Path(self.cluster) if self.cluster else None, self.selection, self.exclude
        )
        with choices.connected(chosen, persist=self.persist, at_once=load_settings().fanout) as connections:
            return run_command(Command(self.words), chosen, Form(), connections)


def read(argv: Sequence[str]) -> PlainExec | None:
    """Return the command of a command line that begins with `exec`; None if it has more than a PlainExec."""
    given, index = dict[str, str](), 1
    while index < len(argv) and argv[index] != "--":
        name = VALUES.get(argv[index], "")
        if not name and "selection" in given:
            break
        index += bool(name)
        name, value = name or "selection", argv[index] if index < len(argv) else ""
        if not value.strip() or value.startswith("-") or name in given:
            return None
        given[name] = value
        index += 1
    ended = argv[index : index + 1] == ["--"]
    words = tuple(argv[index + ended :])
    # Without `--`, an option may belong to either program.
    unclear = not ended and any(word.startswith("-") for word in words)
    if argv[:1] != ["exec"] or unclear or not words or not words[0].strip() or "selection" not in given:
        return None
    return PlainExec(words, **given)
