"""Run all checks before a run, without changing anything; each result is a Finding with its remedy.

Every launch runs a part of these checks, so that problems which would end the run are reported before it starts.
"""

from __future__ import annotations

import importlib.util
import json
import shlex
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from clusterctl import extras
from clusterctl.checks import (
    chips,
    devices,
    images,
    kinds,
    network,
    processors,
    query,
    rdma,
)
from clusterctl.checks import (
    node as checks_node,
)
from clusterctl.checks.answers import NodeAnswers
from clusterctl.checks.job_setup import JobSetup
from clusterctl.errors import ClusterctlError, FindingsError
from clusterctl.finding import Finding as Finding
from clusterctl.inventory import nodeset
from clusterctl.jobs.parts.saving import saving_of
from clusterctl.settings import environment
from clusterctl.text import plural
from clusterctl.transport.failures import fold_texts
from clusterctl.transport.fanout import Outcome, on_all

if TYPE_CHECKING:
    from clusterctl.inventory.cluster import Cluster, Node
    from clusterctl.jobs.job import Job
    from clusterctl.transport.fanout import Connections
    from clusterctl.wire.train_summary import TrainSummary

# Seconds for the native package to report its ops; it may have to compile them first.
NATIVE_LIMIT = 120.0
# Findings about single fused ops, which few people need.
OP_DETAIL = "op"
# The check of logins.
LOGIN = "ssh"


def here() -> list[Finding]:
    """Check the launching machine."""
    return [*_libraries(), *_native(), *_ssh(), *_keepers()]


def _libraries() -> Iterable[Finding]:
    yield Finding("ok", "here", f"Python {sys.version.split()[0]}", check="libraries")
    missing = extras.missing(extras.OF_TRAINER)
    if missing:
        text = f"the embedded trainer can't run: {', '.join(missing)} not installed"
        remedy = f"{extras.command('train')}; trainings on nodes and programs of your own need none here"
        yield Finding("warning", "here", text, remedy)
    if importlib.util.find_spec("deepspeed") is None:
        text = "DeepSpeed is not installed: `engine: deepspeed` can't run"
        yield Finding("note", "here", text, "pip install deepspeed, after torch")


def _native() -> Iterable[Finding]:
    """Yield which backend serves each fused op, and why, as the native package reports it."""
    if importlib.util.find_spec("torch") is None:
        # NodeAnswers already.
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
        text = f"the check of the fused ops did not end within {NATIVE_LIMIT:g} s"
        yield Finding("warning", "here", text, "python -m native")
        return
    try:
        chosen = json.loads(done.stdout)
    except ValueError:
        reason = (done.stderr.strip().splitlines() or ["no answer"])[-1]
        text = f"the fused ops could not be checked: {reason}"
        yield Finding("warning", "here", text, "python -m native says more")
        return
    served = sorted({str(op["chosen"]) for op in chosen.get("ops", ())})
    if served:
        names = ", ".join(str(op["op"]) for op in chosen["ops"])
        yield Finding("ok", "here", f"fused ops by {', '.join(served)}: {names}", check="ops")
    for op in chosen.get("ops", ()):
        reasons = {entry["backend"]: entry["reason"] for entry in op["backends"]}
        text = f"op {op['op']}: {op['chosen']} ({reasons.get(op['chosen'], '')})"
        yield Finding("ok", "here", text, check=OP_DETAIL)
        for name, reason in (
            (entry["backend"], entry["reason"]) for entry in op["backends"] if not entry["available"]
        ):
            yield Finding("note", "here", f"op {op['op']}: no {name} backend: {reason}", check=OP_DETAIL)


def _ssh() -> Iterable[Finding]:
    sshd = shutil.which("sshd") or shutil.which("sshd", path="/usr/sbin:/usr/local/sbin")
    text = f"sandbox nodes run {sshd or 'the embedded SSH server (no sshd is installed)'}"
    yield Finding("ok", "here", text)


def _keepers() -> Iterable[Finding]:
    """Yield this user's keepers that another version of the code started, or that do not answer."""
    from clusterctl.keeper.client import running_keepers

    try:
        reply = [entry.status() for entry in running_keepers()]
    except ClusterctlError as problem:
        yield Finding("warning", "here", problem.message, problem.hint, "keepers")
        return
    pids = [str(entry.pid) for entry in reply if entry]
    if len(pids) > 1 or len(pids) < len(reply):
        text = f"{len(reply)} keepers run ({', '.join(pids)} answer): code or settings changed meanwhile"
        fix = "clusterctl keeper stop"
        yield Finding("warning", "here", text, "end them; the next command starts one", "keepers", fix)


