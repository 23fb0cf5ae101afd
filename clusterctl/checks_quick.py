"""The part of `doctor` that every launch goes through: what would end the run later is said before it starts."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from clusterctl import checks_ask, checks_devices, checks_node, checks_reach, checks_together, nodeset
from clusterctl.errors import Found
from clusterctl.finding import Finding
from clusterctl.run import raise_failures
from clusterctl.words import some

if TYPE_CHECKING:
    from clusterctl.inventory import Cluster
    from clusterctl.job import Job
    from clusterctl.transport import Connections

WITHOUT = "--no-checks starts it all the same; clusterctl doctor asks more"


def before_launch(
    cluster: Cluster, job: Job, connections: Connections, tell: Callable[[str, str], None]
) -> None:
    """Raise what would end the run, say what may; a node that can't be reached raises its own error."""
    found = ask(_as_used(cluster, job), connections, job.master_port)
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
        tell("check", f"{some(len(cluster.nodes), 'node')} fit for it")


def _as_used(cluster: Cluster, job: Job) -> Cluster:
    """The cluster with no other devices than the job's: whoever is on the rest is no matter."""
    if job.devices is None:
        return cluster
    wanted = set(job.devices)
    nodes = [replace(one, devices=tuple(device for device in one.devices if device in wanted)) for one in cluster.nodes]
    return replace(cluster, nodes=tuple(nodes))


def ask(cluster: Cluster, connections: Connections, port: int = 0) -> list[Finding]:
    """Four round trips, whatever the number of nodes: greeting, questions, a port opened, everybody's knock."""
    outcomes = connections.on_each(cluster.nodes, lambda node, link: checks_ask.ask(node, link, quick=True))
    raise_failures(outcomes)
    answers = [outcome.get() for outcome in outcomes]
    findings: list[Finding] = []
    for one in answers:
        findings += [*checks_node.findings(one, quick=True), *checks_devices.findings(one)]
    findings += checks_together.findings(answers, quick=True)
    return findings + checks_reach.master_port(cluster.nodes, connections, port)


def folded(findings: Sequence[Finding]) -> list[Finding]:
    """What is said of several nodes in the same words, said once with all of them; in the order it came."""
    groups: dict[tuple[str, ...], list[Finding]] = {}
    for one in findings:
        groups.setdefault((one.level, one.what, one.remedy, one.check, one.fix), []).append(one)
    return [_one_of(those) for those in groups.values()]


def _one_of(those: Sequence[Finding]) -> Finding:
    return those[0] if len(those) == 1 else replace(those[0], where=nodeset.fold([one.where for one in those]))
