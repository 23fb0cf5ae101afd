"""The profiler's traces of a training: each rank writes its own, on its own node."""

from __future__ import annotations

import posixpath

from clusterctl import contract
from clusterctl.inventory.cluster import Node
from clusterctl.jobs.record import cluster_of
from clusterctl.jobs.run_folder import RunDir
from clusterctl.transfer.pull import pull_tree
from clusterctl.transport.fanout import Connection, Connections, raise_failures


def bring_traces(run: RunDir, connections: Connections) -> list[str]:
    """Bring them home from every node that has some; gives their names."""
    record = run.read_record()

    def bring(node: Node, link: Connection) -> list[str]:
        remote = posixpath.join(record["run_dirs"][node.name], contract.PROFILE_DIR)
        names = [one["name"] for one in link.call("list", {"path": remote})["entries"] if one["kind"] == "f"]
        if names:
            pull_tree(link, remote, run.root / contract.PROFILE_DIR / node.name)
        return names

    outcomes = connections.on_each(cluster_of(run).nodes, bring)
    raise_failures(outcomes)
    return [name for outcome in outcomes for name in outcome.value or ()]
