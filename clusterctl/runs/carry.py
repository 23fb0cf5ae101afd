"""Keep copies of the newest checkpoints on this machine, and push them to a new node of rank 0."""

from __future__ import annotations

import contextlib
import shutil
import threading
from typing import TYPE_CHECKING

from clusterctl.errors import ClusterctlError
from clusterctl.jobs.run_folder import NodeFiles, RunDir
from clusterctl.runs.finish import bring_checkpoint
from clusterctl.runs.watching.updates import Update

if TYPE_CHECKING:
    from clusterctl.jobs.plan import Plan
    from clusterctl.transport.fanout import Connections

# Number of checkpoints kept on this machine: the newest, and the one before it in case the newest is damaged.
KEPT = 2


class Carrier:
    """Copies each checkpoint to this machine in a separate thread, for a run whose nodes may change."""

    def __init__(self, run: RunDir, connections: Connections) -> None:
        self.run, self.connections = run, connections
        self.saved, self.closed = threading.Event(), threading.Event()

    def start(self) -> None:
        threading.Thread(target=self._work, daemon=True, name="carry checkpoints").start()

    def note(self, update: Update) -> None:
        """Start a copy if the trainer reported a checkpoint."""
        if update.metric is not None and update.metric.kind == "checkpoint":
            self.saved.set()

    def close(self) -> None:
        self.closed.set()
        self.saved.set()

    def _work(self) -> None:
        while self.saved.wait() and not self.closed.is_set():
            self.saved.clear()
            # The next checkpoint is tried again; a lost node is detected elsewhere.
            with contextlib.suppress(ClusterctlError):
                bring_checkpoint(self.run, self.connections)
            for old in self._kept()[:-KEPT]:
                shutil.rmtree(self.run.checkpoints / old, ignore_errors=True)

    def _kept(self) -> list[str]:
        folder = self.run.checkpoints
        folders = sorted(folder.iterdir()) if folder.is_dir() else []
        return [path.name for path in folders if path.is_dir() and not path.name.startswith(".")]

    def put(self, made: Plan) -> None:
        """Push the checkpoints to the new node of rank 0."""
        from clusterctl.transfer import push

        node = made.nodes[0].node
        remote = NodeFiles(made.nodes[0].run_dir).checkpoints
        for name in self._kept():
            root = self.run.checkpoints / name
            source = push.Source(root, push.make_manifest(root, everything=True))
            push.push_tree(self.connections.of(node), source, f"{remote}/{name}")
        self.run.add_event(
            "note", node=node.name, text=f"{node.name} has the checkpoints: {', '.join(self._kept())}"
        )
