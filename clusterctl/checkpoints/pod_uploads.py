"""Checkpoints of a job in pods: each pod sends the files of its own ranks to the store, and fetches them from there.

Pods cannot connect to each other, so they coordinate through the store: each pod lists there the files that it has
sent, and the pod of node 0 writes the list of the complete checkpoint when the files of all pods are there.
"""

from __future__ import annotations

import time

from clusterctl.checkpoints.checkpoint import Checkpoint
from clusterctl.checkpoints.copies import folders_in
from clusterctl.checkpoints.find import of_nodes
from clusterctl.checkpoints.stored import access_of, fetch_checkpoint, newest_stored
from clusterctl.checkpoints.uploads import Uploader
from clusterctl.errors import WorkFailed
from clusterctl.inventory.cluster import Node
from clusterctl.jobs.plan import Plan
from clusterctl.jobs.record import RunRecord
from clusterctl.jobs.run_folder import NodeFiles, RunDir
from clusterctl.storage.client import FileList, on_node, read_list
from clusterctl.storage.credentials import Access
from clusterctl.text import plural, size
from clusterctl.transport.fanout import Connections

# Seconds between two searches for a new checkpoint. Only the pod of rank 0 receives a message about one.
EVERY = 5.0
# Seconds that node 0 waits for the files of the other pods, and between two checks for them.
PATIENCE, POLL = 600.0, 5.0


def uploader_for(run: RunDir, connections: Connections) -> Uploader | None:
    """Return the uploader of a run's checkpoints to its store; None if its job names no store."""
    record = run.read_record()
    access = access_of(record.job, record.folder_name)
    if access is None:
        return None
    return (PodUploader if len(record.parts) > 1 else Uploader)(run, connections, access)


class PodUploader(Uploader):
    """Sends the files of this pod's ranks; on node 0 it also completes each checkpoint in the store."""

    every = EVERY

    def __init__(self, run: RunDir, connections: Connections, access: Access) -> None:
        super().__init__(run, connections, access)
        # The manifest's digest of the checkpoint whose files of this pod are in the store, and their list.
        self._sent: tuple[str, FileList] = ("", FileList({}))

    def _copy_newest(self) -> None:
        began = time.monotonic()
        record = self.run.read_record()
        newest = self._newest(record)
        if newest is None:
            return
        self._protect(newest)
        target = self.target_of(newest)
        (copy,) = newest.holdings
        if self._sent[0] != newest.digest:
            self._send_own(record, newest, target)
        if record.cluster.names[0] != record.parts[0]:
            self._digest = newest.digest
            return
        whole = self._whole(record, newest, target)
        if whole is None:
            # A newer checkpoint takes its place.
            return
        self._publish({copy: sorted(whole.files)}, newest, target, whole)
        self._digest = newest.digest
        seconds = time.monotonic() - began
        text = f"{newest.name} of {plural(len(record.parts), 'pod')} is in {self._access.address}"
        facts = {"step": newest.step, "bytes": whole.size, "seconds": round(seconds, 3)}
        self.run.add_event("uploaded", **facts, text=f"{text}: {size(whole.size)}")

    def _newest(self, record: RunRecord) -> Checkpoint | None:
        """Return the newest checkpoint of this pod, unless it is in the store; other pods have its other files."""
        found = of_nodes(list(folders_in(record).values()), self.connections)
        sound = (item for item in found.checkpoints if item.digest and item.facts.state != "weights")
        newest = next((item for item in sound if not item.faults), None)
        return None if newest is None or newest.digest == self._digest else newest

    def _send_own(self, record: RunRecord, newest: Checkpoint, target: Access) -> None:
        (copy,) = newest.holdings
        node = copy.holder.node
        files = self._send(node, {copy: sorted(newest.copies_of)}, newest, target)
        own = FileList(files, step=newest.step, digest=newest.digest)
        store = on_node(node, self.connections.of(node), target)
        store.publish([(target.address / part_list(node.name), own.text())])
        self._sent = (newest.digest, own)

    def _whole(self, record: RunRecord, newest: Checkpoint, target: Access) -> FileList | None:
        """Wait for the lists of the other pods; return the list of all files, None if there is a newer checkpoint."""
        (copy,) = newest.holdings
        node = copy.holder.node
        store = on_node(node, self.connections.of(node), target)
        files = dict(self._sent[1].files)
        missing = [name for name in record.parts if name != node.name]
        deadline = time.monotonic() + PATIENCE
        while True:
            places = [target.address / part_list(name) for name in missing]
            for name, place, text in zip(tuple(missing), places, store.texts(places), strict=True):
                other = read_list(text, str(place)) if text is not None else None
                if other is not None and other.digest == newest.digest:
                    files |= other.files
                    missing.remove(name)
            if not missing:
                break
            if time.monotonic() > deadline:
                problem = f"{newest.name}: the files of {', '.join(missing)} are not in the store"
                raise WorkFailed(f"{problem} after {PATIENCE:g} s", "see the logs of these pods")
            if self._closed.wait(POLL) or self._newest_digest(record) != newest.digest:
                return None
        if lacking := set(newest.manifest().files) - set(files):
            raise WorkFailed(f"{newest.name}: no pod has {', '.join(sorted(lacking)[:5])}")
        return FileList(files, step=newest.step, digest=newest.digest)

    def _newest_digest(self, record: RunRecord) -> str:
        newest = self._newest(record)
        return newest.digest if newest else ""


def part_list(node: str) -> str:
    """Return the name of the object that lists the files that one pod has sent."""
    return f"clusterctl-files.{node}.json"


def bring_from_store(access: Access, made: Plan, own: Node, connections: Connections) -> str:
    """Fetch the files that this pod needs of the newest checkpoint in the store; return a line for the log, or ""."""
    stored = newest_stored(own, connections, access)
    if stored is None:
        return ""
    run_dir = next(part.run_dir for part in made.nodes if part.node == own)
    folders = {own.name: (own, NodeFiles(run_dir).checkpoints)}
    return fetch_checkpoint(*stored, access, made, folders, connections)
