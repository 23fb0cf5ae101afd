"""What can be asked before a run, each answer a Finding with its remedy; nothing is changed."""

from __future__ import annotations

import importlib.util
import json
import shutil
import subprocess
import sys
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from clusterctl import checks_ask, checks_devices, checks_node, checks_reach, checks_together
from clusterctl.errors import ClusterctlError
from clusterctl.finding import Finding as Finding
from clusterctl.settings import environment

if TYPE_CHECKING:
    from clusterctl.inventory import Cluster
    from clusterctl.transport import Connections


def here() -> list[Finding]:
    """The launching machine."""
    return [*_libraries(), *_native(), *_ssh(), *_keepers()]


def _libraries() -> Iterable[Finding]:
    yield Finding("ok", "here", f"Python {sys.version.split()[0]}", check="libraries")
    missing = [
        name
        for name in ("torch", "numpy", "tokenizers", "safetensors")
        if importlib.util.find_spec(name) is None
    ]
    if missing:
        remedy = "pip install torch==2.13.0, then pip install 'clusterctl[train]'; programs of your own need neither"
        yield Finding(
            "warning", "here", f"the embedded trainer can't run: {', '.join(missing)} not installed", remedy
        )
    if importlib.util.find_spec("deepspeed") is None:
        yield Finding(
            "note",
            "here",
            "DeepSpeed is not installed: `engine: deepspeed` can't run",
            "pip install deepspeed, after torch",
        )


def _native() -> Iterable[Finding]:
    """Which backend serves each fused op, and why; the native package itself answers."""
    if importlib.util.find_spec("torch") is None:
        return  # said already
    done = subprocess.run(
        [sys.executable, "-m", "native", "--json"], capture_output=True, text=True, env=environment()
    )
    try:
        chosen = json.loads(done.stdout)
    except ValueError:
        reason = (done.stderr.strip().splitlines() or ["no answer"])[-1]
        yield Finding(
            "warning", "here", f"the fused ops can't be asked: {reason}", "python -m native says more"
        )
        return
    for op in chosen.get("ops", ()):
        reasons = {one["backend"]: one["reason"] for one in op["backends"]}
        missing = [one for one in op["backends"] if not one["available"]]
        yield Finding("ok", "here", f"op {op['op']}: {op['chosen']} ({reasons.get(op['chosen'], '')})")
        for one in missing:
            yield Finding("note", "here", f"op {op['op']}: no {one['backend']} backend: {one['reason']}")


def _ssh() -> Iterable[Finding]:
    sshd = shutil.which("sshd") or shutil.which("sshd", path="/usr/sbin:/usr/local/sbin")
    yield Finding(
        "ok", "here", f"sandbox nodes run {sshd or 'the embedded SSH server (no sshd is installed)'}"
    )


def _keepers() -> Iterable[Finding]:
    """Keepers of this user that were started by other code than this, or that do not answer."""
    from clusterctl.keeper_client import found

    try:
        said = [one.status() for one in found()]
    except ClusterctlError as problem:
        yield Finding("warning", "here", problem.message, problem.hint, "keepers")
        return
    pids = [str(one["pid"]) for one in said if one]
    if len(pids) > 1 or len(pids) < len(said):
        text = f"{len(said)} keepers run ({', '.join(pids)} answer): code or settings changed meanwhile"
        fix = "clusterctl keeper stop"
        yield Finding("warning", "here", text, "end them; the next command starts one", "keepers", fix)


def nodes(cluster: Cluster, connections: Connections, port: int = 0) -> list[Finding]:
    """Every node at once; a node that can't be reached is one finding, not the end."""
    outcomes = connections.on_each(cluster.nodes, checks_ask.ask)
    findings: list[Finding] = []
    for outcome in outcomes:
        if outcome.error is not None:
            findings.append(unreachable(outcome.node.name, outcome.error))
        else:
            findings += [*checks_node.findings(outcome.get()), *checks_devices.findings(outcome.get())]
    answers = [outcome.get() for outcome in outcomes if outcome.ok]
    findings += checks_together.findings(answers)
    return findings + list(_between(cluster, answers, connections, port))


def _between(
    cluster: Cluster, answers: Sequence[checks_ask.Said], connections: Connections, port: int
) -> Iterable[Finding]:
    """What needs more than one node; a master that is gone is said already."""
    try:
        if answers and answers[0].node == cluster.nodes[0]:
            yield from checks_reach.master_port([one.node for one in answers], connections, port)
        yield from checks_reach.device_pings(answers, connections)
    except ClusterctlError as error:
        yield unreachable(getattr(error, "node", cluster.nodes[0].name), error)


def unreachable(node: str, error: ClusterctlError) -> Finding:
    """A node that could not be asked, in the words of what stood in the way."""
    reason = str(getattr(error, "reason", error))
    return Finding("bad", node, reason, error.hint, "ssh", f"clusterctl exec {node} -- true")
