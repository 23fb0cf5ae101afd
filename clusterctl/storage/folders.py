"""Move a folder between this machine and an object store."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from clusterctl.errors import UsageError
from clusterctl.storage.address import StoreOptions, address_fault, parse_address
from clusterctl.storage.client import LIST, FileList, StoredFile, downloads, here
from clusterctl.storage.credentials import Access, access_to
from clusterctl.storage.data import list_with


@dataclass(frozen=True)
class FetchedFolder:
    """What a download of a folder did."""

    files: int
    size: int
    moved: int
    is_listed: bool


def fetch_folder(address: str, folder: Path, endpoint: str = "") -> FetchedFolder:
    """Fetch a folder of a store to this machine; files that are here already are compared, not fetched."""
    access = _access(address, endpoint)
    found = list_with(access, lambda action, **more: here(access, action, **more))
    done = here(access, "download", files=downloads(found.files, access.address, str(folder.absolute())))
    listed = all(file.pieces for file in found.files.values())
    return FetchedFolder(len(found.files), found.size, int(done["fetched"]), listed)


def upload_folder(folder: Path, address: str, endpoint: str = "") -> FileList:
    """Send a folder to a store, and then its list."""
    access = _access(address, endpoint)
    paths = sorted(path for path in folder.rglob("*") if path.is_file())
    names = [path.relative_to(folder).as_posix() for path in paths]
    if not paths:
        raise UsageError(f"{folder}: there is no file in it", "name a folder with data")
    here(access, "probe", key=(access.address / ".clusterctl-probe").prefix)
    files = [
        {"name": name, "path": str(path.absolute()), "key": (access.address / name).prefix}
        for name, path in zip(names, paths, strict=True)
    ]
    answer = here(access, "upload", files=files)
    stored = {name: StoredFile(f["bytes"], f["piece"], tuple(f["pieces"])) for name, f in answer.items()}
    done = FileList(stored)
    here(access, "publish", objects=[{"key": (access.address / LIST).prefix, "text": done.text()}])
    return done


def _access(address: str, endpoint: str) -> Access:
    fault = address_fault(address)
    if fault[0]:
        raise UsageError(f"{fault[0]}", fault[1])
    return access_to(parse_address(address), StoreOptions(endpoint=endpoint))
