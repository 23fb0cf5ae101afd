"""Ask a node's agent to run a setup. The agent stores the result; the values stay on the node."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from clusterctl.transport.link import RequestFailed

if TYPE_CHECKING:
    from clusterctl.inventory.cluster import Node
    from clusterctl.transport.connection import Connection

# Limit of variables that are listed by name; of further ones, only the number is shown.
NAMED = 4


@dataclass(frozen=True)
class SetupResult:
    """What a setup changes on a node; the values stay there."""

    set: dict[str, int] = field(hash=False)
    """The variables that it sets; for a list of paths, how many paths are new."""
    unset: tuple[str, ...] = ()
    kept: bool = False
    """Whether the result of an earlier run was used."""
    seconds: float = 0.0

    def text(self, most: int = NAMED) -> str:
        """Return what is changed in a few words: lists of paths first, then other variables."""
        paths = [f"{name} +{count}" for name, count in self.set.items() if count]
        shown = [*paths, *(name for name, count in self.set.items() if not count)]
        words = [*shown[:most], *([f"{len(shown) - most} more"] if len(shown) > most else [])]
        words += [f"without {', '.join(self.unset[:most])}"] if self.unset else []
        return ", ".join(words) or "nothing"


def ask_setup(
    node: Node, link: Connection, request: Mapping[str, object], *, fresh: bool = False
) -> SetupResult:
    """Run a setup on a node, unless its result is stored; raise a WorkFailed with the last line of its output if it
    fails.
    """
    try:
        return link.ask(SetupResult, "setup", {"setup": dict(request), "fresh": fresh})
    except RequestFailed as failed:
        failed.hint = failed.hint or (
            f"correct `setup`, or try it by hand: clusterctl ssh {node.name}; a command that may fail ends with || true"
        )
        raise
