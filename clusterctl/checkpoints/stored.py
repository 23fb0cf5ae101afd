"""Find the newest checkpoint in an object store, and fetch it to the nodes."""

from __future__ import annotations

import hashlib
import posixpath
import time

from clusterctl.agent.files.checkpoints import step_of
from clusterctl.checkpoints.holder import NodeHolder
from clusterctl.checkpoints.moves import rank_of
from clusterctl.errors import WorkFailed
from clusterctl.inventory.cluster import Node
from clusterctl.inventory.nodeset import fold
from clusterctl.jobs.job import Job
from clusterctl.jobs.parts.saving import saving_of
from clusterctl.jobs.plan import Plan
from clusterctl.storage.address import parse_address
from clusterctl.storage.client import LIST, FileList, on_node, read_list
from clusterctl.storage.credentials import Access, access_to
from clusterctl.text import plural, size
from clusterctl.transport.fanout import Connections, on_each, values
from clusterctl.wire.saved import MANIFEST, UNFINISHED


def access_of(job: Job, name: str) -> Access | None:
    """Return the store folder of a run's checkpoints; None if its job names no store. `name` is the name of that
    folder."""
    to = saving_of(job.train).to
    return access_to(parse_address(to) / name, job.storage) if to else None


def newest_stored(node: Node, connections: Connections, access: Access) -> tuple[str, FileList] | None:
    """Return the folder's name and the list of the newest finished checkpoint in the store."""
    store = on_node(node, connections.of(node), access)
    folders = store.names(f"{access.address.prefix}/", "/").folders
    names = [folder.rstrip("/").rpartition("/")[2] for folder in folders]
    for name in sorted((name for name in names if step_of(name) is not None), reverse=True):
        where = access.address / name / LIST
        text = store.read(where)
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
    manifest = on_node(first, connections.of(first), access).read(access.address / name / MANIFEST)
    if manifest is None or hashlib.sha256(manifest.encode()).hexdigest() != found.digest:
        raise WorkFailed(f"{access.address / name / MANIFEST}: is not the manifest of this checkpoint")

    def work(node: Node) -> int:
        link, folder = connections.of(node), folders[node.name][1]
        # The same name for each attempt: an interrupted download continues.
        aside = posixpath.join(folder, f"{UNFINISHED}store", f"{name}-{found.digest[:12]}")
        files = {file: found.files[file] for file in wanted[node.name]}
        done = on_node(node, link, access).download(files, access.address / name, aside)
        link.put(posixpath.join(aside, MANIFEST), manifest.encode())
        path = posixpath.join(folder, name)
        present = {entry.name: entry for entry in NodeHolder(node, link).listing(folder).checkpoints}.get(
            name
        )
        if present is not None and present.digest != found.digest:
            link.call("remove_checkpoint", {"path": path, "digest": present.digest, "check": False})
        link.call("complete_checkpoint", {"source": aside, "path": path, "digest": found.digest})
        return done.fetched

    moved = sum(values(on_each([node for node, _ in folders.values()], work)).values())
    seconds = time.monotonic() - began
    count = len({file for node in folders for file in wanted[node]})
    where = f"{access.address}, {size(moved)} to {fold(list(folders))} in {seconds:.1f} s"
    return f"{name}: {plural(count, 'file')} fetched from {where}"
