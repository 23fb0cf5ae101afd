"""The fabric tasks behind `clusterctl nodes setup`, which a script may also call with a connection of its own."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from typing import Any

from fabric import task

from clusterctl.errors import WorkFailed
from clusterctl.provision.present import query_line, seen_in
from clusterctl.transport.link import shell_command
from clusterctl.wire.typed_json import BadValue, decode, parse


@dataclass(frozen=True)
class NodeState:
    """What a node has before a setup."""

    fingerprint: str
    """The fingerprint of the complete environment that the link points to; "" if there is none."""
    version: tuple[int, ...] = ()
    machine: str = ""
    trouble: str = ""
    """Why the Python that makes environments does not run."""
    foreign: bool = False
    """Whether the environment's path exists and is not a link."""


@dataclass(frozen=True)
class Order:
    """What `install.py` does on a node."""

    folder: str
    link: str
    wheels: str
    lock: str
    fingerprint: str
    prune: bool = False


@dataclass(frozen=True)
class Installed:
    """The answer of `install.py`."""

    path: str = ""
    installed: bool = False
    seconds: float = 0.0
    removed: tuple[str, ...] = ()
    refused: str = ""
    hint: str = ""


FACTS = "import sys, platform; print(*sys.version_info[:2], platform.machine())"


@task  # type: ignore[untyped-decorator]
def query(c: Any, link: str, fingerprint: str, base: str) -> NodeState:
    """Return the state of a node: the fingerprint of its complete environment, else which Python it has."""
    found = c.run(query_line(link), hide=True, warn=True)
    complete, foreign = seen_in(found.stdout)
    if complete == fingerprint and not foreign:
        return NodeState(complete)
    facts = c.run(shell_command([base, "-I", "-c", FACTS]), hide=True, warn=True)
    words = facts.stdout.split()
    if not facts.ok or len(words) < 3:
        lines = (facts.stderr or facts.stdout).strip().splitlines()
        return NodeState("", trouble=lines[-1][:200] if lines else f"exit {facts.exited}")
    return NodeState("", (int(words[0]), int(words[1])), words[2], foreign=foreign)


@task  # type: ignore[untyped-decorator]
def install(c: Any, base: str, script: str, order: Order) -> Installed:
    """Make an environment with the pushed script and wheels; return the script's answer."""
    done = c.run(shell_command([base, "-I", script, json.dumps(asdict(order))]), hide=True, warn=True)
    lines = done.stdout.strip().splitlines()
    try:
        return decode(Installed, parse(lines[-1] if lines else ""))
    except BadValue:
        text = " / ".join((done.stderr or done.stdout).strip().splitlines()[-3:]) or f"exit {done.exited}"
        raise WorkFailed(f"{c.host}: the installation ended without an answer: {text[:500]}") from None
