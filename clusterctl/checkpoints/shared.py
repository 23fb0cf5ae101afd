"""Check before a start that all nodes share the folder of `save.dir`, and that only this user can write to it."""

from __future__ import annotations

import secrets
import time
from collections.abc import Sequence
from dataclasses import dataclass

from clusterctl.errors import WorkFailed
from clusterctl.inventory.cluster import Node
from clusterctl.inventory.nodeset import fold
from clusterctl.transport.fanout import Connections, on_all

# Seconds in which a file that one node writes must be visible on the others: network disks cache that a file was
# missing.
PATIENCE, PAUSE = 10.0, 0.5
HINT = "mount one disk there on every node, owned by this user; or leave train.save.dir out"


@dataclass(frozen=True)
class SharedAnswer:
    """Whether a node sees the file of another one, and why it cannot use the folder; "" if it can."""

    seen: bool
    fault: str


def check_shared(folder: str, nodes: Sequence[Node], connections: Connections) -> str:
    """Return a line for the log; raise WorkFailed with every node that lacks the folder or has another one."""
    params = {"path": folder, "token": secrets.token_hex(8)}
    first = nodes[0]
    answer = connections.of(first).ask(SharedAnswer, "probe_shared", {**params, "action": "write"})
    if answer.fault:
        raise WorkFailed(f"{first.name}: {answer.fault}", HINT)
    try:
        faults = _not_seen(list(nodes), params, connections, first.name)
    finally:
        connections.of(first).call("probe_shared", {**params, "action": "remove"})
    if faults:
        raise WorkFailed(
            "\n".join(["nothing was started: train.save.dir is not shared by all nodes", *faults]), HINT
        )
    return f"{folder} is shared by {fold([node.name for node in nodes])}"


def _not_seen(nodes: list[Node], params: dict[str, str], connections: Connections, first: str) -> list[str]:
    """Return a fault for each node that does not see the file of the first one in time."""
    deadline = time.monotonic() + PATIENCE
    while True:
        answers = on_all(
            connections,
            nodes,
            lambda node, link: link.ask(SharedAnswer, "probe_shared", {**params, "action": "look"}),
        )
        wrong = {name: answer.fault for name, answer in answers.items() if not answer.seen}
        if not wrong or any(wrong.values()) or time.monotonic() > deadline:
            break
        time.sleep(PAUSE)
    other = f"{params['path']} is another folder than on {first}"
    return [f"{name}: {fault or other}" for name, fault in wrong.items()]
