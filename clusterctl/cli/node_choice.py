"""Which nodes a job runs on, and which stand by: the command line's word over the job's own."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from clusterctl.cli import options
from clusterctl.errors import Fault, InputFaults, UsageError

if TYPE_CHECKING:
    from clusterctl.inventory.cluster import Cluster, Node
    from clusterctl.jobs.job import Job
    from clusterctl.jobs.what_if import WhatIf


@dataclass(frozen=True)
class Choice:
    """What a command line says of nodes, as it was typed."""

    file: Path | None
    nodes: str | None
    exclude: str | None
    include: str | None
    what_if: WhatIf | None = None
    """Nodes that are not there, in the place of the inventory's."""

    def of(self, job: Job) -> tuple[Cluster, tuple[Node, ...]]:
        """The nodes of a job, and its spare ones; what is wrong with both of them at once."""
        faults: list[Fault] = []
        for key in ("nodes", "restart.spare_nodes"):
            try:
                if key == "nodes":
                    cluster = self._cluster(job)
                else:
                    spares = self._spares(job)
            except UsageError as error:
                said = self._said(job, key)
                if not said or repr(said) not in error.message or job.document is None:
                    raise
                faults.append(job.document.fault(tuple(key.split(".")), error.message, error.hint))
        if faults:
            raise InputFaults(faults)
        both = [node.name for node in spares if node.name in cluster.names]
        if both:
            what = f"{', '.join(both)} {'is' if len(both) == 1 else 'are'} among the run's own nodes"
            remedy = "name nodes that stand by, or take them off with --nodes or --exclude"
            if job.document is None:
                raise UsageError(f"restart.spare_nodes: {what}", remedy)
            raise InputFaults([job.document.fault(("restart", "spare_nodes"), what, remedy)])
        return cluster, spares

    def faults(self, job: Job) -> Sequence[Fault]:
        """What is wrong beside the job's own keys: its nodes, and what they make of its devices and its training."""
        from clusterctl.jobs import job as jobs

        try:
            jobs.check(job, self.of(job)[0])
        except InputFaults as error:
            return error.faults
        except UsageError as error:
            return [Fault(job.source, error.message, error.hint)]
        return ()

    def _said(self, job: Job, key: str) -> str | None:
        """The node set that a job itself says under a key, where it counts."""
        if key == "nodes":
            return None if self.nodes else job.nodes
        return job.restart.spare_nodes if job.restart else None

    def _spares(self, job: Job) -> tuple[Node, ...]:
        """The nodes that wait for one to be lost; they can't be at work already."""
        if job.restart is None or job.restart.spare_nodes is None or self.what_if is not None:
            return ()
        return options.cluster_of(self.file, job.restart.spare_nodes).nodes

    def _cluster(self, job: Job) -> Cluster:
        """The command line's choice, else the job's own, else all; then the filter."""
        if self.what_if is not None:
            return self.what_if.cluster(lambda: options.cluster_of(self.file))
        spare, exclude = self._said(job, "restart.spare_nodes"), self.exclude
        # All nodes, but for those that stand by.
        if spare and not (self.nodes or job.nodes):
            exclude = f"{exclude},{spare}" if exclude else spare
        try:
            cluster = options.cluster_of(self.file, self.nodes or job.nodes, exclude)
        except UsageError as error:
            if any(_names_slots(text) for text in (self.nodes, self.exclude)):
                error.hint = f"{error.hint}\n--include names slots, the ones that stay: --include w0@w1:0,2"
            raise
        if self.include is None:
            return cluster
        if job.devices is not None:
            raise UsageError(
                "--include, and devices are chosen already", "leave out --include, or the devices"
            )
        from clusterctl.hostfile.convert import narrowed_cluster

        return narrowed_cluster(cluster, self.include)


def _names_slots(text: str | None) -> bool:
    """Whether a node set reads like a filter of DeepSpeed's, `w0@w1:0,2`."""
    import re

    return text is not None and re.search(r"[^,!&^@]@|[^:]:[0-9]+(,[0-9]+)*(@|\Z)", text) is not None
