"""The checkpoints of a run in an object store, read from this machine."""

from __future__ import annotations

import contextlib
import hashlib
import posixpath
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

from clusterctl.agent.files.checkpoints import FACTS, step_of
from clusterctl.checkpoints.checkpoint import CheckpointList, combine
from clusterctl.checkpoints.holder import Disk, Entry, Listing, Removal, Report, Verification
from clusterctl.errors import UsageError, WorkFailed
from clusterctl.inventory.cluster import Node
from clusterctl.storage.address import Address
from clusterctl.storage.client import LIST, here, read_list
from clusterctl.storage.credentials import Access
from clusterctl.transfer.push import Progress
from clusterctl.wire.saved import LATEST, MANIFEST, Damaged, Manifest, decode_manifest
from clusterctl.wire.typed_json import BadValue, decode, parse

STORE = "store"


@dataclass(frozen=True)
class StoreHolder:
    """The folder of a run in an object store. A path is the name of a checkpoint's folder in it."""

    access: Access

    @property
    def name(self) -> str:
        return STORE

    @property
    def node(self) -> Node:
        return Node(name=STORE, host=STORE, address=STORE)

    def listing(self, folder: str = "") -> Listing:
        """Return the finished checkpoints, newest first; an upload without its list is not finished."""
        prefix = f"{self.access.address.prefix}/"
        sizes = {
            key.removeprefix(prefix): size for key, size in here(self.access).names(prefix).sizes.items()
        }
        names = [name.removesuffix(f"/{LIST}") for name in sizes if name.endswith(f"/{LIST}")]
        entries = [
            self._entry(name, sizes) for name in sorted(names, reverse=True) if step_of(name) is not None
        ]
        latest = _name_in(self._text(LATEST) or "{}") if LATEST in sizes else ""
        return Listing(str(self.access.address), not sizes, latest, tuple(entries), Disk(0, 0))

    def _entry(self, name: str, sizes: dict[str, int]) -> Entry:
        step = step_of(name) or 0
        where = str(self.access.address / name)
        try:
            content = self.manifest_content(name)
            manifest = decode_manifest(content, f"{where}/{MANIFEST}")
        except (WorkFailed, Damaged) as problem:
            return Entry(name, name, step, "", faults=(str(problem),))
        sizes_of = {file: entry.bytes for file, entry in manifest.files.items()}
        facts = {key: manifest.facts.get(key) for key in FACTS}
        facts |= {"name": name, "path": name, "step": manifest.step}
        facts["digest"] = hashlib.sha256(content).hexdigest()
        facts |= {"count": len(sizes_of), "bytes": sum(sizes_of.values())}
        facts["have"] = [file for file, size in sizes_of.items() if sizes.get(f"{name}/{file}") == size]
        try:
            return decode(Entry, facts)
        except BadValue as problem:
            return Entry(name, name, step, "", faults=(f"{where}/{MANIFEST}: damaged: {problem}",))

    def manifest(self, path: str) -> Manifest:
        try:
            return decode_manifest(self.manifest_content(path), str(self.access.address / path / MANIFEST))
        except Damaged as problem:
            raise WorkFailed(str(problem), "choose another --step") from None

    def manifest_content(self, path: str) -> bytes:
        return (self._text(posixpath.join(path, MANIFEST), needed=True) or "").encode()

    def fetch(self, path: str, names: Sequence[str], dest: Path, progress: Progress) -> None:
        """Fetch files of a checkpoint; each piece is compared with its hash."""
        where = self.access.address / path
        found = read_list(self._text(posixpath.join(path, LIST), needed=True) or "", str(where / LIST))
        if missing := [name for name in names if name not in found.files]:
            raise WorkFailed(f"{where / LIST}: does not name {missing[0]}", "choose another --step")
        files = {name: found.files[name] for name in names}
        seen, total = [0], sum(file.bytes for file in files.values())

        def report(count: int) -> None:
            seen[0] += count
            progress(seen[0], total)

        here(self.access).download(files, where, str(dest), report)

    @contextlib.contextmanager
    def held(self, paths: Sequence[str]) -> Iterator[None]:
        """Protect nothing: clusterctl deletes nothing in a store."""
        yield

    def verify(self, path: str, report: Report) -> Verification:
        self._refuse(path)

    def remove(self, path: str, digest: str, *, check: bool) -> Removal:
        return Removal(0, "it is in the store, where clusterctl deletes nothing")

    def _refuse(self, path: str) -> NoReturn:
        hint = "`clusterctl checkpoint pull` fetches it here, and verifies every byte"
        raise UsageError(f"{self.access.address / path} is in an object store", hint)

    def _text(self, name: str, *, needed: bool = False) -> str | None:
        where: Address = self.access.address / name
        text = here(self.access).read(where)
        if text is None and needed:
            raise WorkFailed(f"{where}: there is no such object", "choose another --step")
        return text


def of_store(source: str, access: Access) -> CheckpointList:
    """Return the checkpoints of a run in its store."""
    holder = StoreHolder(access)
    listing = holder.listing()
    return CheckpointList(source, combine([(holder, listing)]), listing.latest)


def _name_in(text: str) -> str:
    """Return the name in the object `latest`; "" if it is damaged."""
    try:
        value = parse(text)
    except BadValue:
        return ""
    return str(value.get("name", "")) if isinstance(value, dict) else ""
