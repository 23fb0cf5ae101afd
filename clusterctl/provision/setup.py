"""Make the same Python environment on every node: query the nodes, push the wheels, install them."""

from __future__ import annotations

import posixpath
import re
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from clusterctl.errors import Fault, InputFaults, UsageError, WorkFailed
from clusterctl.inventory.cluster import Node
from clusterctl.provision import fabfile
from clusterctl.provision import install as on_node
from clusterctl.provision.fabfile import Installed, NodeState
from clusterctl.provision.lock import Lock
from clusterctl.provision.wheelhouse import Wheelhouse, check_hashes, lacks
from clusterctl.ssh.fabric import Logins, fabric_connection
from clusterctl.text import plural, size
from clusterctl.transfer import push
from clusterctl.transfer.relay import relay_for
from clusterctl.transport.fanout import Connections, Outcome, on_each, values

Tell = Callable[[str, str], None]
PYTHON = re.compile(r"(?P<environment>(~|/).*)/bin/python[0-9.]*\Z")


@dataclass(frozen=True)
class Wanted:
    """The environment that every node should have."""

    lock: Lock
    base: str
    """The Python that makes it."""
    environment: str = ""
    """Where it is; "" for the folder that the inventory's `python` is in."""
    prune: bool = False

    @property
    def fingerprint(self) -> str:
        return self.lock.fingerprint(self.base)

    def link_on(self, node: Node) -> str:
        """Return the path of the environment on a node."""
        found = PYTHON.fullmatch(node.python)
        return self.environment or (found["environment"] if found else f"{node.workdir}/environment")


@dataclass(frozen=True)
class Result:
    """What a setup did to one node."""

    path: str
    installed: bool
    """False if the node had this environment already."""
    seconds: float
    bytes_sent: int = 0
    bytes_relayed: int = 0
    removed: tuple[str, ...] = ()


def query_nodes(
    logins: Logins, nodes: Sequence[Node], wanted: Wanted, fanout: int
) -> list[Outcome[NodeState]]:
    """Return for each node whether it has the environment, and which Python it has."""

    def work(node: Node) -> NodeState:
        with fabric_connection(logins, node) as connection:
            state: NodeState = fabfile.query(
                connection, wanted.link_on(node), wanted.fingerprint, wanted.base
            )
            return state

    return on_each(nodes, work, fanout=fanout)


def require_fit(states: dict[Node, NodeState], wanted: Wanted, house: Wheelhouse | None) -> None:
    """Raise one error for all nodes on which the environment cannot be made."""
    faults = []
    others = "name another Python of the nodes: --base python3.11"
    for node, state in states.items():
        name = node.name
        if state.foreign:
            problem = f"{wanted.link_on(node)} exists and is not an environment of clusterctl"
            faults.append(Fault(name, problem, "rename that folder, or choose another one with --env"))
        if state.trouble:
            faults.append(Fault(name, f"{wanted.base} does not run: {state.trouble}", others))
        elif state.version and state.version < (3, 8):
            text = f"{wanted.base} is Python {_dotted(state)}"
            faults.append(Fault(name, f"{text}; environments need 3.8 or newer", others))
    kinds: dict[tuple[tuple[int, ...], str], list[str]] = {}
    for node, state in states.items():
        if state.version:
            kinds.setdefault((state.version, state.machine), []).append(node.name)
    if len({version for version, _ in kinds}) > 1:
        each = "; ".join(
            f"{names[0]} and {len(names) - 1} more: {v[0]}.{v[1]}" for (v, _), names in kinds.items()
        )
        faults.append(Fault(wanted.base, f"is not the same Python on every node ({each})", others))
    elif house is not None:
        for version, machine in kinds:
            faults += lacks(house, wanted.lock, (version[0], version[1]), machine)
    if faults:
        raise InputFaults(faults, "nothing was changed")


def _dotted(state: NodeState) -> str:
    return ".".join(map(str, state.version))


@dataclass(frozen=True)
class Setup:
    """One setup of nodes: connections, the environment, and how to push the wheels."""

    logins: Logins
    connections: Connections
    wanted: Wanted
    relay: str
    fanout: int

    def run(self, nodes: Sequence[Node], house: Wheelhouse, tell: Tell) -> list[Outcome[Result]]:
        """Push the wheels to the nodes that lack the environment, and install it there."""
        check_hashes(house, self.wanted.lock)
        began = time.monotonic()
        moved = values(self._push(nodes, house))
        total = sum(result.bytes_sent for result in moved.values())
        relayed = sum(result.bytes_relayed for result in moved.values())
        text = (
            f"{size(total)} from here, {size(relayed)} from node to node, in {time.monotonic() - began:.1f} s"
        )
        tell("push", f"{plural(len(house.files_for(self.wanted.lock)), 'wheel')}: {text}")

        def work(node: Node) -> Result:
            pushed = moved[node.name]
            done = self._install(node, pushed.path)
            return Result(
                done.path, done.installed, done.seconds, pushed.bytes_sent, pushed.bytes_relayed, done.removed
            )

        return on_each(nodes, work, fanout=self.fanout)

    def _push(self, nodes: Sequence[Node], house: Wheelhouse) -> list[Outcome[Any]]:
        only = house.files_for(self.wanted.lock)
        source = push.Source(house.folder, push.make_manifest(house.folder, only=only, everything=True))
        with relay_for(self.relay, nodes) as relay:

            def work(node: Node) -> push.PushResult:
                link = self.connections.of(self._with_base(node))
                workdir = str(link.hello().workdir)
                link.put(f"{workdir}/environments/install.py", Path(on_node.__file__).read_bytes())
                return push.push_tree(link, source, f"{workdir}/wheels", relay=relay)

            return on_each(nodes, work, fanout=self.fanout)

    def _with_base(self, node: Node) -> Node:
        """Return a node whose agent does not need the environment that is to be made."""
        return replace(node, python=self.wanted.base)

    def _install(self, node: Node, wheels: str) -> Installed:
        workdir = posixpath.dirname(wheels)
        order = fabfile.Order(
            folder=f"{workdir}/environments/{self.wanted.fingerprint}",
            link=self.wanted.link_on(node),
            wheels=wheels,
            lock=self.wanted.lock.text,
            fingerprint=self.wanted.fingerprint,
            prune=self.wanted.prune,
        )
        script = f"{workdir}/environments/install.py"
        with fabric_connection(self.logins, node) as connection:
            done: Installed = fabfile.install(connection, self.wanted.base, script, order)
        if done.refused:
            raise WorkFailed(f"{node.name}: {done.refused}", done.hint)
        return done


def require_base(base: str, nodes: Sequence[Node], wanted: Wanted) -> None:
    """Refuse a base Python inside the environment that it would make."""
    for node in nodes:
        if base.startswith(wanted.link_on(node) + "/"):
            raise UsageError(
                f"--base {base} is inside the environment that is to be made on {node.name}",
                "name the system's Python: --base python3",
            )
