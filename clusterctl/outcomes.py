"""What came of a fan-out: all values, or one error that names every node that failed."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from clusterctl.errors import LinkLost, NodeError, NodesFailed, WorkFailed
from clusterctl.inventory import Node
from clusterctl.transport import Outcome

if TYPE_CHECKING:
    from clusterctl.transport import Connection, Connections


def on_all(
    connections: Connections, nodes: Sequence[Node], work: Callable[[Node, Connection], Any]
) -> dict[str, Any]:
    """The same work on all nodes at once; every node that fails is named."""
    outcomes = connections.on_each(nodes, work)
    raise_failures(outcomes)
    return {outcome.node.name: outcome.value for outcome in outcomes}


def within(
    connections: Connections,
    nodes: Sequence[Node],
    work: Callable[[Node, Connection], Any],
    seconds: float | None = None,
) -> list[Outcome[Any]]:
    """What came of each node in so many seconds; a node that is silent is a lost link then, and holds up nobody."""
    if seconds is None:
        return connections.on_each(nodes, work)
    found: dict[str, Outcome[Any]] = {}

    def note(outcome: Outcome[Any]) -> None:
        found[outcome.node.name] = outcome

    asking = threading.Thread(
        target=connections.on_each, args=(nodes, work), kwargs={"on_outcome": note}, daemon=True, name="ask"
    )
    asking.start()
    asking.join(seconds)
    late = f"no answer in {seconds:g} s"
    return [found.get(node.name) or Outcome(node, error=LinkLost(node.name, late)) for node in nodes]


def raise_failures(outcomes: Sequence[Outcome[Any]]) -> None:
    """One error for all nodes that failed: unreachable ones first, and their exit code, since nothing else can be
    believed before."""
    errors = [outcome.error for outcome in outcomes if outcome.error is not None]
    unreachable = [error for error in errors if isinstance(error, NodeError)]
    if unreachable:
        failed = [error for error in errors if not isinstance(error, NodeError)]
        raise unreachable[0] if len(errors) == 1 else NodesFailed(unreachable, failed)
    if errors:
        hints = "\n".join(dict.fromkeys(error.hint for error in errors if error.hint))
        raise (
            errors[0] if len(errors) == 1 else WorkFailed("\n".join(error.message for error in errors), hints)
        )
