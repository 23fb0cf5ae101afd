"""Send each checkpoint to an object store while the run continues, and fetch one from there.

Every node sends the files that it has. The list of the checkpoint is written after all files, and `latest` after
the list: a checkpoint without a list is unfinished, and is never used.
"""

from __future__ import annotations

import hashlib
import json
import posixpath
import time
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from clusterctl.agent.files.checkpoints import UNFINISHED, step_of
from clusterctl.agent.files.saved import LATEST, MANIFEST
from clusterctl.checkpoints.copies import Copier, folders_in
from clusterctl.checkpoints.find import Checkpoint, CheckpointCopy
from clusterctl.checkpoints.holder import NodeHolder
from clusterctl.checkpoints.moves import rank_of
from clusterctl.errors import WorkFailed
from clusterctl.inventory.nodeset import fold
from clusterctl.jobs.parts.saving import saving_of
from clusterctl.storage.address import parse_address
from clusterctl.storage.client import LIST, FileList, StoredFile, downloads, on_node, read_list
from clusterctl.storage.credentials import Access, access_to
from clusterctl.text import plural, size
from clusterctl.transport.fanout import on_each, raise_failures
from clusterctl.typed_json import BadValue, decode

if TYPE_CHECKING:
    from clusterctl.inventory.cluster import Node
    from clusterctl.jobs.job import Job
    from clusterctl.jobs.plan import Plan
    from clusterctl.jobs.run_folder import RunDir
    from clusterctl.transport.fanout import Connections

# Seconds that the end of a run waits for its last checkpoint; a store that does not answer ends the wait earlier.
LAST_UPLOAD = 86400.0


def access_of(job: Job, name: str) -> Access | None:
    """Return where the checkpoints of a run go in the store; None if its job names no store. `name` is that of its
    folder there."""
    to = saving_of(job.train).to
    return access_to(parse_address(to) / name, job.storage) if to else None


class Uploader(Copier):
    """Sends each whole checkpoint to the store, in a thread of its own; no rank waits for it."""

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
        raise_failures(sent)
        files = {name: file for outcome in sent for name, file in outcome.get().items()}
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
                f"{node.name}: {'; '.join(faults)}", "the checkpoint is damaged; an older one may be sound"
            )
        files = [
            {"name": name, "path": posixpath.join(path, name), "key": (target.address / name).prefix}
            for name in names
        ]
        answer = on_node(node, self.connections.of(node), target, "upload", None, files=files)
        try:
            return decode(_Sent, {"files": answer}).files
        except BadValue as problem:
            raise WorkFailed(f"{node.name}: its answer about an upload is wrong: {problem}") from None

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
        objects = [{"key": address.prefix, "text": text} for address, text in texts]
        on_node(node, link, target, "publish", None, objects=objects)


@dataclass(frozen=True)
class _Sent:
    """What a node's program answers to an upload."""

    files: dict[str, StoredFile]


def _shares(newest: Checkpoint, order: list[str]) -> dict[CheckpointCopy, list[str]]:
    """Return which node sends which files: each file goes once, from the node that has the fewest to send."""
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


# ---- fetch


def newest_stored(node: Node, connections: Connections, access: Access) -> tuple[str, FileList] | None:
    """Return the folder's name and the list of the newest finished checkpoint in the store."""
    link = connections.of(node)
    found = on_node(node, link, access, "names", None, prefix=f"{access.address.prefix}/", delimiter="/")
    names = [folder.rstrip("/").rpartition("/")[2] for folder in found["folders"]]
    for name in sorted((name for name in names if step_of(name) is not None), reverse=True):
        where = access.address / name / LIST
        text = on_node(node, link, access, "read", None, key=where.prefix)
        if text is not None:
            return name, read_list(text, str(where))
    return None


def fetch_checkpoint(
    name: str,
    found: FileList,
    access: Access,
    made: Plan,
    folders: dict[str, tuple[Node, str]],
    connections: Connections,
) -> str:
    """Fetch a checkpoint to the nodes of `folders`: each gets its ranks' files; return a line for the log.

    The other nodes of the plan fetch their files themselves.
    """
    began = time.monotonic()
    node_of = {process.rank: part.node.name for part in made.nodes for process in part.processes}
    names = [part.node.name for part in made.nodes]
    wanted: dict[str, list[str]] = {node: [] for node in names}
    for number, file in enumerate(sorted(found.files)):
        rank = rank_of(file)
        target = node_of.get(rank) if rank is not None else None
        for node in [target] if target else names if rank is None else [names[number % len(names)]]:
            wanted[node].append(file)
    first = next(iter(folders.values()))[0]
    key = (access.address / name / MANIFEST).prefix
    manifest = on_node(first, connections.of(first), access, "read", None, key=key)
    if manifest is None or hashlib.sha256(manifest.encode()).hexdigest() != found.digest:
        raise WorkFailed(f"{access.address / name / MANIFEST}: is not the manifest of this checkpoint")

    def work(node: Node) -> int:
        link, folder = connections.of(node), folders[node.name][1]
        # The same name for each attempt: an interrupted download continues.
        aside = posixpath.join(folder, f"{UNFINISHED}store", f"{name}-{found.digest[:12]}")
        files = {file: found.files[file] for file in wanted[node.name]}
        done = on_node(
            node, link, access, "download", None, files=downloads(files, access.address / name, aside)
        )
        link.put(posixpath.join(aside, MANIFEST), manifest.encode())
        path = posixpath.join(folder, name)
        present = {entry.name: entry for entry in NodeHolder(node, link).listing(folder).checkpoints}.get(
            name
        )
        if present is not None and present.digest != found.digest:
            link.call("remove_checkpoint", {"path": path, "digest": present.digest, "check": False})
        link.call("complete_checkpoint", {"source": aside, "path": path, "digest": found.digest})
        return int(done["fetched"])

    outcomes = on_each([node for node, _ in folders.values()], work)
    raise_failures(outcomes)
    moved = sum(outcome.get() for outcome in outcomes)
    seconds = time.monotonic() - began
    count = len({file for node in folders for file in wanted[node]})
    where = f"{access.address}, {size(moved)} to {fold(list(folders))} in {seconds:.1f} s"
    return f"{name}: {plural(count, 'file')} fetched from {where}"
