"""`doctor`: every check a finding with its remedy; exit 1 when something is bad."""

from __future__ import annotations

from dataclasses import asdict

from clusterctl.cli import options, screen
from clusterctl.errors import Found


def doctor(
    cluster: options.ClusterFile = None,
    nodes: options.Nodes = None,
    exclude: options.Exclude = None,
    accept_new: options.AcceptNew = False,
    as_json: options.Json = False,
) -> None:
    """Whether this machine and the nodes are fit for a run; changes nothing."""
    from clusterctl import checks, views

    findings = checks.here()
    if cluster or nodes or options.inventory_there():
        chosen = options.cluster_of(cluster, nodes, exclude)
        with options.connected(chosen, accept_new) as connections:
            findings += checks.nodes(chosen, connections)
    else:
        findings.append(
            checks.Finding(
                "warning",
                "here",
                "no cluster.yaml in this folder: no node was asked",
                "clusterctl init, or -c FILE",
            )
        )
    if as_json:
        screen.show_json([asdict(one) for one in findings])
    else:
        screen.show(views.findings_view(findings))
    bad = [one for one in findings if one.level == "bad"]
    if bad:
        raise Found(f"{len(bad)} of {len(findings)} findings must be mended before a run")