@dataclass(frozen=True)
class CheckedJob:
    """A job that the nodes are checked for."""

    job: Job
    need: checks_node.CheckpointNeed | None = None
    """The space of its checkpoints on each disk."""
    code: str = ""
    """The hash of the code that its start pushes; "" without code."""

    @property
    def setup(self) -> JobSetup | None:
        return JobSetup(self.job.setup, self.code) if self.job.setup is not None else None

    def findings(
        self, cluster: Cluster, answers: Sequence[NodeAnswers], connections: Connections
    ) -> Iterable[Finding]:
        """Yield the findings against a start of the job on these nodes."""
        need = self.need
        for answer in answers:
            yield from checks_node.checkpoint_room(answer, need) if need else ()
            yield from rdma.before_launch(answer, self.job.network.rdma)
        yield from chips.findings(self.job, cluster, answers)
        yield from images.findings(cluster, self.job, connections)


def checked_job(job: Job, summary: TrainSummary | None, code: str = "") -> CheckedJob:
    """Return the facts of a job that the checks need; `summary` is the trainer's, with the size of checkpoints."""
    need = None
    if summary is not None:
        cost = summary.checkpoints
        need = checks_node.CheckpointNeed(cost.disk_bytes, cost.kept, saving_of(job.train).dir)
    return CheckedJob(job, need, code)


def nodes(
    cluster: Cluster,
    connections: Connections,
    port: int = 0,
    report: Callable[[list[Finding], str], None] = lambda findings, waits_for: None,
    checked: CheckedJob | None = None,
) -> list[Finding]:
    """Check all nodes in parallel; a node that cannot be reached is one finding and does not end the check.

    `report` gets findings as soon as they are known, and the next wait. With a job, its own checks are made too, and
    only its devices count.
    """
    cluster, findings = kinds.checked(cluster, connections)
    cluster = _as_used(cluster, checked.job) if checked else cluster
    need, setup = (checked.need, checked.setup) if checked else (None, None)
    paths = [need.folder] if need and need.folder else []
    left = set(cluster.names)

    def note(outcome: Outcome[NodeAnswers]) -> None:
        left.discard(outcome.node.name)
        report(
            [], f"{len(left)} of {plural(len(cluster.nodes), 'node')}: {nodeset.fold(left)}" if left else ""
        )

    report([], plural(len(left), "node"))
    outcomes = connections.on_each(
        cluster.nodes,
        lambda node, link: query.query_node(node, link, paths=paths, job=setup),
        on_outcome=note,
    )
    for outcome in outcomes:
        if outcome.error is not None:
            findings.append(unreachable(outcome.node.name, outcome.error))
        else:
            reply = outcome.get()
            findings += [*checks_node.findings(reply), *devices.findings(reply), *rdma.findings(reply)]
    answers = [outcome.get() for outcome in outcomes if outcome.ok]
    findings += [*network.findings(answers), *processors.findings(answers)]
    # The checks of a training compare the devices themselves.
    if checked is None or checked.job.train is None:
        findings += chips.differing(answers)
    findings += checked.findings(cluster, answers, connections) if checked else ()
    findings += kinds.unexpected(cluster, connections)
    report(findings, "connections between the nodes")
    between = list(_between(cluster, answers, connections, port))
    report(between, "")
    return findings + between


def _between(
    cluster: Cluster, answers: Sequence[NodeAnswers], connections: Connections, port: int
) -> Iterable[Finding]:
    """Yield the checks that involve several nodes; an unreachable master has been reported already."""
    try:
        if answers and answers[0].node == cluster.nodes[0]:
            yield from network.master_port([entry.node for entry in answers], connections, port)
        yield from network.device_pings(answers, connections)
    except ClusterctlError as error:
        yield unreachable(getattr(error, "node", cluster.nodes[0].name), error)


def unreachable(node: str, error: ClusterctlError) -> Finding:
    """Return the finding for a node that could not be reached, in the words of its error."""
    reason = str(getattr(error, "reason", error))
    return Finding("bad", node, reason, error.hint, LOGIN, _try_again(node))


def _try_again(names: str) -> str:
    """Return the command that connects to nodes once more."""
    return f"clusterctl exec {shlex.quote(names)} -- true"


