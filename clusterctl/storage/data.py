"""Folders of data in an object store: upload one, and let this machine or each node fetch it."""

from __future__ import annotations

import hashlib
import json
import posixpath
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from clusterctl.errors import UsageError, WorkFailed
from clusterctl.inventory.cluster import Node
from clusterctl.storage.address import Address, StoreOptions, address_fault, parse_address
from clusterctl.storage.client import LIST, FileList, StoreClient, StoredFile, here, on_node, read_list
from clusterctl.storage.credentials import Access, access_to
from clusterctl.storage.program import piece_of
from clusterctl.transport.connection import Connection
from clusterctl.transport.fanout import Connections, on_all


@dataclass(frozen=True)
class Fetched:
    """Data that every node has after a fetch."""

    folders: dict[str, str]
    """The folder on each node."""
    files: int
    size: int
    moved: int
    """Bytes that all nodes together fetched from the store."""
    is_listed: bool
    """Whether the store has our list, with a hash for each piece."""


def fetch_data(
    address: str, options: StoreOptions, nodes: Sequence[Node], connections: Connections
) -> Fetched:
    """Fetch a folder of a store to every node, at the same time; existing files are compared, not fetched."""
    access = access_to(parse_address(address), options)
    found = list_with(on_node(nodes[0], connections.of(nodes[0]), access), access.address)
    name = hashlib.sha256(json.dumps([address, options.endpoint, found.text()]).encode()).hexdigest()

    def work(node: Node, link: Connection) -> tuple[str, int]:
        folder = posixpath.join(link.hello().workdir, "store", "data", name)
        return folder, on_node(node, link, access).download(found.files, access.address, folder).fetched

    done = on_all(connections, nodes, work)
    folders = {node: folder for node, (folder, _) in done.items()}
    moved = sum(count for _, count in done.values())
    listed = all(file.pieces for file in found.files.values())
    return Fetched(folders, len(found.files), found.size, moved, listed)


def list_with(store: StoreClient, address: Address) -> FileList:
    """Return the files below an address: from our list in the store, else the store's names, without hashes."""
    where = address / LIST
    text = store.read(where)
    if text is not None:
        return read_list(text, str(where))
    prefix = f"{address.prefix}/" if address.prefix else ""
    names = store.names(prefix)
    files = {
        key.removeprefix(prefix): StoredFile(size, piece_of(size), ())
        for key, size in names.sizes.items()
        if not key.endswith("/")
    }
    if not files:
        raise WorkFailed(f"{address}: there is no object below it", "correct the address, or `data upload`")
    wrong = [
        name for name in files if any(part in ("", ".", "..") for part in name.split("/")) or "\\" in name
    ]
    if wrong:
        raise WorkFailed(f"{address}: {wrong[0][:80]!r} is not the path of a file", "rename the object")
    # The folder on the nodes is named by this hash.
    objects = {key: [size, names.tags[key]] for key, size in names.sizes.items()}
    return FileList(files, digest=hashlib.sha256(json.dumps(objects, sort_keys=True).encode()).hexdigest())


@dataclass(frozen=True)
class FetchedFolder:
    """The result of a download of a folder."""

    files: int
    size: int
    moved: int
    is_listed: bool


def fetch_folder(address: str, folder: Path, endpoint: str = "") -> FetchedFolder:
    """Fetch a folder of a store to this machine; existing files are compared, not fetched."""
    access = _access(address, endpoint)
    store = here(access)
    found = list_with(store, access.address)
    done = store.download(found.files, access.address, str(folder.absolute()))
    listed = all(file.pieces for file in found.files.values())
    return FetchedFolder(len(found.files), found.size, done.fetched, listed)


def upload_folder(folder: Path, address: str, endpoint: str = "") -> FileList:
    """Send a folder to a store, and then its list."""
    access = _access(address, endpoint)
    paths = sorted(path for path in folder.rglob("*") if path.is_file())
    files = {path.relative_to(folder).as_posix(): path for path in paths}
    if not files:
        raise UsageError(f"{folder}: it contains no file", "name a folder with data")
    store = here(access)
    store.probe(access.address / ".clusterctl-probe")
    done = FileList(
        store.upload({name: str(path.absolute()) for name, path in files.items()}, access.address)
    )
    store.publish([(access.address / LIST, done.text())])
    return done


def _access(address: str, endpoint: str) -> Access:
    fault = address_fault(address)
    if fault[0]:
        raise UsageError(f"{fault[0]}", fault[1])
    return access_to(parse_address(address), StoreOptions(endpoint=endpoint))
