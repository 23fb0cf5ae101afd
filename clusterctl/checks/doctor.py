"""What can be asked before a run, each answer a Finding with its remedy; nothing is changed.

The part of `doctor` that every launch goes through: what would end the run later is said before it starts.
"""

from __future__ import annotations

import importlib.util
import json
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from clusterctl.checks import (
    ask,
    devices,
    network,
)
from clusterctl.checks import (
    node as checks_node,
)
from clusterctl.errors import ClusterctlError, Found
from clusterctl.finding import Finding as Finding
from clusterctl.inventory import nodeset
from clusterctl.settings import environment
from clusterctl.text import plural
from clusterctl.transport.fanout import raise_failures

if TYPE_CHECKING:
    from clusterctl.inventory.cluster import Cluster
    from clusterctl.jobs.job import Job
    from clusterctl.transport.fanout import Connections

# Seconds for the native package to report its ops; it may have to compile them first.
NATIVE_LIMIT = 120.0


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
        # Said already.
        return
    try:
        done = subprocess.run(
            [sys.executable, "-m", "native", "--json"],
            capture_output=True,
            text=True,
            env=environment(),
            timeout=NATIVE_LIMIT,
        )
    except subprocess.TimeoutExpired:
        yield Finding(
            "warning", "here", f"the fused ops gave no answer in {NATIVE_LIMIT:g} s", "python -m native"
        )
        return
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
    from clusterctl.keeper.client import found

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
    outcomes = connections.on_each(cluster.nodes, ask.ask)
    findings: list[Finding] = []
    for outcome in outcomes:
        if outcome.error is not None:
            findings.append(unreachable(outcome.node.name, outcome.error))
        else:
            findings += [*checks_node.findings(outcome.get()), *devices.findings(outcome.get())]
    answers = [outcome.get() for outcome in outcomes if outcome.ok]
    findings += network.findings(answers)
    return findings + list(_between(cluster, answers, connections, port))


def _between(
    cluster: Cluster, answers: Sequence[ask.Said], connections: Connections, port: int
) -> Iterable[Finding]:
    """What needs more than one node; a master that is gone is said already."""
    try:
        if answers and answers[0].node == cluster.nodes[0]:
            yield from network.master_port([one.node for one in answers], connections, port)
        yield from network.device_pings(answers, connections)
    except ClusterctlError as error:
        yield unreachable(getattr(error, "node", cluster.nodes[0].name), error)


def unreachable(node: str, error: ClusterctlError) -> Finding:
    """A node that could not be asked, in the words of what stood in the way."""
    reason = str(getattr(error, "reason", error))
    return Finding("bad", node, reason, error.hint, "ssh", f"clusterctl exec {node} -- true")


WITHOUT = "--no-checks starts it all the same; clusterctl doctor asks more"


def before_launch(
    cluster: Cluster, job: Job, connections: Connections, tell: Callable[[str, str], None]
) -> None:
    """Raise what would end the run, say what may; a node that can't be reached raises its own error."""
    found = _quick_findings(_as_used(cluster, job), connections, job.master_port)
    odd = folded([one for one in found if not one.is_sound])
    for one in odd:
        if one.level == "warning":
            tell("check", f"{one.where}: {one.what}" + (f"; try: {one.remedy}" if one.remedy else ""))
    bad = [one for one in odd if one.level == "bad"]
    if bad:
        remedies = dict.fromkeys(one.remedy for one in bad if one.remedy)
        lines = [f"{one.where}: {one.what}" for one in bad]
        raise Found("nothing was started:\n" + "\n".join(lines), "\n".join([*remedies, WITHOUT]))
    if not odd:
        tell("check", f"{plural(len(cluster.nodes), 'node')} fit for it")


def _as_used(cluster: Cluster, job: Job) -> Cluster:
    """The cluster with no other devices than the job's: whoever is on the rest is no matter."""
    if job.devices is None:
        return cluster
    wanted = set(job.devices)
    nodes = [
        replace(one, devices=tuple(device for device in one.devices if device in wanted))
        for one in cluster.nodes
    ]
    return replace(cluster, nodes=tuple(nodes))


def _quick_findings(cluster: Cluster, connections: Connections, port: int = 0) -> list[Finding]:
    """Four round trips, whatever the number of nodes: greeting, questions, a port opened, everybody's knock."""
    outcomes = connections.on_each(cluster.nodes, lambda node, link: ask.ask(node, link, quick=True))
    raise_failures(outcomes)
    answers = [outcome.get() for outcome in outcomes]
    findings: list[Finding] = []
    for one in answers:
        findings += [*checks_node.findings(one, quick=True), *devices.findings(one)]
    findings += network.findings(answers, quick=True)
    return findings + network.master_port(cluster.nodes, connections, port)


def folded(findings: Sequence[Finding]) -> list[Finding]:
    """What is said of several nodes in the same words, said once with all of them; in the order it came."""
    groups: dict[tuple[str, ...], list[Finding]] = {}
    for one in findings:
        groups.setdefault((one.level, one.what, one.remedy, one.check, one.fix), []).append(one)
    return [_one_of(those) for those in groups.values()]


def _one_of(those: Sequence[Finding]) -> Finding:
    return (
        those[0] if len(those) == 1 else replace(those[0], where=nodeset.fold([one.where for one in those]))
    )
