"""Resume a run on other nodes: copy its code and data to them from nodes that have them."""

from __future__ import annotations

import posixpath
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from clusterctl.errors import WorkFailed
from clusterctl.inventory.cluster import Cluster, Node
from clusterctl.inventory.nodeset import fold
from clusterctl.runs import abandoned
from clusterctl.runs import start as runs
from clusterctl.runs.prepare.stage import Tell, compare_data
from clusterctl.runs.state import end_half_line
from clusterctl.text import size
from clusterctl.transfer.between import End, copy_between
from clusterctl.transport.fanout import on_all, within

if TYPE_CHECKING:
    from clusterctl.jobs.record import RunRecord
    from clusterctl.jobs.run_folder import RunDir
    from clusterctl.transport.connection import Connection
    from clusterctl.transport.fanout import Connections

# Seconds in which a node that may have the code or data must answer.
PATIENCE = 10.0


def resume_on(run: RunDir, cluster: Cluster, connections: Connections, tell: Tell) -> None:
    """Start the next attempt of an ended run on the nodes of `cluster`; the nodes that it leaves become spares."""
    before: list[RunRecord] = []

    def chosen() -> Cluster:
        abandoned.clear(run, connections)
        record = run.read_record()
        before.append(record)
        after = replace(record.cluster, nodes=cluster.nodes)
        code = _brought(record, after, record.code_paths, "code", connections, tell)
        if record.job.data_there:
            data = compare_data(after, record.job.data_there, connections, tell)
        else:
            data = _brought(record, after, record.data_paths, "data", connections, tell)
        run.write_record(_moved(run, replace(record, code_paths=code, data_paths=data), cluster.nodes))
        return after

    try:
        runs.resume(run, connections, tell, chosen)
    except BaseException:
        # Nothing started, so that no node has joined or left.
        if before and run.read_record().attempt == before[0].attempt:
            run.write_record(before[0])
        raise


def _moved(run: RunDir, record: RunRecord, nodes: Sequence[Node]) -> RunRecord:
    """Return the record before the next attempt: the nodes that the run leaves are spares of it."""
    names = {node.name for node in nodes}
    left = [node for node in record.cluster.nodes if node.name not in names]
    known = {node.name for node in left}
    spares = [node for node in record.spares if node.name not in names | known]
    base = record.metrics_base
    if nodes[0].name != record.cluster.nodes[0].name:
        base = end_half_line(run)
    return replace(record, spares=(*spares, *left), size=len(nodes), metrics_base=base)


def _brought(
    record: RunRecord,
    after: Cluster,
    paths: dict[str, str],
    kind: str,
    connections: Connections,
    tell: Tell,
) -> dict[str, str]:
    """Return where the code or data is on each node, after copying it to those that lack it."""
    lacking = [node for node in after.nodes if node.name not in paths]
    if not paths or not lacking:
        return paths
    source, path = _source(record, paths, kind, connections)
    name = posixpath.basename(path)
    found = dict(paths)
    moved = 0
    for node_name, hello in on_all(connections, lacking, lambda node, link: link.hello()).items():
        found[node_name] = f"{hello.workdir}/store/{kind}/{name}"
    for node in lacking:
        link = connections.of(node)
        if link.directory(found[node.name]).missing:
            done = copy_between(source, path, None, End(node, link), found[node.name])
            moved += done.bytes_relayed + done.bytes_sent
    tell(f"copy {kind}", f"{size(moved)} from {source.node.name} to {fold([node.name for node in lacking])}")
    return found


def _source(record: RunRecord, paths: dict[str, str], kind: str, connections: Connections) -> tuple[End, str]:
    """Return a living node that has the code or data, and its folder there."""
    known = {node.name: node for node in (*record.cluster.nodes, *record.spares) if node.name in paths}

    def has(node: Node, link: Connection) -> bool:
        return not link.directory(paths[node.name]).missing

    for outcome in within(connections, list(known.values()), has, PATIENCE):
        if outcome.ok and outcome.value:
            return End(outcome.node, connections.of(outcome.node)), paths[outcome.node.name]
    raise WorkFailed(f"no living node has the run's {kind}", "launch the job again: that pushes it again")
