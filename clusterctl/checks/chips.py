"""Compare a training with the chips that its nodes report, and check whether it fits them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from clusterctl.checks import devices
from clusterctl.checks.answers import NodeAnswers
from clusterctl.finding import Finding
from clusterctl.inventory import nodeset
from clusterctl.jobs import job_check

if TYPE_CHECKING:
    from clusterctl.inventory.cluster import Cluster
    from clusterctl.jobs.job import Job


def findings(job: Job, cluster: Cluster, answers: Sequence[NodeAnswers]) -> Iterator[Finding]:
    """Yield nodes whose devices differ, and the trainer's findings about the job on these devices.

    If the job names no chip, memory and number types are those of the reported one; of an unknown chip, or of a part of
    one, the memory is what the driver's tool shows.
    """
    if job.train is None:
        return
    yield from differing(answers)
    for name, nodes in _reported(answers).items():
        memory = min(shown[name] for shown in map(devices.names, answers) if name in shown)
        found = job_check.check_reported(job, cluster, name, memory)
        where = nodeset.fold(nodes)
        for fault in found.faults:
            text = f"its devices are {name}: {fault.key} {fault.what}"
            yield Finding("bad", where, text, fault.remedy, "chip")
        if found.summary is not None and found.summary.fits is False:
            text = f"its devices are {name}: by the plan, the training does not fit their memory"
            yield Finding("warning", where, text, "`clusterctl plan` shows what it needs", "chip")


def differing(answers: Sequence[NodeAnswers]) -> Iterator[Finding]:
    """Yield a finding if the nodes' devices are not all of one kind: the slowest decides how fast a training is."""
    reported = _reported(answers)
    if len(reported) > 1:
        parts = [f"{name} on {nodeset.fold(nodes)}" for name, nodes in reported.items()]
        text = f"their devices differ: {', '.join(parts)}"
        yield Finding("warning", "all nodes", text, "run on nodes with equal devices", "chip")


def _reported(answers: Sequence[NodeAnswers]) -> dict[str, list[str]]:
    """Return by name of a device the nodes that have such devices."""
    reported: dict[str, list[str]] = {}
    for answer in answers:
        for name in sorted(devices.names(answer)):
            reported.setdefault(name, []).append(answer.node.name)
    return reported
