"""Run the setups of a job's nodes before its ranks start, so that a failure is known early."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from clusterctl.inventory import nodeset
from clusterctl.inventory.cluster import Cluster
from clusterctl.inventory.setup import request_for
from clusterctl.jobs.job import Job
from clusterctl.text import plural, short_time
from clusterctl.transport.fanout import Connections, on_all
from clusterctl.transport.setups import ask_setup


def run_setups(
    cluster: Cluster,
    job: Job,
    connections: Connections,
    code: Mapping[str, str],
    tell: Callable[[str, str], None],
) -> None:
    """Run the setup of every node of a job, and report what the setups change; raise an error if one fails."""
    requests = {
        node.name: request
        for node in cluster.nodes
        if (request := request_for(node.setup, job.setup, code.get(node.name, ""))) is not None
    }
    if not requests:
        return
    nodes = [node for node in cluster.nodes if node.name in requests]
    results = on_all(connections, nodes, lambda node, link: ask_setup(node, link, requests[node.name]))
    ran = [result.seconds for result in results.values() if not result.kept]
    how = (
        f"took {'up to ' * (len(ran) > 1)}{short_time(max(ran))} on {plural(len(ran), 'node')}"
        if ran
        else "known from an earlier start"
    )
    groups: dict[str, list[str]] = {}
    for name, result in results.items():
        groups.setdefault(result.text(), []).append(name)
    changed = "; ".join(
        f"{text}" if len(groups) == 1 else f"{nodeset.fold(names)}: {text}" for text, names in groups.items()
    )
    tell("setup", f"{changed}  ({how})")
