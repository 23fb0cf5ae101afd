"""Choose the nodes of a job and its spares: the caller's own choice takes precedence over the job."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

from clusterctl.errors import Collected, Fault, InputFaults, UsageError, faults_of

if TYPE_CHECKING:
    from clusterctl.inventory.cluster import Cluster, Node
    from clusterctl.jobs.job import Job
    from clusterctl.jobs.what_if import WhatIf


@dataclass(frozen=True)
class Choice:
    """Nodes that were chosen for a job, as its caller wrote them, and the inventory that they are from."""

    select: Callable[[str | None, str | None], Cluster]
    """Returns the nodes of the inventory in a node set, without those in another one."""
    nodes: str | None = None
    exclude: str | None = None
    include: str | None = None
    """Devices, in DeepSpeed's notation."""
    what_if: WhatIf | None = None
    """Imaginary nodes that replace those of the inventory."""
    completed: Callable[[Cluster], Cluster] = lambda cluster: cluster
    """Adds the devices that the nodes report, where the inventory does not name them."""

    def of(self, job: Job) -> tuple[Cluster, tuple[Node, ...]]:
        """Return the nodes of a job and its spare nodes; report the errors of both together."""
        from clusterctl.jobs import job_check

        errors = Collected()
        with errors, self._at(job, "nodes"):
            cluster = self._cluster(job)
        with errors, self._at(job, "restart.spare_nodes"):
            spares = self._spares(job)
        if errors.errors and job.train is not None:
            with errors:
                raise InputFaults(job_check.check_without_nodes(job))
        errors.raise_all()
        both = [node.name for node in spares if node.name in cluster.names]
        if both:
            problem = f"{', '.join(both)}: nodes of the run cannot be spare nodes too"
            remedy = "choose other spare nodes, or leave these out with --nodes or --exclude"
            if job.document is None:
                raise UsageError(f"restart.spare_nodes: {problem}", remedy)
            raise InputFaults([job.document.fault(("restart", "spare_nodes"), problem, remedy)])
        return cluster, spares

    @contextmanager
    def _at(self, job: Job, key: str) -> Iterator[None]:
        """Name the line of a key of the job in the error of its node set."""
        try:
            yield
        except UsageError as error:
            written = self._from_job(job, key)
            if not written or repr(written) not in error.message or job.document is None:
                raise
            place = tuple(key.split("."))
            # A fault of the inventory has a place of its own.
            faults = [
                job.document.fault(place, fault.what, fault.remedy)
                if repr(written) in fault.what and not fault.where
                else fault
                for fault in faults_of(error)
            ]
            raise InputFaults(faults) from None

    def faults(self, job: Job) -> Sequence[Fault]:
        """Return the errors of a job that depend on its nodes: selection, devices and training."""
        from clusterctl.jobs import job_check

        try:
            job_check.check(job, self.of(job)[0])
        except InputFaults as error:
            return error.faults
        except UsageError as error:
            return [Fault(job.source, error.message, error.hint)]
        return ()

    def _from_job(self, job: Job, key: str) -> str | None:
        """Return the node set of a key of the job, unless the caller overrides it."""
        if key == "nodes":
            return None if self.nodes else job.nodes
        return job.restart.spare_nodes if job.restart else None

    def _spares(self, job: Job) -> tuple[Node, ...]:
        """Return the spare nodes of a job."""
        if job.restart is None or job.restart.spare_nodes is None or self.what_if is not None:
            return ()
        return self.completed(self.select(job.restart.spare_nodes, None)).nodes

    def _cluster(self, job: Job) -> Cluster:
        """Return the nodes of the caller, else of the job, else all; then apply --include."""
        if self.what_if is not None:
            return self.what_if.cluster(lambda: self.select(None, None))
        spare, exclude = self._from_job(job, "restart.spare_nodes"), self.exclude
        # All nodes means all except the spares.
        if spare and not (self.nodes or job.nodes):
            exclude = f"{exclude},{spare}" if exclude else spare
        try:
            cluster = self.select(self.nodes or job.nodes, exclude)
        except UsageError as error:
            if any(_names_slots(text) for text in (self.nodes, self.exclude)):
                error.hint = f"{error.hint}\nto choose slots, use --include: --include w0@w1:0,2"
            raise
        cluster = self.completed(cluster)
        if self.include is None:
            return cluster
        if job.devices is not None:
            raise UsageError("--include and a choice of devices cannot be combined", "leave out one of them")
        from clusterctl.hostfile.convert import narrowed_cluster

        return narrowed_cluster(cluster, self.include)


def _names_slots(text: str | None) -> bool:
    """Return whether a node set looks like a DeepSpeed filter: `w0@w1:0,2`."""
    return text is not None and re.search(r"[^,!&^@]@|[^:]:[0-9]+(,[0-9]+)*(@|\Z)", text) is not None
