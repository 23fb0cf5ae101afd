"""Send each checkpoint to an object store while the run continues.

Every node sends the files that it has. The list of the checkpoint is written after all files, and `latest` after
the list: a checkpoint without a list is unfinished, and is never used.
"""

from __future__ import annotations

import hashlib
import json
import posixpath
import time
from dataclasses import replace

from clusterctl.checkpoints.checkpoint import Checkpoint, CheckpointCopy
from clusterctl.checkpoints.copies import Copier, folders_in
from clusterctl.errors import WorkFailed
from clusterctl.inventory.cluster import Node
from clusterctl.jobs.run_folder import RunDir
from clusterctl.storage.client import LIST, FileList, StoredFile, on_node
from clusterctl.storage.credentials import Access
from clusterctl.text import size
from clusterctl.transport.fanout import Connections, on_each, values
from clusterctl.wire.saved import LATEST, MANIFEST

# Seconds that the end of a run waits for its last checkpoint; a store that does not answer ends the wait earlier.
LAST_UPLOAD = 86400.0


class Uploader(Copier):
    """Sends each complete checkpoint to the store, in a separate thread; no rank waits for it."""

    after_failures = True
    subject = "a checkpoint is not in the store"

    def __init__(self, run: RunDir, connections: Connections, access: Access) -> None:
        super().__init__(run, connections, last=LAST_UPLOAD)
        self._access = access

    def _copy_newest(self) -> None:
        began = time.monotonic()
        record = self.run.read_record()
        newest = self._newest(record)
        if newest is None:
            return
        self._protect(newest)
        shares = _shares(newest, list(folders_in(record)))
        target = self.target_of(newest)
        sent = on_each(
            [copy.holder.node for copy in shares], lambda node: self._send(node, shares, newest, target)
        )
        files = {name: file for found in values(sent).values() for name, file in found.items()}
        self._publish(shares, newest, target, FileList(files, step=newest.step, digest=newest.digest))
        self._digest = newest.digest
        total, seconds = sum(file.bytes for file in files.values()), time.monotonic() - began
        text = f"{newest.name} is in {self._access.address}: {size(total)} sent in {seconds:.1f} s"
        self.run.add_event("uploaded", step=newest.step, bytes=total, seconds=round(seconds, 3), text=text)

    def target_of(self, newest: Checkpoint) -> Access:
        """Return the folder of a checkpoint in the store."""
        return replace(self._access, address=self._access.address / newest.name.partition(".")[0])

    def _send(
        self, node: Node, shares: dict[CheckpointCopy, list[str]], newest: Checkpoint, target: Access
    ) -> dict[str, StoredFile]:
        """Verify a node's share by the hashes that were made when it was saved, and send it."""
        copy = next(copy for copy in shares if copy.holder.name == node.name)
        names, path = shares[copy], copy.entry.path
        checked = copy.holder.verify(path, lambda count: None)
        if faults := [found.fault for name, found in checked.files.items() if name in names and found.fault]:
            raise WorkFailed(
                f"{node.name}: {'; '.join(faults)}", "the checkpoint is damaged; an older one may be valid"
            )
        store = on_node(node, self.connections.of(node), target)
        return store.upload({name: posixpath.join(path, name) for name in names}, target.address)

    def _publish(
        self, shares: dict[CheckpointCopy, list[str]], newest: Checkpoint, target: Access, done: FileList
    ) -> None:
        """Write the manifest, then the list, then `latest`."""
        copy = next(iter(shares))
        node = copy.holder.node
        link = self.connections.of(node)
        manifest = link.get(posixpath.join(copy.entry.path, MANIFEST))
        if hashlib.sha256(manifest).hexdigest() != newest.digest:
            raise WorkFailed(f"{node.name}: {newest.name} was saved again meanwhile")
        texts = [
            (target.address / MANIFEST, manifest.decode()),
            (target.address / LIST, done.text()),
            (self._access.address / LATEST, json.dumps({"name": posixpath.basename(target.address.prefix)})),
        ]
        on_node(node, link, target).publish(texts)


def _shares(newest: Checkpoint, order: list[str]) -> dict[CheckpointCopy, list[str]]:
    """Return which node sends which files: each file is sent once, by the node with the fewest files to send."""
    shares: dict[CheckpointCopy, list[str]] = {}
    load: dict[str, int] = {}
    for file in sorted(newest.copies_of):
        holders = [copy for copy in newest.holders_of(file) if copy.holder.name in order]
        if not holders:
            raise WorkFailed(f"{newest.name}: no node of the run has {file}")
        chosen = min(holders, key=lambda copy: load.get(copy.holder.name, 0))
        load[chosen.holder.name] = load.get(chosen.holder.name, 0) + 1
        shares.setdefault(chosen, []).append(file)
    return shares
