"""The Python API: everything that a program of your own may import from clusterctl.

    from clusterctl import api

    with api.Cluster.load("cluster.yaml") as cluster:
        for outcome in cluster.select("node[1-4]").run(["uname", "-n"]):
            print(outcome.node.name, outcome.get().text)

The names in `__all__` are stable: they change only with a new minor version, and the changelog says so. Everything
else in the package may change at any time. docs/reference/python-api.md explains each name with examples.
"""

from __future__ import annotations

from clusterctl.client.batch import submit
from clusterctl.client.cluster import Cluster, resume
from clusterctl.client.function_run import FunctionRun
from clusterctl.client.results import Failure, FunctionFailed
from clusterctl.client.run import Run, find_run, list_runs
from clusterctl.errors import (
    ClusterctlError,
    InputFaults,
    NodeError,
    RunFailed,
    UsageError,
    WorkFailed,
)
from clusterctl.inventory import nodeset
from clusterctl.inventory.cluster import Node
from clusterctl.jobs.sweep import Variant
from clusterctl.ranktable import api as ranktable
from clusterctl.transport.completed import Completed
from clusterctl.transport.fanout import Outcome

__all__ = [
    "Cluster",
    "ClusterctlError",
    "Completed",
    "Failure",
    "FunctionFailed",
    "FunctionRun",
    "InputFaults",
    "Node",
    "NodeError",
    "Outcome",
    "Run",
    "RunFailed",
    "UsageError",
    "Variant",
    "WorkFailed",
    "find_run",
    "list_runs",
    "nodeset",
    "ranktable",
    "resume",
    "submit",
]
