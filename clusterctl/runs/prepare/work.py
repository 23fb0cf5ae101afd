"""Make the working folders of a program on the nodes, while the other steps of a start run."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from clusterctl.transport.fanout import on_all

if TYPE_CHECKING:
    from clusterctl.inventory.cluster import Cluster, Node
    from clusterctl.jobs.job import Job
    from clusterctl.transport.connection import Connection
    from clusterctl.transport.fanout import Connections


@dataclass(frozen=True)
class Made:
    """The answer of a node; `altered`: the code in its store was changed, so that it has to be pushed again."""

    altered: bool


class WorkFolders:
    """The working folders of a run, which threads make; `ready` waits for them."""

    def __init__(
        self,
        cluster: Cluster,
        job: Job,
        connections: Connections,
        code: Mapping[str, str],
        run_dirs: Mapping[str, str],
        push_again: Callable[[Cluster], object],
    ) -> None:
        """`push_again` pushes the code to nodes of which the store was altered."""
        # Without code the folder is empty: the node makes it when the ranks start.
        self.paths = {
            name: path
            for name, run_dir in run_dirs.items()
            if name in code and (path := job.work_on(run_dir))
        }
        self._cluster, self._connections, self._code = cluster, connections, code
        self._keep, self._push_again = job.workdir == "keep", push_again
        self._problem: BaseException | None = None
        self._thread = threading.Thread(target=self._work, daemon=True, name="work folders")
        if self.paths:
            self._thread.start()

    def ready(self) -> None:
        """Return when the folders are there; raise the error that kept one from being made."""
        if self.paths:
            self._thread.join()
        if self._problem is not None:
            raise self._problem

    def _work(self) -> None:
        try:
            altered = self._make(self._cluster)
            if altered.nodes:
                self._push_again(altered)
                self._make(altered)
        except BaseException as problem:
            # Raised again where the folders are needed.
            self._problem = problem

    def _make(self, cluster: Cluster) -> Cluster:
        """Make the folders; return the nodes on which the code in the store was altered."""

        def make(node: Node, link: Connection) -> bool:
            where = {"path": self.paths[node.name], "code": self._code[node.name]}
            return link.ask(Made, "work_folder", {**where, "keep": self._keep}).altered

        nodes = [node for node in cluster.nodes if node.name in self.paths]
        altered = on_all(self._connections, nodes, make)
        return replace(cluster, nodes=tuple(node for node in nodes if altered[node.name]))
