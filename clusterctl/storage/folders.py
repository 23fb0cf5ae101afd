"""Move a folder between this machine and an object store."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from clusterctl.errors import UsageError
from clusterctl.storage.address import StoreOptions, address_fault, parse_address
from clusterctl.storage.client import LIST, FileList, here
from clusterctl.storage.credentials import Access, access_to
from clusterctl.storage.data import list_with


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