WITHOUT = "--no-checks starts it all the same; clusterctl doctor asks more"


def before_launch(
    cluster: Cluster,
    job: Job,
    connections: Connections,
    tell: Callable[[str, str], None],
    summary: TrainSummary | None = None,
) -> None:
    """Raise an error for problems that would end the run, and report those that may; an unreachable node raises its own
    error.
    """
    checked = checked_job(job, summary)
    used = _as_used(cluster, job)
    answers, result = _quick_findings(used, connections, checked)
    result += [*checked.findings(used, answers, connections), *kinds.unexpected(used, connections)]
    result += processors.findings(answers) if job.train is not None else ()
    odd = folded([entry for entry in result if not entry.is_sound])
    for entry in odd:
        if entry.level == "warning":
            tell("check", f"{entry.where}: {entry.what}" + (f"; try: {entry.remedy}" if entry.remedy else ""))
    bad = [entry for entry in odd if entry.level == "bad"]
    if bad:
        remedies = dict.fromkeys(entry.remedy for entry in bad if entry.remedy)
        lines = [f"{entry.where}: {entry.what}" for entry in bad]
        raise FindingsError("nothing was started:\n" + "\n".join(lines), "\n".join([*remedies, WITHOUT]))
    if not odd:
        tell("check", f"{plural(len(cluster.nodes), 'node')} ready")


def _as_used(cluster: Cluster, job: Job) -> Cluster:
    """Return the cluster with only the devices of the job, because the use of other devices does not matter."""
    if job.devices is None:
        return cluster
    wanted = set(job.devices)
    nodes = [
        replace(entry, devices=tuple(device for device in entry.devices if device in wanted))
        for entry in cluster.nodes
    ]
    return replace(cluster, nodes=tuple(nodes))


def _quick_findings(
    cluster: Cluster, connections: Connections, checked: CheckedJob
) -> tuple[list[NodeAnswers], list[Finding]]:
    """Return the nodes' answers, and the findings of four round trips: greeting, query, a port opened, and every
    node's connection to it."""
    need = checked.need
    paths = [need.folder] if need and need.folder else []
    by_name = on_all(
        connections,
        cluster.nodes,
        lambda node, link: query.query_node(node, link, quick=True, paths=paths, job=checked.setup),
    )
    answers = list(by_name.values())
    findings: list[Finding] = []
    for entry in answers:
        findings += [*checks_node.findings(entry, quick=True), *devices.findings(entry)]
    findings += network.findings(answers, quick=True)
    return answers, findings + network.master_port(cluster.nodes, connections, checked.job.master_port)


def folded(findings: Sequence[Finding], nodes: Sequence[Node] = ()) -> list[Finding]:
    """Return findings with the same words once, with all their nodes, in the order in which they came.

    The findings of `nodes` that cannot be reached may differ in the names and addresses of these nodes.
    """
    groups: dict[tuple[str, ...], list[Finding]] = {}
    for entry in _with_unreachable_folded(findings, nodes):
        groups.setdefault((entry.level, entry.what, entry.remedy, entry.check, entry.fix), []).append(entry)
    return [_one_of(those) for those in groups.values()]


def _with_unreachable_folded(findings: Sequence[Finding], nodes: Sequence[Node]) -> list[Finding]:
    """Return the findings; nodes that cannot be reached for the same reason share one, in the place of the first."""
    by_name = {node.name: node for node in nodes}
    places = [
        index for index, entry in enumerate(findings) if _is_unreachable(entry) and entry.where in by_name
    ]
    texts = [
        (by_name[findings[index].where], (findings[index].what, findings[index].remedy)) for index in places
    ]
    shown: dict[int, Finding | None] = dict.fromkeys(places)
    for members, (reason, remedy) in fold_texts(texts):
        first = places[members[0]]
        names = nodeset.fold(findings[places[member]].where for member in members)
        shown[first] = replace(
            findings[first], where=names, what=reason, remedy=remedy, fix=_try_again(names)
        )
    entries = (shown.get(index, entry) for index, entry in enumerate(findings))
    return [entry for entry in entries if entry is not None]


def _is_unreachable(finding: Finding) -> bool:
    return finding.level == "bad" and finding.check == LOGIN


def _one_of(those: Sequence[Finding]) -> Finding:
    return (
        those[0]
        if len(those) == 1
        else replace(those[0], where=nodeset.fold([entry.where for entry in those]))
    )
